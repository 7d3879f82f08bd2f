"""Learners on meshes: variables, slots and averages after some steps are those of one device, whatever is split."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves, leaves_by_path, path_name
from praxis_lite.common.weighted import weighted_mean
from praxis_lite.models.base import BaseModel
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training import PartitionedTask
from praxis_lite.training.learning import (
  LayerDecay,
  Learner,
  LearnerRule,
  MultiLearner,
  adafactor,
  cautious,
  mars,
  muon,
  shampoo,
  soap,
  sophia,
)
from praxis_lite.training.task import SingleTask

BATCH = {'x': np.linspace(0.5, 1.5, 5, dtype=np.float32)}
# Sizes of which few divide by 2 or 3: (shape, split, stack, split of the stack).
WEIGHTS: dict[str, tuple[Any, ...]] = {
  'emb': ((7, 5), ('mdl', 'data')),
  'query': ((5, 3, 4), ('data', 'mdl', None), (3,), (None,)),
  'out': ((3, 4, 5), ('mdl', None, 'data'), (3,), (None,)),
  'ff': ((5, 11), ('data', 'mdl'), (3,), (None,)),
  'experts': ((2, 5, 7), ('data', None, 'mdl'), (3,), (None,)),
  'scale': ((5,), ('mdl',), (3,), (None,)),
  'deep': ((7, 5), (None, 'mdl'), (2, 3), (None, 'data')),
  'head': ((5, 7), ('data', 'mdl')),
}
# As layers declare them.
MATRICES: dict[str, dict[str, Any]] = {
  'query': {'fan_in_axes': (0,), 'fan_out_axes': (1, 2)},
  'out': {'fan_in_axes': (0, 1), 'fan_out_axes': (2,)},
  'experts': {'fan_in_axes': (1,), 'fan_out_axes': (2,)},
}


class Weights(BaseModel):
  """A loss whose gradient in each weight is one random matrix plus a half of the weight, times the mean of x."""

  def setup(self) -> None:
    for name, (shape, split, *stack) in WEIGHTS.items():
      repeat, along = stack or ((), ())
      self.create_variable(
        name,
        WeightHParams(
          shape,
          tensor_split_dims_mapping=split,
          repeat_prefix=repeat,
          repeat_prefix_split_dims_mapping=along,
          **MATRICES.get(name, {}),
        ),
      )

  def compute_predictions(self, batch: Any) -> Any:
    return batch['x']

  def compute_loss(self, predictions: Any, batch: Any) -> Any:
    rng, total = np.random.default_rng(1), jnp.zeros(())
    for name in WEIGHTS:
      w = getattr(self.theta, name)
      total += jnp.sum(w * rng.standard_normal(w.shape).astype(np.float32) + w * w / 4)
    return {'loss': weighted_mean(predictions * total, batch['weights'])}, {}


def partitioned(learner: Config, shape: tuple[int, ...], how: str = 'auto') -> PartitionedTask:
  names = ('replica', 'data', 'mdl')[-len(shape) :]
  task = Config(SingleTask, model=Config(Weights), mesh_axis_names=names, ici_mesh_shape=shape, partitioning=how)
  task.train.learner = learner
  return PartitionedTask(task.instantiate(), BATCH)


def after_steps(task: PartitionedTask, start: Any, steps: int = 2) -> dict[str, np.ndarray]:
  state = task.pad(start)
  for _ in range(steps):
    state = task.train_step(state, jax.random.key(1), BATCH).state
  return {path_name(path): np.asarray(x) for path, x in leaves_by_path(task.unpad(state)).items()}


def assert_meshes_agree(learner: Config, shape: tuple[int, ...], how: str = 'auto') -> None:
  one = partitioned(learner, (1, 1))
  start = one.unpad(one.init_state(jax.random.key(0)))
  expected = after_steps(one, start)
  old = {path_name(('mdl_vars', *path)): x for path, x in leaves(start.mdl_vars).items()}
  changed = [name for name, x in old.items() if not np.array_equal(x, expected[name])]
  assert len(changed) == len(WEIGHTS), 'the learner changed too little to be compared'
  task = partitioned(learner, shape, how)
  assert_slots_are_split(task)
  found = after_steps(task, start)
  assert found.keys() == expected.keys()
  for name, x in expected.items():
    np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-5 * np.max(np.abs(x), initial=1e-3), err_msg=name)


every_mesh = pytest.mark.parametrize('shape', [(3, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str)


def assert_slots_are_split(task: PartitionedTask) -> None:
  """Each slot with the shape of its variable is split like it."""
  specs, shapes = leaves(task.layout.specs.mdl_vars), leaves(task.unpadded_state_shapes.mdl_vars)
  of_slots = leaves_by_path(task.layout.specs.opt_states)
  found = set()
  for path, x in leaves_by_path(task.unpadded_state_shapes.opt_states).items():
    owner = path[-1:]
    if owner in specs and x.shape == shapes[owner].shape:
      assert of_slots[path] == specs[owner], path
      found.add(owner)
  assert found, 'no slot was checked'


STACKS = ('query', 'out', 'ff', 'experts', 'scale')
MULTI = Config(
  MultiLearner,
  clip_gradient_norm_to_value=3.0,
  rules=(
    Config(
      LearnerRule,
      name='stacks',
      regex=STACKS,
      learner=Config(Learner, optimizer=Config(optax.lamb), learning_rate=0.1, ema_decay=0.9),
      layer_decay=Config(LayerDecay, factor=0.5, layers='|'.join(STACKS)),
      update_factor=0.5,
    ),
    Config(
      LearnerRule,
      name='late',
      regex='head',
      learner=Config(Learner, optimizer=Config(optax.adamw), learning_rate=0.1),
      train_from_step=1,
    ),
    Config(
      LearnerRule,
      name='rest',
      gradient_factor=2.0,
      learner=Config(
        Learner, optimizer=Config(optax.sgd, momentum=0.9), learning_rate=0.1, clip_gradient_norm_to_value=1.0
      ),
    ),
  ),
)


@every_mesh
def test_several_optimizers_on_meshes_are_those_of_one_device(shape: tuple[int, ...]) -> None:
  assert_meshes_agree(MULTI, shape)


@every_mesh
def test_so_they_are_if_each_device_updates_its_parts(shape: tuple[int, ...]) -> None:
  learner = MULTI.clone()
  with pytest.raises(ConfigError, match=r'learner\.rules\[0\]\.learner\.optimizer: lamb needs whole tensors'):
    partitioned(learner, shape, 'shard_map').train_step  # noqa: B018
  learner.rules[0].learner.optimizer = Config(optax.adamw)
  assert_meshes_agree(learner, shape, 'shard_map')


@pytest.mark.slow
def test_soap_of_one_rule_on_a_mesh_is_that_of_one_device() -> None:
  learner = Config(Learner, optimizer=Config(soap, weight_decay=0.1, eps=0.1), learning_rate=0.05)
  rules = (Config(LearnerRule, name='stacks', regex=STACKS, learner=learner), Config(LearnerRule, name='rest'))
  assert_meshes_agree(Config(MultiLearner, rules=rules), (3, 2))


ADAFACTOR = Config(optax.adafactor, min_dim_size_to_factor=3, momentum=0.9, multiply_by_parameter_scale=False)
OPTIMIZERS = {
  'muon_by_owner': Config(muon, weight_decay=0.1, placement='owner'),
  'muon_auto': Config(muon, nesterov=False, consistent_rms=0.2),
  'muon_split': Config(muon, placement='split'),
  'muon': Config(optax.contrib.muon, weight_decay=0.1),
  # The gradients of both steps have nearly the same eigenvectors. Without eps, what is zero but for rounding would be
  # divided by its size.
  'soap': Config(soap, weight_decay=0.1, eps=0.1),
  # Their statistics have full rank, so a refresh does not multiply rounding errors.
  'soap_of_small_sides': Config(soap, largest_side=5, refresh_every=1, placement='owner'),
  'shampoo': Config(shampoo, weight_decay=0.1, refresh_every=2),
  'shampoo_split': Config(shampoo, graft='none', ridge=0.1, placement='split'),
  'adafactor': ADAFACTOR,
  'adafactor_of_praxis': Config(adafactor, min_dim_size_to_factor=3, beta1=0.9, weight_decay=0.1),
  'lion': Config(optax.lion),
  'lamb': Config(optax.lamb, weight_decay=0.1),
  'lars': Config(optax.lars, weight_decay=0.1, momentum=0.9),
  'prodigy': Config(optax.contrib.prodigy, estim_lr0=0.1),
  'cautious': Config(cautious, Config(optax.adam)),
  'mars': Config(mars, Config(optax.adamw, b1=0.95, b2=0.99)),
  'sophia': Config(sophia, batch_weight=4.0, refresh_every=2),
  'schedule_free': Config(optax.contrib.schedule_free_adamw),
}


@pytest.mark.slow
@every_mesh
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_every_optimizer_on_meshes_is_that_of_one_device(name: str, shape: tuple[int, ...]) -> None:
  assert_meshes_agree(Config(Learner, optimizer=OPTIMIZERS[name], learning_rate=0.05), shape)


@every_mesh
@pytest.mark.parametrize(
  ('optimizer', 'per_layer'),
  [
    pytest.param(Config(muon, placement='owner'), None, marks=pytest.mark.slow),
    (Config(muon), True),
    pytest.param(Config(shampoo, ridge=0.01), None, marks=pytest.mark.slow),
    pytest.param(Config(soap, eps=0.1), None, marks=pytest.mark.slow),
  ],
)
def test_owners_also_gather_matrices_if_each_device_updates_its_parts(
  optimizer: Config, per_layer: bool | None, shape: tuple[int, ...]
) -> None:
  optimizer = optimizer.clone().set(weight_decay=0.1)
  learner = Config(Learner, optimizer=optimizer, learning_rate=0.05, per_layer_statistics=per_layer)
  assert_meshes_agree(learner, shape, 'shard_map')


WITH_STATE = Config(
  Learner,
  optimizer=Config(optax.adamw),
  learning_rate=0.05,
  independent_weight_decay=0.1,
  clip_gradient_z_score=2.0,
  power_averages=(0.05, 0.2),
)


@pytest.mark.slow
@every_mesh
def test_clipping_by_units_and_by_past_norms_and_averages_on_meshes_are_those_of_one_device(
  shape: tuple[int, ...],
) -> None:
  assert_meshes_agree(WITH_STATE.clone(clip_gradient_unit_ratio=0.1), shape)
  with pytest.raises(ConfigError, match=r'clip_gradient_unit_ratio: clipping by units needs whole tensors'):
    partitioned(WITH_STATE.clone(clip_gradient_unit_ratio=0.1), (3, 2), 'shard_map').train_step  # noqa: B018


@pytest.mark.slow
@every_mesh
def test_so_they_are_in_rules_and_if_each_device_updates_its_parts(shape: tuple[int, ...]) -> None:
  rules = (Config(LearnerRule, name='a', regex=STACKS, learner=WITH_STATE), Config(LearnerRule, name='b'))
  assert_meshes_agree(Config(MultiLearner, rules=rules), shape, 'shard_map')


@pytest.mark.slow
def test_noise_of_gradients_on_meshes_is_that_of_one_device() -> None:
  """Also if rows fill up the mesh."""
  learner = Config(Learner, optimizer=Config(optax.sgd), num_microbatches=5, report_noise_scale=True)
  found = []
  for shape in ((1, 1), (2, 2, 2), (3, 2)):
    task = partitioned(learner, shape)
    out = task.train_step(task.init_state(jax.random.key(0)), jax.random.key(1), BATCH)
    found.append([float(out.mean_metrics[f'grad_noise/{name}'][0]) for name in ('variance', 'signal')])
  np.testing.assert_allclose(found, [found[0]] * 3, rtol=1e-3)
  # A row's gradient is x times one vector, whose squared norm is that of the mean gradient over the squared mean of x.
  x = np.asarray(BATCH['x'])
  assert found[0][0] / found[0][1] == pytest.approx(np.var(x, ddof=1) / (1 - np.var(x, ddof=1) / 5), rel=1e-3)
  with pytest.raises(ConfigError, match='report_noise_scale: under partitioning'):
    partitioned(learner, (3, 2), 'shard_map').train_step  # noqa: B018
  with pytest.raises(ConfigError, match=r'learner\.report_noise_scale: it compares the gradients of microbatches'):
    partitioned(learner.clone(num_microbatches=1), (1, 1))
