"""Gathers and slices, which read parts of an array, and scatters, which write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherDimensionNumbers, GatherScatterMode, ScatterDimensionNumbers

from tools.splits.assign import Dims
from tools.splits.batches import Program
from tools.splits.parts import function_program, gradient_program

# For each lookup: its name, the shapes of table and ids, the numbers of dimensions for `GatherDimensionNumbers`, the
# sizes of a slice, and the names of dimensions. Some ids are past the end: XLA clamps them, or drops their updates.
_LOOKUPS: tuple[Any, ...] = (
  *(
    (
      'rows',
      (rows, dims),
      (ids, 1),
      {'offset': (1,), 'collapsed': (0,), 'looked_up': (0,)},
      (1, dims),
      ((None, 'd'), ('n', None), ('n', 'd')),
    )
    for rows, dims, ids in ((12, 12, 12), (5, 7, 3), (6, 4, 1), (1, 6, 2), (24, 6, 2), (24, 4, 6))
  ),
  *(
    (
      'rows of ids of two dimensions',
      (rows, dims),
      (batch, length, 1),
      {'offset': (2,), 'collapsed': (0,), 'looked_up': (0,)},
      (1, dims),
      ((None, 'd'), ('b', 't', None), ('b', 't', 'd')),
    )
    for rows, dims, batch, length in ((6, 6, 6, 4), (5, 3, 3, 5), (30, 4, 3, 2))
  ),
  (
    'entries by two ids',
    (5, 6, 4),
    (6, 2),
    {'offset': (1,), 'collapsed': (0, 1), 'looked_up': (0, 1)},
    (1, 1, 4),
    ((None, None, 'd'), ('n', None), ('n', 'd')),
  ),
  *(
    (
      'rows of a batch',
      (batch, rows, 4),
      (batch, ids, 1),
      {'offset': (2,), 'collapsed': (1,), 'looked_up': (1,), 'batch': (0,), 'batch_of_ids': (0,)},
      (1, 1, 4),
      (('b', None, 'd'), ('b', 'n', None), ('b', 'n', 'd')),
    )
    for batch, rows, ids in ((6, 4, 6), (3, 5, 2), (4, 24, 3))
  ),
  *(
    (
      'slices of a batch',
      (batch, rows, 2),
      (batch, 1),
      {'offset': (1, 2), 'collapsed': (), 'looked_up': (1,), 'batch': (0,), 'batch_of_ids': (0,)},
      (1, size, 2),
      (('b', None, 'd'), ('b', None), ('b', None, 'd')),
    )
    for batch, rows, size in ((4, 5, 4), (6, 6, 2), (3, 4, 4))
  ),
)


def gathers() -> Iterator[Program]:
  for kind, table, ids, numbers, sizes, dims in _lookups():
    fn = _gather(GatherDimensionNumbers(*numbers), sizes)
    name = f'{kind} {table.shape} {ids.shape}'
    yield Program(name, 'stablehlo.gather', fn, (table, ids), np.asarray(fn(table, ids)), dims)


def scatters() -> Iterator[Program]:
  for kind, table, ids, numbers, sizes, dims in _lookups():
    rows = np.asarray(_gather(GatherDimensionNumbers(*numbers), sizes)(table, ids)) + 7
    for write in (jax.lax.scatter_add, jax.lax.scatter_max):
      fn = _scatter(write, ScatterDimensionNumbers(*numbers))
      name = f'{write.__name__}: {kind} {table.shape} {ids.shape}'
      arrays = (dims[0], dims[1], dims[2], dims[0])
      yield Program(name, 'stablehlo.scatter', fn, (table, ids, rows), np.asarray(fn(table, ids, rows)), arrays)


def _lookups() -> Iterator[tuple[str, np.ndarray, np.ndarray, tuple[tuple[int, ...], ...], tuple[int, ...], Dims]]:
  """Yields, for each lookup, its name, the table, the ids, the numbers of its dimensions, and the rest of its entry."""
  for kind, shape, of_ids, numbers, sizes, dims in _LOOKUPS:
    of_dims = tuple(numbers.get(name, ()) for name in ('offset', 'collapsed', 'looked_up', 'batch', 'batch_of_ids'))
    yield kind, _table(shape), _ids(shape, of_ids, numbers['looked_up']), of_dims, sizes, dims


def dynamic_slices() -> Iterator[Program]:
  for shape, sizes, begin in (((5, 6), (2, 6), (4, 0)), ((12, 4), (5, 3), (9, 3)), ((3, 7), (3, 4), (0, 1))):
    x, starts = _table(shape), tuple(np.array(n, np.int32) for n in begin)
    names = tuple(name if n == size else None for name, n, size in zip('tu', shape, sizes))
    fn = _slice(sizes)
    expected = np.asarray(fn(x, *starts))
    yield Program(f'{shape} {sizes}', 'stablehlo.dynamic_slice', fn, (x, *starts), expected, (names, (), (), names))
    update = expected + 7
    yield Program(
      f'{shape} updated by {sizes}',
      'stablehlo.dynamic_update_slice',
      _write_slice,
      (x, update, *starts),
      np.asarray(_write_slice(x, update, *starts)),
      (names, names, (), (), names),
    )


def _table(shape: Sequence[int]) -> np.ndarray:
  return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1


def _ids(shape: Sequence[int], of_ids: Sequence[int], looked_up: Sequence[int]) -> np.ndarray:
  most = [shape[dim] + 1 for dim in looked_up]
  return np.random.default_rng(0).integers(0, most, of_ids).astype(np.int32)


def _gather(numbers: GatherDimensionNumbers, sizes: Sequence[int]) -> Callable[..., jax.Array]:
  return lambda table, ids: jax.lax.gather(table, ids, numbers, sizes, mode=GatherScatterMode.CLIP)


def _scatter(write: Callable[..., jax.Array], numbers: ScatterDimensionNumbers) -> Callable[..., jax.Array]:
  return lambda table, ids, rows: write(table, ids, rows, numbers, mode=GatherScatterMode.FILL_OR_DROP)


def _slice(sizes: Sequence[int]) -> Callable[..., jax.Array]:
  return lambda x, *starts: jax.lax.dynamic_slice(x, starts, sizes)


def _write_slice(x: Any, update: Any, *starts: Any) -> jax.Array:
  return jax.lax.dynamic_update_slice(x, update, starts)


_X4, _X3, _X2 = (3, 4, 5, 6), (5, 6, 4), (7, 6)
_I, _J, _MANY, _OTHERS = 2, 3, (2, 0, 2), (1, 3, 3)
# Each function with its name, the shape of its array, and its ids.
_FUNCTIONS: tuple[tuple[str, Callable[..., jax.Array], tuple[int, ...], tuple[Any, ...]], ...] = (
  ('x[i]', lambda x, i: x[i], _X2, (_I,)),
  ('x[ids]', lambda x, i: x[i], _X2, (_MANY,)),
  ('x[:, i]', lambda x, i: x[:, i], _X2, (_I,)),
  ('x[:, ids]', lambda x, i: x[:, i], _X2, (_MANY,)),
  ('x[:, :, i, j]', lambda x, i, j: x[:, :, i, j], _X4, (_I, _J)),
  ('x[:, :, ids, ids]', lambda x, i, j: x[:, :, i, j], _X4, (_MANY, _OTHERS)),
  ('x[i, :, j]', lambda x, i, j: x[i, :, j], _X3, (_I, _J)),
  ('x[ids, :, ids]', lambda x, i, j: x[i, :, j], _X3, (_MANY, _OTHERS)),
  ('x[i, :, ids]', lambda x, i, j: x[i, :, j], _X3, (_I, _OTHERS)),
  ('take', lambda x, i: jnp.take(x, i, axis=1), _X3, (_MANY,)),
  ('dynamic_index', lambda x, i: jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False), _X3, (_I,)),
  (
    'take_along_axis',
    lambda x, i: jnp.take_along_axis(x, i, axis=1),
    _X2,
    (((1,), (5,), (0,), (2,), (2,), (3,), (4,)),),
  ),
  (
    'one-hot rows',
    lambda x, i: jnp.take_along_axis(x, i[..., None], axis=-1)[..., 0],
    (3, 5, 4),
    (((1, 0, 3, 3, 2),) * 3,),
  ),
  ('set', lambda x, i: x.at[i].set(x[:3] + 20, unique_indices=True), _X2, ((4, 0, 6),)),
  ('set columns', lambda x, i: x.at[:, i].set(x[:, :2] + 20), _X2, ((5, 1),)),
  ('set one', lambda x, i: x.at[:, i].set(x[:, 0] + 20), _X2, (_I,)),
  ('multiplied', lambda x, i: x.at[i].multiply(x[:3] + 2, unique_indices=True), _X2, ((4, 0, 6),)),
)


def lookup_functions() -> Iterator[Program]:
  """Yields lookups and writes as users write them with `jax.numpy`, and their gradients with respect to the array."""
  for name, fn, shape, ids in _FUNCTIONS:
    x = np.random.default_rng(0).integers(-9, 10, shape).astype(np.float32)
    args = (x, *(np.array(i, np.int32) for i in ids))
    yield function_program(name, fn, args)
    yield gradient_program(name, fn, args, 0)
