"""Grouped products by the Triton kernels of tokamax, for NVIDIA GPUs; see `tokamax_target.py`.

Its Mosaic kernels are not used; docs/planning-figures.md says why.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import first_line
from praxis_lite.layers.tokamax_target import (
  INSTALL,
  OLDEST_CAPABILITY,
  compute_capability,
  is_installed,
  tokamax_for_mesh,
)
from praxis_lite.sharding.mesh import device_kind

_DTYPES = ('float32', 'bfloat16', 'float16')
# A product of a kernel has at least this number of rows.
_FEWEST_ROWS = 16


def why_no_kernel(dtype: jax.typing.DTypeLike | None, rows: int) -> str:
  """Returns why no kernel can multiply groups of rows; '' if one can.

  Args:
    dtype: dtype of both operands; None means float32.
    rows: number of rows of all groups.
  """
  if (name := jnp.dtype(jnp.float32 if dtype is None else dtype).name) not in _DTYPES:
    return f'the kernel takes {", ".join(_DTYPES)}, not {name}'
  if rows < _FEWEST_ROWS:
    return f'the kernel takes at least {_FEWEST_ROWS} rows, not {rows}'
  return _why_no_kernel(device_kind())


def multiply(rows_MK: jax.Array, weights: jax.Array, sizes_G: jax.Array, transposed: bool) -> jax.Array:
  """Returns [M, N]: the rows of each group multiplied by its weights, [G, K, N] or, if transposed, [G, N, K]."""
  out_MN = _call(rows_MK, weights, sizes_G, ((1,), (2 if transposed else 1,)), rhs_group_dimensions=(0,))
  # The kernel does not write rows after the last group.
  return jnp.where(jnp.arange(len(out_MN))[:, None] < jnp.sum(sizes_G), out_MN, 0)


def sum_outer_products(left_MK: jax.Array, right_MN: jax.Array, sizes_G: jax.Array) -> jax.Array:
  """Returns [G, K, N]: for each group, the sum over its rows of the outer products of both operands."""
  out_GKN = _call(left_MK, right_MN, sizes_G, ((0,), (0,)), rhs_group_dimensions=())
  # For an empty group, the kernel sums rows of the group before it.
  return jnp.where(sizes_G[:, None, None] > 0, out_GKN, 0)


def _call(
  left: jax.Array,
  right: jax.Array,
  sizes_G: jax.Array,
  summed: tuple[tuple[int], tuple[int]],
  rhs_group_dimensions: tuple[int, ...],
) -> jax.Array:
  numbers = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(summed, ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=rhs_group_dimensions,
  )
  with tokamax_for_mesh() as tokamax:
    return tokamax.ragged_dot_general(left, right, sizes_G, numbers, implementation='triton')


@functools.cache
def _why_no_kernel(chip: str) -> str:
  """Returns why no kernel can be lowered for the chips of the ambient mesh, of kind `chip`; '' if one can."""
  del chip  # What is lowered depends on it.
  if not is_installed():
    return f"'triton' needs tokamax: {INSTALL}"
  if (capability := compute_capability()) is None:
    return "'triton' takes GPUs of NVIDIA"
  if capability < OLDEST_CAPABILITY:
    return f"'triton' takes compute capability 8.0 and newer, not {'.'.join(map(str, capability))}"
  rows, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 128), (1, 128, 128)))
  sizes = jax.ShapeDtypeStruct((1,), jnp.int32)
  try:
    jax.jit(multiply, static_argnums=3).trace(rows, weights, sizes, False).lower(lowering_platforms=('cuda',))
  except Exception as error:  # Of whatever a release of tokamax raises that does not fit this JAX, or lacks packages.
    return f"'triton' fails on this JAX or lacks packages: {first_line(error)}; {INSTALL}"
  return ''
