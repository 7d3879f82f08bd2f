"""Training through shard_map is training: it matches compiler placement, step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from explicit_models import FSDP, class_batch, lm_batch, lm_task, partitioned, train

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import ConvNet, Dropout, Mlp, SpectralNormLinear
from praxis_lite.models import ClassificationModel, transformer_lm
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')


def assert_close(left, right, rtol=1e-5, atol=1e-6):
  for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=rtol, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize('devices, strategy', [(8, None), (5, FSDP)], ids=['data_8', 'fsdp_5'])
def test_one_step_and_twenty_match_compiler_placement(devices, strategy):
  # 13 rows leave a device with padding alone, and the weights of rows differ: a mean of means would be wrong.
  batches = [lm_batch(13, seed) for seed in range(20)]  # Fifty are taken in test_ways_agree.py.
  first, losses, _ = train(lm_task('auto', devices, strategy), batches)
  explicit, explicit_losses, state = train(lm_task('shard_map', devices, strategy), batches)
  assert_close(explicit, first)
  np.testing.assert_allclose(explicit_losses, losses, rtol=1e-4)
  assert losses[-1] < 0.8 * losses[0]
  if strategy and devices == 8:
    stored = np.asarray(state.mdl_vars['lm']['embedding']['w'])
    assert stored.shape == (40, 20)
    assert stored[:37].all() and not stored[37:].any()


def classifier(partitioning, network, mesh=(('data',), (8,)), **learner):
  model = Config(ClassificationModel, num_classes=10, network_tpl=network)
  task = Config(SingleTask, model=model, partitioning=partitioning, mesh_axis_names=mesh[0], ici_mesh_shape=mesh[1])
  task.strategy = [('.*', f'fsdp(axis={mesh[0]!r}, min_size_to_shard_mb=0.0001)')]
  task.train.inputs_split_mapping = {'map_1d': (mesh[0],), 'map_4d': (mesh[0], None, None, None)}
  task.train.learner.set(learning_rate=1e-2, **learner)
  return task


MLP = Config(Mlp, input_dims=16, hidden_dims=(30,))
CASES = {
  'microbatches': (MLP, (('data',), (8,)), {'num_microbatches': 4, 'clip_gradient_single_norm_to_value': 0.01}),
  'two_axes': (MLP, (('replica', 'data'), (2, 3)), {'ema_decay': 0.9, 'report_param_norm': True}),
  'batch_norm': (Config(ConvNet, input_channels=1, channels=(9,)), (('data',), (8,)), {'num_microbatches': 2}),
  'spectral_norm': (MLP.clone(linear_tpl=Config(SpectralNormLinear)), (('replica', 'data'), (2, 3)), {}),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize('case', CASES)
def test_a_classifier_matches_compiler_placement(case):
  network, mesh, learner = CASES[case]
  batches = [class_batch(13, seed) for seed in range(3)]
  first, losses, state = train(classifier('auto', network, mesh, **learner), batches)
  explicit, explicit_losses, explicit_state = train(classifier('shard_map', network, mesh, **learner), batches)
  # Adam divides gradients by their size: what is near zero is told apart by the gradient norm and the losses.
  assert_close(explicit.mean_metrics, first.mean_metrics)
  assert_close(explicit.per_example_out, first.per_example_out)
  np.testing.assert_allclose(explicit_losses, losses, rtol=1e-4)
  assert_close(explicit_state, state, rtol=1e-3, atol=1e-4)


@pytest.mark.slow_cases
@pytest.mark.parametrize('num_microbatches', [1, 2])
def test_a_frozen_variable_that_is_split_stays_frozen(num_microbatches):
  frozen = {'bprop_variable_exclusion': ('network.linear_0.w',), 'num_microbatches': num_microbatches}
  batches = [class_batch(13, seed) for seed in range(2)]
  first, losses, state = train(classifier('auto', MLP, **frozen), batches)
  explicit, explicit_losses, explicit_state = train(classifier('shard_map', MLP, **frozen), batches)
  assert_close(explicit.mean_metrics, first.mean_metrics)
  np.testing.assert_allclose(explicit_losses, losses, rtol=1e-4)
  w = explicit_state.mdl_vars['network']['linear_0']['w']
  assert w.addressable_shards[0].data.size < w.size
  np.testing.assert_array_equal(w, state.mdl_vars['network']['linear_0']['w'])


class PerClass(ClassificationModel):
  """Adds a metric that is an array, with a weight for each of its entries, and one with a single weight."""

  def compute_loss(self, predictions, batch):
    metrics, per_example = super().compute_loss(predictions, batch)
    of_class_BV = jax.nn.one_hot(batch['label'], self.num_classes) * batch['weights'][:, None]
    weight_V = of_class_BV.sum(0)
    sums_V = (of_class_BV * predictions.xent[:, None]).sum(0)
    metrics['loss_of_class'] = (sums_V / jnp.where(weight_V == 0, 1, weight_V), weight_V)
    total = batch['weights'].sum()
    logits_V = (predictions.logits * batch['weights'][:, None]).sum(0) / jnp.where(total == 0, 1, total)
    return {**metrics, 'logits': (logits_V, total)}, per_example


@pytest.mark.slow_cases
@pytest.mark.parametrize('num_microbatches', [1, 2])
def test_metrics_may_be_arrays(num_microbatches):
  def task(partitioning, num_microbatches):
    config = classifier(partitioning, MLP, num_microbatches=num_microbatches)
    config.model = Config(PerClass, num_classes=10, network_tpl=MLP)
    return config

  batches = [class_batch(13)]
  first, _, _ = train(task('auto', 1), batches)
  explicit, _, _ = train(task('shard_map', num_microbatches), batches)
  assert first.mean_metrics['loss_of_class'][0].shape == (10,)
  assert_close(explicit.mean_metrics, first.mean_metrics)


def test_each_device_draws_its_own_dropout():
  network = Config(Mlp, input_dims=16, hidden_dims=(64,), dropout_tpl=Config(Dropout, rate=0.5))
  row = class_batch(1)
  batch = {name: np.repeat(x, 8, 0) for name, x in row.items()}
  out, _, _ = train(classifier('shard_map', network), [batch])
  assert len(set(np.asarray(out.per_example_out['loss']).tolist())) == 8


@pytest.mark.parametrize('optimizer', [optax.lamb, optax.adafactor, optax.noisy_sgd])
def test_an_optimizer_that_needs_whole_tensors_is_refused(optimizer):
  task = classifier('shard_map', MLP, optimizer=Config(optimizer))
  with pytest.raises(
    ConfigError, match=rf'learner.optimizer: {optimizer.__name__} needs whole tensors.*network.linear_0'
  ):
    partitioned(task, class_batch(8)).train_step  # noqa: B018
  task.strategy = None
  assert partitioned(task, class_batch(8)).train_step is not None


def test_an_optimizer_of_global_sums_within_a_chain_is_refused():
  chain = Config(optax.chain, Config(optax.clip_by_global_norm, max_norm=1.0), Config(optax.adam))
  with pytest.raises(ConfigError, match='clip_by_global_norm needs whole tensors'):
    partitioned(classifier('shard_map', MLP, optimizer=chain), class_batch(8)).train_step  # noqa: B018


def test_an_unknown_partitioning_is_refused():
  with pytest.raises(ConfigError, match=r"task.partitioning: expected 'auto' or 'shard_map'.*Did you mean 'shard_map'"):
    classifier('shardmap', MLP).instantiate()


def test_a_batch_without_a_mapping_for_its_rank_is_refused_as_under_compiler_placement():
  task = classifier('shard_map', MLP)
  task.train.inputs_split_mapping = {'map_1d': ('data',)}
  with pytest.raises(ValueError, match='map_4d'):
    partitioned(task, class_batch(8)).train_step.compile()


@pytest.mark.slow
@pytest.mark.parametrize('kind', [{'style': 'gpt2', 'remat': 'dots_saveable'}, {'repeat': False, 'remat': 'full'}])
def test_other_language_models_match_too(kind):
  def task(partitioning):
    sizes = {'vocab_size': 37, 'model_dims': 20, 'num_layers': 2, 'num_heads': 2, 'hidden_dims': 44}
    config = lm_task(partitioning, 4, [('.*', 'fsdp(axis="data", min_size_to_shard_mb=0)')])
    config.model = transformer_lm(**sizes, **kind)
    config.train.learner.num_microbatches = 2
    return config

  batches = [lm_batch(13, seed) for seed in range(2)]
  first, losses, _ = train(task('auto'), batches)
  explicit, explicit_losses, _ = train(task('shard_map'), batches)
  assert_close(explicit.mean_metrics, first.mean_metrics)
  np.testing.assert_allclose(explicit_losses, losses, rtol=1e-5)
