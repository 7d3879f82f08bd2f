"""Products of matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import numpy as np

from tools.splits.batches import Program

# The letters of both operands and of the result, and which dimensions are small, odd or large.
_EQUATIONS = ('bv,vc->bc', 'vb,cv->bc', 'gbv,gcv->gbc', 'btd,dnh->btnh', 'btnh,nhd->btd', 'ghbv,ghv->ghb', 'v,vc->c', 'b,c->bc')
_SIZES: tuple[Mapping[str, int], ...] = (
  {letter: 12 for letter in 'bvcgtdnh'},
  {'b': 3, 'v': 5, 'c': 7, 'g': 5, 't': 2, 'd': 6, 'n': 3, 'h': 4},
  {'b': 2, 'v': 4, 'c': 24, 'g': 1, 't': 6, 'd': 3, 'n': 8, 'h': 2},
)


def programs() -> Iterator[Program]:
  for equation in _EQUATIONS:
    for sizes in _SIZES:
      yield _product(equation, sizes)


def _product(equation: str, sizes: Mapping[str, int]) -> Program:
  operands, out = equation.split('->')
  left, right = operands.split(',')
  summed = [x for x in left if x in right and x not in out]
  rows = [x for x in left if x in right and x in out]
  numbers = tuple(tuple(tuple(side.index(x) for x in names) for side in (left, right)) for names in (summed, rows))
  rng = np.random.default_rng(0)
  args = tuple(rng.integers(-3, 4, [sizes[x] for x in side]).astype(np.float32) for side in (left, right))
  return Program(
    name=f'{equation} ' + ' '.join(f'{x}={sizes[x]}' for x in dict.fromkeys(left + right)),
    op='stablehlo.dot_general',
    fn=lambda x, y: jax.lax.dot_general(x, y, numbers),
    args=args,
    expected=np.einsum(equation, *args),
    dims=((*left,), (*right,), (*out,)),
  )
