"""Counts the FLOPs of products in a jaxpr. XLA's own cost analysis counts loop bodies once, and skips library kernels.

    dot_general             2 * batch * M * N * K
    ragged_dot_general      2 * M * N * K: each row is multiplied by the weights of its group
    grouped_product         the same
    grouped_sum             the same, for the gradient of the weights
    conv_general_dilated    2 * output elements * kernel elements per output channel
    fused attention         4 * B * N * T * S * H, for its two products
    pallas_call             the kernel's `cost_estimate`; without one, its body at each point of the grid
    kernels of tokamax      for attention, the FLOPs in the name of the function that calls them

In blockwise attention and splash attention, blocks that are fully masked do not count: a causal mask leaves the blocks
on and below the diagonal. Dense attention computes all logits, so all count.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.extend import core

from praxis_lite.common.jax_internals.programs import inner_programs, mapped_axes
from praxis_lite.layers.tokamax_attention import kernel_flops
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.steps import eval_step_single_learner
from praxis_lite.training.trips import Bound, LoopBounds

_JIT = ('jit', 'pjit')


def model_flops(partitioned: PartitionedTask) -> float:
  """Returns the FLOPs of a training step, summed over all devices; the backward pass has two thirds of them."""
  # Traced without the mesh, because on a mesh, buffers for exchanges between devices are larger than their data.
  evaluate = functools.partial(eval_step_single_learner, partitioned.jax_task)
  key, step = jax.eval_shape(lambda: (jax.random.key(0), jnp.zeros((), jnp.int32)))
  variables = partitioned.unpadded_state_shapes.mdl_vars
  return 3 * count_flops(jax.make_jaxpr(evaluate)(variables, key, step, partitioned.inputs_shape))


def count_flops(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> float:
  """Returns the FLOPs of one call of a program.

  For a `cond`, the most expensive branch counts; for a `while`, the largest possible number of iterations, or one if
  the program shows no limit. So blockwise attention counts as if each row were one segment, because the segment ids,
  which decide what blocks are skipped, are data. Ring attention counts as if there were no mask.
  """
  return _flops(jaxpr, [])


def flops_by_scope(
  jaxpr: core.ClosedJaxpr | core.Jaxpr, scope: str = '', inputs: Sequence[Bound] = ()
) -> Iterator[tuple[str, float]]:
  """Yields each product's scope, such as 'jvp(lm)/ff', and its FLOPs in one call of the program; see `count_flops`."""
  bounds = LoopBounds(jaxpr, inputs)
  for equation in jaxpr.eqns:
    name = '/'.join(filter(None, (scope, str(equation.source_info.name_stack))))
    flops = equation_flops(equation, bounds)
    below = [(inner, bounds.below(equation, inner)) for inner in inner_programs(equation)]
    parts = [part for inner, known in below for part in flops_by_scope(inner, name, known)]
    once = sum(part for _, part in parts)
    if once:
      yield from ((at, flops * part / once) for at, part in parts)
    elif flops:
      yield name, flops
    bounds.add(equation)


def _flops(jaxpr: core.ClosedJaxpr | core.Jaxpr, inputs: Sequence[Bound]) -> float:
  bounds, total = LoopBounds(jaxpr, inputs), 0.0
  for equation in jaxpr.eqns:
    total += equation_flops(equation, bounds)
    bounds.add(equation)
  return total


def equation_flops(equation: core.JaxprEqn, bounds: LoopBounds) -> float:
  """Returns the FLOPs of an equation, including programs inside it; `bounds` come from the program around it."""
  name, params = equation.primitive.name, equation.params
  shapes: list[tuple[int, ...]] = [getattr(v.aval, 'shape', ()) for v in equation.invars[:3]]
  elements = math.prod(getattr(equation.outvars[0].aval, 'shape', ())) if equation.outvars else 0
  if name == 'dot_general':
    (contracting, _), _ = params['dimension_numbers']
    return 2.0 * elements * math.prod(shapes[0][d] for d in contracting)
  if name == 'ragged_dot_general':
    numbers = params['ragged_dot_dimension_numbers']
    (contracting, _), _ = numbers.dot_dimension_numbers
    # If groups divide the contracted dimension, each group has its own result, summed over its part of the dimension.
    summed_in_groups = set(numbers.lhs_ragged_dimensions) <= set(contracting)
    groups = shapes[2][-1] if summed_in_groups else 1
    return 2.0 * elements * math.prod(shapes[0][d] for d in contracting) / groups
  if name == 'conv_general_dilated':
    out_channels = shapes[1][params['dimension_numbers'].rhs_spec[0]]
    return 2.0 * elements * math.prod(shapes[1]) / out_channels
  if name.startswith('dot_product_attention_fwd'):
    query, key = shapes[:2]  # [B, T, N, H] and [B, S, K, H]
    return 4.0 * math.prod(query) * key[1]
  # In the gradient of a scan, JAX moves parts of these functions before the scan. These parts have the same name, but
  # no operands or no products.
  if name in _JIT and params['name'] == 'grouped_product' and len(shapes) == 3:
    return 2.0 * elements * shapes[0][-1]
  if name in _JIT and params['name'] == 'grouped_sum' and len(shapes) == 3:
    return 2.0 * elements * shapes[0][-2] / shapes[2][-1]
  if name in _JIT and (named := kernel_flops(params['name'])):
    return named[0] * named[1]
  if name == 'pallas_call' and params['cost_estimate'] is not None:
    return float(params['cost_estimate'].flops)
  flops = [_flops(jaxpr, bounds.below(equation, jaxpr)) for jaxpr in inner_programs(equation)]
  below = max(flops) if name == 'cond' else sum(flops)
  if name == 'scan':
    return below * params['length']
  if name == 'pallas_call':
    return below * math.prod(size for size in params['grid_mapping'].grid if isinstance(size, int))
  if name == 'while':
    return below * (1 if below == 0 or (trips := bounds.most_trips(equation)) is None else trips)
  if name == 'shard_map':  # Its body has the shapes on one device.
    return below * math.prod(mapped_axes(equation).values())
  return below
