"""Sums and maxima over dimensions, cumulative ones, the largest entries and their positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from tools.splits.batches import ArrayFunction, Program
from tools.splits.parts import function_program, gradient_program


def reductions() -> Iterator[Program]:
  for shape, dims in (((12, 6), (1,)), ((5, 7), (0,)), ((3, 4, 5), (0, 2)), ((2, 5, 3), (1,))):
    x = _distinct(shape)
    names = 'tuvw'[: len(shape)]
    kept = tuple(name for dim, name in enumerate(names) if dim not in dims)
    for kind, fn in (('sum', jnp.sum), ('max', jnp.max)):
      split = (tuple(names), (), kept)
      yield Program(
        f'{kind} {shape} {dims}', 'stablehlo.reduce', _reduce(fn, dims), (x,), getattr(x, kind)(dims), split
      )
    if len(dims) == 1:
      both = (tuple(names), tuple(names), (), (), kept, kept)
      expected = x.argmax(dims[0])
      yield Program(f'argmax {shape} {dims}', 'stablehlo.reduce', _argmax(dims[0]), (x,), expected, both)


_CUMULATIVE: tuple[tuple[str, ArrayFunction, tuple[int, ...], bool], ...] = (
  ('cumsum', lambda x: jax.lax.cumsum(x, 0), (5, 7), True),
  ('cumsum, even', lambda x: jax.lax.cumsum(x, 1), (4, 12), True),
  ('cumsum from the end', lambda x: jax.lax.cumsum(x, 1, reverse=True), (3, 5, 4), True),
  ('cummax', lambda x: jax.lax.cummax(x, 0), (7, 3), True),
  ('cummax from the end', lambda x: jax.lax.cummax(x, 1, reverse=True), (6, 5), False),
  ('cummin', lambda x: jax.lax.cummin(x, 1), (2, 6), False),
  ('associative scan', lambda x: jax.lax.associative_scan(jnp.add, x, axis=0), (7, 4), True),
  ('associative scan, even', lambda x: jax.lax.associative_scan(jnp.maximum, x, axis=1), (3, 12), False),
)


def cumulative() -> Iterator[Program]:
  yield from _programs(_CUMULATIVE)


_LARGEST: tuple[tuple[str, ArrayFunction, tuple[int, ...], bool], ...] = (
  ('largest', lambda x: jax.lax.top_k(x, 3)[0], (5, 7), True),
  ('largest, even', lambda x: jax.lax.top_k(x, 2)[0], (4, 12), True),
  ('where the largest are', lambda x: jax.lax.top_k(x, 3)[1], (3, 2, 5), False),
  ('where the largest is', lambda x: jnp.argmax(x, 1), (6, 5), False),
  ('where the smallest is, of all', jnp.argmin, (5, 3), False),
  ('order', lambda x: jnp.argsort(x, axis=0), (7, 4), False),
  ('largest of rows', lambda x: jnp.max(x, 1), (5, 6), True),
  ('one-hot', lambda x: jax.nn.one_hot(jnp.argmax(x, 1), x.shape[1]), (5, 6), False),
  ('positions', lambda x: x * jax.lax.broadcasted_iota(jnp.float32, x.shape, 1), (5, 7), True),
)


def largest() -> Iterator[Program]:
  yield from _programs(_LARGEST)


def _programs(functions: tuple[tuple[str, ArrayFunction, tuple[int, ...], bool], ...]) -> Iterator[Program]:
  """Yields, for each function, the program of its values, and the program of its gradient if its flag is True."""
  for name, fn, shape, has_gradient in functions:
    yield function_program(name, fn, (_distinct(shape),))
    if has_gradient:
      yield gradient_program(name, fn, (_distinct(shape),), 0)


def _distinct(shape: tuple[int, ...]) -> np.ndarray:
  return np.random.default_rng(0).permutation(np.prod(shape)).astype(np.float32).reshape(shape) - 9


def _reduce(fn: Callable[..., jax.Array], dims: tuple[int, ...]) -> ArrayFunction:
  return lambda x: fn(x, dims)


def _argmax(dim: int) -> ArrayFunction:
  return lambda x: jax.lax.argmax(x, dim, np.int32)
