"""The computation of experts, as pure functions of the tokens and experts of one device.

Without expert parallelism, a device has all experts. With it, experts are split over mesh axes, and all-to-alls send
tokens to their experts and results back.

    with_capacity   slots [E, n, D]; all-to-all: [E / P, P n, D]; one product for all experts
    dropless        rows [M, D] sorted by expert, with the size of each group; `grouped_matmul`

An all-to-all has a fixed size. With capacities, this is the number of slots. Without capacities, the number of rows for
each device is bounded, and rows above the bound are dropped. If the bound is the number of rows, all rows are kept.

Outputs are multiplied by the weights of their choices before they are sent back. The gradients of the weights then need
only outputs of the same device, so that a backward pass that recomputes the layer does not send them again.

N tokens of the device, K experts per token, E experts, P parts of the expert axes, D model dims, F hidden dims, M
slots, n slots of an expert on one device, R rows of an expert, I inputs and O outputs of a product.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.layers.dispatch import DispatchPlan, capacity_plan, combine, dispatch, sorted_plan
from praxis_lite.layers.grouped_matmul import grouped_matmul
from praxis_lite.layers.int8 import RowProduct
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.routing import TokenChoice
from praxis_lite.sharding.constraints import with_sharding_constraint
from praxis_lite.sharding.padding import pad_to, slice_to
from praxis_lite.sharding.specs import all_axes, spec_axes

# Computes outputs, given a function that multiplies rows by weights, and the rows.
ExpertFn = Callable[[RowProduct, jax.Array], jax.Array]


# For each variable that has a dimension of hidden dims, F, the index of this dimension.
_HIDDEN_DIM = {
  **{'gate': 2, 'up': 2, 'down': 1, 'gate_bias': 1, 'up_bias': 1},
  **{'gate_lora_b': 2, 'up_lora_b': 2, 'down_lora_a': 1},
}


@dataclasses.dataclass(frozen=True)
class ExpertSplit:
  """How tokens and experts are split over the mesh axes that a `shard_map` maps."""

  tokens: PartitionSpec  # Spec of [B, T].
  weights: Mapping[str, PartitionSpec]  # Spec of each weight, as it is stored.
  expert: tuple[str, ...]  # Axes over which tokens are exchanged; () without expert parallelism.
  tensor: tuple[str, ...]  # Axes that split the hidden dims while experts compute, so that outputs must be summed.

  @property
  def axes(self) -> frozenset[str]:
    """All axes that the `shard_map` maps."""
    return frozenset({*all_axes(self.tokens), *(a for spec in self.weights.values() for a in all_axes(spec))})

  @property
  def parts(self) -> int:
    """Inside `shard_map`: returns P, the number of devices that split the experts."""
    return jax.lax.axis_size(self.expert) if self.expert else 1

  def gather_weight(self, name: str, weight: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inside `shard_map`: gathers all dimensions of a weight except experts and hidden dims; removes their padding.

    `shape` is the weight's shape before padding. In the backward pass, its gradient is summed and scattered.
    """
    hidden = _HIDDEN_DIM.get(name)
    for dim, entry in enumerate(self.weights[name] if self.axes else ()):
      axes = spec_axes(entry)
      if axes and axes != {0: self.expert, hidden: self.tensor}.get(dim, ()):
        weight = jax.lax.all_gather(weight, axes, axis=dim, tiled=True)
        weight = jax.lax.slice_in_dim(weight, 0, shape[dim], axis=dim)
    return weight


class DeviceExperts(NamedTuple):
  """The experts of a device."""

  mlp: ExpertFn  # For rows [E / P, R, D] or [M, D]; the given product multiplies by weights [E / P, ...].
  num_experts: int  # E, including the padding of the last device.
  split: ExpertSplit  # How experts are split.
  grouped_matmul: str = 'auto'  # How rows that are sorted by expert are multiplied; see `choose_grouped_matmul`.
  stage_axes: tuple[str, ...] = ()  # The mesh axes that split the pipeline's stages around the layer, evenly.

  def grouped_product(self, sizes: jax.Array) -> RowProduct:
    """Returns the function that multiplies rows [M, I], sorted by expert; `sizes` has the number of rows of each."""
    return _GroupedProduct(sizes, self.grouped_matmul, self.stage_axes)


@functools.partial(jax.tree_util.register_dataclass, data_fields=['sizes'], meta_fields=['method', 'stage_axes'])
@dataclasses.dataclass(frozen=True)
class _GroupedProduct:
  """A `RowProduct` for rows [M, I] that are sorted by expert."""

  sizes: jax.Array  # The number of rows of each expert.
  method: str
  stage_axes: tuple[str, ...]

  def __call__(self, rows: jax.Array, weights: jax.Array, biases: jax.Array | None = None) -> jax.Array:
    outputs = grouped_matmul(rows, weights, self.sizes, self.method, self.stage_axes)
    return outputs if biases is None else outputs + self.spread(biases, rows)

  def spread(self, x_EO: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns [M, O]: for each row, the entries x_EO[e] of its expert e. Rows that belong to no expert get zeros."""
    expert_of_row = jnp.sum(jnp.arange(len(rows))[:, None] >= jnp.cumsum(self.sizes), axis=1)
    return x_EO.at[expert_of_row].get(mode='fill', fill_value=0, indices_are_sorted=True)


def run_with_capacity(x_ND: jax.Array, plan: DispatchPlan, weights_M: jax.Array, experts: DeviceExperts) -> jax.Array:
  """Returns [N, D]: for each token, the weighted sum of the outputs of its experts.

  All experts have the same number of slots in the plan; `weights_M` are the weights of the slots.
  """
  axes = experts.split.expert

  def to_experts(x: jax.Array) -> jax.Array:
    x = x.reshape(experts.num_experts, -1, *x.shape[1:])
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=1, tiled=True) if axes else x

  slots, weights = to_experts(dispatch(x_ND, plan)), to_experts(weights_M)
  slots = _scale(experts.mlp(batched_product, slots), weights)
  if axes:
    slots = jax.lax.all_to_all(slots, axes, split_axis=1, concat_axis=0, tiled=True)
  return combine(slots.reshape(-1, x_ND.shape[1]), plan, x_ND.shape[0])


def dropless(
  x_ND: jax.Array, routed: TokenChoice, experts: DeviceExperts, bound: int
) -> tuple[jax.Array, DispatchPlan]:
  """Returns for each token the weighted sum of the outputs of its experts, [N, D]; and the plan of this device's slots.

  At most `bound` rows are exchanged with each device along the axes of experts.
  """
  axes, mlp = experts.split.expert, experts.mlp
  if not axes:
    plan, sizes = sorted_plan(routed.experts, experts.num_experts)
    slots = mlp(experts.grouped_product(sizes), dispatch(x_ND, plan))
    slots = _scale(slots, plan.choices_to_slots(routed.weights))
  else:
    exchange = functools.partial(jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True)
    devices = jax.lax.axis_size(axes)
    own = experts.num_experts // devices
    plan = capacity_plan(routed.experts // own, devices, bound)  # Here the plan is over devices, not experts.
    rows, expert_of_row, weights = (
      exchange(dispatch(x_ND, plan)),
      exchange(plan.choices_to_slots(routed.experts % own, empty=own)),
      exchange(plan.choices_to_slots(routed.weights)),
    )
    received, sizes = sorted_plan(expert_of_row[:, None], own)
    outputs = mlp(experts.grouped_product(sizes), dispatch(rows, received))
    slots = exchange(_scale(combine(outputs, received, len(rows)), weights))
  return combine(slots, plan, x_ND.shape[0]), plan


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def pad_for_shard_map(x: jax.Array, spec: PartitionSpec, shape: tuple[int, ...], true: tuple[int, ...]) -> jax.Array:
  """Returns floating `x`, of shape `true`, padded with zeros to `shape`, because a `shard_map` needs equal parts.

  The gradient is a slice. By JAX's own rule, it would be a pad with negative sizes, for which the guards of XLA would
  gather the array.
  """
  return with_sharding_constraint(pad_to(with_sharding_constraint(x, spec), shape), spec)


def _slice_gradient(
  spec: PartitionSpec, shape: tuple[int, ...], true: tuple[int, ...], _: None, gradient: jax.Array
) -> tuple[jax.Array]:
  return (with_sharding_constraint(slice_to(with_sharding_constraint(gradient, spec), true), spec),)


pad_for_shard_map.defvjp(lambda x, spec, shape, true: (pad_for_shard_map(x, spec, shape, true), None), _slice_gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_outputs(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """Inside `shard_map` without `check_vma`: returns the sum of an output over `axes`, which do not split the sum.

  In the backward pass, each device gets an equal share of the sum's gradient, and multiplies it by the number of
  devices. JAX's own rule would communicate, to sum the shares.
  """
  return jax.lax.psum(x, axes)


sum_outputs.defvjp(
  lambda x, axes: (jax.lax.psum(x, axes), None), lambda axes, _, share: (share * jax.lax.axis_size(axes),)
)


def keep_on_first(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """Inside `shard_map`: returns `x` on the first device along `axes`, and zeros on others, so a sum counts it once."""
  return jnp.where(jax.lax.axis_index(axes) == 0, x, 0)


@jax.tree_util.register_static
class _BatchedProduct:
  """A `RowProduct` for rows [E, R, I] and weights [E, I, O]: returns [E, R, O]."""

  def __call__(self, rows: jax.Array, weights: jax.Array, biases: jax.Array | None = None) -> jax.Array:
    sums = jnp.int32 if rows.dtype == weights.dtype == jnp.int8 else None
    outputs = jnp.einsum('eri,eio->ero', rows, weights, preferred_element_type=sums)
    return outputs if biases is None else outputs + self.spread(biases, rows)

  def spread(self, x_EO: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns [E, 1, O]."""
    return x_EO[:, None]


batched_product = _BatchedProduct()


def _scale(slots: jax.Array, weights: jax.Array) -> jax.Array:
  return (to_sum_dtype(slots) * weights[..., None]).astype(slots.dtype)
