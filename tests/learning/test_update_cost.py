"""A learner's update costs no more than the same written by hand with optax, as XLA counts operations and bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from small_trees import SKIP, weight

from praxis_lite.common.config import Config
from praxis_lite.training.learning import Learner

WEIGHTS = {
  'emb': weight(64, 32),
  'layers': {'w': weight(32, 64, repeat=(4,)), 'norm': weight(32, repeat=(4,), marks=(SKIP,))},
}
MASK = {'emb': True, 'layers': {'w': True, 'norm': False}}
PARAMS = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.full_shape, jnp.float32), WEIGHTS)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def by_hand(optimizer: Any) -> Any:
  tx = optax.chain(optax.clip_by_global_norm(1.0), optimizer)

  def update(params: Any, state: Any, grads: Any) -> Any:
    changes, state = tx.update(grads, state, params)
    return optax.apply_updates(params, changes), state, optax.global_norm(grads)

  return compiled(update, PARAMS, jax.eval_shape(tx.init, PARAMS), PARAMS)


def ours(optimizer: Config, **fields: Any) -> Any:
  learner = Config(Learner, optimizer=optimizer, clip_gradient_norm_to_value=1.0, **fields).instantiate().bind(WEIGHTS)

  def update(params: Any, state: Any, grads: Any, loss: Any, step: Any) -> Any:
    out = learner.update(grads, loss, params, state, None, step)
    return out.mdl_vars, out.opt_states, out.stats

  state = jax.eval_shape(learner.init, PARAMS)
  return compiled(update, PARAMS, state, PARAMS, SCALAR, SCALAR)


def compiled(update: Any, *shapes: Any) -> Any:
  return jax.jit(update, donate_argnums=(0, 1)).lower(*shapes).compile()


@pytest.mark.parametrize('per_layer', [None, True])
@pytest.mark.parametrize('on_nonfinite', ['skip', 'ignore'])
def test_adamw_with_clipping_costs_what_it_costs_by_hand(on_nonfinite: str, per_layer: bool | None) -> None:
  hand = by_hand(optax.adamw(1e-3, weight_decay=0.1, mask=MASK))
  mine = ours(Config(optax.adamw, weight_decay=0.1), on_nonfinite=on_nonfinite, per_layer_statistics=per_layer)
  for what in ('flops', 'bytes accessed'):
    assert mine.cost_analysis()[what] <= 1.01 * hand.cost_analysis()[what], what
  num_bytes = 4 * sum(p.size for p in jax.tree.leaves(PARAMS))
  extra = mine.memory_analysis().temp_size_in_bytes - hand.memory_analysis().temp_size_in_bytes
  assert extra <= 0.01 * num_bytes
  # Parameters and both slots are updated in place.
  assert mine.memory_analysis().alias_size_in_bytes >= 3 * num_bytes
