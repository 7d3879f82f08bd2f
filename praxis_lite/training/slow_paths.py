"""Finds operations in the jaxpr of a step that take a slow path on its chips, and says which field changes that.

    expanded grouped product   a `ragged_dot` outside of TPUs: XLA multiplies every row by the weights of every group
    logits in memory           a product with an entry for each pair of tokens, in attention that is not fused
    float32 product            both operands are float32, on a chip that multiplies bfloat16 faster

Products inside of kernels do not count. Times are computed from the additional work and the published figures of the
chip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from praxis_lite.common.accelerators import Accelerator
from praxis_lite.common.figures import format_bytes
from praxis_lite.common.jax_internals.programs import inner_programs, mapped_axes, scopes
from praxis_lite.common.trees import path_name
from praxis_lite.layers.base import Layer
from praxis_lite.training.flops import equation_flops
from praxis_lite.training.trips import Bound, LoopBounds

_LONG = 1024  # Batched products with at least this many rows and columns may be attention logits.
_MOST_SUMMED = 512  # The largest number of dims of a head.
_USES_OF_LOGITS = 4  # Logits and probabilities are each written and read.
_LEAST = 0.01  # Findings that take less than this fraction of the time of all products are left out.


class SlowPath(NamedTuple):
  """Additional work of a layer because of a slow path, and what to change."""

  layer: str  # Its path; '' if the work is in no layer.
  what: str
  seconds: float  # On each device in a step.
  remedy: str

  @property
  def cost(self) -> str:
    return f'{1e3 * self.seconds:.3g} ms of a step'

  def __str__(self) -> str:
    return f'slow path: {self.layer or "the step"}: {self.what}, {self.cost}; {self.remedy}'


def describe_slow_paths(found: Sequence[SlowPath]) -> Iterator[str]:
  """Yields a line for each kind of slow path, in the order of `found`; layers with the same kind share a line."""
  kinds: dict[tuple[str, str], list[SlowPath]] = {}
  for slow in found:
    kinds.setdefault((slow.what, slow.remedy), []).append(slow)
  for (what, remedy), same in kinds.items():
    layer = same[0].layer
    places = f'{len(same)} layers, such as {layer or "the step"}' if len(same) > 1 else layer
    yield str(SlowPath(places, what, sum(slow.seconds for slow in same), remedy))


def find_slow_paths(
  jaxpr: core.ClosedJaxpr, model: Layer, accelerator: Accelerator, num_devices: int
) -> list[SlowPath]:
  """Returns slow paths that take at least 1 % of the time of a step's products, most costly first; [] on a CPU.

  The step was traced for a mesh of `num_devices` chips of the kind `accelerator`, which share all work outside of
  `shard_map`. The paths of layers in the result come from `model`.
  """
  if accelerator.kind == 'cpu':  # The figures for CPUs are placeholders.
    return []
  paths, products = {path_name(layer.path) for layer in model.descendants()}, 0.0
  found: dict[tuple[str, str, str], tuple[float, float]] = {}
  for scope, equation, flops, times in _products(jaxpr, '', 1 / num_devices, ()):
    products += times * flops / accelerator.peak(_dtype(equation))
    if slow := _slow_path(equation, flops, accelerator):
      kind, amount, seconds, remedy = slow
      key = _layer(scope, paths), kind, remedy
      total = found.get(key, (0.0, 0.0))
      found[key] = total[0] + times * amount, total[1] + times * seconds
  slow_paths = [
    SlowPath(layer, kind.format(amount=amount, size=format_bytes(amount)), seconds, remedy)
    for (layer, kind, remedy), (amount, seconds) in found.items()
    if seconds > _LEAST * products
  ]
  return sorted(slow_paths, key=lambda slow: -slow.seconds)


def _slow_path(equation: core.JaxprEqn, flops: float, accelerator: Accelerator) -> tuple[str, float, float, str] | None:
  """Returns a text, a number for '{size}' in it, seconds on a device, and the remedy; None if nothing is slow."""
  name, dtype = equation.primitive.name, _dtype(equation)
  shapes = [tuple(_array(v).shape) for v in equation.invars]
  out = _array(equation.outvars[0])
  if name == 'ragged_dot_general':
    more = flops * (shapes[2][-1] - 1)
    if accelerator.kind == 'tpu' or not more:
      return None
    what = f'XLA multiplies every row by the weights of all {shapes[2][-1]:,} groups'
    return what, more, more / accelerator.peak(dtype), "set grouped_matmul to 'auto'"
  if name == 'dot_general':
    (summed, _), (batch, _) = equation.params['dimension_numbers']
    num_summed, same = (math.prod(shapes[0][d] for d in dims) for dims in (summed, batch))
    fewest = min(math.prod(shape) // max(num_summed * same, 1) for shape in shapes)
    if batch and fewest >= _LONG and num_summed <= _MOST_SUMMED:
      size = float(math.prod(out.shape) * out.dtype.itemsize * _USES_OF_LOGITS)
      what = 'attention moves {size} of logits through memory'
      return what, size, size / accelerator.device_bandwidth, "set implementation to 'auto', or 'blockwise'"
  lost = flops / accelerator.peak('f32') - flops / accelerator.peak('bf16')
  if dtype == 'f32' and name != 'ragged_dot_general' and lost > 0:
    return 'products of float32', flops, lost, "set fprop_dtype to 'bfloat16'"
  return None


def _array(var: core.Var | core.Literal) -> Any:
  """Returns the shape and dtype of an operand or a result."""
  return var.aval


def _dtype(equation: core.JaxprEqn) -> str:
  """Returns 'f32' if both operands are float32, otherwise 'bf16', as spelled in `Accelerator.peaks`."""
  return 'f32' if all(_array(v).dtype == jnp.float32 for v in equation.invars[:2]) else 'bf16'


def _products(
  jaxpr: core.ClosedJaxpr | core.Jaxpr, scope: str, times: float, inputs: Sequence[Bound]
) -> Iterator[tuple[str, core.JaxprEqn, float, float]]:
  """Yields each product of a program: its scopes, equation and FLOPs, and how often a device computes it in a step."""
  bounds = LoopBounds(jaxpr, inputs)
  for equation in jaxpr.eqns:
    name, repeats = equation.primitive.name, times
    at = f'{scope}/{equation.source_info.name_stack}'
    if name in ('dot_general', 'ragged_dot_general', 'conv_general_dilated'):
      yield at, equation, equation_flops(equation, bounds), times
    elif name == 'scan':
      repeats *= equation.params['length']
    elif name == 'while':
      repeats *= bounds.most_trips(equation) or 1
    elif name == 'shard_map':
      repeats *= math.prod(mapped_axes(equation).values())
    if name != 'pallas_call':
      for inner in inner_programs(equation):
        yield from _products(inner, at, repeats, bounds.below(equation, inner))
    bounds.add(equation)


def _layer(scope: str, paths: set[str]) -> str:
  """Returns the path of the innermost layer in a scope, 'lm.ff' for 'lm/while/body/ff/search'; '' if there is none."""
  path = ''
  for part in scopes(scope).split('/'):
    if (below := f'{path}.{part}' if path else part) in paths:
      path = below
  return path
