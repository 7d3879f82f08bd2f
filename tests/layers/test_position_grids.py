"""Positions of patches for images of another size: against NumPy, and which grid a table has."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.layers.base.facts import PositionGrid
from praxis_lite.layers.positions import grid_of, resample_positions


def weights_by_hand(old, new):
  """[new, old]: triangles around the middles of the new cells, wider ones if cells get larger; each row sums to 1."""
  scale = new / old
  middles = (np.arange(new) + 0.5) / scale - 0.5
  reach = max(1.0, 1 / scale)
  weights = np.maximum(0, 1 - np.abs(middles[:, None] - np.arange(old)) / reach)
  return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize('others', [0, 1])
@pytest.mark.parametrize('old, new', [((4, 4), (6, 6)), ((6, 6), (4, 3)), ((2, 4), (3, 7)), ((1, 1), (2, 3))])
def test_a_table_is_interpolated_along_rows_and_columns(old, new, others):
  table = np.random.default_rng(0).standard_normal((others + old[0] * old[1], 3)).astype(np.float32)
  found = resample_positions(jnp.asarray(table), PositionGrid(*old, others), PositionGrid(*new, others))
  rows, columns = (weights_by_hand(a, b) for a, b in zip(old, new))
  grid = np.einsum('Rr,Cc,rcd->RCd', rows, columns, table[others:].reshape(*old, 3))
  np.testing.assert_allclose(found, np.concatenate([table[:others], grid.reshape(-1, 3)]), atol=1e-6)
  same = resample_positions(jnp.asarray(table), PositionGrid(*old, others), PositionGrid(*old, others))
  np.testing.assert_allclose(same, table, atol=1e-6)


@pytest.mark.parametrize(
  'count, like, expected',
  [
    (17, (6, 6, 1), (4, 4)),
    (16, (6, 6, 0), (4, 4)),
    (17, (6, 6, 0), None),
    (9, (4, 8, 1), (2, 4)),
    (8, (6, 3, 0), (4, 2)),
    (12, (6, 6, 0), None),
    (1, (6, 6, 1), None),
    (0, (6, 6, 1), None),
  ],
)
def test_the_grid_of_a_table_is_a_square_or_has_the_same_aspect_ratio(count, like, expected):
  assert grid_of(count, PositionGrid(*like)) == (expected and PositionGrid(*expected, like[2]))
