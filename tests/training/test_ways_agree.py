"""One language model, one seed, sharded in every way there is: equal specs train bit for bit alike, others to 1e-4."""

import functools

import jax
import numpy as np
import optax
import pytest
from drawn_state import drawn_state

from praxis_lite.common.config import Config
from praxis_lite.inputs import SyntheticLMInput
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.partitioning import MoePjitPartitioner, PjitPartitioner
from praxis_lite.training.learning import Learner
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

STEPS, FEW = 50, 10
AXES = ('data', 'model')
RULES = (('batch', 'data'), ('embed', 'data'), ('heads', 'model'))


def task(model, mesh, **fields):
  config = Config(SingleTask, model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh, **fields)
  config.train.inputs_split_mapping = {'map_1d': ('data',), 'map_2d': ('data', None)}
  config.train.learner = Config(
    Learner, optimizer=Config(optax.adamw), learning_rate=1e-2, clip_gradient_norm_to_value=1.0
  )
  return config


def model(**splits):
  """Vocabulary 37, D 18, 3 heads and F 45: nothing divides."""
  config = transformer_lm(vocab_size=37, model_dims=18, num_layers=2, num_heads=3, dims_per_head=6, hidden_dims=45)
  config.packed = False
  return set_sharding(config, **splits) if splits else config


def by_mapping(mesh):
  return task(model(batch_axes='data', data_axis='data', mdl_axis='model'), mesh), {}


def by_rules(mesh):
  return task(model(batch_axes='batch', data_axis='embed', mdl_axis='heads'), mesh, logical_axis_rules=RULES), {}


def by_strategy(mesh):
  ops = 'fsdp(axis="data", min_size_to_shard_mb=0, allow_padding=True)'
  return task(model(), mesh, strategy=[('.*', ops)]), {}


def by_t5x(mesh):
  config = task(model(batch_axes='batch', data_axis='embed', mdl_axis='heads'), None)
  partitioner = PjitPartitioner(mesh[1], logical_axis_rules=RULES, devices=jax.devices()[: mesh[0] * mesh[1]])
  return config.set(mesh_axis_names=partitioner.mesh.axis_names, logical_axis_rules=RULES), {'partitioner': partitioner}


def by_moe(mesh):
  config = task(model(batch_axes='batch', data_axis='embed', mdl_axis='heads'), None)
  devices = jax.devices()[: mesh[0] * mesh[1]]
  partitioner = MoePjitPartitioner(0, mesh[1], logical_axis_rules=RULES, devices=devices)
  return config.set(mesh_axis_names=partitioner.mesh.axis_names, logical_axis_rules=RULES), {'partitioner': partitioner}


def explicitly(mesh, data_axis):
  splits = {'batch_axes': 'data', 'data_axis': data_axis, 'mdl_axis': None}
  return task(model(**splits), (mesh[0] * mesh[1], 1), partitioning='shard_map'), {}


WAYS = {
  'mapping': by_mapping,
  'rules': by_rules,
  'strategy': by_strategy,
  't5x': by_t5x,
  'moe': by_moe,
  'shard_map_data': functools.partial(explicitly, data_axis=None),
  'shard_map_fsdp': functools.partial(explicitly, data_axis='data'),
}


def partitioned(config, arguments):
  """Returns (the task, its data)."""
  data = Config(SyntheticLMInput, seq_len=12, vocab_size=37, batch_size=10, num_synthetic_examples=40, is_training=True)
  source = data.instantiate()
  return PartitionedTask(config.instantiate(), source.batch_struct(), **arguments), source


def losses(config, arguments, steps=STEPS):
  """Returns (losses, the variables after a few steps)."""
  trained, source = partitioned(config, arguments)
  state, key, curve = drawn_state(trained), jax.random.key(1), []
  for step in range(steps):
    out = trained.train_step(state, key, source.get_next())
    state = out.state
    curve.append(float(out.weighted_loss))
    if step + 1 == FEW:
      variables = jax.tree.map(np.array, state.mdl_vars)
  return np.array(curve), variables


# Their specs and their programs are those of 'mapping', bit for bit, so that a few steps tell.
SAME_AS_MAPPING = ('rules', 't5x', 'moe')


@functools.cache
def curve_of(way, mesh, steps=STEPS):
  with jax.default_matmul_precision('highest'):
    return losses(*WAYS[way](mesh), FEW if way in SAME_AS_MAPPING else steps)


@pytest.fixture(scope='module')
def one_device():
  curve, _ = losses(task(model(), (1, 1)), {})
  assert curve[-1] < curve[0] / 2
  return curve


@pytest.mark.slow
# A mesh that divides nothing is tried with each kind of program once: equal specs make equal programs.
@pytest.mark.parametrize(
  'way, mesh', [*((way, (4, 2)) for way in WAYS), ('mapping', (5, 1)), ('shard_map_fsdp', (5, 1))]
)
def test_trains_like_one_device(way, mesh, one_device):
  curve = curve_of(way, mesh)[0]
  np.testing.assert_allclose(curve, one_device[: len(curve)], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('way', SAME_AS_MAPPING)
def test_equal_specs_train_bit_for_bit_alike(way):
  curve, variables = curve_of(way, (4, 2))
  expected_curve, expected = curve_of('mapping', (4, 2), FEW)
  np.testing.assert_array_equal(curve, expected_curve)
  jax.tree.map(np.testing.assert_array_equal, variables, expected)


def test_the_specs_are_equal_where_bits_are_compared():
  tasks = (partitioned(*WAYS[way]((4, 2)))[0] for way in ('mapping', *SAME_AS_MAPPING))
  specs = [task.state_specs.mdl_vars for task in tasks]
  assert all(s == specs[0] for s in specs)
