"""Rows that fill up microbatches of a pipeline count in nothing: against each microbatch alone, without such rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.common.errors import DataError
from praxis_lite.common.trees import merge
from praxis_lite.layers import BatchNorm, FullSoftmax, MoeFeedForward, Pipelined, Repeat, TransformerBlock
from praxis_lite.layers.base import Layer
from praxis_lite.models import set_pipeline, transformer_lm
from praxis_lite.sharding.weights import WeightHParams, WeightInit

B, T, D, M = 5, 4, 6, 3  # One row of six only fills up.


def x_BTD():
  return np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)


def router(**fields):
  moe = Config(MoeFeedForward, input_dims=D, hidden_dims=5, num_experts=4, num_experts_per_token=1, **fields)
  moe.router_tpl.set(load_balance_loss_weight=1.0, z_loss_weight=1.0, bias_update_rate=0.125, score='sigmoid')
  return moe


@functools.partial(jax.jit, static_argnums=0)
def results(layer, variables, x, args, side):
  """Returns (outputs, auxiliary losses, updates, summaries) of a layer."""
  y, out = layer.apply(variables, x, *args, do_eval=False, **side)
  losses = {name: value * weight for name, (value, weight) in out.aux_losses.items()}
  return y, losses, out.updates, {name: s.value for name, s in out.summaries.items() if s.kind == 'scalar'}


def in_parts(layer_tpl, side=None):
  """Returns the results of one layer, microbatch after microbatch."""
  layer = Config(Repeat, layers_tpl=layer_tpl, num_layers=1).instantiate()
  variables, x, side, losses, summaries = drawn_variables(layer.abstract_init()), x_BTD(), side or {}, [], []
  y = np.zeros_like(x)
  for m in range(M):
    rows = np.arange(m, B, M)
    own = {name: v[rows] if np.ndim(v) and len(v) == B else v for name, v in side.items()}
    y[rows], *of_part = results(layer, variables, x[rows], (), own)
    if any(v is not None and not np.any(v) for name, v in own.items() if name in ('valid', 'weights')):
      continue  # Padding alone counts in nothing.
    losses.append(of_part[0])
    updates = of_part[1]
    variables = merge(variables, updates)
    summaries.append(of_part[2])

  def mean(*values):
    return np.mean(values, axis=0)

  return y, jax.tree.map(mean, *losses), updates, jax.tree.map(mean, *summaries)


def staged(layer_tpl, args=(), side=None, **fields):
  """The same in a pipeline."""
  layer = Config(
    Pipelined, layers_tpl=layer_tpl, num_layers=1, num_stages=1, num_microbatches=M, **fields
  ).instantiate()
  return results(layer, drawn_variables(layer.abstract_init()), x_BTD(), args, side or {})


def assert_equal(got, expected):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, expected)


def some_padding(dtype):
  paddings = np.zeros((B, T), dtype)
  paddings[1, 2:] = paddings[4, :1] = 1
  return paddings


NO_PADDINGS = {
  'nothing is said': {},
  'None': {'paddings': None},
  'none is padding': {'paddings': np.zeros((B, T), bool)},
}
KINDS = {**NO_PADDINGS, 'bool': {'paddings': some_padding(bool)}, 'float': {'paddings': some_padding(np.float32)}}


@pytest.mark.slow_cases
@pytest.mark.parametrize('side', [pytest.param(side, id=name) for name, side in KINDS.items()])
def test_a_router_does_not_count_them(side):
  assert_equal(staged(router(), side=side), in_parts(router(), side))


@pytest.mark.slow_cases
@pytest.mark.parametrize('fields', [{'dispatch': 'capacity'}, {'num_shared_experts': 1, 'gated': False}])
def test_whatever_the_experts_are(fields):
  assert_equal(staged(router(**fields)), in_parts(router(**fields)))


@pytest.mark.slow
def test_a_block_with_experts_does_not_count_them():
  block = Config(TransformerBlock, input_dims=D, hidden_dims=5, num_heads=2, ff_tpl=router())
  segments = np.ones((B, T), np.int32)
  for side in ({}, {'segment_ids': segments}, {'paddings': some_padding(bool), 'segment_ids': segments}):
    assert_equal(staged(block, side=side), in_parts(block, side))


def test_nor_does_a_stage_that_repeats_a_layer_or_is_a_pipeline_itself():
  def of(cls, **fields):
    return Config(cls, layers_tpl=Config(BatchNorm, dims=D), num_layers=1, **fields)

  expected = in_parts(of(Repeat))
  assert_equal(staged(of(Repeat)), expected)
  assert_equal(staged(of(Pipelined, num_stages=1, num_microbatches=1)), expected)


WEIGHTS = np.array([1, 1, 0, 2, 1], np.float32)


@pytest.mark.slow_cases
@pytest.mark.parametrize('weights', [None, WEIGHTS, np.ones((B, T), np.float32)])
def test_batch_statistics_leave_them_out(weights):
  norm = Config(BatchNorm, dims=D)
  expected = in_parts(norm, {'weights': weights})
  assert_equal(staged(norm, side={'weights': weights}), expected)
  assert_equal(staged(norm, args=(weights,)), expected)


class WithSoftmax(Layer):
  def setup(self):
    self.create_child('softmax', Config(FullSoftmax, input_dims=D, num_classes=3, z_loss_weight=1.0))

  def __call__(self, x, ids):
    return x + self.softmax(x, ids).xent[..., None]


def test_the_z_loss_of_a_softmax_leaves_them_out():
  ids = np.random.default_rng(1).integers(0, 3, (B, T))
  assert_equal(staged(Config(WithSoftmax), args=(ids,)), in_parts(Config(WithSoftmax), {'ids': ids}))


class Counts(Layer):
  """A layer of a user, which counts tokens as arguments say."""

  takes_paddings = True
  marks_of_padding = {**Layer.marks_of_padding, 'valid': 0}

  def setup(self):
    self.create_variable('count', WeightHParams((), WeightInit.Constant(0.0)), trainable=False)

  def __call__(self, x, valid=None, more=None, paddings=None, weights=None):
    counted = jnp.ones(x.shape[:2])
    for given in (
      valid,
      weights,
      None if more is None else more['valid'][0],
      None if paddings is None else paddings == 0,
    ):
      counted *= 1.0 if given is None else given.reshape(*given.shape, *(1,) * (2 - given.ndim))
    self.update_var('count', self.theta.count + jnp.sum(counted))
    self.add_aux_loss('mean', jnp.sum(counted * jnp.sum(x, axis=-1)) / jnp.sum(counted))
    return x


@pytest.mark.slow
def test_arguments_that_say_what_is_padding_say_it_of_them():
  valid = np.array([1, 1, 0, 1, 1], np.int32)
  for side in (
    {'paddings': some_padding(np.float32)},
    {'weights': WEIGHTS},
    {'valid': valid},
    {'valid': valid.astype(bool)},
    {'more': {'valid': (valid.astype(np.float32),)}},
  ):
    expected = in_parts(Config(Counts), side) if 'more' not in side else in_parts(Config(Counts), {'valid': valid})
    assert_equal(staged(Config(Counts), side=side), expected)
  assert_equal(staged(Config(Counts), args=(valid,)), in_parts(Config(Counts), {'valid': valid}))
  # And where nothing is said, a layer that takes paddings is told of them.
  assert_equal(staged(Config(Counts)), in_parts(Config(Counts)))


class Asks(Layer):
  def __call__(self, x, scale):
    real = self.real_rows(len(x))
    weights = jnp.ones(len(x)) if real is None else real
    self.add_aux_loss('mean', jnp.sum(weights * jnp.sum(x, axis=(1, 2))) / jnp.sum(weights))
    return x / scale


def test_a_layer_may_ask_which_rows_are_real_and_never_sees_what_no_row_of_the_batch_has():
  scale = np.full((B, 1, 1), 2.0, np.float32)
  assert_equal(staged(Config(Asks), args=(scale,)), in_parts(Config(Asks), {'scale': scale}))


class Merges(Layer):
  def setup(self):
    self.create_child('norm', Config(BatchNorm, dims=D))

  def __call__(self, x):
    return self.norm(x.reshape(-1, D)).reshape(x.shape)


def test_rows_that_a_layer_has_merged_are_not_guessed():
  with pytest.raises(DataError, match=r'layers.norm: the arrays have 8 rows, and the microbatch .* has 2, .*divides'):
    staged(Config(Merges))
  layer = Config(Pipelined, layers_tpl=Config(Merges), num_layers=1, num_stages=1, num_microbatches=5).instantiate()
  layer.apply(drawn_variables(layer.abstract_init()), x_BTD(), do_eval=False)  # No row fills anything up.


def language_model(**fields):
  experts = Config(MoeFeedForward, num_experts=4, num_experts_per_token=1)
  experts.router_tpl.set(load_balance_loss_weight=1.0, z_loss_weight=1.0, bias_update_rate=0.125)
  plain = transformer_lm(
    vocab_size=17, model_dims=8, num_layers=2, num_heads=2, hidden_dims=8, experts=experts, **fields
  )
  return set_pipeline(plain, num_stages=2, num_microbatches=3)


def batch_of(ids, added):
  """A batch with rows of no weight after its own."""
  batch = {'ids': ids, 'labels': np.roll(ids, -1, 1), 'weights': np.ones(ids.shape, np.float32)}
  return {name: np.pad(x, ((0, added), (0, 0))) for name, x in batch.items()}


@pytest.mark.slow_cases
@pytest.mark.parametrize('rows', [4, 5])
def test_the_losses_of_a_language_model_are_those_with_more_rows_of_no_weight(rows):
  model = language_model().instantiate()
  variables = drawn_variables(model.abstract_init())
  ids = np.random.default_rng(0).integers(0, 17, (rows, 6)).astype(np.int32)

  @jax.jit
  def losses(batch):
    _, out = model.apply(variables, batch, do_eval=False, key=jax.random.key(1))
    return out.aux_losses, out.updates

  assert_equal(losses(batch_of(ids, 0)), losses(batch_of(ids, 6 - rows)))


@pytest.mark.slow
@pytest.mark.parametrize('rows, added', [(1, 2), (2, 5)])
def test_microbatches_of_rows_that_fill_up_a_batch_count_in_nothing(rows, added):
  model = language_model(dropout=0.25).instantiate()
  variables = drawn_variables(model.abstract_init())
  ids = np.random.default_rng(0).integers(0, 17, (rows, 6)).astype(np.int32)

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def found(variables, batch):
    (metrics, _), out = model.apply(variables, batch, do_eval=False, key=jax.random.key(1))
    total = metrics['loss'][0] + sum(value * weight for value, weight in out.aux_losses.values())
    return total, (out.aux_losses, out.updates, {name: s.value for name, s in out.summaries.items()})

  assert_equal(found(variables, batch_of(ids, added)), found(variables, batch_of(ids, 0)))


class Averages(Layer):
  """A layer of a user, which is told what is padding, and not of microbatches of nothing else."""

  takes_paddings = True

  def setup(self):
    self.create_variable('count', WeightHParams((), WeightInit.Constant(0.0)), trainable=False)

  def __call__(self, x, paddings=None, weights=None, segment_ids=None):
    self.update_var('count', self.theta.count + 1)
    self.add_aux_loss('fixed', jnp.float32(3.0), weight=0.5)
    self.add_summary('mean', jnp.mean(x[0]))
    self.add_summary('last', x[0], kind='histogram')
    return 2 * x


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'name, mark, stages, rounds',
  [('paddings', 1, 1, 1), ('paddings', True, 2, 1), ('weights', 0, 3, 1), ('segment_ids', 0, 2, 2)],
)
def test_whatever_says_so_and_whatever_the_layer_does(name, mark, stages, rounds):
  layer = Config(
    Pipelined, layers_tpl=Config(Averages), num_layers=4, num_stages=stages, num_microbatches=M, circular_repeat=rounds
  ).instantiate()
  x, variables = x_BTD()[:2], drawn_variables(layer.abstract_init())

  @jax.jit
  def run(x, said):
    y, out = layer.apply(variables, x, do_eval=False, **{name: said})
    return y[:2], out.aux_losses, out.updates, {name: s.value for name, s in out.summaries.items()}

  def found(added):
    said = np.full((2 + added, T), mark)
    said[:2] = not mark
    return run(np.pad(x, ((0, added), (0, 0), (0, 0))), said)

  assert_equal(found(4), found(0))
  # A batch of padding alone is computed as any other.
  said = np.full((B, T), mark)
  _, aux_losses, *_ = run(x_BTD(), said)
  assert_equal(aux_losses, {'layers/fixed': (3.0, 2.0)})


def test_a_pipeline_in_a_pipeline_leaves_out_microbatches_of_rows_that_fill_up_the_outer_one():
  inner = Config(Pipelined, layers_tpl=Config(Averages), num_layers=1, num_stages=1, num_microbatches=2)
  outer = Config(Pipelined, layers_tpl=inner, num_layers=1, num_stages=1, num_microbatches=M).instantiate()
  variables = drawn_variables(outer.abstract_init())
  _, out = outer.apply(variables, x_BTD(), do_eval=False)
  # Microbatches of 2, 2 and 1 rows, of which each inner one has one.
  count = variables['layers']['layers']['count']
  np.testing.assert_array_equal(out.updates['layers']['layers']['count'] - count, [[5.0]])
