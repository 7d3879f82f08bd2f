"""Lowers programs with other rules for some operations, and for devices that do not exist.

lower_with                  lowers a traced program with other rules
lower_scan_as_loop          JAX's own rule for `scan`, ignoring `unroll`
lower_call                  lowers a call of a program to a call of a function in the module
sharding_rule_attribute     converts a rule of `custom_partitioning` to an attribute
pretend_cudnn               lets GPU fused attention be traced without cuDNN
used_inputs                 finds the inputs on which the outputs of a program depend
export_changed              exports a lowered program after a change
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.export
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir

from praxis_lite.common.errors import error_summary
from praxis_lite.common.jax_internals import UnknownJax, reading
from praxis_lite.common.jax_internals.mlir import ir

# Takes the context of the lowering, the operands, and the parameters of the operation; returns the results.
Rule = Callable[..., Sequence[ir.Value]]
_FUSED_ATTENTION = 'jax._src.cudnn.fused_attention_stablehlo'


def lower_with(traced: jax.stages.Traced, platform: str, rules: Mapping[str, Rule]) -> jax.stages.Lowered:
  """Lowers a traced program for a platform, 'cpu', 'cuda' or 'tpu', with or without devices.

  `rules` are lowering rules by operation: 'scan' and 'custom_partitioning'.
  """
  with reading('lowering with other rules'):
    known = {
      'custom_partitioning': _private('custom_partitioning').custom_partitioning_p,
      'scan': _private('lax.control_flow.loops').scan_p,
    }
    overrides = tuple((known[name], rule) for name, rule in rules.items())
    parameters = _private('interpreters.mlir').LoweringParameters(override_lowering_rules=overrides)
    lower: Callable[..., jax.stages.Lowered] = traced.lower
  with _allow_no_devices():
    return lower(lowering_platforms=(platform,), _private_parameters=parameters)


def lower_scan_as_loop(context: Any, *values: ir.Value, **params: Any) -> Sequence[ir.Value]:
  """A lowering rule: lowers `scan` to a loop, and ignores the parameter `unroll`."""
  run = functools.partial(_private('lax.control_flow.loops')._scan_impl, **{**params, 'unroll': 1})
  return mlir.lower_fun(run, multiple_results=True)(context, *values)


def lower_call(context: Any, call: Any, *values: ir.Value) -> Sequence[ir.Value]:
  """Lowers a call of a program to a call of a function in the module."""
  return mlir.lower_fun(jax.jit(jaxpr_as_fun(call)), multiple_results=True)(context, *values)


def sharding_rule_attribute(
  context: Any, rule: Any, static_args: Sequence[Any], taken: Sequence[ir.Type], given: Sequence[ir.Type]
) -> ir.Attribute | None:
  """Returns Shardy's propagation rule for a `custom_partitioning` operation; None if it has no rule.

  `rule` and `static_args` are parameters of the operation; `taken` and `given` are the types of operands and results.
  """
  partitioning, sizes = _private('custom_partitioning'), {}
  if callable(rule):
    mesh = getattr(context.module_context.axis_context, 'abstract_mesh', None)
    rule = rule(*static_args, mesh, taken, given)
  if isinstance(rule, tuple | list):
    rule, sizes = rule
  if isinstance(rule, str):
    rule = partitioning.str_to_sdy_sharding_rule(rule, **sizes)
  return None if rule is None else partitioning.sdy_sharding_rule_to_mlir(rule, taken, given)


@contextlib.contextmanager
def pretend_cudnn(version: int) -> Iterator[None]:
  """Lets fused attention be traced without cuDNN, by telling JAX that cuDNN has this version."""
  module: Any = importlib.import_module(_FUSED_ATTENTION) if importlib.util.find_spec(_FUSED_ATTENTION) else None
  with replace_attribute(module, 'check_cudnn_version', lambda: version):
    yield


def used_inputs(program: Any) -> list[bool]:
  """Returns, for each input of a jaxpr without constants, whether an output depends on it."""
  with reading('which inputs a program uses'):
    from jax.interpreters import partial_eval

    _, used = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    return [bool(is_used) for is_used in used]


def export_changed(
  jitted: jax.stages.Wrapped,
  change: Callable[[jax.stages.Lowered], object],
  platforms: Sequence[str],
  args: Sequence[object],
) -> jax.export.Exported:
  """Exports a jitted function for arguments of these shapes, after changing its lowered program in place."""
  changing = _ChangingJit(jitted, change)
  try:
    exported = jax.export.export(changing, platforms=platforms)(*args)
  except Exception as error:
    if changing.has_changed:
      raise
    jax.export.export(jitted, platforms=platforms)(*args)  # Raises the function's own error, if it has one.
    raise UnknownJax(f'export of a program: {error_summary(error)}') from error
  if not changing.has_changed:
    raise UnknownJax('export of a program: it is lowered in another way')
  return exported


class _ChangingJit:
  """A jitted function whose lowered program is changed; has the attributes that JAX's export uses."""

  def __init__(self, jitted: Any, change: Callable[[jax.stages.Lowered], object]):
    self._jitted = jitted
    self._change = change
    self._traced: Any = None
    self.has_changed = False

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._jitted(*args, **kwargs)

  def trace(self, *args: Any, **kwargs: Any) -> Any:
    self._traced = self._jitted.trace(*args, **kwargs)
    return self

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    lowered = (self._traced or self._jitted).lower(*args, **kwargs)
    self._change(lowered)
    self.has_changed = True
    return lowered

  def __getattr__(self, name: str) -> Any:
    """Returns an attribute of the traced function."""
    return getattr(self.__dict__.get('_traced') or self._jitted, name)


def _allow_no_devices() -> contextlib.AbstractContextManager[None]:
  """Lets JAX lower operations that it otherwise lowers only for existing devices."""
  return replace_attribute(_private('dispatch'), 'jaxpr_has_prim_requiring_devices', lambda jaxpr: False)


@contextlib.contextmanager
def replace_attribute(module: Any, name: str, value: Any) -> Iterator[None]:
  """Replaces an attribute of a module, if it exists."""
  before = getattr(module, name, None)
  if before is None:
    yield
    return
  setattr(module, name, value)
  try:
    yield
  finally:
    setattr(module, name, before)


def _private(name: str) -> Any:
  with reading(f'jax._src.{name}'):
    return importlib.import_module(f'jax._src.{name}')
