"""Routing and dispatch against tables by hand and against loops over tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.dispatch import (
  DispatchPlan,
  capacity_plan,
  combine,
  dispatch,
  plan_of_rows,
  sorted_plan,
)
from praxis_lite.layers.routing import Router, choose_experts, choose_tokens, expert_capacity, router_scores

# Four tokens, three experts; the last token is padding.
LOGITS = np.array([[2, 1, 0], [2, 0, 1], [0, 2, 1], [2, 1, 0]], np.float32)
REAL = np.array([True, True, True, False])


def combine_weights(plan: DispatchPlan, weights, num_experts, num_tokens):
  """[N, E, C]: the weight of each slot in the sum of each token."""
  slots = np.asarray(plan.choices_to_slots(jnp.asarray(weights)))
  out = np.zeros((num_tokens, plan.choice_of_slot.size))
  for slot, token in enumerate(np.asarray(plan.token_of_slot)):
    if token < num_tokens:
      out[token, slot] = slots[slot]
  return out.reshape(num_tokens, num_experts, -1)


def test_top_2_gating_table_by_hand():

  @jax.jit
  def gate(logits):
    choice = choose_experts(router_scores(logits, 'softmax'), REAL, 2)
    return choice, capacity_plan(choice.experts, 3, 2)

  choice, plan = gate(LOGITS)
  expected = np.zeros((4, 3, 2))
  expected[0, 0, 0], expected[0, 1, 1] = 0.7311, 0.2689
  expected[1, 0, 1], expected[1, 2, 0] = 0.7311, 0.2689
  expected[2, 1, 0], expected[2, 2, 1] = 0.7311, 0.2689
  np.testing.assert_allclose(combine_weights(plan, choice.weights, 3, 4), expected, atol=1e-4)


def placed_by_a_loop(experts_NK, num_experts, capacity):
  """First choices of all tokens in their order, then second ones; each takes the next slot of its expert."""
  taken, slot_of_choice = [0] * num_experts, np.full(experts_NK.shape, num_experts * capacity)
  for k in range(experts_NK.shape[1]):
    for token, expert in enumerate(experts_NK[:, k]):
      if expert < num_experts and taken[expert] < capacity:
        slot_of_choice[token, k] = expert * capacity + taken[expert]
        taken[expert] += 1
  return slot_of_choice


@pytest.mark.parametrize(('k', 'capacity'), [(1, 2), (3, 3)])
def test_slots_are_those_of_a_loop_over_choices(k, capacity):
  rng, (rows, tokens, experts) = np.random.default_rng(k), (3, 11, 5)
  real = rng.random((rows, tokens)) > 0.2

  @jax.jit
  def placed(logits, real):
    choice = choose_experts(router_scores(logits, 'softmax'), real, k)
    plans = jax.vmap(lambda e: capacity_plan(e, experts, capacity))(choice.experts)
    return choice, plans, plan_of_rows(plans, tokens * k, capacity)

  choice, plans, whole = jax.tree.map(np.asarray, placed(rng.normal(size=(rows, tokens, experts)), real))
  for row in range(rows):
    expected = placed_by_a_loop(np.asarray(choice.experts[row]), experts, capacity)
    np.testing.assert_array_equal(plans.slot_of_choice[row], expected)
    plan = DispatchPlan(plans.choice_of_slot[row], plans.slot_of_choice[row])
    table = combine_weights(plan, choice.weights[row], experts, tokens)
    assert (table.sum((1, 2)) <= 1 + 1e-6).all()
    assert not table[~real[row]].any()
    assert ((table > 0).sum(0) <= 1).all()
  slots = np.asarray(whole.slot_of_choice).reshape(rows, tokens, k)
  for row, token, i in np.ndindex(rows, tokens, k):
    slot, own = slots[row, token, i], int(plans.slot_of_choice[row, token, i])
    if own == experts * capacity:
      assert slot == rows * experts * capacity
    else:
      expert, place = divmod(own, capacity)
      assert slot == (expert * rows + row) * capacity + place
      assert whole.choice_of_slot[slot] == (row * tokens + token) * k + i
  assert int((whole.choice_of_slot < rows * tokens * k).sum()) == int((plans.choice_of_slot < tokens * k).sum())


def test_choice_with_bias_sigmoid_scale_and_without_renormalizing():
  scores = router_scores(LOGITS, 'sigmoid')
  np.testing.assert_allclose(scores, 1 / (1 + np.exp(-LOGITS)), rtol=1e-6)
  bias = jnp.array([-9.0, 0.0, 0.0])
  choice = choose_experts(scores, REAL, 2, bias=bias, renormalize=False, weight_scale=2.0)
  np.testing.assert_array_equal(choice.experts, [[1, 2], [2, 1], [1, 2], [3, 3]])
  one = lambda x: 2 / (1 + np.exp(-x))  # noqa: E731
  np.testing.assert_allclose(choice.weights, [[one(1), one(0)], [one(1), one(0)], [one(2), one(1)], [0, 0]], rtol=1e-6)
  scaled = choose_experts(scores, REAL, 2, bias=bias, weight_scale=2.5)
  np.testing.assert_allclose(scaled.weights.sum(-1), [2.5, 2.5, 2.5, 0], rtol=1e-6)
  # Scores that underflow are no reason for NaN.
  assert np.isfinite(choose_experts(jnp.zeros((1, 3)), jnp.array([True]), 2).weights).all()


@pytest.mark.slow_cases
@pytest.mark.parametrize('groups, kept, k', [(1, 1, 3), (3, 1, 2), (3, 2, 3), (6, 4, 4), (2, 2, 5), (2, 1, 1)])
def test_tokens_use_experts_of_the_groups_with_the_best_pairs(groups, kept, k):
  """Against a loop over tokens; scores plus biases are negative, too, and the last token is padding."""
  E = 6
  rng = np.random.default_rng(groups + kept)
  scores, bias = rng.uniform(size=(9, E)).astype(np.float32), rng.normal(size=E).astype(np.float32)
  real = np.arange(9) < 8
  bias_E = jnp.asarray(bias)
  choice = choose_experts(scores, real, k, bias=bias_E, groups=(groups, kept), renormalize=False)
  for token in range(8):
    by = scores[token] + bias
    rank = [sorted(by[g * E // groups : (g + 1) * E // groups])[-2:] for g in range(groups)]
    best = sorted(range(groups), key=lambda g: -sum(rank[g]))[:kept]
    allowed = [e for e in range(E) if e // (E // groups) in best]
    expected = sorted(allowed, key=lambda e: -by[e])[:k]
    np.testing.assert_array_equal(choice.experts[token], expected)
    np.testing.assert_array_equal(choice.weights[token], scores[token][expected])
  assert (choice.experts[8] == E).all() and not choice.weights[8].any()


def test_experts_choose_the_tokens_with_the_highest_scores():
  scores = router_scores(LOGITS, 'softmax')
  choice = choose_tokens(scores, REAL, 2)
  np.testing.assert_array_equal(choice.tokens, [[0, 1], [2, 0], [1, 2]])
  expected = [[scores[0, 0], scores[1, 0]], [scores[2, 1], scores[0, 1]], [scores[1, 2], scores[2, 2]]]
  np.testing.assert_allclose(choice.weights, expected, rtol=1e-6)
  few = choose_tokens(scores, np.array([False, True, False, False]), 2)
  np.testing.assert_array_equal(few.tokens, [[1, 4]] * 3)
  np.testing.assert_array_equal(few.weights[:, 1], 0)


def test_capacity_is_rounded_up_and_within_bounds():
  assert expert_capacity(0.75, 4, 2, 3) == 2
  assert expert_capacity(1.25, 1024, 2, 8) == 320
  assert expert_capacity(1.0, 7, 2, 3) == 5
  assert expert_capacity(1.0, 1, 2, 8) == 1
  assert expert_capacity(9.0, 16, 2, 8) == 16


EXPERTS = np.array([[0, 1], [0, 2], [1, 2], [3, 3], [0, 3], [2, 0]], np.int32)
PLANS = {
  'capacity': lambda: capacity_plan(jnp.asarray(EXPERTS), 3, 2),
  'sorted': lambda: sorted_plan(jnp.asarray(EXPERTS), 3)[0],
  'experts choose': lambda: DispatchPlan(jnp.array([0, 5, 2, 0, 6, 6]), None),
}


@pytest.mark.parametrize('name', PLANS)
def test_dispatch_and_combine_are_the_products_with_a_matrix_and_its_transpose(name):
  plan, rng = jax.jit(PLANS[name])(), np.random.default_rng(0)
  matrix = (np.asarray(plan.token_of_slot)[:, None] == np.arange(6)).astype(np.float32)
  x, slots = rng.normal(size=(6, 3)).astype(np.float32), rng.normal(size=(len(matrix), 3)).astype(np.float32)

  @jax.jit
  def both(x, slots):
    out, transpose = jax.vjp(lambda x, slots: (dispatch(x, plan), combine(slots, plan, 6)), x, slots)
    return *out, *transpose((slots, x))

  for found, expected in zip(both(x, slots), (matrix @ x, matrix.T @ slots, matrix.T @ slots, matrix @ x)):
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_sorted_rows_are_grouped_by_expert_and_counted():
  experts = np.array([[0, 1], [0, 2], [1, 2], [4, 4], [0, 3], [2, 0]], np.int32)  # 4 is none.
  plan, sizes = jax.jit(lambda e: sorted_plan(e, 4))(experts)
  np.testing.assert_array_equal(sizes, [4, 2, 3, 1])
  of_slot = np.append(experts.reshape(-1), 4)[plan.choice_of_slot]
  np.testing.assert_array_equal(of_slot, [0] * 4 + [1] * 2 + [2] * 3 + [3] + [4] * 2)
  np.testing.assert_array_equal(plan.choices_to_slots(jnp.asarray(experts), empty=4), of_slot)
  np.testing.assert_array_equal(plan.has_slot(), experts < 4)


def call(router, *args, do_eval=False):
  return jax.jit(lambda variables, *a: router.apply(variables, *a, method='record_choices', do_eval=do_eval))(*args)


def test_losses_biases_and_summaries_by_hand():
  config = Config(Router, input_dims=2, num_experts=3, score='sigmoid', bias_update_rate=0.1)
  config.set(z_loss_weight=0.5, load_balance_loss_weight=0.25)
  router = config.instantiate()
  variables = router.init(jax.random.key(0))
  logits, real = LOGITS.reshape(2, 2, 3), REAL.reshape(2, 2)
  load, dropped = np.array([[[2, 1, 1]], [[0, 1, 1]]], np.float32), np.array([[1], [0]], np.float32)
  _, side = call(router, variables, logits, real, load, dropped)
  z = np.log(np.exp(LOGITS).sum(-1)) ** 2
  np.testing.assert_allclose(side.aux_losses['Router/z_loss'], (z[:3].mean(), 0.5), rtol=1e-6)
  scores = 1 / (1 + np.exp(-LOGITS))
  share = scores / scores.sum(-1, keepdims=True)
  balance = 3 * np.sum(np.array([2, 2, 2]) / 6 * share[:3].mean(0))
  np.testing.assert_allclose(side.aux_losses['Router/load_balance'], (balance, 0.25), rtol=1e-6)
  summaries = {name.partition('/')[2]: np.asarray(s.value) for name, s in side.summaries.items()}
  np.testing.assert_allclose(summaries['fraction_dropped'], 1 / 6)
  np.testing.assert_allclose(summaries['entropy'], -(share * np.log(share)).sum(-1)[:3].mean(), rtol=1e-6)
  np.testing.assert_allclose((summaries['max_load'], *summaries['load']), 1.0)
  np.testing.assert_array_equal(side.updates['bias'], 0.0)

  rows = config.clone(load_balance_scope='row').instantiate()
  _, side = call(rows, variables, logits, real, load, dropped)
  of_rows = [3 * share[:2] @ np.array([2, 1, 1]) / 4, 3 * share[2:3] @ np.array([0, 1, 1]) / 2]
  np.testing.assert_allclose(side.aux_losses['Router/load_balance'][0], np.concatenate(of_rows).mean(), rtol=1e-6)

  uneven = np.array([[[3, 1, 0]], [[0, 1, 1]]], np.float32)
  _, side = call(router, variables, logits, real, uneven, dropped)
  np.testing.assert_allclose(side.updates['bias'], [-0.1, 0.0, 0.1])
  assert not call(router, variables, logits, real, uneven, dropped, do_eval=True)[1].updates


def test_jitter_in_training_only():
  router = Config(Router, input_dims=2, num_experts=3, jitter=0.1).instantiate()
  variables, x = router.init(jax.random.key(0)), np.ones((2, 3, 2), np.float32)
  (plain, _), (first, _), (second, _) = (
    jax.jit(router.apply, static_argnames='do_eval')(variables, x, key=jax.random.key(i), do_eval=do_eval)
    for i, do_eval in ((0, True), (0, False), (1, False))
  )
  np.testing.assert_allclose(plain, x @ variables['w'], rtol=1e-6)
  assert 0 < np.abs(first - plain).max() <= 0.1 * np.abs(variables['w']).sum(0).max() + 1e-6
  assert np.abs(first - second).max() > 0


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'choice': 'tokens'}, r"Router\.choice: expected 'token' or 'expert', got 'tokens'\. Did you mean 'token'"),
    ({'score': 'softplus'}, r"Router\.score: expected 'softmax' or 'sigmoid'"),
    ({'jitter': 1.0}, r'Router\.jitter: expected at least 0 and less than 1, got 1\.0'),
    ({'bias_update_rate': -0.1}, r'Router\.bias_update_rate: expected at least 0'),
    ({'num_groups': 2}, r'Router\.num_groups: 2 does not divide num_experts, 3'),
    (
      {'num_groups': 3, 'num_groups_per_token': 4},
      r'Router\.num_groups_per_token: expected at least 1 and less than 4',
    ),
    ({'choice': 'expert', 'num_groups': 3}, r"Router\.num_groups: with choice='expert' tokens choose no groups"),
    ({'choice': 'expert', 'bias_update_rate': 0.1}, r"Router\.bias_update_rate: with choice='expert'"),
    ({'choice': 'expert', 'load_balance_loss_weight': 0.1}, r"load_balance_loss_weight: with choice='expert'"),
  ],
)
def test_mistakes_in_a_router(fields, message):
  with pytest.raises(ConfigError, match=message):
    Config(Router, input_dims=2, num_experts=3, **fields).instantiate()
