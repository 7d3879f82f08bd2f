"""Mixup and CutMix: what is mixed with what, the loss of a classifier, and padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import ImageMixing, Mlp
from praxis_lite.models import ClassificationModel

B, SIDE = 64, 8
IMAGES = np.arange(B, dtype=np.float32)[:, None, None, None] * np.ones((1, SIDE, SIDE, 1), np.float32)
WEIGHTS = np.where(np.arange(B) == 5, 0, 1).astype(np.float32)
BEFORE = np.roll(np.arange(B), 1)


def mix(images=IMAGES, do_eval=False, **alphas):
  layer = Config(ImageMixing, **alphas).instantiate()
  (image, share), _ = layer.apply({}, images, WEIGHTS, key=jax.random.key(0), do_eval=do_eval)
  return np.asarray(image), np.asarray(share)


@pytest.mark.slow
def test_mixup_is_a_mean_of_two_images_by_their_shares():
  image, share = mix(mixup_alpha=1.0)
  assert share[6] == 1  # The image before it is padding.
  assert 0.35 < np.delete(share, 6).mean() < 0.65 and share.min() < 0.2
  expected = share * np.arange(B) + (1 - share) * BEFORE
  np.testing.assert_allclose(image, expected[:, None, None, None] * np.ones_like(image), atol=1e-4)


def test_cutmix_puts_a_box_of_the_image_before_into_an_image():
  image, share = mix(cutmix_alpha=1.0)
  for i in range(B):
    box = image[i, ..., 0] == BEFORE[i]
    assert set(np.unique(image[i])) <= {i, BEFORE[i]}
    np.testing.assert_allclose(1 - box.mean(), share[i], atol=1e-6)
    rows, columns = box.any(1), box.any(0)
    assert (box == rows[:, None] & columns[None, :]).all()
  assert share[6] == 1 and 0.4 < share.mean() < 0.95


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'alphas', [{'mixup_alpha': 0.5}, {'cutmix_alpha': 1.0}, {'mixup_alpha': 0.5, 'cutmix_alpha': 1.0}]
)
@pytest.mark.parametrize('count', [1, 7])
def test_filler_rows_at_the_end_change_nothing(alphas, count):
  layer = Config(ImageMixing, **alphas).instantiate()
  weights = np.ones(count, np.float32)
  (image, share), _ = layer.apply({}, IMAGES[:count], weights, key=jax.random.key(0))
  padded, weights = np.pad(IMAGES[:count], ((0, 3), (0, 0), (0, 0), (0, 0))), np.pad(weights, (0, 3))
  (filled, shares), _ = layer.apply({}, padded, weights, key=jax.random.key(0))
  np.testing.assert_allclose(filled[:count], image, atol=1e-6)
  np.testing.assert_allclose(shares[:count], share, atol=1e-6)
  if count > 1:
    assert share[0] < 1 and np.abs(image[0] - IMAGES[0]).max() > 0  # The first row is mixed with the last.


def test_a_row_draws_one_of_both_and_evaluation_mixes_nothing():
  image, _ = mix(mixup_alpha=1.0, cutmix_alpha=1.0)
  is_cut = [set(np.unique(image[i])) <= {i, BEFORE[i]} for i in range(B)]
  assert 15 < sum(is_cut) < 50
  for still in (mix(mixup_alpha=1.0, do_eval=True), mix()):
    np.testing.assert_array_equal(still[0], IMAGES)
    assert (still[1] == 1).all()


def test_the_loss_is_the_mean_of_those_of_both_labels():
  network = Config(Mlp, input_dims=SIDE * SIDE, hidden_dims=(5,))
  plain = Config(ClassificationModel, num_classes=3, network_tpl=network)
  mixed = plain.clone(mixing_tpl=Config(ImageMixing, mixup_alpha=0.4, cutmix_alpha=1.0))
  model, variables = mixed.instantiate(), drawn_variables(plain.instantiate().abstract_init())
  label = np.where(WEIGHTS == 0, -100, np.arange(B) % 3).astype(np.int32)
  batch = {'image': IMAGES / B, 'label': label, 'weights': WEIGHTS}
  # The same images without mixing, from the layer with the key that it gets in the model.
  seen = {}

  def listen(self, image, weights, call=ImageMixing.__call__):
    seen['mixed'] = call(self, image, weights)
    return seen['mixed']

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(ImageMixing, '__call__', listen)
    (metrics, outputs), _ = model.apply(variables, batch, key=jax.random.key(3))
  image, share = map(np.asarray, seen['mixed'])
  found, _ = plain.instantiate().apply(variables, {**batch, 'image': image}, method='predict', do_eval=True)
  log_probs = np.log(found['probabilities'])
  own, other = (-np.take_along_axis(log_probs, at[:, None], 1)[:, 0] for at in (label.clip(0), label[BEFORE].clip(0)))
  expected = np.where(share == 1, own, share * own + (1 - share) * other)
  np.testing.assert_allclose(outputs['loss'][WEIGHTS > 0], expected[WEIGHTS > 0], rtol=1e-5)
  np.testing.assert_allclose(metrics['loss'][0], (expected * WEIGHTS).sum() / WEIGHTS.sum(), rtol=1e-5)
  assert 0 < (share < 1).sum() < B

  def loss(variables, **kwargs):
    return model.apply(variables, batch, **kwargs)[0][0]['loss'][0]

  assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.grad(loss)(variables, key=jax.random.key(3))))
  np.testing.assert_allclose(
    loss(variables, do_eval=True), plain.instantiate().apply(variables, batch)[0][0]['loss'][0]
  )


def test_mistakes_are_named():
  with pytest.raises(ConfigError, match='mixup_alpha: expected at least 0, got -1'):
    Config(ImageMixing, mixup_alpha=-1.0).instantiate()
  with pytest.raises(ConfigError, match='images to mix are floating-point numbers, and these are uint8'):
    mix(IMAGES.astype(np.uint8), mixup_alpha=1.0)
  assert mix(jnp.asarray(IMAGES, jnp.bfloat16), mixup_alpha=1.0)[0].dtype == np.float32
