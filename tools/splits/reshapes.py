"""Reshapes that join dimensions, split them into several, or leave them as they are."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from tools.splits.assign import Dims
from tools.splits.batches import Program

# Shapes before and after, with names of the dimensions that are split alike where they divide.
_RESHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...], Dims], ...] = (
  ((4, 6), (24,), (('t', None), ('t',))),
  ((6, 2), (12,), (('t', None), ('t',))),
  ((24,), (6, 4), (('t',), ('t', None))),
  ((24,), (2, 3, 4), (('t',), ('t', None, None))),
  ((15,), (3, 5), (('t',), ('t', None))),
  ((5, 4, 6), (5, 24), (('r', 't', None), ('r', 't'))),
  ((12, 4), (12, 2, 2), (('r', 't'), ('r', 't', None))),
  ((4, 6), (6, 4), (('t', None), ('t', None))),
  ((12, 4), (4, 12), (('t', None), ('t', None))),
  ((32, 12), (8, 4, 6, 2), (('r', 't'), ('r', None, 't', None))),
  ((8, 4, 6, 2), (32, 12), (('r', None, 't', None), ('r', 't'))),
  ((5, 2, 3, 4), (10, 12), (('r', None, 't', None), ('r', 't'))),
  ((4, 3, 6), (72,), (('t', None, None), ('t',))),
  ((4, 1, 3), (4, 3), (('r', None, 't'), ('r', 't'))),
  ((3, 7, 3), (1, 63), (('t', None, None), (None, 't'))),
  ((1, 63), (3, 7, 3), ((None, 't'), ('t', None, None))),
  ((10, 1, 1), (2, 5), (('t', None, None), ('t', None))),
  ((25, 1, 1), (5, 5), (('t', None, None), ('t', None))),
  ((5, 5), (25,), (('t', None), ('t',))),
  ((5, 7), (7, 5), (('t', None), ('t', None))),
)


def reshape_programs() -> Iterator[Program]:
  for before, after, dims in _RESHAPES:
    x = np.arange(1, 1 + np.prod(before), dtype=np.float32).reshape(before)

    def fn(x, shape=after):  # type: ignore[no-untyped-def]
      return jnp.reshape(x, shape)

    yield Program(f'{before} to {after}', 'stablehlo.reshape', fn, (x,), x.reshape(after), dims)
