"""check: it finds each problem that is planted, and says nothing that is not so."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.common.config import Config
from praxis_lite.instruments.explain import (
  Problem,
  Severity,
  WarningLimits,
  check,
  explain_task,
  format_problems,
  format_report,
  has_errors,
)
from praxis_lite.layers import Mlp
from praxis_lite.models import ClassificationModel
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure
from praxis_lite.training.state import state_layout
from praxis_lite.training.task import SingleTask

BATCH = {
  'image': jax.ShapeDtypeStruct((16, 8), jnp.float32),
  'label': jax.ShapeDtypeStruct((16,), jnp.int32),
  'weights': jax.ShapeDtypeStruct((16,), jnp.float32),
}


def classifier(wt: Any = ('data', 'mdl'), hidden: tuple[int, ...] = (16,), **fields: Any) -> Config:
  """A classifier of 8 classes on a mesh data 2 x mdl 4, without a problem unless the arguments bring one."""
  network = Config(Mlp, input_dims=8, hidden_dims=hidden)
  network.linear_tpl.weight_split_dims_mapping.wt = wt
  model = Config(ClassificationModel, num_classes=8, network_tpl=network)
  mesh = {'mesh_axis_names': ('data', 'mdl'), 'ici_mesh_shape': (2, 4)}
  return Config(SingleTask, model=model, **{**mesh, **fields})


def kinds(problems: list[Problem]) -> list[tuple[str, str]]:
  return [(p.kind, p.path) for p in problems]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
  assert check(classifier(), BATCH) == []
  assert format_problems([]) == 'no problems found'


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
  ('wt', 'kind', 'message'),
  [
    (('data', 'model'), 'unknown axis', "axis 'model' is not a mesh axis; mesh_axis_names = ('data', 'mdl')"),
    (('data', 7), 'unknown axis', 'axis 7 is out of range'),
    (('mdl', 'mdl'), 'axis used twice', "mesh axis 'mdl' occurs twice in ('mdl', 'mdl')"),
    (('mdl',), 'wrong rank', "mapping ('mdl',) has 1 entry, but the tensor has 2 dimensions"),
  ],
)
def test_a_mapping_that_cannot_be_is_an_error_with_its_field(wt: Any, kind: str, message: str) -> None:
  (problem,) = check(classifier(wt), BATCH)
  assert problem.severity is Severity.ERROR
  assert problem.kind == kind
  field = 'task.model.network.linear.weight_split_dims_mapping.wt'
  assert problem.path == (field if len(wt) == 2 else 'network.linear_0.w')  # The rank is that of the weight.
  assert message in problem.message
  assert has_errors([problem])


@pytest.mark.parametrize('fault', ['branch on an array', 'shapes'])
def test_an_error_of_the_model_in_the_step_is_not_called_one_of_shardings(fault: str) -> None:
  def loss(self: ClassificationModel, predictions: Any, batch: Any) -> Any:
    if fault == 'shapes':
      return batch['label'] + jnp.ones((3, 5))
    return 1.0 if batch['weights'].sum() > 0 else 0.0

  config = classifier()
  model = type('Faulty', (ClassificationModel,), {'compute_loss': loss})
  config.model = Config(model, num_classes=8, network_tpl=config.model.network_tpl)
  (problem,) = check(config, BATCH)
  assert problem.kind == 'error in the step' and has_errors([problem])


def test_an_axis_that_the_mesh_does_not_have_is_found_in_rules_strategies_and_inputs() -> None:
  rules = classifier(('embed', 'mlp'), logical_axis_rules=(('embed', 'model'), ('mlp', 'mdl')))
  strategy = classifier(None, strategy=[('.*', 'shard_dim("model", 0)')])
  inputs = classifier()
  inputs.train.inputs_split_mapping = {'map_1d': ('data',), 'map_2d': ('batch', None)}
  for task in (rules, strategy, inputs):
    problems = check(task, BATCH)
    assert problems and {p.kind for p in problems} == {'unknown axis'}
    assert has_errors(problems)


def test_all_variables_that_a_strategy_does_not_fit_are_listed() -> None:
  problems = check(classifier(None, strategy=[('.*', 'shard_dim("mdl", 1)')]), BATCH)
  assert all(name in str(p) for name, p in zip(['network.linear_0.b', 'softmax.b'], problems, strict=True))
  assert all('has 1 dimension, and shard_dim is to split dimension 1' in p.message for p in problems)


def test_an_input_without_a_mapping_of_its_rank_is_an_error() -> None:
  task = classifier()
  task.train.inputs_split_mapping = {'map_2d': ('data', None)}
  (problem,) = check(task, BATCH)
  assert problem.kind == 'missing input mapping'
  assert "no 'map_1d'" in problem.message


def test_an_activation_mapping_of_the_wrong_rank_is_found_by_tracing() -> None:
  task = classifier()
  task.model.network_tpl.linear_tpl.activation_split_dims_mapping.out = ('data', None, 'mdl')
  (problem,) = check(task, BATCH)
  assert (problem.kind, problem.path) == ('wrong rank', 'task.model.network.linear.activation_split_dims_mapping.out')


def test_a_strategy_that_cannot_be_read_is_an_error() -> None:
  (problem,) = check(classifier(None, strategy=[('.*', 'fsdp(axis=data)')]), BATCH)
  assert problem.severity is Severity.ERROR
  assert "'data' is not a literal" in problem.message


# ---------------------------------------------------------------- warnings


def test_an_axis_that_splits_nothing() -> None:
  task = classifier(('data', None))
  task.train.inputs_split_mapping = {'map_1d': ('data',), 'map_2d': ('data', None)}
  assert kinds(check(task, BATCH)) == [('unused axis', 'mesh axis mdl')]
  task.ici_mesh_shape = (8, 1)
  assert check(task, BATCH) == []


def test_a_large_weight_on_every_device() -> None:
  task = classifier(None)
  limits = WarningLimits(replicated_bytes=8 * 16 * 4)
  assert kinds(check(task, BATCH, limits=limits)) == [
    ('replicated weight', 'network.linear_0.w'),
    ('replicated weight', 'softmax.w'),
  ]
  problem = check(task, BATCH, limits=limits)[0]
  assert '512 B are replicated on all 8 devices' in problem.message
  assert "split dimension 1, of size 16, over 'data' or 'mdl'" in problem.remedy
  assert check(task, BATCH, limits=WarningLimits(replicated_bytes=513)) == []


def test_padding_over_the_limit() -> None:
  task = classifier(hidden=(13,))
  limits = WarningLimits(wasted_fraction=0.1, wasted_bytes=1)
  assert kinds(check(task, BATCH, limits=limits)) == [
    ('padding', 'network.linear_0.b'),
    ('padding', 'network.linear_0.w'),
  ]
  assert 'dimension 1 has 13 and is split in 4' in check(task, BATCH, limits=limits)[1].message
  assert check(task, BATCH, limits=WarningLimits(wasted_fraction=0.2, wasted_bytes=1)) == []


@pytest.mark.parametrize(
  ('size', 'mapping', 'microbatches', 'computed', 'over'),
  [
    (9, None, 1, 16, 'all 8 devices'),
    (3, ('data', None), 1, 8, 'all 8 devices'),
    (3, ('data', None), 2, 16, 'all 8 devices and in 2 microbatches'),
    (3, ('data', 'mdl'), 1, 4, '2 devices'),
  ],
)
def test_a_batch_of_which_rows_only_fill_up_the_mesh(
  size: int, mapping: Any, microbatches: int, computed: int, over: str
) -> None:
  """Rows are split over all axes but those that split another dimension of the batch, also over unmapped ones."""
  short = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), BATCH)
  task = classifier()
  task.train.learner.num_microbatches = microbatches
  if mapping:
    task.train.inputs_split_mapping = {'map_1d': ('data',), 'map_2d': mapping}
  *others, problem = check(task, short)
  assert [other.kind for other in others] == (['mismatch'] if mapping == ('data', 'mdl') else [])
  assert (problem.kind, problem.path) == ('padding', 'inputs')
  assert f'{1 - size / computed:.1%} of the rows' in problem.message
  assert problem.message.endswith(
    f'{size} examples are computed as {computed}, because rows enter the step split over {over}'
  )
  assert problem.remedy.endswith(f'a multiple of {8 * microbatches if "all" in over else 2}, such as {computed}')
  row = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in jax.tree.leaves(short))
  title = f'Inputs: {size * row} B, {computed * row} B with padding, '
  assert title in format_report(explain_task(task, short))


def mismatched(wt: Any, out: Any = ('data', 'mdl')) -> list[Problem]:
  """Problems of two hidden layers that are both split by `wt`, with activations split by `out`."""
  task = classifier(wt, hidden=(16, 16))
  task.model.network_tpl.linear_tpl.activation_split_dims_mapping.out = out
  return check(task, BATCH)


def test_a_product_of_operands_that_are_split_crosswise() -> None:
  (problem,) = mismatched((None, 'mdl'))
  assert (problem.kind, problem.path) == ('mismatch', 'network.linear_1.w')
  assert "the sum over 16 with the activation of ClassificationModel.network.linear_0 is split over 'mdl'" in (
    problem.message
  )


def test_a_product_of_operands_whose_sums_are_split_over_different_axes() -> None:
  (problem,) = mismatched(('data', None), out=(None, 'mdl'))
  assert (problem.kind, problem.path) == ('mismatch', 'network.linear_1.w')
  assert "over ('data',) here and over ('mdl',)" in problem.message


@pytest.mark.parametrize(
  ('wt', 'out'),
  [
    (('mdl', None), ('data', 'mdl')),  # The sum is split alike: one reduction.
    (('data', None), ('data', None)),  # Fully sharded: the weight is gathered, as is meant.
    (('mdl', 'data'), ('data', 'mdl')),
    ((('mdl', 'data'), None), ('data', 'mdl')),
    (('mdl', None), ('data', None)),  # The activation is whole along it, and cut where it lies.
  ],
)
def test_products_that_fit_are_not_reported(wt: Any, out: Any) -> None:
  assert [p for p in mismatched(wt, out) if p.kind == 'mismatch'] == []


def test_a_reported_mismatch_does_communicate_and_the_remedy_does_not() -> None:
  """Compiled: crosswise operands need a gather or an exchange beside the sum, matching ones only the sum."""
  mesh = jax.make_mesh((2, 4), ('data', 'mdl'), axis_types=(jax.sharding.AxisType.Auto,) * 2)

  def moved(wt: P) -> set[str]:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
      return jax.lax.with_sharding_constraint(x @ w, jax.NamedSharding(mesh, P('data', None)))

    shardings = (jax.NamedSharding(mesh, P('data', 'mdl')), jax.NamedSharding(mesh, wt))
    arguments = (jnp.ones((16, 16)), jnp.ones((16, 16)))
    text = jax.jit(product, in_shardings=shardings).lower(*arguments).compile().as_text()
    return {op for op in ('all-gather', 'all-to-all', 'all-reduce', 'collective-permute') if f' {op}(' in text}

  assert moved(P('mdl', None)) == {'all-reduce'}
  assert moved(P(None, 'mdl')) & {'all-gather', 'all-to-all', 'collective-permute'}


def test_a_rule_that_an_earlier_one_always_precedes() -> None:
  rules = (('embed', 'data'), ('mlp', 'mdl'), ('embed', ('data', 'mdl')))
  problems = check(classifier(('embed', 'mlp'), logical_axis_rules=rules), BATCH)
  assert kinds(problems) == [('shadowed rule', 'task.logical_axis_rules[2]')]
  assert 'never decides anything: rule 0' in problems[0].message


@pytest.mark.parametrize(
  ('strategy', 'why'),
  [
    ([('.*/kernel', 'replicate'), ('.*', 'shard_dim("data", 0)')], 'no variable has a path that it matches'),
    ([('.*', 'shard_dim("data", 0)'), ('softmax/.*', 'replicate')], 'earlier patterns match all its variables first'),
  ],
)
def test_a_pattern_that_decides_nothing(strategy: Any, why: str) -> None:
  (problem,) = check(classifier(None, strategy=strategy), BATCH)
  assert problem.kind == 'unused pattern'
  assert why in problem.message


def test_a_pattern_whose_variables_have_mappings_of_their_own() -> None:
  strategy = [('network/linear_0/.*', 'replicate'), ('.*', 'shard_dim("data", 0)')]
  (problem,) = check(classifier(strategy=strategy), BATCH)
  assert (problem.kind, problem.path) == ('unused pattern', 'task.strategy[0]')
  assert 'have mappings of their own' in problem.message


def test_a_slot_that_is_split_unlike_its_weight() -> None:
  task = classifier().instantiate()
  layout = state_layout(task, abstract_mesh(task.mesh_sizes()))
  assert check(task, BATCH, layout=layout) == []

  def differ(path: Any, spec: P) -> P:
    return P('mdl', 'data') if 'mu' in str(path) and 'linear_0' in str(path) and len(spec) == 2 else spec

  opt_states = jax.tree_util.tree_map_with_path(differ, layout.specs.opt_states)
  layout = layout._replace(specs=layout.specs.replace(opt_states=opt_states))
  (problem,) = check(task, BATCH, layout=layout)
  assert problem.kind == 'slot unlike its weight'
  assert problem.path.endswith('mu.network.linear_0.w')
  assert "('mdl', 'data'), and its variable network.linear_0.w as ('data', 'mdl')" in problem.message


def flat_momentum(learning_rate: Any) -> optax.GradientTransformation:
  """Keeps its momentum as one flat vector, which belongs to no variable."""

  def init(params: Any) -> Any:
    return {'flat': jnp.concatenate([p.ravel() for p in jax.tree.leaves(params)])}

  return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def test_a_large_slot_of_no_weight() -> None:
  task = classifier()
  task.train.learner.optimizer = Config(flat_momentum)
  problems = check(task, BATCH, limits=WarningLimits(replicated_bytes=1024))
  assert [p.kind for p in problems] == ['replicated slot']
  assert problems[0].path.endswith('flat')


@pytest.mark.slow
def test_stages_that_do_not_divide_their_axis() -> None:
  config = configure(registry.get('pipelines.SyntheticLmCircular'))
  config.task.model.num_layers = 6
  config.task.model.lm_tpl.transformer_tpl.num_stages = 3
  (problem,) = [p for p in check(config) if p.kind == 'uneven stages']
  assert problem.path == 'lm.transformer.num_stages' and '3 stages over 4 devices' in problem.message
  assert problem.remedy == 'make it a multiple of 4, or the mesh axis a divisor of 3'
