"""Equations of traced programs, whose parameters differ between releases of JAX.

scan        num_consts, num_carry     up to 0.10
            ft_in, ft_out             since 0.11: trees of (constants, carry, slices) and of (carry, stacked)
shard_map   manual_axes               up to 0.10.0
            newly_manual_axes         since 0.10.1
Jaxpr       and ClosedJaxpr           two classes up to 0.10, and one class since 0.11
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from praxis_lite.common.jax_internals import UnknownJax, reading


class ScanSizes(NamedTuple):
  """Numbers of operands of a `scan`, in order: constants, carried values, sliced arrays."""

  consts: int
  carry: int
  slices: int


class WhileSizes(NamedTuple):
  """Numbers of operands of a `while`, in order: constants of its condition, constants of its body, carried values."""

  cond_consts: int
  body_consts: int
  carry: int


# Operations that compute each entry of the result from the same entry of each operand.
_ELEMENTWISE_NAMES = """
  abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp
  clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
  igamma igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or
  polygamma population_count pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
  shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""
ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
# The names of parameters that hold the program that an operation calls.
_CALLED = ('jaxpr', 'call_jaxpr', 'fun_jaxpr')
_SizesT = TypeVar('_SizesT', ScanSizes, WhileSizes)
T = TypeVar('T')


def scan_sizes(equation: JaxprEqn) -> ScanSizes:
  """Counts the operands of a `scan`: constants, carried values and scanned arrays."""
  params = equation.params
  with reading("scan's parameters"):
    if 'num_consts' in params:
      consts, carry = params['num_consts'], params['num_carry']
    else:
      consts, carry, _ = (len(part) for part in params['ft_in'].unpack())
    sizes = ScanSizes(consts, carry, len(equation.invars) - consts - carry)
  return _check_sizes(equation, sizes, min(sizes) >= 0 and carry <= len(equation.outvars))


def while_sizes(equation: JaxprEqn) -> WhileSizes:
  """Counts the operands of a `while`: constants of its condition, constants of its body, and carried values."""
  params = equation.params
  with reading("while's parameters"):
    cond, body = params['cond_nconsts'], params['body_nconsts']
    sizes = WhileSizes(cond, body, len(equation.invars) - cond - body)
  return _check_sizes(equation, sizes, min(sizes) >= 0 and sizes.carry == len(equation.outvars))


def _check_sizes(equation: JaxprEqn, sizes: _SizesT, fit: bool) -> _SizesT:
  if not fit:
    operands, results = len(equation.invars), len(equation.outvars)
    raise UnknownJax(f'{equation.primitive.name} of {operands} operands and {results} results has {sizes}')
  return sizes


def mapped_axes(equation: JaxprEqn) -> dict[str, int]:
  """Returns the sizes of the mesh axes that a `shard_map` maps, except those that an enclosing `shard_map` maps."""
  params = equation.params
  with reading("shard_map's parameters"):
    names = params['newly_manual_axes'] if 'newly_manual_axes' in params else params['manual_axes']
    return {str(name): int(params['mesh'].shape[name]) for name in names}


def called_program(equation: JaxprEqn) -> Jaxpr | ClosedJaxpr | None:
  """Returns the program that an equation, such as `jit` or `custom_vjp_call`, calls; None if it calls none."""
  return program_in(equation.params)


def program_in(params: Mapping[str, Any]) -> Jaxpr | ClosedJaxpr | None:
  """Returns the program that an equation with these parameters calls; None if it calls none."""
  found = next((params[name] for name in _CALLED if name in params), None)
  return found if _is_program(found) else None


def inner_programs(equation: JaxprEqn) -> list[Jaxpr | ClosedJaxpr]:
  """Returns all programs that an equation has: the one that it calls, branches, conditions and bodies of loops."""
  return [x for x in jax.tree.leaves(equation.params, is_leaf=_is_program) if _is_program(x)]


def _is_program(value: object) -> bool:
  return isinstance(value, Jaxpr | ClosedJaxpr)


def run_program(
  program: Jaxpr | ClosedJaxpr,
  arguments: Sequence[T],
  apply: Callable[[JaxprEqn, list[T]], Sequence[T]],
  convert: Callable[[Any], T] = lambda constant: constant,
) -> list[T]:
  """Runs a program on values of any kind, equation by equation; returns its results.

  `apply` returns the results of an equation for its operands, and `convert` the value for a constant or a literal. A
  program that is not closed must have no constants.
  """
  inner, constants = strip_constants(program), getattr(program, 'consts', ())
  known: dict[Any, T] = dict(zip(inner.constvars, map(convert, constants), strict=True))
  known.update(zip(inner.invars, arguments, strict=True))

  def read(x: Any) -> T:
    return convert(x.val) if isinstance(x, Literal) else known[x]

  for equation in inner.eqns:
    known.update(zip(equation.outvars, apply(equation, [read(x) for x in equation.invars]), strict=True))
  return [read(x) for x in inner.outvars]


def strip_constants(program: Jaxpr | ClosedJaxpr) -> Jaxpr:
  """Returns a program without the values of its constants, which a `ClosedJaxpr` has."""
  inner: Jaxpr = getattr(program, 'jaxpr', program)  # type: ignore[arg-type]
  return inner


def bind(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
  """Applies an equation's operation to other operands, in the context in which it was traced; returns the results."""
  with reading('binding an equation'):
    bound = equation.primitive.get_bind_params(equation.params)
    functions, bound = bound if isinstance(bound, tuple) else ((), bound)  # Up to 0.10 it is a tuple.
    manager = equation.ctx.manager
  with manager:
    out = equation.primitive.bind(*functions, *operands, **bound)
  return list(out) if equation.primitive.multiple_results else [out]


def current_trace() -> object:
  """Returns an object that identifies the running trace, by equality; None if JAX does not say.

  A trace belongs to one call of a transform such as `grad`, or of a body such as a scan's.
  """
  read = getattr(core, 'get_opaque_trace_state', None)  # A public name that some releases may lack.
  return None if read is None else read(convention='praxis_lite')


def scopes(name: str) -> str:
  """Returns the scopes in an operation's name: 'lm/ff/dot' for 'jit(step)/transpose(jvp(lm))/ff/jit(f)/dot'."""
  name = re.sub(r'jit\([^()]*\)', '', name)
  while (inner := re.sub(r'\w+\(([^()]*)\)', r'\1', name)) != name:
    name = inner
  return '/'.join(filter(None, name.split('/')))
