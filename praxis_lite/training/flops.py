"""Model operations, counted in the jaxpr: XLA's count for a compiled program includes the body of a loop once and skips
library kernels.

    dot_general             2 * batch * M * N * K
    ragged_dot_general      2 * M * N * K: each row by the weights of its group
    conv_general_dilated    2 * output elements * kernel elements per output channel
    fused attention         4 * B * N * T * S * H, the two products that it computes
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.extend import core

from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.steps import eval_step_single_learner


def model_flops(partitioned: PartitionedTask) -> float:
  """Returns the operations of a training step over all devices: the forward pass, and twice that backward."""
  # Traced without the mesh: on it, what is exchanged between devices has places for more than there is.
  evaluate = functools.partial(eval_step_single_learner, partitioned.jax_task)
  key, step = jax.eval_shape(lambda: (jax.random.key(0), jnp.zeros((), jnp.int32)))
  variables = partitioned.unpadded_state_shapes.mdl_vars
  return 3 * count_flops(jax.make_jaxpr(evaluate)(variables, key, step, partitioned.inputs_shape))


def count_flops(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> float:
  """Returns the operations of one call: of the most expensive branch of a `cond`, and of one round of a `while`."""
  return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def flops_by_scope(jaxpr: core.ClosedJaxpr | core.Jaxpr, scope: str = '') -> Iterator[tuple[str, float]]:
  """Yields for each product its scopes, as in 'jvp(lm)/ff', and its operations; of a `cond` those of all branches."""
  for equation in jaxpr.eqns:
    params, name = equation.params, '/'.join(filter(None, (scope, str(equation.source_info.name_stack))))
    below = [inner for inner in jax.tree.leaves(params, is_leaf=_is_jaxpr) if _is_jaxpr(inner)]
    if not below or equation.primitive.name == 'dot_general':
      if flops := _equation_flops(equation):
        yield name, flops
      continue
    times = _times(equation)
    for inner in below:
      yield from ((at, times * flops) for at, flops in flops_by_scope(inner, name))


def _times(equation: core.JaxprEqn) -> float:
  """How often the equations below one run, over all devices."""
  params = equation.params
  if equation.primitive.name == 'shard_map':  # Inside, shapes are those of one device.
    return math.prod(params['mesh'].shape[axis] for axis in params['newly_manual_axes'])
  return params['length'] if equation.primitive.name == 'scan' else 1


def _equation_flops(equation: core.JaxprEqn) -> float:
  name, params = equation.primitive.name, equation.params
  shapes: list[tuple[int, ...]] = [getattr(v.aval, 'shape', ()) for v in equation.invars[:3]]
  elements = math.prod(getattr(equation.outvars[0].aval, 'shape', ())) if equation.outvars else 0
  if name == 'dot_general':
    (contracting, _), _ = params['dimension_numbers']
    return 2.0 * elements * math.prod(shapes[0][d] for d in contracting)
  if name == 'ragged_dot_general':
    numbers = params['ragged_dot_dimension_numbers']
    (contracting, _), _ = numbers.dot_dimension_numbers
    # Where groups are of the dimension summed over, there is a result for each, summed over its part.
    summed_in_groups = set(numbers.lhs_ragged_dimensions) <= set(contracting)
    groups = shapes[2][-1] if summed_in_groups else 1
    return 2.0 * elements * math.prod(shapes[0][d] for d in contracting) / groups
  if name == 'conv_general_dilated':
    out_channels = shapes[1][params['dimension_numbers'].rhs_spec[0]]
    return 2.0 * elements * math.prod(shapes[1]) / out_channels
  if name.startswith('dot_product_attention_fwd'):
    query, key = shapes[:2]  # [B, T, N, H] and [B, S, K, H]
    return 4.0 * math.prod(query) * key[1]
  if name == 'cond':
    return max(count_flops(branch) for branch in params['branches'])
  below = sum(count_flops(jaxpr) for jaxpr in jax.tree.leaves(params, is_leaf=_is_jaxpr) if _is_jaxpr(jaxpr))
  return below * _times(equation)


def _is_jaxpr(value: object) -> bool:
  return isinstance(value, core.ClosedJaxpr | core.Jaxpr)
