"""Resamples learned positions of a grid of patches for images of another size.

R rows and C columns of patches, D dims.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from praxis_lite.layers.base.facts import PositionGrid


def grid_of(count: int, like: PositionGrid) -> PositionGrid | None:
  """Returns the grid of a table with `count` positions; `like.others` of them belong to other tokens.

  The grid is a square if possible, otherwise it has the aspect ratio of `like`. Returns None if neither is possible.
  """
  patches = count - like.others
  side = math.isqrt(max(patches, 0))
  if side and side * side == patches:
    return PositionGrid(side, side, like.others)
  rows = math.isqrt(max(patches * like.rows // like.columns, 0))
  columns = rows * like.columns // like.rows
  if rows and rows * columns == patches and rows * like.columns == columns * like.rows:
    return PositionGrid(rows, columns, like.others)
  return None


def resample_positions(table: jax.Array, old: PositionGrid, new: PositionGrid) -> jax.Array:
  """Returns a table [others + R C, D] for the grid `new`, interpolated linearly along rows and columns.

  A smaller grid is antialiased: each entry averages several old ones. The `others` positions, which belong to no
  patch, do not change.
  """
  others, patches = table[: old.others], table[old.others :]
  grid_RCD = jnp.reshape(patches.astype(jnp.float32), (old.rows, old.columns, -1))
  shape = (new.rows, new.columns, grid_RCD.shape[-1])
  resized_RCD = jax.image.resize(grid_RCD, shape, method='linear', antialias=True)
  return jnp.concatenate([others, resized_RCD.reshape(-1, shape[-1]).astype(table.dtype)])
