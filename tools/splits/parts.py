"""Static slices, concatenations and reversals, and functions that consist of these: their values and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tools.splits.batches import SEVERAL, ArrayFunction, Program

_NAMES = 'tuvw'


def static_slices() -> Iterator[Program]:
  for shape, begin, end, strides in (
    ((12, 4), (0, 0), (5, 4), (1, 1)),
    ((7, 6), (2, 1), (3, 5), (1, 1)),
    ((5, 8), (0, 1), (5, 8), (1, 2)),
    ((3, 5, 4), (2, 0, 0), (3, 5, 4), (1, 1, 1)),
    ((12, 3), (1, 0), (12, 3), (3, 1)),
  ):
    x = _entries(shape)
    cuts = tuple(map(slice, begin, end, strides))
    is_whole = [(i, j, k) == (0, n, 1) for n, i, j, k in zip(shape, begin, end, strides)]
    names = tuple(name if whole else None for name, whole in zip(_NAMES, is_whole))
    yield Program(f'{shape} {begin} {end} {strides}', 'stablehlo.slice', _slice(cuts), (x,), x[cuts], (names, names))


def concatenations() -> Iterator[Program]:
  for shapes, dim in (
    (((5, 4), (7, 4)), 0),
    (((6, 4), (6, 8)), 1),
    (((3, 1, 5), (3, 1, 5), (3, 1, 5)), 1),
    (((4, 3), (0, 3), (1, 3)), 0),
  ):
    arrays = tuple(_entries(shape) for shape in shapes)
    names = tuple(None if i == dim else name for i, name in enumerate(_NAMES[: len(shapes[0])]))
    fn, expected = _concatenate(dim), np.concatenate(arrays, dim)
    yield Program(f'{shapes} {dim}', 'stablehlo.concatenate', fn, arrays, expected, (names,) * (len(arrays) + 1))


def reversals() -> Iterator[Program]:
  for shape, dims in (((12, 5), (0,)), ((5, 7), (0, 1)), ((3, 4, 6), (1,)), ((7,), (0,))):
    x = _entries(shape)
    names = tuple(None if i in dims else name for i, name in enumerate(_NAMES[: len(shape)]))
    yield Program(f'{shape} {dims}', 'stablehlo.reverse', _reverse(dims), (x,), np.flip(x, dims), (names, names))


# Functions with the shapes of their arguments.
_FUNCTIONS: tuple[tuple[str, ArrayFunction, tuple[tuple[int, ...], ...]], ...] = (
  ('stack', lambda *x: jnp.stack(x), ((5, 3),) * 3),
  ('stack along the last dimension', lambda *x: jnp.stack(x, -1), ((7, 4),) * 2),
  ('concatenate', lambda *x: jnp.concatenate(x, 1), ((3, 5), (3, 2))),
  ('halves', lambda x: jnp.concatenate(jnp.split(x, 2, -1)[::-1], -1), ((5, 6),)),
  ('one half', lambda x: jnp.split(x, 2)[1], ((6, 5),)),
  ('pairs', lambda x: jnp.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape), ((3, 6),)),
  ('roll', lambda x: jnp.roll(x, 2, 0), ((7, 3),)),
  ('flip', lambda x: x[::-1] * x, ((5, 6),)),
  ('one row', lambda x: x[2], ((5, 7),)),
  ('every third', lambda x: x[1::3], ((7, 4),)),
  ('differences', lambda x: jnp.diff(x, axis=1), ((4, 5),)),
)


def slice_functions() -> Iterator[Program]:
  for name, fn, shapes in _FUNCTIONS:
    args = tuple(_entries(shape) for shape in shapes)
    yield function_program(name, fn, args)
    for i in range(len(args)):
      yield gradient_program(name, fn, args, i)


def function_program(name: str, fn: ArrayFunction, args: tuple[np.ndarray, ...]) -> Program:
  """Returns the program of a function of several operations. Its expected result is computed on one device."""
  expected = np.asarray(jax.jit(fn)(*args))
  return Program(f'{name} {format_shapes(args)}', SEVERAL, fn, args, expected, tuple(map(names_of, (*args, expected))))


def gradient_program(name: str, fn: ArrayFunction, args: tuple[np.ndarray, ...], number: int) -> Program:
  """Returns the program of a function's gradient with respect to one argument. Its sums and products are exact."""
  out = jax.eval_shape(fn, *args)
  weights = np.random.default_rng(1).integers(-3, 4, out.shape).astype(np.float32)

  def gradient(weights: jax.Array, *args: jax.Array) -> jax.Array:
    return jax.grad(lambda *xs: jnp.sum(fn(*xs) * weights), argnums=number)(*args)

  return function_program(f'gradient of {name} by {number}', gradient, (weights, *args))


def format_shapes(args: Sequence[np.ndarray]) -> str:
  return ' '.join(str(x.shape) for x in args)


def names_of(x: np.ndarray) -> tuple[str, ...]:
  """Returns names of dimensions; arrays of equal rank get equal names."""
  return tuple(_NAMES[: x.ndim])


def _entries(shape: Sequence[int]) -> np.ndarray:
  return np.random.default_rng(0).integers(-9, 10, shape).astype(np.float32)


def _slice(cuts: Sequence[slice]) -> ArrayFunction:
  begin, end, strides = ([getattr(cut, name) for cut in cuts] for name in ('start', 'stop', 'step'))
  return lambda x: jax.lax.slice(x, begin, end, strides)


def _concatenate(dim: int) -> ArrayFunction:
  return lambda *arrays: jax.lax.concatenate(arrays, dim)


def _reverse(dims: Sequence[int]) -> ArrayFunction:
  return lambda x: jax.lax.rev(x, dims)
