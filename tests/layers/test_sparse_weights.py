"""Weights of which n of m neighbouring inputs are kept: by loops in NumPy, their gradients, on meshes, in few bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.checkpoints.streamed import StreamedArray, whole_box
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves
from praxis_lite.layers import Linear, QuantizedWeights
from praxis_lite.layers.weight_formats import WeightFormat
from praxis_lite.models import BaseModel, dequantize_variables, quantize_weights, weighted_mean
from praxis_lite.runs.quantized_arrays import apply_masks
from praxis_lite.training import train_step_single_learner
from praxis_lite.training.state import TrainState
from praxis_lite.training.task import SingleTask


class InMemory(StreamedArray):
  def __init__(self, array):
    self.array, self.shape, self.dtype = array, array.shape, array.dtype

  def read(self, box):
    return np.array(self.array[box])


def pruned_by_hand(w, n, m):
  """The weight [..., I, O] with zeros, by a loop over groups of inputs."""
  found = np.zeros_like(w)
  for *stack, out in np.ndindex(*w.shape[:-2], w.shape[-1]):
    for start in range(0, w.shape[-2], m):
      inputs = range(start, min(start + m, w.shape[-2]))
      for i in sorted(inputs, key=lambda i: (-abs(w[*stack, i, out]), i))[:n]:
        found[*stack, i, out] = w[*stack, i, out]
  return found


@pytest.mark.parametrize('shape', [(8, 3), (2, 9, 2), (1, 1), (3, 2, 6, 1)])
@pytest.mark.parametrize('kept', [(2, 4), (1, 3), (3, 4)])
def test_the_largest_of_each_group_are_kept(shape, kept):
  w = np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)  # With equal ones and zeros.
  np.testing.assert_array_equal(WeightFormat('float', kept=kept).prune(jnp.asarray(w)), pruned_by_hand(w, *kept))


def test_weights_of_projections_are_pruned_along_the_dims_of_a_head():
  w = np.random.default_rng(0).standard_normal((3, 6, 5)).astype(np.float32)
  out = WeightFormat('float', num_inputs=2, kept=(2, 4)).prune(jnp.asarray(w))
  np.testing.assert_array_equal(out, pruned_by_hand(w, 2, 4))
  heads = WeightFormat('float', num_outputs=2, kept=(2, 4)).prune(jnp.asarray(w.swapaxes(0, 1)))
  np.testing.assert_array_equal(heads, pruned_by_hand(w.swapaxes(0, 1).reshape(6, 15), 2, 4).reshape(6, 3, 5))


@pytest.mark.parametrize('name', ['int8', 'int4', 'nf4'])
@pytest.mark.parametrize('symmetric', [True, False])
def test_zeros_are_zeros_in_few_bits_too(name, symmetric):
  if name == 'nf4' and not symmetric:
    return
  w = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
  form = WeightFormat(name, group_size=8, symmetric=symmetric, kept=(2, 4))
  found = form.dequantize(form.quantize(jnp.asarray(w)), 9)
  assert not np.any(np.asarray(found)[pruned_by_hand(w, 2, 4) == 0])


@pytest.mark.parametrize('name', ['float', 'int4'])
def test_the_gradient_goes_to_all_weights_or_to_kept_ones(name):
  w = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
  for stays in (False, True):
    form = WeightFormat(name, kept=(2, 4), mask_stays=stays)
    gradient = jax.grad(lambda w, form=form: jnp.sum(form.round_weight(w) * 3))(jnp.asarray(w))
    is_kept = pruned_by_hand(w, 2, 4) != 0
    np.testing.assert_allclose(gradient, 3 * (is_kept if stays else np.ones_like(w)))
    assert not np.any(np.asarray(form.round_weight(jnp.asarray(w)))[~is_kept])


def test_rules_that_are_not_valid():
  for fields, message in (
    ({'format': 'float'}, "'float' is for weights with `kept`"),
    ({'format': 'float', 'kept': (2, 4)}, "'float' is for weights with `kept`"),
    ({'kept': (4, 2)}, r'kept: expected \(n, m\) with 0 < n < m'),
    ({'kept': (2, 4), 'mask_stays': True}, 'mask_stays: it is for weights with'),
    ({'kept': (2, 4), 'num_shots': 2}, 'num_shots: it is for weights with'),
    ({'kept': (2, 4), 'num_shots': 2, 'trained': True, 'mask_stays': True}, 'num_shots: it is for weights with'),
    ({'kept': (2, 4), 'num_shots': 0, 'trained': True}, 'num_shots.*at least 1'),
  ):
    with pytest.raises(ConfigError, match=message):
      Config(QuantizedWeights, **fields).instantiate()


class Regression(BaseModel):
  """Mean of |x w - y|^2 over rows."""

  def setup(self):
    super().setup()
    self.create_child('only', Config(Linear, input_dims=9, output_dims=4))

  def __call__(self, batch):
    errors = jnp.sum(jnp.square(self.only(batch['x']) - batch['y']), -1)
    return {'loss': weighted_mean(errors, batch['weights'])}, {}


FEW_SHOTS = Config(
  QuantizedWeights, format='float', kept=(2, 4), trained=True, num_shots=2, mask_update_interval=3, target_step=1
)


def regression_task(**fields):
  model = quantize_weights(Config(Regression), FEW_SHOTS)
  task = Config(SingleTask, model=model, **fields)
  task.train.learner.set(optimizer=Config(optax.sgd), learning_rate=0.05)
  return task.instantiate()


def test_the_mask_is_renewed_at_some_steps_and_masked_weights_wait():
  rng = np.random.default_rng(0)
  x, y, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 9), (6, 4), (9, 4)))
  batch = {'x': x, 'y': 9 * y, 'weights': np.ones(6, np.float32)}
  task, mask, masks = regression_task(), np.ones((9, 4), bool), []
  variables = {'only': {'w': jnp.asarray(w), 'w_sparsity_mask': jnp.ones((9, 4), jnp.uint8)}}
  assert task.model.abstract_init()['only'].keys() == variables['only'].keys()
  assert task.model.active_num_params == 36
  state = TrainState(np.int32(0), variables, task.bind_learner().init(variables), None)
  step = jax.jit(lambda state: train_step_single_learner(task, state, jax.random.key(0), batch))
  for t in range(8):
    if t in (1, 4):  # And not at 7: there are two shots.
      mask = pruned_by_hand(w, 2, 4) != 0
    masks.append(mask)
    out = step(state)
    error = x @ (w * mask) - batch['y']
    np.testing.assert_allclose(out.weighted_loss, np.square(error).sum(1).mean(), rtol=1e-4)
    w = w - 0.05 * mask * (x.T @ (2 * error / 6))
    state = out.state
    np.testing.assert_allclose(state.mdl_vars['only']['w'], w, atol=1e-4)
    np.testing.assert_array_equal(state.mdl_vars['only']['w_sparsity_mask'], mask)
  assert np.any(masks[4] & ~masks[1])  # A weight has come back.
  np.testing.assert_allclose(dequantize_variables(task.model, state.mdl_vars)['only']['w'], w * mask, atol=1e-4)
  streamed = {'only': {name: InMemory(np.asarray(v)) for name, v in state.mdl_vars['only'].items()}}
  (found,) = leaves(apply_masks(task.model, streamed)).values()
  np.testing.assert_array_equal(found.read(whole_box(w.shape)), np.asarray(state.mdl_vars['only']['w']) * mask)


def test_explicit_collectives_do_not_renew_masks():
  task = regression_task(partitioning='shard_map')
  with pytest.raises(ConfigError, match=r"task.partitioning: masks that training renews .* need 'auto'"):
    train_step_single_learner(task, TrainState(np.int32(0), {}, {}, None), jax.random.key(0), {})
