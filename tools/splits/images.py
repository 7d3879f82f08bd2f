"""Convolutions, windows and pads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tools.splits.batches import Program

WindowSizes = tuple[int, ...]
_FORWARD, _FILTER_GRADIENT = ('NHWC', 'HWIO', 'NHWC'), ('CHWN', 'IHWO', 'HWNC')


class _Convolution(NamedTuple):
  """Sizes of images [N, H, W, C], of filters [H, W, I, O], groups, strides, and edges that pad height and width."""

  images: tuple[int, int, int, int]
  filters: tuple[int, int, int, int]
  feature_groups: int = 1
  batch_groups: int = 1
  stride: int = 1
  edges: tuple[int, int] = (0, 0)
  layout: tuple[str, str, str] = _FORWARD


_CONVOLUTIONS = (
  _Convolution((6, 4, 6, 4), (3, 3, 4, 6), edges=(1, 1)),
  _Convolution((3, 4, 5, 5), (1, 1, 5, 2)),
  _Convolution((2, 5, 4, 3), (2, 3, 3, 4), stride=2),
  _Convolution((6, 4, 4, 4), (4, 4, 4, 3), layout=_FILTER_GRADIENT, edges=(1, 1)),
)
_GROUPED = (
  _Convolution((6, 4, 4, 8), (3, 3, 2, 8), feature_groups=4, edges=(1, 1)),
  _Convolution((4, 3, 4, 12), (1, 1, 1, 12), feature_groups=12),
  _Convolution((3, 3, 3, 4), (1, 1, 2, 6), feature_groups=2),
  _Convolution((3, 3, 4, 6), (2, 1, 1, 12), feature_groups=6, stride=2),
)
_GRADIENTS = (
  _Convolution((8, 4, 4, 6), (4, 4, 6, 8), batch_groups=4, layout=_FILTER_GRADIENT, edges=(1, 1)),
  _Convolution((12, 3, 2, 4), (3, 2, 4, 12), batch_groups=12, layout=_FILTER_GRADIENT),
  _Convolution((4, 3, 3, 5), (3, 3, 5, 6), batch_groups=2, layout=_FILTER_GRADIENT),
  _Convolution((6, 3, 3, 4), (2, 2, 4, 6), batch_groups=3),
)


def convolutions() -> Iterator[Program]:
  yield from map(_program, _CONVOLUTIONS)


def grouped_convolutions() -> Iterator[Program]:
  yield from map(_program, (*_GROUPED, *_GRADIENTS))


def _program(case: _Convolution) -> Program:
  rng = np.random.default_rng(0)
  images, filters = (rng.integers(-3, 4, shape).astype(np.float32) for shape in (case.images, case.filters))
  of_images, of_filters, of_result = case.layout
  groups = 'g' if case.feature_groups * case.batch_groups > 1 else None
  names = (
    {'N': groups if case.batch_groups > 1 else 'n', 'C': groups if case.feature_groups > 1 else 's'},
    {'I': None if case.feature_groups > 1 else 's', 'O': groups or 'o'},
    {'N': None if case.batch_groups > 1 else 'n', 'C': groups or 'o'},
  )

  def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
      *(x, w, (case.stride,) * 2, (case.edges,) * 2),
      dimension_numbers=case.layout,
      feature_group_count=case.feature_groups,
      batch_group_count=case.batch_groups,
    )

  return Program(
    name=f'images {case.images}, filters {case.filters}, groups {case.feature_groups} {case.batch_groups}, '
    f'stride {case.stride}, {of_images}',
    op='stablehlo.convolution',
    fn=convolve,
    args=(_reorder(images, 'NHWC', of_images), _reorder(filters, 'HWIO', of_filters)),
    expected=_reorder(_convolve(images, filters, case), 'NHWC', of_result),
    dims=tuple(tuple(of.get(x) for x in layout) for of, layout in zip(names, case.layout)),
  )


def _reorder(x: np.ndarray, before: str, after: str) -> np.ndarray:
  return x.transpose([before.index(name) for name in after])


def _convolve(x: np.ndarray, w: np.ndarray, case: _Convolution) -> np.ndarray:
  """Computes the convolution in NumPy, group by group."""
  groups = case.feature_groups * case.batch_groups
  parts = np.split(x, groups, axis=3 if case.feature_groups > 1 else 0)
  x_w = zip(parts, np.split(w, groups, axis=3))
  padded = ((0, 0), case.edges, case.edges, (0, 0))
  results = []
  for x_BxHxWxC, w_hxwxCxO in x_w:
    windows = sliding_window_view(np.pad(x_BxHxWxC, padded), w_hxwxCxO.shape[:2], (1, 2))
    results.append(np.einsum('BHWChw,hwCO->BHWO', windows[:, :: case.stride, :: case.stride], w_hxwxCxO))
  return np.concatenate(results, 3)


def windows() -> Iterator[Program]:
  """Yields maxima and sums over windows. Some windows are padded, overlap, or move along only one dimension."""
  for shape, size, stride, edges in (
    ((6, 8, 5), (1, 2, 1), (1, 2, 1), ((0, 0),) * 3),
    ((3, 7, 4), (1, 3, 2), (1, 1, 2), ((0, 0), (1, 1), (0, 0))),
    ((4, 6, 12), (1, 6, 1), (1, 1, 1), ((0, 0), (5, 0), (0, 0))),
    ((2, 5), (3, 1), (1, 1), ((1, 0), (0, 0))),
    ((12, 3), (1, 1), (2, 1), ((0, 0), (0, 0))),
  ):
    x = np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)
    padded = np.pad(x, edges, constant_values=-np.inf)
    seen = sliding_window_view(padded, size)[tuple(slice(None, None, n) for n in stride)]
    expected = seen.max(axis=tuple(range(len(shape), 2 * len(shape))))
    names = tuple(name if (n, s, e) == (1, 1, (0, 0)) else None for name, n, s, e in zip('tuvw', size, stride, edges))
    yield Program(
      f'{shape} {size} {stride} {edges}',
      'stablehlo.reduce_window',
      _maximum(size, stride, edges),
      (x,),
      expected,
      (names, (), names),
    )


def _maximum(
  size: WindowSizes, stride: WindowSizes, edges: Sequence[tuple[int, int]]
) -> Callable[[jax.Array], jax.Array]:
  return lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, size, stride, edges)


def pads() -> Iterator[Program]:
  """Yields pads with edges, crops, and padding between entries."""
  for shape, edges in (
    ((6, 4), ((1, 1, 0), (0, 0, 0))),
    ((5, 3), ((2, 0, 0), (0, 3, 0))),
    ((2, 6), ((-1, 0, 2), (0, 0, 0))),
    ((7, 12), ((-1, -2, 0), (1, 0, 0))),
    ((4, 3), ((0, 0, 1), (-1, 1, 0))),
  ):
    x = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    expected = np.asarray(x)
    for dim, (low, high, between) in enumerate(edges):
      expected = _pad_array(expected, dim, low, high, between)
    names = tuple(name if min(low, high) >= 0 == between else None for name, (low, high, between) in zip('tu', edges))
    yield Program(f'{shape} {edges}', 'stablehlo.pad', _pad(edges), (x,), expected, (names, (), names))


def _pad(edges: Sequence[tuple[int, int, int]]) -> Callable[[jax.Array], jax.Array]:
  return lambda x: jax.lax.pad(x, np.float32(0), edges)


def _pad_array(x: np.ndarray, dim: int, low: int, high: int, between: int) -> np.ndarray:
  entries = np.moveaxis(x, dim, 0)
  length = len(entries) + (len(entries) - 1) * between
  wide = np.zeros((length, *entries.shape[1:]), x.dtype)
  wide[:: between + 1] = entries
  ends = ((max(low, 0), max(high, 0)), *((0, 0),) * (x.ndim - 1))
  return np.moveaxis(np.pad(wide, ends)[max(-low, 0) : max(low, 0) + length + high], 0, dim)


def window_gradients() -> Iterator[Program]:
  """Yields gradients of maxima over windows. Each is added to the first of the largest entries."""
  for shape, size, stride in (
    ((6, 8, 5), (1, 2, 1), (1, 2, 1)),
    ((3, 7, 4), (1, 3, 1), (1, 1, 1)),
    ((5, 6), (1, 1), (1, 1)),
  ):
    rng = np.random.default_rng(0)
    x = rng.permutation(np.prod(shape)).reshape(shape).astype(np.float32)
    seen = sliding_window_view(x, size)[tuple(slice(None, None, n) for n in stride)]
    source = rng.integers(-3, 4, seen.shape[: len(shape)]).astype(np.float32)
    largest = seen.max(axis=tuple(range(len(shape), 2 * len(shape))))
    expected = np.zeros_like(x)
    for value, amount in zip(largest.flat, source.flat):
      expected[x == value] += amount
    names = tuple(name if n == 1 else None for name, n in zip('tuvw', size))
    select = _select_gradient(size, stride)
    yield Program(
      f'{shape} {size} {stride}',
      'stablehlo.select_and_scatter',
      select,
      (x, source),
      expected,
      (names, names, (), names),
    )


def _select_gradient(size: WindowSizes, stride: WindowSizes) -> Callable[[jax.Array, jax.Array], jax.Array]:
  def gradient(x: jax.Array, source: jax.Array) -> jax.Array:
    maxima = _maximum(size, stride, ((0, 0),) * x.ndim)
    return jax.vjp(maxima, x)[1](source)[0]

  return gradient
