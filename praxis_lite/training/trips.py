"""Finds the largest number of iterations of a `while` in a jaxpr, if the program shows it.

A loop made by `jax.lax.fori_loop` runs while its counter is below a limit. If the limit is data, such as the number of
blocks that a mask does not empty, it often has a bound: a sum of n booleans is at most n. So bounds of integer and
boolean arrays are propagated from equation to equation:

    constants           themselves
    booleans            1: True
    x & y, min(x, y)    the smaller bound
    x | y, max(x, y)    the larger bound
    x + y, sums         sums of bounds
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from praxis_lite.common.jax_internals.programs import scan_sizes, strip_constants, while_sizes

# The largest possible value of each entry of an array; None if unknown.
Bound = np.ndarray | None
_MOST_ENTRIES = 2**20


class LoopBounds:
  """Upper bounds of the values in a program, given bounds of its inputs; call `add` for each equation, in order."""

  def __init__(self, jaxpr: core.ClosedJaxpr | core.Jaxpr, inputs: Sequence[Bound] = ()):
    self._known: dict[core.Var, np.ndarray] = {}
    inner, constants = strip_constants(jaxpr), map(_bound_of_value, getattr(jaxpr, 'consts', ()))
    for var, bound in (*zip(inner.constvars, constants), *zip(inner.invars, inputs)):
      self._set(var, bound)

  def bound_of(self, var: core.Var | core.Literal) -> Bound:
    """Returns the bound of a variable or of a literal; None if it is unknown."""
    if isinstance(var, core.Literal):
      return _bound_of_value(var.val)
    shape = getattr(var.aval, 'shape', ())
    if var not in self._known and getattr(var.aval, 'dtype', None) == jnp.bool_ and math.prod(shape) <= _MOST_ENTRIES:
      return np.ones(shape, np.int64)
    return self._known.get(var)

  def add(self, equation: core.JaxprEqn) -> None:
    """Derives the bound of an equation's result, if there is a rule for the primitive and bounds of all operands."""
    rule = _RULES.get(equation.primitive.name)
    bounds = [self.bound_of(var) for var in equation.invars] if rule else []
    if rule and all(bound is not None for bound in bounds):
      self._set(equation.outvars[0], rule(bounds, equation.params))

  def below(self, equation: core.JaxprEqn, jaxpr: core.ClosedJaxpr | core.Jaxpr) -> list[Bound]:
    """Returns the bounds of the inputs of `jaxpr`, a program inside an equation."""
    name = equation.primitive.name
    inputs = [self.bound_of(var) for var in equation.invars]
    inner = strip_constants(jaxpr)
    if name == 'while':
      cond, body, _ = while_sizes(equation)
      inputs = inputs[cond : cond + body]
    elif name == 'scan':
      inputs = inputs[: scan_sizes(equation).consts]
    elif name == 'cond':
      inputs = inputs[1:]
    elif name == 'shard_map' or len(inputs) != len(inner.invars):
      inputs = []
    return [*inputs, *[None] * (len(inner.invars) - len(inputs))]

  def most_trips(self, equation: core.JaxprEqn) -> int | None:
    """Returns the largest possible number of iterations of a `while`; None if unknown."""
    cond, body = equation.params['cond_jaxpr'].jaxpr, equation.params['body_jaxpr'].jaxpr
    of_cond, of_body, _ = while_sizes(equation)
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name != 'lt' or cond.outvars[0] is not cond.eqns[0].outvars[0]:
      return None
    counter, limit = cond.eqns[0].invars
    if counter not in cond.invars[of_cond:]:
      return None
    number = cond.invars.index(counter) - of_cond
    start = equation.invars[of_cond + of_body + number]
    if not isinstance(start, core.Literal) or not _counts_up(body, number + of_body, number):
      return None
    bound = self.bound_of(limit) if isinstance(limit, core.Literal) else None
    if limit in cond.invars[:of_cond]:
      bound = self.bound_of(equation.invars[cond.invars.index(limit)])
    elif limit in cond.invars[of_cond:]:
      carried = cond.invars.index(limit) - of_cond
      if body.outvars[carried] is body.invars[of_body + carried]:
        bound = self.bound_of(equation.invars[of_cond + of_body + carried])
    return None if bound is None else max(0, int(bound) - int(start.val))

  def _set(self, var: core.Var, bound: Bound) -> None:
    if bound is not None and bound.shape == getattr(var.aval, 'shape', None):
      self._known[var] = np.asarray(bound)


def _bound_of_value(value: object) -> Bound:
  dtype, size = getattr(value, 'dtype', None), getattr(value, 'size', 1)
  if isinstance(value, bool | int) or (
    dtype is not None and size <= _MOST_ENTRIES and (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer))
  ):
    return np.asarray(value).astype(np.int64)
  return None


def _counts_up(body: core.Jaxpr, invar: int, outvar: int) -> bool:
  """Whether a loop's body adds 1 to a carried value, which is the body's input `invar` and its output `outvar`."""
  counter, result = body.invars[invar], body.outvars[outvar]
  for equation in body.eqns:
    if equation.outvars[0] is result and equation.primitive.name == 'add':
      one = [var.val for var in equation.invars if isinstance(var, core.Literal)]
      return counter in equation.invars and one == [1]
  return False


_RULES = {
  'convert_element_type': lambda bounds, params: (
    bounds[0] if jnp.issubdtype(params['new_dtype'], jnp.integer) else None
  ),
  'and': lambda bounds, _: np.minimum(*bounds) if bounds[0].max(initial=0) <= 1 else None,
  'or': lambda bounds, _: np.maximum(*bounds) if max(b.max(initial=0) for b in bounds) <= 1 else None,
  'min': lambda bounds, _: np.minimum(*bounds),
  'max': lambda bounds, _: np.maximum(*bounds),
  'add': lambda bounds, _: np.add(*bounds),
  'reduce_sum': lambda bounds, params: bounds[0].sum(axis=tuple(params['axes'])),
}
