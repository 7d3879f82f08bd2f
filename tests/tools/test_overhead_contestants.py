"""The two sides of the overhead benchmark are one program: the same training, at the same compiled cost."""

import jax
import numpy as np
import pytest

from tools.benchmark_overhead import TWO_SIDED, within_limit
from tools.handwritten_lm import Size
from tools.overhead_contestants import handwritten_step, praxis_lite_step

SIZE = Size(batch=8, length=64, model_dims=64, num_layers=3, num_heads=4, hidden_dims=256, vocab=96)


def handwritten_params(lm):
  """Our variables under the names of the handwritten step."""
  layers = lm['transformer']['layers']
  attention = {name[0]: layers['attention'][name]['w'] for name in ('query', 'key', 'value', 'out')}
  return {
    'embedding': lm['embedding']['w'],
    'softmax': lm['softmax']['w'],
    'final_norm': lm['final_norm']['scale'],
    'norm1': layers['attention_norm']['scale'],
    'norm2': layers['ff_norm']['scale'],
    **attention,
    **{name: layers['ff'][name]['w'] for name in ('gate', 'up', 'down')},
  }


@pytest.fixture(scope='module', params=[1, 8], ids=['one device', '8 devices'])
def contestants(request):
  pair = praxis_lite_step(SIZE, request.param), handwritten_step(SIZE, request.param)
  for contestant in pair:
    contestant.compile()
  return pair


@pytest.mark.slow
def test_the_same_parameters_take_the_same_steps(contestants):
  framework, hand = contestants
  state, batch = framework.start()
  params, opt_state, hand_batch = hand.start()
  copies = {name: np.asarray(w) for name, w in handwritten_params(state.mdl_vars['lm']).items()}
  assert {name: w.shape for name, w in copies.items()} == {name: w.shape for name, w in params.items()}
  params = {name: jax.device_put(copies[name], w.sharding) for name, w in params.items()}

  mine, theirs = (state, batch), (params, opt_state, hand_batch)
  losses = []
  for _ in range(5):
    mine, loss = framework.advance(framework.compiled, mine)
    theirs, hand_loss = hand.advance(hand.compiled, theirs)
    jax.block_until_ready((mine, theirs))
    losses.append((float(loss), float(hand_loss)))

  first, last = losses[0][0], losses[-1][0]
  assert last < first - 0.1
  np.testing.assert_allclose(*zip(*losses), rtol=1e-5)


@pytest.mark.slow
def test_the_compiled_programs_cost_the_same(contestants):
  framework, hand = contestants
  ratios = {
    'parameters': framework.num_params / hand.num_params,
    'memory': framework.peak_bytes / hand.peak_bytes,
    'flops': framework.cost['flops'] / hand.cost['flops'],
    'bytes': framework.cost['bytes accessed'] / hand.cost['bytes accessed'],
  }
  assert {what: ratio for what, ratio in ratios.items() if not within_limit(what, ratio)} == {}


def test_a_two_sided_limit_is_one_both_ways():
  assert 'flops' in TWO_SIDED
  assert within_limit('flops', 0.995)
  assert not within_limit('flops', 0.9)
  assert not within_limit('flops', 1.02)
  assert within_limit('step', 0.5)
