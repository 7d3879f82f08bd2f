"""Randomness inside `shard_map`: what each device draws by itself."""

from __future__ import annotations

from collections.abc import Sequence

import jax


def fold_rng_over_axis(key: jax.Array, axis: str | Sequence[str]) -> jax.Array:
  """Inside `shard_map`: returns `key` folded with the device's index along `axis`.

  Devices that differ along the axis then draw differently, as dropout on different rows of a batch must. Devices that
  differ only along other axes draw the same, as dropout on an activation that all of them hold must.

  Args:
    key: a PRNG key, the same on all devices.
    axis: a mesh axis, or several, which count as one with the first the slowest; of none, the key stays as it is.
  """
  axes = (axis,) if isinstance(axis, str) else tuple(axis)
  return jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key
