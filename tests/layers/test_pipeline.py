"""Pipelined against microbatch after microbatch, layer after layer, in Python; bubbles are NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from side_inputs import gradients
from test_repeat import Residual, Shift

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError, DataError, ShardingError
from praxis_lite.layers import PipelinedTransformer, PipelineSchedule, RepeatedTransformer, TransformerBlock, pipeline
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.call import fold_in_path
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.normalizations import RMSNorm
from praxis_lite.layers.pipeline import Pipelined, describe_pipelines
from praxis_lite.layers.repeat import Repeat

D = 3


@pytest.fixture(autouse=True)
def bubbles_are_nan(monkeypatch):
  monkeypatch.setattr(pipeline, 'BUBBLE', float('nan'))


def pipelined(L, S, M, R=1, sub=None, **fields):
  layers = Config(Residual, dims=D, mesh_axis_names=('data', 'stage'), **(sub or {}))
  return Config(
    Pipelined, layers_tpl=layers, num_layers=L, num_stages=S, num_microbatches=M, circular_repeat=R, **fields
  )


def by_layer(variables, L):
  """Variables of a pipeline as those of `Repeat`: [R, layers / R, ...] -> [layers, ...]."""
  return jax.tree.map(lambda v, one: v.reshape(L, *one.shape), variables, single_variables())


def normal(*shape):
  return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def single(**sub):
  return Config(Residual, dims=D, **sub).instantiate()


def single_variables():
  return {'layers': jax.eval_shape(single().init, jax.random.key(0))}


def sequential(L, M, variables, x, shift, key, **sub):
  """Returns (outputs, auxiliary loss, calls [L], summaries [L])."""
  layer, rows = single(**sub), np.stack([np.arange(m, len(x), M) for m in range(M)])
  drawn = jax.random.fold_in(fold_in_path(key, ()), 0)

  def microbatch(calls, xs):
    x_m, shift_m, m = xs
    key_m = jax.random.fold_in(drawn, m) if M > 1 else drawn

    def one(x, xs):
      w, calls, i = xs
      y, side = layer.apply({'w': w, 'calls': calls}, x, shift_m, key=jax.random.fold_in(key_m, i))
      ((value, weight),) = side.aux_losses.values()
      return y, (side.updates['calls'], side.summaries['Residual/mean'].value, value * weight)

    y, (calls, means, aux) = jax.lax.scan(one, x_m, (variables['layers']['w'], calls, jnp.arange(L)))
    return calls, (y, means, jnp.sum(aux))

  calls, (y, means, aux) = jax.lax.scan(microbatch, variables['layers']['calls'], (x[rows], shift[rows], jnp.arange(M)))
  return jnp.zeros_like(x).at[rows].set(y), jnp.mean(aux), calls, jnp.mean(means, axis=0)


# layers, stages, microbatches, rounds, rows: even; uneven layers; circular, even and not; few microbatches
CASES = [(4, 2, 4, 1, 8), (7, 3, 4, 1, 8), (8, 4, 4, 2, 8), (14, 3, 5, 2, 10), (9, 8, 2, 1, 2)]


@pytest.mark.slow_cases
@pytest.mark.parametrize('L, S, M, R, B', CASES)
def test_a_pipeline_computes_what_its_layers_do_one_after_the_other(L, S, M, R, B):
  sub = {'aux': True, 'noise': 0.1}
  layer = pipelined(L, S, M, R, sub).instantiate()
  variables, key = drawn_variables(layer.abstract_init()), jax.random.key(2)
  x, shift = normal(B, D), normal(B, 1)

  def of_pipeline(variables, x, shift):
    y, side = layer.apply(variables, x, shift, key=key)
    ((value, weight),) = side.aux_losses.values()
    calls = side.updates['layers']['calls'].reshape(L)
    return jnp.sum(y**2) + value * weight, (y, calls, side.summaries['layers/mean'].value)

  def of_sequence(variables, x, shift):
    y, aux, calls, means = sequential(L, M, by_layer(variables, L), x, shift, key, **sub)
    return jnp.sum(y**2) + aux, (y, calls, means)

  got, expected = (
    jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))(variables, x, shift)
    for f in (of_pipeline, of_sequence)
  )
  assert all(np.isfinite(v).all() for v in jax.tree.leaves(got))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), got, expected)


KINDS = Residual, Shift


def patterned(L, S, M, R, num_first, **sub):
  kinds = tuple(Config(kind, dims=D, mesh_axis_names=('data', 'stage'), **sub) for kind in KINDS)
  layer = Config(Pipelined, layers_tpl=kinds, first_tpl=kinds[1:] * num_first, num_layers=L, num_stages=S)
  return layer.set(num_microbatches=M, circular_repeat=R).instantiate()


def by_turn(variables, L, num_first):
  """Returns (name, place in its stack or None, class, variables) for each layer, with its variables in order."""
  found = []
  for i in range(L):
    turn, kind = divmod(i - num_first, 2) if i >= num_first else (0, 1)
    in_stage = num_first <= i < L - (L - num_first) % 2
    name = f'layers_{kind}' if in_stage else f'first_{i}' if i < num_first else f'rest_{kind}'
    of_layer = variables[name]
    if in_stage:
      ranks = {'w': 2, 'shift': 1, 'calls': 0}
      of_layer = {n: v.reshape(-1, *v.shape[v.ndim - ranks[n] :])[turn] for n, v in of_layer.items()}
    found.append((name, turn if in_stage else None, KINDS[kind], of_layer))
  return found


def pattern_by_turn(variables, L, num_first, M, x, shift, key, **sub):
  """Returns (outputs, auxiliary loss, calls by name); layers outside of stages see the whole batch."""
  drawn, aux, calls = jax.random.fold_in(fold_in_path(key, ()), 0), 0.0, {}
  for i, (name, turn, cls, weights) in enumerate(by_turn(variables, L, num_first)):
    layer, outs = Config(cls, dims=D, **sub).instantiate(), []
    for m in [slice(None)] if turn is None else [slice(m, None, M) for m in range(M)]:
      key_m = drawn if turn is None else jax.random.fold_in(drawn, m.start)
      y, side = layer.apply(weights, x[m], shift[m], key=jax.random.fold_in(key_m, i))
      ((value, weight),) = side.aux_losses.values()
      weights = {**weights, **side.updates}
      outs.append((y, value * weight))
      aux += value * weight / (1 if turn is None else M)
    for m, (y, _) in zip(range(M), outs):
      x = y if turn is None else x.at[m::M].set(y)
    calls.setdefault(name, []).append(weights['calls'])
  return x, aux, calls


# layers, stages, microbatches, rounds, rows, first layers: uneven stages and a rest; circular and a first layer
@pytest.mark.slow
@pytest.mark.parametrize('L, S, M, R, B, num_first', [(7, 2, 3, 1, 6, 0), (10, 2, 4, 2, 8, 1)])
def test_a_pattern_in_stages_computes_what_its_layers_do_in_turn(L, S, M, R, B, num_first):
  sub = {'aux': True, 'noise': 0.1}
  layer = patterned(L, S, M, R, num_first, **sub)
  variables, key = drawn_variables(layer.abstract_init()), jax.random.key(2)

  def of_pipeline(variables, x, shift):
    y, side = layer.apply(variables, x, shift, key=key)
    calls = {name: list(jnp.ravel(of['calls'])) for name, of in side.updates.items()}
    return jnp.sum(y**2) + sum(value * weight for value, weight in side.aux_losses.values()), (y, calls)

  def in_turn(variables, x, shift):
    y, aux, calls = pattern_by_turn(variables, L, num_first, M, x, shift, key, **sub)
    return jnp.sum(y**2) + aux, (y, calls)

  got, expected = (
    jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))(variables, normal(B, D), normal(B, 1))
    for f in (of_pipeline, in_turn)
  )
  assert all(np.isfinite(v).all() for v in jax.tree.leaves(got))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), got, expected)


@pytest.mark.slow_cases
@pytest.mark.parametrize('bubble', [0.0, float('nan')])
@pytest.mark.parametrize(
  'L, S, M, R, B', [(4, 2, 3, 1, 6), (5, 2, 3, 1, 7), (5, 3, 1, 1, 2), (10, 3, 4, 2, 7), (4, 2, 1, 1, 1)]
)
def test_bubbles_do_not_reach_the_gradients_of_side_inputs(L, S, M, R, B, bubble, monkeypatch):
  monkeypatch.setattr(pipeline, 'BUBBLE', bubble)
  layer, of_sequence, given = gradients(Repeat, B, num_layers=L)
  variables = drawn_variables(layer.abstract_init())
  stack = (lambda v: v.reshape(R, -1, *v.shape[1:])) if R > 1 else lambda v: v

  def in_rounds(variables):
    return jax.tree.map(stack, variables)

  _, of_pipeline, _ = gradients(
    Pipelined, B, in_rounds, num_layers=L, num_stages=S, num_microbatches=M, circular_repeat=R
  )
  expected, got = (jax.jit(of)(variables, *given) for of in (of_sequence, of_pipeline))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), got, expected)


class Scaled(Layer):
  """Has the weight of a layer that is outside of the stack that it is in."""

  def __call__(self, x, outside):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True) * outside.theta.scale


class WithShared(Layer):
  stack_tpl: Config = REQUIRED

  def setup(self):
    self.create_child('norm', Config(RMSNorm, dims=D))
    self.create_child('stack', self.stack_tpl.clone(layers_tpl=Config(Scaled)))

  def __call__(self, x):
    return self.stack(x, self.norm)


@pytest.mark.slow
def test_bubbles_do_not_reach_the_gradient_of_a_weight_that_is_shared_with_layers_outside():
  def gradient(stack_tpl):
    layer = Config(WithShared, stack_tpl=stack_tpl).instantiate()
    variables = {'norm': {'scale': jnp.array([1.0, 2.0, 0.5])}}
    return jax.grad(lambda v: jnp.sum(jnp.sin(layer.apply(v, normal(4, D))[0])))(variables)

  expected = gradient(Config(Repeat, num_layers=5))
  got = gradient(Config(Pipelined, num_layers=5, num_stages=2, num_microbatches=2))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)


def blocks(cls, **fields):
  block = Config(TransformerBlock, input_dims=8, hidden_dims=16, num_heads=2)
  block.attention_tpl.causal = True
  return Config(cls, layers_tpl=block, num_layers=5, **fields).instantiate()


@pytest.mark.slow
def test_rows_that_fill_up_microbatches_do_not_count_and_side_inputs_follow_their_rows():
  repeated = blocks(RepeatedTransformer)
  staged = blocks(PipelinedTransformer, num_stages=2, num_microbatches=3, remat='dots_saveable', stage_remat='full')
  assert jax.tree.map(lambda w: w.full_shape, staged.abstract_init()) == jax.tree.map(
    lambda w: w.full_shape, repeated.abstract_init()
  )
  variables, x = drawn_variables(repeated.abstract_init()), normal(7, 6, 8)
  segment_ids = jnp.cumsum(jax.random.bernoulli(jax.random.key(2), 0.3, (7, 6)), axis=1)
  mask = jax.random.bernoulli(jax.random.key(3), 0.8, (1, 1, 6, 6))

  def loss(layer):
    def fn(variables, x):
      y, _ = layer.apply(variables, x, segment_ids=segment_ids, segment_pos=None, mask=mask)
      return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), y

    return jax.jit(jax.value_and_grad(fn, argnums=(0, 1), has_aux=True))(variables, x)

  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), loss(staged), loss(repeated))


@pytest.mark.slow
def test_blocks_decode_through_the_stages():
  repeated, staged = blocks(RepeatedTransformer), blocks(PipelinedTransformer, num_stages=3, microbatch_size=1)
  variables, x = drawn_variables(repeated.abstract_init()), normal(2, 5, 8)

  def decoded(layer):
    _, side = layer.apply(variables, 2, 5, method='init_decode_state')
    prompt_pos, pos = jnp.tile(jnp.arange(4), (2, 1)), jnp.full((2, 1), 4)
    first, side = layer.apply(variables, x[:, :4], prompt_pos, decode_state=side.decode_state, method='extend_step')
    second, side = layer.apply(variables, x[:, 4:], pos, decode_state=side.decode_state, method='extend_step')
    return first, second, side.decode_state

  got, (first, second, caches) = jax.jit(lambda: (decoded(staged), decoded(repeated)))()
  expected = first, second, caches
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


def test_a_stage_may_repeat_a_layer():
  stage = Config(Repeat, layers_tpl=Config(Residual, dims=D), num_layers=2)
  layer = Config(Pipelined, layers_tpl=stage, num_layers=3, num_stages=3, num_microbatches=2).instantiate()
  whole = Config(Repeat, layers_tpl=Config(Residual, dims=D), num_layers=6).instantiate()
  variables, x = drawn_variables(layer.abstract_init()), normal(4, D)
  flat = {'layers': jax.tree.map(lambda v: v.reshape(6, *v.shape[2:]), variables['layers']['layers'])}
  got, expected = jax.jit(lambda: (layer.apply(variables, x)[0], whole.apply(flat, x)[0]))()
  np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_pattern_has_the_variables_and_results_of_a_scan():
  """Also a pattern of a single layer; 7 rows fill 3 microbatches."""
  for kinds, L in ((1, 5), (2, 7)):
    pattern = tuple(Config(kind, dims=D) for kind in KINDS[:kinds])
    fields = {'layers_tpl': pattern, 'num_layers': L, 'first_tpl': pattern[:1] * (kinds - 1)}
    whole = Config(Repeat, **fields).instantiate()
    layer = Config(Pipelined, num_stages=2, num_microbatches=3, name='lm', **fields).instantiate()
    variables, x = drawn_variables(whole.abstract_init()), normal(7, D)
    assert jax.tree.structure(layer.abstract_init()) == jax.tree.structure(variables)
    got, expected = jax.jit(lambda layers=(layer, whole), v=variables, x=x: [one.apply(v, x)[0] for one in layers])()
    np.testing.assert_allclose(got, expected, rtol=1e-5)
  described = '2 stages x 4 layers and 1 layer in no stage, 3 microbatches of 3 rows in 4 ticks, bubble 25.0%'
  assert describe_pipelines(layer, 7) == [f'lm: {described}']


class Counting(Layer):
  """Passes a pair of arrays on."""

  def __call__(self, x):
    y, count = x
    return 2 * y, count + 1


def test_layers_may_pass_on_a_tuple():
  layer = pipelined(4, 2, 2, sub={}).set(layers_tpl=Config(Counting)).instantiate()
  y, count = layer.apply({}, (normal(3, D), jnp.zeros(3, jnp.int32)))[0]
  np.testing.assert_array_equal(y, 16 * normal(3, D))
  np.testing.assert_array_equal(count, [4, 4, 4])


@pytest.mark.parametrize('R, kinds, num_first', [(1, 1, 0), (2, 1, 0), (2, 2, 1)])
def test_caches_go_through_the_stages(R, kinds, num_first):
  L, x = 6 if kinds == 1 else 10, normal(3, 2, D)
  config = pipelined(L, 2, 4, R)
  if kinds == 2:
    pattern = config.layers_tpl, Config(Shift, dims=D)
    config.set(layers_tpl=pattern, first_tpl=pattern[1:] * num_first)
  repeated = Config(Repeat, num_layers=L, layers_tpl=config.layers_tpl, first_tpl=config.first_tpl, unroll=1)
  layer, repeat = config.instantiate(), repeated.instantiate()
  variables = drawn_variables(layer.abstract_init())

  def flat(tree, like):
    return jax.tree.map(lambda v, one: v.reshape(one.shape), tree, like)

  of_repeat = flat(variables, jax.eval_shape(repeat.init, jax.random.key(0)))
  state = layer.apply(variables, 2, method='init_decode_state')[1].decode_state
  expected = repeat.apply(of_repeat, 2, method='init_decode_state')[1].decode_state

  @jax.jit
  def extend(x_BD, *states):
    layers = (layer, variables), (repeat, of_repeat)
    both = [one.apply(v, x_BD, decode_state=state, method='extend_step') for (one, v), state in zip(layers, states)]
    return [(y, side.decode_state) for y, side in both]

  for x_BD in x:
    (y, state), (y_repeat, expected) = extend(x_BD, state, expected)
    np.testing.assert_allclose(y, y_repeat, rtol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), flat(state, expected), expected)


def test_what_is_kept_for_the_backward_pass():
  """Activations for each tick; but weights once, however many rounds there are."""
  for R, fields in ((1, {}), (2, {}), (1, {'stage_remat': 'full'})):
    layer = pipelined(8, 2, 6, R, **fields).instantiate()
    variables, x = drawn_variables(layer.abstract_init()), jnp.ones((6, D))
    pull = jax.eval_shape(lambda v, layer=layer, x=x: jax.vjp(lambda v: layer.apply(v, x)[0], v)[1], variables)
    kept = jax.tree.leaves(pull)
    ticks = layer.schedule(6).num_ticks
    assert all(v.size <= 8 * D * D for v in kept if v.ndim >= 2 and v.shape[-2:] == (D, D))
    activations = [v.shape for v in kept if v.shape[0] == ticks and v.shape[-1] == D]
    if fields:
      assert activations == [(ticks, 2, 1, D)]
    else:
      assert len(activations) >= 2


class Widening(Layer):
  def __call__(self, x):
    return jnp.concatenate([x, x], axis=-1)


def test_mistakes_are_named():
  for change, message in (
    ({'num_microbatches': None}, r'Pipelined.num_microbatches: give this or microbatch_size, and neither is set'),
    ({'microbatch_size': 2}, r'and both are set'),
    ({'num_stages': 0}, r'Pipelined.num_stages: expected at least 1, got 0'),
    ({'num_stages': 9}, r'Pipelined.num_stages: 9 stages need at least 9 layers, and num_layers is 8'),
    ({'circular_repeat': 3}, r'Pipelined.circular_repeat: 3 does not divide the number of repetitions, 8'),
    ({'circular_repeat': 4}, r'4 stages of circular_repeat=4 groups need at least 16 layers'),
    ({'layers_tpl': (Config(Residual, dims=D),) * 3}, r'4 stages need at least 12 layers, and num_layers is 8'),
    ({'first_tpl': (Config(Residual, dims=D),) * 5}, r'4 stages need at least 9 layers, and num_layers is 8'),
    ({'stage_remat': 'ful'}, r"Pipelined.stage_remat: .*Did you mean 'full'"),
  ):
    with pytest.raises(ConfigError, match=message):
      pipelined(8, 4, 2).set(**change).instantiate()
  apart = Config(Pipelined, layers_tpl=Config(Linear, input_dims=D, output_dims=D), num_layers=2, num_stages=2)
  apart.set(microbatch_size=1, mesh_axis_names=('data', 'stage'))
  apart.weight_split_dims_mapping.stages = ('stages',)
  with pytest.raises(ShardingError, match=r"stages.*Did you mean 'stage'"):
    apart.instantiate()
  apart.weight_split_dims_mapping.stages = ('stage',)
  apart.layers_tpl.activation_split_dims_mapping.out = (('data', 'stage'), None)
  with pytest.raises(
    ConfigError, match=r"layers.activation_split_dims_mapping.out: 'stage' splits the stages of Pipel"
  ):
    apart.instantiate()

  layer = pipelined(4, 2, 2).instantiate()
  variables, x = drawn_variables(layer.abstract_init()), jnp.ones((4, D))
  with pytest.raises(DataError, match=r'Pipelined: the side input shift has shape \(3,\).*the batch, 4, or 1'):
    layer.apply(variables, x, shift=jnp.ones(3))
  with pytest.raises(DataError, match=r'the same dimension 0, the batch; got \(4,\), \(3,\)'):
    layer.apply(variables, {'a': jnp.ones(4), 'b': jnp.ones(3)})
  widening = Config(Pipelined, layers_tpl=Config(Widening), num_layers=2, num_stages=2, microbatch_size=1)
  with pytest.raises(
    ConfigError, match=r'layers_tpl: a layer of a pipeline returns what it is given, .*\[1,3\].*\[1,6\]'
  ):
    widening.instantiate().apply({}, jnp.ones((2, 3)))


def test_the_schedule_and_its_bubbles():
  assert PipelineSchedule(4, 8).num_ticks == 11
  assert PipelineSchedule(4, 8).bubble_fraction == pytest.approx(3 / 11)
  assert PipelineSchedule(4, 8, 3).bubble_fraction == pytest.approx(3 / (3 * 8 + 3))
  for S, M, R in ((1, 3, 1), (3, 3, 2), (4, 6, 2), (4, 2, 3), (2, 7, 1)):
    schedule = PipelineSchedule(S, M, R)
    for row in schedule.table():
      assert sorted(entry for entry in row if entry) == [(m, r) for m in range(M) for r in range(R)]
    assert schedule.table()[-1][-1] == (M - 1, R - 1)
    for tick in range(schedule.num_ticks):
      if R == 1:
        assert [schedule.microbatch(tick, s) % M for s in range(S)] == list((tick - np.arange(S)) % M)
  assert str(PipelineSchedule(3, 2)).splitlines() == [
    'tick     0 1 2 3',
    'stage 0  0 1 . .',
    'stage 1  . 0 1 .',
    'stage 2  . . 0 1',
  ]


def test_a_pipeline_is_described_for_a_batch():
  layer = pipelined(7, 3, 4, name='lm').instantiate()
  assert describe_pipelines(layer, 10) == ['lm: 3 stages x 3 layers, 4 microbatches of 3 rows in 6 ticks, bubble 33.3%']
  assert layer.schedule(2).num_microbatches == 2
  assert pipelined(8, 2, None, 2, microbatch_size=2).instantiate().schedule(9).num_microbatches == 5
