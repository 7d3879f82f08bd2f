"""SpecAugment: how wide its masks are and where, that a key draws them, and that evaluation has none."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import SpectrumAugmenter

B, T, M = 400, 20, 12
ONES = np.ones((B, T, M), np.float32)


def augment(key=0, paddings=None, do_eval=False, **fields):
  layer = Config(SpectrumAugmenter, **fields).instantiate()
  return np.asarray(layer.apply({}, ONES, paddings, key=jax.random.key(key), do_eval=do_eval)[0])


def widths(hidden):
  """The number of hidden places in each row [B, size], which must be one stretch."""
  assert all((np.diff(np.pad(row.astype(int), 1)) == 1).sum() <= 1 for row in hidden)
  return hidden.sum(1)


def test_one_mask_has_every_width_and_every_place():
  y = augment(freq_mask_count=1, freq_mask_max_bins=3, time_mask_count=0)
  assert (y == y[:, :1]).all()
  count = np.bincount(widths(y[:, 0] == 0), minlength=4)
  assert len(count) == 4 and (abs(count - B / 4) < 45).all()
  assert (y[:, 0] == 0).any(0).all()
  y = augment(freq_mask_count=0, time_mask_count=1, time_mask_max_frames=4)
  assert (y == y[..., :1]).all()
  assert set(widths(y[..., 0] == 0)) == {0, 1, 2, 3, 4} and (y[..., 0] == 0).any(0).all()


def test_stretches_are_inside_the_frames_and_at_most_a_share_of_them():
  lengths = np.arange(B) % (T + 1)
  paddings = np.arange(T) >= lengths[:, None]
  y = augment(paddings=paddings, freq_mask_count=0, time_mask_count=1, time_mask_max_frames=9, time_mask_max_ratio=0.25)
  hidden = y[..., 0] == 0
  assert not (hidden & paddings).any()
  assert (widths(hidden) <= np.floor(lengths * 0.25)).all() and widths(hidden).max() == 5


def test_masks_may_be_wider_than_the_features_and_several():
  y = augment(freq_mask_count=3, freq_mask_max_bins=99, time_mask_count=3, time_mask_max_frames=99)
  assert set(np.unique(y)) == {0, 1} and (y == 0).all((1, 2)).any()


def test_a_key_draws_them_and_evaluation_has_none():
  assert (augment(1) == augment(1)).all() and (augment(1) != augment(2)).any()
  assert (augment(do_eval=True) == ONES).all()
  layer = Config(SpectrumAugmenter, freq_mask_count=0, time_mask_count=0).instantiate()
  assert (layer.apply({}, ONES)[0] == ONES).all()


def test_rows_that_fill_up_a_batch_change_no_masks_of_others():
  layer = Config(SpectrumAugmenter).instantiate()
  seven, eight = (layer.apply({}, ONES[:rows], key=jax.random.key(0))[0] for rows in (7, 8))
  np.testing.assert_array_equal(eight[:7], seven)


@pytest.mark.parametrize('fields', [{'time_mask_max_ratio': 1.5}, {'freq_mask_count': -1}])
def test_mistakes_are_named(fields):
  with pytest.raises(ConfigError, match=next(iter(fields))):
    augment(**fields)
