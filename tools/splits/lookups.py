"""Gathers and slices, which read parts of an array, and scatters, which write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.lax import GatherDimensionNumbers, GatherScatterMode, ScatterDimensionNumbers

from tools.splits.batches import Program

# The table, the ids, the dimensions of a slice in the result and in the table, those that are looked up, those that
# both have, and the sizes of a slice. Some ids are past the end, where XLA clamps them, or drops their updates.
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
    for rows, dims, ids in ((12, 12, 12), (5, 7, 3), (6, 4, 1), (1, 6, 2))
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
    for rows, dims, batch, length in ((6, 6, 6, 4), (5, 3, 3, 5))
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
    for batch, rows, ids in ((6, 4, 6), (3, 5, 2))
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
  for kind, shape, of_ids, numbers, sizes, dims in _LOOKUPS:
    dimensions = GatherDimensionNumbers(
      numbers['offset'],
      numbers['collapsed'],
      numbers['looked_up'],
      numbers.get('batch', ()),
      numbers.get('batch_of_ids', ()),
    )
    table, ids = _table(shape), _ids(shape, of_ids, numbers['looked_up'])
    fn = _gather(dimensions, sizes)
    yield Program(f'{kind} {shape} {of_ids}', 'stablehlo.gather', fn, (table, ids), np.asarray(fn(table, ids)), dims)


def scatters() -> Iterator[Program]:
  for kind, shape, of_ids, numbers, sizes, dims in _LOOKUPS:
    dimensions = ScatterDimensionNumbers(
      numbers['offset'],
      numbers['collapsed'],
      numbers['looked_up'],
      numbers.get('batch', ()),
      numbers.get('batch_of_ids', ()),
    )
    gathered = GatherDimensionNumbers(
      numbers['offset'],
      numbers['collapsed'],
      numbers['looked_up'],
      numbers.get('batch', ()),
      numbers.get('batch_of_ids', ()),
    )
    table, ids = _table(shape), _ids(shape, of_ids, numbers['looked_up'])
    rows = np.asarray(_gather(gathered, sizes)(table, ids)) + 7
    for write in (jax.lax.scatter_add, jax.lax.scatter_max):
      fn = _scatter(write, dimensions)
      name = f'{write.__name__}: {kind} {shape} {of_ids}'
      arrays = (dims[0], dims[1], dims[2], dims[0])
      yield Program(name, 'stablehlo.scatter', fn, (table, ids, rows), np.asarray(fn(table, ids, rows)), arrays)


def slices() -> Iterator[Program]:
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
