"""Products of matrices, and transposes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from tools.splits.batches import Program

_EQUATIONS = (
  *('bv,vc->bc', 'vb,cv->bc', 'gbv,gcv->gbc', 'btd,dnh->btnh'),
  *('btnh,nhd->btd', 'ghbv,ghv->ghb', 'v,vc->c', 'b,c->bc'),
)
# The cases differ in which operand is larger, and in whether meshes divide dimensions.
_SIZES: tuple[Mapping[str, int], ...] = (
  dict.fromkeys('bvcgtdnh', 12),
  {'b': 3, 'v': 5, 'c': 7, 'g': 5, 't': 2, 'd': 6, 'n': 3, 'h': 4},
  {'b': 2, 'v': 4, 'c': 24, 'g': 1, 't': 6, 'd': 3, 'n': 8, 'h': 2},
)


def product_programs() -> Iterator[Program]:
  for equation, sizes in itertools.product(_EQUATIONS, _SIZES):
    # Arrays with many dimensions are small, because a program computes hundreds of cases.
    yield _product(equation, {name: min(size, 6) for name, size in sizes.items()} if len(equation) > 12 else sizes)


def transposes() -> Iterator[Program]:
  for shape, order in (((12, 8), (1, 0)), ((3, 5), (1, 0)), ((4, 6, 3), (1, 0, 2)), ((4, 5, 2), (2, 0, 1))):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    names = [*'tuv'[: len(shape)]]
    dims = (tuple(names), tuple(names[i] for i in order))
    yield Program(f'{shape} {order}', 'stablehlo.transpose', _transpose(order), (x,), x.transpose(order), dims)


def _transpose(order: Sequence[int]) -> Callable[[jax.Array], jax.Array]:
  return lambda x: jax.lax.transpose(x, order)


def _product(equation: str, sizes: Mapping[str, int]) -> Program:
  operands, out = equation.split('->')
  left, right = operands.split(',')

  def dims(names: Sequence[str]) -> tuple[list[int], list[int]]:
    return [left.index(x) for x in names], [right.index(x) for x in names]

  both = [x for x in left if x in right]
  summed, rows = [x for x in both if x not in out], [x for x in both if x in out]
  rng = np.random.default_rng(0)
  args = tuple(rng.integers(-3, 4, [sizes[x] for x in side]).astype(np.float32) for side in (left, right))
  return Program(
    name=f'{equation} ' + ' '.join(f'{x}={sizes[x]}' for x in dict.fromkeys(left + right)),
    op='stablehlo.dot_general',
    fn=lambda x, y: jax.lax.dot_general(x, y, (dims(summed), dims(rows))),
    args=args,
    expected=np.einsum(equation, *args),
    dims=((*left,), (*right,), (*out,)),
  )
