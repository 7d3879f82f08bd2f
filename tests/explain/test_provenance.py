"""Every answer to "why is it split like that" comes from the declaration that decided, not from a guess."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core
from jax.sharding import PartitionSpec as P

from praxis_lite.common.config import Config, template
from praxis_lite.common.config.json import to_json
from praxis_lite.common.config.text import to_text
from praxis_lite.common.trees import leaves_by_path
from praxis_lite.instruments.explain import check, explain, explain_task, format_report
from praxis_lite.instruments.explain.report import task_and_inputs, trace_task
from praxis_lite.layers import Linear, Mlp
from praxis_lite.layers.base import Layer, SplitMapping
from praxis_lite.models import ClassificationModel
from praxis_lite.partitioning import partition_spmd_model
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.sharding.weights import DeclaredSplit, WeightHParams, to_declared_split
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure
from praxis_lite.training.state import state_layout
from praxis_lite.training.task import SingleTask

registry.load_all()
ANY = P.UNCONSTRAINED
SHAPES = {
  'image': jax.ShapeDtypeStruct((16, 8), jnp.float32),
  'label': jax.ShapeDtypeStruct((16,), jnp.int32),
  'weights': jax.ShapeDtypeStruct((16,), jnp.float32),
}


def classifier(network: Config | None = None, **fields: Any) -> Config:
  """A classifier of vectors of 8, 4 classes, on a mesh data 2 x mdl 4."""
  network = network or Config(Mlp, input_dims=8, hidden_dims=(16,))
  model = Config(ClassificationModel, num_classes=4, network_tpl=network)
  return Config(SingleTask, model=model, mesh_axis_names=('data', 'mdl'), **{'ici_mesh_shape': (2, 4), **fields})


# ---------------------------------------------------------------- declarations


def test_a_declared_split_is_the_tuple_it_equals() -> None:
  plain = ('data', None, ('replica', 'mdl'))
  split = DeclaredSplit.make(plain, 'lm.wt')
  assert split == plain and hash(split) == hash(plain) and repr(split) == repr(plain)
  for same in (copy.deepcopy(split), copy.copy(split), pickle.loads(pickle.dumps(split))):
    assert same == plain and same.sources == ('lm.wt',) * 3
  assert split[0] == 'data' and split[-1] == ('replica', 'mdl')
  for part, expected in (
    (split[::-1], plain[::-1]),
    (split[-1:], plain[-1:]),
    (split.pick(2, None, 0), (('replica', 'mdl'), None, 'data')),
  ):
    assert part == expected and part.sources == ('lm.wt',) * len(expected)
  assert to_declared_split(split, 'lm.ff.wt') is split
  assert to_declared_split(None, 'lm.wt') is None and to_declared_split('data', 'lm.wt') == 'data'


def test_building_a_task_leaves_its_config_as_it_is() -> None:
  config = classifier()
  mapping = ('data', 'mdl')
  config.model.network_tpl.linear_tpl.weight_split_dims_mapping.wt = mapping
  text, encoded = to_text(config), to_json(config)
  layer = config.instantiate().model.network
  assert type(config.model.network_tpl.linear_tpl.weight_split_dims_mapping.wt) is tuple
  assert type(layer.linear_tpl.weight_split_dims_mapping.wt) is tuple
  assert (to_text(config), to_json(config)) == (text, encoded)
  assert config == config.clone() and layer.linear_tpl == config.model.network_tpl.linear_tpl


class TwoSplit(SplitMapping):
  """`first` and `second`: [D, D]."""

  first: Any = None
  second: Any = None


class Two(Layer):
  """Two weights with fields of their own; a linear layer split like the second, and one split by itself."""

  output_dims: int = 8
  linear_tpl: Config = template(Linear, use_bias=True)
  own_tpl: Config = template(Linear)
  weight_split_dims_mapping: Config = template(TwoSplit)

  def setup(self) -> None:
    first, second = self.weight_split_dims_mapping.first, self.weight_split_dims_mapping.second
    self.create_variable('a', WeightHParams((8, 8), tensor_split_dims_mapping=first))
    self.create_variable('b', WeightHParams((8, 8), tensor_split_dims_mapping=second))
    self.create_variable('c', WeightHParams((8,), tensor_split_dims_mapping=('mdl',)))
    linear = self.linear_tpl.clone(input_dims=8, output_dims=8)
    if second is not None:
      linear.weight_split_dims_mapping.wt = second[::-1]
    self.create_child('linear', linear)
    self.create_child('own', self.own_tpl.clone(input_dims=8, output_dims=8))

  def __call__(self, x_BD: jax.Array, weights_B: jax.Array) -> jax.Array:
    return self.own(self.linear(x_BD @ (self.theta.a + self.theta.b) + self.theta.c))


def test_of_equal_mappings_each_weight_names_the_field_that_it_is_declared_by() -> None:
  network = Config(Two)
  network.weight_split_dims_mapping.set(first=('data', 'mdl'), second=('data', 'mdl'))
  network.own_tpl.weight_split_dims_mapping.wt = ('data', 'mdl')
  report = explain_task(classifier(network))
  field = 'network.weight_split_dims_mapping.'
  assert report.find('network.a').why == f'{field}first'
  assert report.find('network.b').why == f'{field}second'
  assert report.find('network.linear.w').why == f'{field}second'
  assert report.find('network.linear.w').spec == P('mdl', 'data')
  assert report.find('network.linear.b').why == f'{field}second'
  assert report.find('network.own.w').why == 'network.own.weight_split_dims_mapping.wt'
  assert report.find('network.c').why == 'network.c.tensor_split_dims_mapping'


def test_what_is_not_set_names_the_field_to_set() -> None:
  report = explain_task(classifier(Config(Two)))
  assert report.find('network.b').why == 'network.weight_split_dims_mapping.first is not set'
  assert report.find('network.linear.w').why == 'network.linear.weight_split_dims_mapping.wt is not set'


def test_a_mapping_of_the_wrong_rank_names_weight_and_field() -> None:
  network = Config(Two)
  network.weight_split_dims_mapping.second = ('data', 'mdl', None)
  (problem,) = check(classifier(network), SHAPES)
  assert (problem.kind, problem.path) == ('wrong rank', 'network.b')
  assert 'give one entry per dimension in task.model.network.weight_split_dims_mapping.second' in problem.message


# ---------------------------------------------------------------- the train step


def constraints_in(jaxpr: Any) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...]]]:
  """(shape, spec of full rank) of each sharding constraint in a program and the programs inside it."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'sharding_constraint':
      shape, spec = eqn.outvars[0].aval.shape, tuple(eqn.params['sharding'].spec)
      yield shape, (*spec, *(None,) * (len(shape) - len(spec)))
    for value in eqn.params.values():
      inner = value.jaxpr if isinstance(value, core.ClosedJaxpr) else value
      if isinstance(inner, core.Jaxpr):
        yield from constraints_in(inner)


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', ['lm_sizes.Llama8B', 'lm.SyntheticLmTiny', 'digits.DigitsMlpSharded'])
def test_what_is_said_of_activations_is_what_the_train_step_constrains(name: str) -> None:
  task, inputs_struct = task_and_inputs(registry.get(name))
  assert inputs_struct is not None
  sizes = {**task.mesh_sizes(), 'data': 2, 'mdl': 4}
  step = trace_task(task, state_layout(task, abstract_mesh(sizes)), inputs_struct)
  stated = set(constraints_in(step.jaxpr.jaxpr))
  constrained = [e for e in explain_task(task, inputs_struct, sizes).activations if e.constrained]
  assert constrained
  for e in constrained:
    assert (e.shape, tuple(e.spec)) in stated, e.path


def test_activations_are_those_of_one_microbatch() -> None:
  task = classifier()
  task.model.network_tpl.linear_tpl.activation_split_dims_mapping.out = ('data', 'mdl')
  assert explain(task, 'network.linear_0.out', SHAPES).shape == (16, 16)
  task.train.learner.num_microbatches = 2
  e = explain(task, 'network.linear_0.out', SHAPES)
  assert (e.shape, e.spec) == ((8, 16), P('data', 'mdl'))
  assert explain(task, 'inputs.image', SHAPES).shape == (16, 8)


def test_inside_shard_map_activations_are_one_devices_part() -> None:
  task = classifier(partitioning='shard_map')
  report = explain_task(task, SHAPES)
  e = report.find('network.linear_0.out')
  assert (e.shape, e.per_device, e.constrained) == ((2, 16), True, False)
  assert e.bytes_per_device == 2 * 16 * 4
  assert 'own part' in format_report(report)
  assert check(task, SHAPES) == []


def test_what_the_train_step_refuses_is_an_error_of_check() -> None:
  task = classifier(partitioning='shard_map')
  task.model.network_tpl.linear_tpl.weight_split_dims_mapping.wt = ('data', 'mdl')
  task.train.learner.optimizer = Config(optax.adafactor)
  (problem,) = check(task, SHAPES)
  assert problem.path == 'task.train.learner.optimizer' and 'needs whole tensors' in problem.message


def test_products_of_padded_weights_are_followed() -> None:
  network = Config(Mlp, input_dims=8, hidden_dims=(18, 18))
  network.linear_tpl.weight_split_dims_mapping.wt = (None, 'mdl')
  network.linear_tpl.activation_split_dims_mapping.out = ('data', 'mdl')
  problems = [p for p in check(classifier(network), SHAPES) if p.kind == 'mismatch']
  assert [p.path for p in problems] == ['network.linear_1.w']


def test_a_product_in_a_repeated_layer_is_checked_once() -> None:
  config = configure(registry.get('lm_sizes.Llama8B'))
  feed_forward = config.task.model.lm_tpl.transformer_tpl.layers_tpl.ff_tpl
  feed_forward.weight_split_dims_mapping.down = ('data', 'mdl')
  (problem,) = check(config)
  assert (problem.kind, problem.path) == ('mismatch', 'lm.transformer.layers.ff.down.w')
  assert 'lm.transformer.layers.ff.weight_split_dims_mapping.down' in problem.remedy


def test_an_unconstrained_dimension_is_shown_as_the_compilers() -> None:
  task = classifier(logical_axis_rules=(('batch', 'data'), ('mlp', ANY)))
  task.model.network_tpl.linear_tpl.activation_split_dims_mapping.out = ('batch', 'mlp')
  e = explain(task, 'network.linear_0.out', SHAPES)
  assert (e.spec, e.constrained, e.at_most, e.mesh_axes) == (P('data', ANY), True, True, ('data',))
  assert e.remarks == ('left to the compiler: dimension 1',)
  assert 'spec (data, ?)' in str(e) and 'at most 512 B on each device' in str(e)


# ---------------------------------------------------------------- strategies


def test_logical_partitioning_in_the_strategy_of_a_task_acts_in_training() -> None:
  rules = (('embed', None), ('mlp', 'mdl'))
  network = Config(Mlp, input_dims=8, hidden_dims=(16,))
  network.linear_tpl.weight_split_dims_mapping.wt = ('embed', 'mlp')
  plain = classifier(network, logical_axis_rules=rules)
  task = plain.clone(strategy=[('.*', 'logical_partitioning | fsdp("data", 0)')])
  e = explain(task, 'network.linear_0.w')
  assert (explain(plain, 'network.linear_0.w').spec, e.spec) == (P(None, 'mdl'), P('data', 'mdl'))
  assert e.sources[0] == 'strategy \'.*\': fsdp("data", 0)'
  field = 'network.linear_0.weight_split_dims_mapping.wt'
  assert e.sources[1] == f"strategy '.*': logical_partitioning, rule ('mlp', 'mdl'), for 'mlp' in {field}"
  batch = {
    'image': np.linspace(0, 1, 128, dtype=np.float32).reshape(16, 8),
    'label': np.arange(16, dtype=np.int32) % 4,
    'weights': np.ones(16, np.float32),
  }
  losses = []
  for config in (plain, task):
    model = partition_spmd_model(config, jax.random.key(0), SHAPES)
    losses.append(model.train_step(model.partitioned_train_state, jax.random.key(1), batch).weighted_loss)
  assert model.train_state_partition_specs.mdl_vars['network']['linear_0']['w'] == P('data', 'mdl')
  slots = leaves_by_path(model.train_state_partition_specs.opt_states)
  assert sum(path[-3:] == ('network', 'linear_0', 'w') and s == P('data', 'mdl') for path, s in slots.items()) == 2
  np.testing.assert_allclose(*losses, rtol=1e-5)
