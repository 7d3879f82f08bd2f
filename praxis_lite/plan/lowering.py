"""A step lowered for chips that are not there: for a mesh that has a platform, but neither devices nor a compiler.

What the compiler splits by a rule of its own (`custom_partitioning`, as the fused attention of GPUs), JAX lowers only
for devices. Here it becomes a custom call all the same, with its rule, by which Shardy propagates as for devices.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir

from praxis_lite.jax_internals.mlir import ir, stablehlo
from praxis_lite.partitioning.local_program import SPLIT_BY_RULE, UNROLLED

_PLATFORMS = {'gpu': 'cuda', 'tpu': 'tpu', 'cpu': 'cpu'}


def lower_without_devices(traced: jax.stages.Traced, kind: str) -> jax.stages.Lowered:
  """Returns what was traced on an abstract mesh, lowered for chips of a kind: 'cpu', 'gpu' or 'tpu'.

  What is split by a rule is a custom call named `SPLIT_BY_RULE`; the function that it calls computes it on one device.
  """
  custom_partitioning: Any = importlib.import_module('jax._src.custom_partitioning')
  parameters: Any = importlib.import_module('jax._src.interpreters.mlir').LoweringParameters
  loops: Any = importlib.import_module('jax._src.lax.control_flow.loops')
  rules = (
    (custom_partitioning.custom_partitioning_p, _lower_with_rule),
    (loops.scan_p, _lower_as_loop),
  )
  lower: Callable[..., jax.stages.Lowered] = traced.lower
  with _no_devices_needed():
    return lower(lowering_platforms=(_PLATFORMS[kind],), _private_parameters=parameters(override_lowering_rules=rules))


def _lower_as_loop(context: Any, *values: ir.Value, unroll: int, **params: Any) -> Sequence[ir.Value]:
  """How `scan` is lowered: as a loop also where it is unrolled, which is marked as `UNROLLED`."""
  loops: Any = importlib.import_module('jax._src.lax.control_flow.loops')
  lower = mlir.lower_fun(functools.partial(loops._scan_impl, unroll=1, **params), multiple_results=True)
  outputs = lower(context, *values)
  if unroll >= params['length']:
    for output in outputs:
      if isinstance(output, ir.OpResult) and output.owner.name == 'stablehlo.while':
        output.owner.attributes[UNROLLED] = ir.UnitAttr.get()
  return outputs


def _lower_with_rule(
  context: Any, *values: ir.Value, call: Any, sharding_rule: Any, static_args: Any, **others: Any
) -> Sequence[ir.Value]:
  """How `custom_partitioning` is lowered: as a custom call of what JAX makes of it for one device."""
  custom_partitioning: Any = importlib.import_module('jax._src.custom_partitioning')
  outputs = mlir.lower_fun(jax.jit(jaxpr_as_fun(call)), multiple_results=True)(context, *values)
  (made,) = {output.owner for output in outputs}
  taken, given = [value.type for value in values], [result.type for result in made.results]
  called = ir.ArrayAttr.get([made.attributes['callee']])
  made.erase()
  split = stablehlo.CustomCallOp(given, list(values), call_target_name=SPLIT_BY_RULE, called_computations=called)
  rule, sizes = sharding_rule, {}
  if callable(rule):
    mesh = getattr(context.module_context.axis_context, 'abstract_mesh', None)
    rule = rule(*static_args, mesh, taken, given)
  if isinstance(rule, tuple | list):
    rule, sizes = rule
  if isinstance(rule, str):
    rule = custom_partitioning.str_to_sdy_sharding_rule(rule, **sizes)
  if rule is not None:
    split.attributes['sdy.sharding_rule'] = custom_partitioning.sdy_sharding_rule_to_mlir(rule, taken, given)
  return split.results


@contextlib.contextmanager
def _no_devices_needed() -> Iterator[None]:
  """Lets JAX lower what it lowers for devices alone."""
  dispatch: Any = importlib.import_module('jax._src.dispatch')
  ask = dispatch.jaxpr_has_prim_requiring_devices
  dispatch.jaxpr_has_prim_requiring_devices = lambda jaxpr: False
  try:
    yield
  finally:
    dispatch.jaxpr_has_prim_requiring_devices = ask
