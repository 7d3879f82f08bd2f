"""Dispatch: how tokens travel to the slots of experts, and back.

A plan gives each choice (token, expert) a slot, so that the slots of an expert are neighbours:

    slots = dispatch(x, plan)            slot -> the token of its choice; zeros if the slot is empty
    y     = combine(slots, plan, N)      token -> the sum over the slots of its choices

Each is the transpose of the other. Both, and their gradients, read rows instead of adding to rows in memory, because
that is faster on accelerators.

    capacity_plan    C slots for each expert; first choices of all tokens, in order, before second choices
    sorted_plan      one slot for each choice, sorted by expert, for `grouped_matmul`

N tokens, K choices of a token, E experts, C capacity, M slots, D model dims.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.layers.precision import sum_dtype, to_sum_dtype


class DispatchPlan(NamedTuple):
  """The slots of choices. Choice k of token t has the number t K + k."""

  choice_of_slot: jax.Array  # [M] int32, the number of the slot's choice; N K if the slot is empty.
  # [N, K] int32, the slot of each choice; M if it has none. None if experts choose tokens; then the number of a choice
  # is the number of its token, and an empty slot has N.
  slot_of_choice: jax.Array | None

  @property
  def token_of_slot(self) -> jax.Array:
    """The token whose choice is in each slot, [M] int32; N if the slot is empty."""
    return self.choice_of_slot if self.slot_of_choice is None else self.choice_of_slot // self.slot_of_choice.shape[1]

  def has_slot(self) -> jax.Array:
    """Returns [N, K] bool, whether the choice has a slot; raises ValueError if the plan does not list choices."""
    if self.slot_of_choice is None:
      raise ValueError('the plan does not list the choices of tokens')
    return self.slot_of_choice < self.choice_of_slot.size

  def choices_to_slots(self, of_choices_NK: jax.Array, empty: int = 0) -> jax.Array:
    """Returns [M]: for each slot, the value that its choice has in `of_choices_NK`; `empty` for empty slots."""
    return of_choices_NK.reshape(-1).at[self.choice_of_slot].get(mode='fill', fill_value=empty)


def capacity_plan(experts_NK: jax.Array, num_experts: int, capacity: int) -> DispatchPlan:
  """Returns the plan of E C slots; slot e C + c is slot c of expert e. Expert number E means no expert and no slot."""
  by_expert = _sort_by_expert(experts_NK, num_experts)
  place = by_expert.rank - by_expert.starts.at[by_expert.experts].get(mode='clip')
  fits = (by_expert.experts < num_experts) & (place < capacity)
  return _plan(by_expert.experts * capacity + place, fits, num_experts * capacity, *experts_NK.shape)


def sorted_plan(experts_NK: jax.Array, num_experts: int) -> tuple[DispatchPlan, jax.Array]:
  """Returns a plan, and the number of slots of each expert, [E].

  The plan has N K slots, which are sorted by expert, with empty slots at the end.
  """
  by_expert = _sort_by_expert(experts_NK, num_experts)
  num_slots = experts_NK.size
  plan = _plan(by_expert.rank, by_expert.experts < num_experts, num_slots, *experts_NK.shape)
  return plan, jnp.diff(by_expert.starts)


def plan_of_rows(plans: DispatchPlan, num_choices: int, capacity: int) -> DispatchPlan:
  """Joins the plans of the rows of a batch into one plan, whose slots are ordered by expert, then by row.

  `plans` is a stack of plans, [B, ...], each with E C slots. A row has T K choices, `num_choices`.
  """
  rows, slots = plans.choice_of_slot.shape
  of_row = jnp.arange(rows, dtype=jnp.int32)[:, None]
  choices = plans.choice_of_slot + num_choices * of_row
  choices = jnp.where(plans.choice_of_slot < num_choices, choices, num_choices * rows)
  choices = jnp.swapaxes(choices.reshape(rows, -1, capacity), 0, 1).reshape(-1)
  if plans.slot_of_choice is None:
    return DispatchPlan(choices, None)
  slot, of_row = plans.slot_of_choice, of_row[..., None]
  expert, place = slot // capacity, slot % capacity
  slot = jnp.where(slot < slots, (expert * rows + of_row) * capacity + place, slots * rows)
  return DispatchPlan(choices, slot.reshape(-1, slot.shape[-1]))


@jax.custom_vjp
def dispatch(x_ND: jax.Array, plan: DispatchPlan) -> jax.Array:
  """Returns slots [M, D]; empty ones are zero."""
  return _rows(x_ND, plan.token_of_slot)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def combine(slots_MD: jax.Array, plan: DispatchPlan, num_tokens: int) -> jax.Array:
  """Returns [N, D]: for each token, the sum over the slots of its choices; zero for a token without slots."""
  if plan.slot_of_choice is None:
    zeros = jnp.zeros((num_tokens, *slots_MD.shape[1:]), sum_dtype(slots_MD))
    return zeros.at[plan.token_of_slot].add(to_sum_dtype(slots_MD), mode='drop').astype(slots_MD.dtype)
  choices = _rows(slots_MD, plan.slot_of_choice)
  return jnp.sum(choices, axis=1, dtype=sum_dtype(choices)).astype(slots_MD.dtype)


def _dispatch_bwd(residuals: tuple[DispatchPlan, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
  plan, tokens = residuals
  return combine(gradient, plan, tokens.shape[0]), None


# Residuals must be arrays, so an empty array carries the number of tokens.
dispatch.defvjp(lambda x, plan: (dispatch(x, plan), (plan, jnp.zeros((x.shape[0], 0)))), _dispatch_bwd)
combine.defvjp(
  lambda slots, plan, num_tokens: (combine(slots, plan, num_tokens), plan),
  lambda num_tokens, plan, gradient: (dispatch(gradient, plan), None),
)


class _ByExpert(NamedTuple):
  """Choices in order of priority: the first choices of all tokens, then all second choices, and so on."""

  experts: jax.Array  # [K N] int32.
  rank: jax.Array  # [K N] int32, the place of each choice in the order by expert.
  starts: jax.Array  # [E + 1] int32, the first rank of each expert; at the end, the number of choices with an expert.


def _sort_by_expert(experts_NK: jax.Array, num_experts: int) -> _ByExpert:
  experts = experts_NK.T.reshape(-1).astype(jnp.int32)
  order = jnp.argsort(experts, stable=True)
  numbers = jnp.arange(experts.size, dtype=jnp.int32)
  rank = jnp.zeros_like(numbers).at[order].set(numbers, unique_indices=True)
  counts = jnp.sum(experts[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
  return _ByExpert(experts, rank, jnp.cumulative_sum(counts, include_initial=True))


def _plan(slot: jax.Array, fits: jax.Array, num_slots: int, num_tokens: int, k: int) -> DispatchPlan:
  """Returns the plan in which each choice, in order of priority, gets its `slot` if `fits`, and none otherwise."""
  slot_of_choice = jnp.where(fits, slot, num_slots).reshape(k, num_tokens).T
  numbers = jnp.arange(num_tokens * k, dtype=jnp.int32)
  empty = jnp.full(num_slots, num_tokens * k, jnp.int32)
  return DispatchPlan(empty.at[slot_of_choice.reshape(-1)].set(numbers, mode='drop'), slot_of_choice)


def _rows(x: jax.Array, rows: jax.Array) -> jax.Array:
  return x.at[rows].get(mode='fill', fill_value=0)
