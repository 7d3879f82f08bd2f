"""Grouped products by kernels in Pallas, which JAX compiles by Triton, for NVIDIA GPUs.

Each program of a kernel computes a tile of the result. In `multiply`, a tile has rows of one group, and a table says
which rows. So the number of programs grows with the rows, and not with rows times groups as in the kernels of tokamax
0.0.12; docs/benchmarks.md compares the times of both. The kernels of tokamax 0.0.17 need other packages.

JAX 0.12 deprecates the part of Pallas that compiles by Triton. On a release without it, 'blocks' is used instead, and
the reason says so.

M rows, G groups, K dims that are summed over, N dims of the output.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from praxis_lite.layers.gpu_capability import LARGE_SHARED_MEMORY, compute_capability
from praxis_lite.sharding.mesh import platform

# How many rows of tiles are computed together; see `_place`.
_TILES_TOGETHER = 8


class Tiles(NamedTuple):
  """Sizes of a program."""

  m: int  # Rows of its tile of the result.
  n: int  # Columns of its tile.
  k: int  # Number of dims that it sums over at a time.
  warps: int  # Number of warps.
  stages: int  # Number of loads that are in flight.


def multiply(rows_MK: jax.Array, weights: jax.Array, sizes_G: jax.Array, transposed: bool) -> jax.Array:
  """Returns [M, N]: the rows of each group multiplied by its weights, [G, K, N] or, if transposed, [G, N, K]."""
  (M, K), G = rows_MK.shape, len(weights)
  N = weights.shape[1 if transposed else 2]
  tiles = _tiles_for(rows_MK.dtype, M // G, N, K)
  ends_G = jnp.cumsum(sizes_G, dtype=jnp.int32)
  # Rows after the last group are one more group, of zeros.
  starts, ends = jnp.insert(ends_G, 0, 0), jnp.append(ends_G, M)
  table = _table_of_tiles(starts, ends, tiles.m, M // tiles.m + G + 1)
  columns = pl.cdiv(N, tiles.n)
  kernel = functools.partial(_multiply_tile, tiles=tiles, columns=columns, transposed=transposed)
  out = jax.ShapeDtypeStruct((M, N), rows_MK.dtype)
  return _call(kernel, out, len(table.group) * columns, tiles)(rows_MK, weights, *table)


def sum_outer_products(left_MK: jax.Array, right_MN: jax.Array, sizes_G: jax.Array) -> jax.Array:
  """Returns [G, K, N]: for each group, the sum over its rows of the outer products of both operands."""
  (M, K), N, G = left_MK.shape, right_MN.shape[1], len(sizes_G)
  tiles = _tiles_for(left_MK.dtype, K, N, M // G)
  ends_G = jnp.cumsum(sizes_G, dtype=jnp.int32)
  grid = pl.cdiv(K, tiles.m), pl.cdiv(N, tiles.n)
  kernel = functools.partial(_sum_tile, tiles=tiles, grid=grid)
  out = jax.ShapeDtypeStruct((G, K, N), left_MK.dtype)
  return _call(kernel, out, G * grid[0] * grid[1], tiles)(left_MK, right_MN, ends_G - sizes_G, ends_G)


class _Table(NamedTuple):
  """For each tile of rows, int32: its group, its first row, and the index after the last row of its group."""

  group: jax.Array
  start: jax.Array
  end: jax.Array


def _table_of_tiles(starts: jax.Array, ends: jax.Array, size: int, most: int) -> _Table:
  """Returns a table of `most` tiles of `size` rows: first the tiles of all groups, then tiles without rows."""
  counts = -(-(ends - starts) // size)
  last = jnp.cumsum(counts)
  tile = jnp.arange(most, dtype=jnp.int32)
  group = jnp.minimum(jnp.sum(tile[:, None] >= last, axis=1, dtype=jnp.int32), len(starts) - 1)
  start = starts[group] + size * (tile - (last - counts)[group])
  return _Table(group, start, ends[group])


def _multiply_tile(
  rows: Any, weights: Any, group: Any, start: Any, end: Any, out: Any, *, tiles: Tiles, columns: int, transposed: bool
) -> None:
  """Writes a tile of the result of `multiply`. The arguments are references to whole arrays."""
  K, G, N = rows.shape[1], weights.shape[0], out.shape[1]
  tile, column = _place(pl.program_id(0), group.shape[0], columns)
  first, last, g = start[tile], end[tile], group[tile]
  row, col = first + jnp.arange(tiles.m), column * tiles.n + jnp.arange(tiles.n)
  inside = (row < last)[:, None] & (col < N)[None, :]

  def add(i: jax.Array, total: jax.Array) -> jax.Array:
    k = i * tiles.k + jnp.arange(tiles.k)
    x = _load(rows, (row, k), (row < last, _before(k, K, tiles.k)))
    if transposed:
      w = _load(weights, (g, col, k), (_before(col, N, tiles.n), _before(k, K, tiles.k))).T
    else:
      w = _load(weights, (g, k, col), (_before(k, K, tiles.k), _before(col, N, tiles.n)))
    return total + dot(x, w)

  @pl.when((first < last) & (g < G))
  def _() -> None:
    total = jax.lax.fori_loop(0, pl.cdiv(K, tiles.k), add, jnp.zeros((tiles.m, tiles.n), jnp.float32))
    triton.store(out.at[row[:, None], col[None, :]], total.astype(out.dtype), mask=inside)

  @pl.when((first < last) & (g == G))
  def _() -> None:
    triton.store(out.at[row[:, None], col[None, :]], jnp.zeros((tiles.m, tiles.n), out.dtype), mask=inside)


def _sum_tile(left: Any, right: Any, start: Any, end: Any, out: Any, *, tiles: Tiles, grid: tuple[int, int]) -> None:
  """Writes a tile of the result of `sum_outer_products`. The arguments are references to whole arrays."""
  _, K, N = out.shape
  g, rest = jnp.divmod(pl.program_id(0), grid[0] * grid[1])
  row, column = _place(rest, *grid)
  first, last = start[g], end[g]
  k, col = row * tiles.m + jnp.arange(tiles.m), column * tiles.n + jnp.arange(tiles.n)

  def add(i: jax.Array, total: jax.Array, masked: bool = False) -> jax.Array:
    m = first + i * tiles.k + jnp.arange(tiles.k)
    inside = m < last if masked else None
    x = _load(left, (m, k), (inside, _before(k, K, tiles.m)))
    y = _load(right, (m, col), (inside, _before(col, N, tiles.n)))
    return total + dot(x.T, y)

  full = (last - first) // tiles.k
  total = jax.lax.fori_loop(0, full, add, jnp.zeros((tiles.m, tiles.n), jnp.float32))
  total = add(full, total, masked=True)
  inside = (k < K)[:, None] & (col < N)[None, :]
  triton.store(out.at[g, k[:, None], col[None, :]], total.astype(out.dtype), mask=inside)


def _place(program: jax.Array, rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
  """Returns the row and the column of the tile that a program computes, in a grid of rows x columns tiles.

  Programs run in order, about a hundred of them at the same time. Tiles are computed in bands of `_TILES_TOGETHER`
  rows, and in a band column by column. So programs that run at the same time read the same operands, from the chip's
  cache.
  """
  several, rest = jnp.divmod(program, _TILES_TOGETHER * columns)
  height = jnp.minimum(rows - several * _TILES_TOGETHER, _TILES_TOGETHER)
  return several * _TILES_TOGETHER + rest % height, rest // height


def _before(index: jax.Array, size: int, tile: int) -> jax.Array | None:
  """Returns which indices are less than `size`; None if all are, because the size of a tile divides `size`."""
  return index < size if size % tile else None


def _load(ref: Any, indices: tuple[jax.Array, ...], inside: tuple[jax.Array | None, jax.Array | None]) -> jax.Array:
  """Returns a tile of a matrix, or of a matrix in a stack; zeros where a mask of one of its two dimensions is false."""
  *stack, first, second = indices
  masks = [mask.reshape(shape) for mask, shape in zip(inside, ((-1, 1), (1, -1))) if mask is not None]
  at = ref.at[(*stack, first[:, None], second[None, :])]
  if not masks:
    return triton.load(at)
  mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), (len(first), len(second)))
  return triton.load(at, mask=mask, other=0.0)


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns the product in float32."""
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)


def _tiles_for(dtype: jax.typing.DTypeLike, rows: int, columns: int, summed: int) -> Tiles:
  """Returns the sizes of tiles that were fast on an H100, made smaller for small operands.

  The result of an average group has `rows` rows and `columns` columns; each entry is a sum over `summed` products.
  """
  wide = 4 // jnp.dtype(dtype).itemsize
  if rows < 64 or columns <= 128:
    most = Tiles(128, 128, 32 * wide, 4, 4)
  else:
    most = Tiles(128, 256, 32 * wide, 8, 3)
  if compute_capability() not in LARGE_SHARED_MEMORY:
    most = Tiles(128, 128, 16 * wide, 4, 3)
  m, n, k = (min(max(16, pl.next_power_of_2(size)), most_of) for size, most_of in zip((rows, columns, summed), most))
  return most._replace(m=m, n=n, k=k)


def _call(kernel: Any, out: jax.ShapeDtypeStruct, programs: int, tiles: Tiles) -> Any:
  """Returns a function that runs a kernel; on CPUs, Pallas interprets the kernel."""
  return pl.pallas_call(
    kernel,
    out,
    grid=(programs,),
    interpret=platform() == 'cpu',
    compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
  )
