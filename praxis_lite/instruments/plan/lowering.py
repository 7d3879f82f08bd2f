"""Lowers a step for a platform that this machine does not have, without devices or a compiler.

JAX lowers `custom_partitioning`, which the fused attention of GPUs uses, only for real devices. This module lowers it
to a custom call with its sharding rule, so that Shardy propagates shardings as it does for devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from praxis_lite.common.jax_internals.lowering import (
  lower_call,
  lower_scan_as_loop,
  lower_with,
  sharding_rule_attribute,
)
from praxis_lite.common.jax_internals.mlir import ir, stablehlo
from praxis_lite.instruments.plan.local_program import SPLIT_BY_RULE, UNROLLED

_PLATFORMS = {'gpu': 'cuda', 'tpu': 'tpu', 'cpu': 'cpu'}


def lower_without_devices(traced: jax.stages.Traced, kind: str) -> jax.stages.Lowered:
  """Lowers a program that was traced on an abstract mesh, for chips of a kind: 'cpu', 'gpu' or 'tpu'.

  Each `custom_partitioning` becomes a custom call named `SPLIT_BY_RULE`, of the function that JAX uses for one device.

  Raises:
    UnknownJax: this release of JAX lowers programs in a way that this module does not support.
  """
  return lower_with(traced, _PLATFORMS[kind], {'custom_partitioning': _lower_with_rule, 'scan': _lower_as_loop})


def _lower_as_loop(context: Any, *values: ir.Value, unroll: int, **params: Any) -> Sequence[ir.Value]:
  """Lowers `scan` to a loop, even one that would be fully unrolled, and marks such a loop as `UNROLLED`."""
  outputs = lower_scan_as_loop(context, *values, **params)
  if unroll >= params['length']:
    for output in outputs:
      if isinstance(output, ir.OpResult) and output.owner.name == 'stablehlo.while':
        output.owner.attributes[UNROLLED] = ir.UnitAttr.get()
  return outputs


def _lower_with_rule(
  context: Any, *values: ir.Value, call: Any, sharding_rule: Any, static_args: Any, **others: Any
) -> Sequence[ir.Value]:
  """Lowers `custom_partitioning` to a custom call of the function that JAX uses for one device."""
  outputs = lower_call(context, call, *values)
  made: Any
  (made,) = {output.owner for output in outputs}
  taken, given = [value.type for value in values], [result.type for result in made.results]
  called = ir.ArrayAttr.get([made.attributes['callee']])
  made.erase()
  split = stablehlo.CustomCallOp(given, list(values), call_target_name=SPLIT_BY_RULE, called_computations=called)
  rule = sharding_rule_attribute(context, sharding_rule, static_args, taken, given)
  if rule is not None:
    split.attributes['sdy.sharding_rule'] = rule
  return split.results
