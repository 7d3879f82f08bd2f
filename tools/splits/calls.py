"""Sorts, Fourier transforms and calls of LAPACK, on vectors or matrices; other dimensions only batch these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from tools.splits.batches import Program


def sorts() -> Iterator[Program]:
  for shape, dim in (((5, 7), 1), ((12, 12), 1), ((6, 4), 0), ((3, 4, 6), 1)):
    x = np.random.default_rng(0).permutation(np.prod(shape)).astype(np.float32).reshape(shape)
    names = tuple(None if i == dim else name for i, name in enumerate('tuv'[: len(shape)]))
    yield Program(f'{shape} {dim}', 'stablehlo.sort', _sort(dim), (x,), np.sort(x, dim), (names, names))


def transforms() -> Iterator[Program]:
  """Yields Fourier transforms of 2 and 4 entries, which are exact."""
  for shape, lengths in (((6, 4), (4,)), ((3, 5, 4), (4,)), ((5, 2, 4), (2, 4))):
    x = np.random.default_rng(0).integers(-3, 4, shape).astype(np.complex64)
    names = tuple('tuv'[: len(shape) - len(lengths)]) + (None,) * len(lengths)
    for kind in (jax.lax.FftType.FFT, jax.lax.FftType.IFFT, jax.lax.FftType.RFFT):
      of_kind = x.real.copy() if kind == jax.lax.FftType.RFFT else x
      fn = _fft(kind, lengths)
      expected = np.asarray(fn(of_kind))
      yield Program(f'{kind.name} {shape} {lengths}', 'stablehlo.fft', fn, (of_kind,), expected, (names, names))


def factorizations() -> Iterator[Program]:
  for batch in ((6,), (5,), (3, 4)):
    x = np.random.default_rng(0).integers(1, 5, (*batch, 2)).astype(np.float32)[..., None] ** 2 * np.eye(2, dtype='f')
    names = tuple('tu'[: len(batch)])
    dims = ((*names, None, None), (*names, None, None), names)
    yield Program(f'cholesky {x.shape}', 'stablehlo.custom_call', _cholesky, (x,), np.sqrt(x), dims)


def _sort(dim: int) -> Callable[[jax.Array], jax.Array]:
  return lambda x: jax.lax.sort(x, dimension=dim)


def _fft(kind: jax.lax.FftType, lengths: Sequence[int]) -> Callable[..., jax.Array]:
  return lambda x: jax.lax.fft(x, kind, lengths)


def _cholesky(x: jax.Array) -> jax.Array:
  return jax.lax.linalg.cholesky(x, symmetrize_input=False)
