"""Plans of runs that train only adapters: frozen weights are stored, without slots and gradients."""

import jax.numpy as jnp
import optax
import pytest
from small_lm import DIMS, HEADS, HIDDEN, LAYERS, D, small_lm

from praxis_lite.common.config import Config
from praxis_lite.instruments.plan import plan
from praxis_lite.layers import Lora
from praxis_lite.training import train_adapters

RANK = 4
# Of queries, keys, values and outputs, and of gates, up and down: rank x (inputs + outputs).
ADAPTERS = LAYERS * RANK * (4 * (D + HEADS * DIMS) + 3 * (D + HIDDEN))


@pytest.mark.slow_cases
@pytest.mark.parametrize('topology, mesh', [('h100:1x1', (1, 1, 1)), ('h100:1x8', (2, 2, 2))])
def test_frozen_weights_have_no_slots(topology, mesh):
  whole, tuned = small_lm(mesh), small_lm(mesh)
  for config in (whole, tuned):
    config.task.train.learner.optimizer = Config(optax.adamw)
    config.task.model.dtype = jnp.bfloat16
  train_adapters(tuned.task, Config(Lora, rank=RANK))
  all_weights, adapters = (plan(config, None, topology, compile=False) for config in (whole, tuned))
  added = adapters.memory.state.parameters - all_weights.memory.state.parameters
  # A of a column layer is split over 'data' and B over 'mdl', or the other way around: both have 2 devices.
  assert added == 4 * ADAPTERS // mesh[1]
  counts = 16  # Counters of steps.
  assert adapters.memory.state.slots == pytest.approx(2 * added, abs=counts)
  assert adapters.memory.state.slots < all_weights.memory.state.slots / 2
