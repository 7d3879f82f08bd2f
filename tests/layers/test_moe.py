"""Mixtures of experts against sums over experts written in NumPy, and on meshes against one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, ShardingError
from praxis_lite.instruments.testing import assert_collectives, collectives
from praxis_lite.layers import (
  FeedForward,
  GatedFeedForward,
  MoeFeedForward,
  RepeatedTransformer,
  RotaryPositions,
  TransformerBlock,
)
from praxis_lite.layers.transformer_block import token_paddings
from praxis_lite.models import transformer_lm
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.specs import to_partition_spec

B, T, D, F, E = 3, 6, 8, 10, 5
AXES = ('replica', 'data', 'mdl')
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
PADDINGS = np.zeros((B, T), bool)
PADDINGS[1, 4:] = True
PADDINGS[2, 0] = True


def config(router=None, **fields):
  moe = Config(MoeFeedForward, **{'input_dims': D, 'hidden_dims': F, 'num_experts': E, **fields})
  moe.router_tpl.set(**(router or {}))
  return moe


def softmax(x):
  exp = np.exp(x - x.max(-1, keepdims=True))
  return exp / exp.sum(-1, keepdims=True)


def silu(x):
  return x / (1 + np.exp(-x))


def experts_of(variables, x):
  """What each expert makes of each token, [B, T, E, D]."""
  gate, up = (np.einsum('btd,edf->btef', x, variables[name]) for name in ('gate', 'up'))
  return np.einsum('btef,efd->bted', silu(gate) * up, variables['down'])


@functools.cache
def weights():
  return jax.tree.map(np.asarray, jax.jit(config().instantiate().init)(jax.random.key(0)))


def combined(choices_BTE):
  return np.einsum('bte,bted->btd', choices_BTE, experts_of(weights(), X))


def top_k(scores, k, by=None):
  """[B, T, E]: the scores of the k experts that `by` is highest for, 0 for the others and for padding."""
  order = np.argsort(-(scores if by is None else by), axis=-1)[..., :k]
  chosen = np.zeros_like(scores)
  np.put_along_axis(chosen, order, np.take_along_axis(scores, order, -1), -1)
  return np.where(PADDINGS[..., None], 0, chosen)


def run(moe, variables=None, paddings=PADDINGS, **kwargs):
  layer = moe.instantiate()
  return jax.jit(lambda v, x: layer.apply(v, x, paddings, **kwargs))(weights() if variables is None else variables, X)


# ---------------------------------------------------------------- one device


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  ('k', 'router', 'renormalize', 'scale'),
  [
    (2, {}, True, 1.0),
    (1, {'renormalize': False}, False, 1.0),
    (3, {'score': 'sigmoid', 'weight_scale': 2.5}, True, 2.5),
  ],
)
def test_dropless_is_the_sum_over_chosen_experts(k, router, renormalize, scale):
  y, side = run(config(router, num_experts_per_token=k))
  logits = X @ weights()['router']['w']
  choices = top_k(softmax(logits) if router.get('score') is None else 1 / (1 + np.exp(-logits)), k)
  if renormalize:
    choices /= np.maximum(choices.sum(-1, keepdims=True), 1e-30)
  np.testing.assert_allclose(y, combined(scale * choices), atol=1e-5)
  load = (choices > 0).sum((0, 1))
  np.testing.assert_allclose(side.summaries['router/load'].value, load * E / load.sum(), rtol=1e-6)
  assert side.summaries['router/fraction_dropped'].value == 0


def rounded(x, axis):
  scale = np.abs(x).max(axis, keepdims=True) / 127
  return np.round(x / np.where(scale == 0, 1, scale)) * scale


@pytest.mark.parametrize(
  'fields', [{}, {'grouped_matmul': 'xla'}, {'dispatch': 'capacity', 'capacity_factor': E, 'use_bias': True}]
)
def test_experts_in_int8(fields):
  moe = config(num_experts_per_token=2, matmul='int8', **fields)
  variables = drawn_variables(moe.instantiate().abstract_init())
  y, _ = run(moe, variables)
  choices = top_k(softmax(X @ variables['router']['w']), 2)
  choices /= np.maximum(choices.sum(-1, keepdims=True), 1e-30)
  expected = np.zeros_like(X)
  for e in range(E):
    w = {name: x[e] for name, x in variables.items() if name != 'router'}
    gate, up = (rounded(X, -1) @ rounded(w[n], 0) + w.get(f'{n}_bias', 0) for n in ('gate', 'up'))
    hidden = gate / (1 + np.exp(-gate)) * up
    expected += choices[..., e : e + 1] * (rounded(hidden, -1) @ rounded(w['down'], 0) + w.get('down_bias', 0))
  np.testing.assert_allclose(y, expected, atol=1e-2 * np.abs(expected).max())
  assert np.abs(y - expected).mean() < 1e-4 * np.abs(expected).mean()  # Few values are near the middle of two integers.
  in_floats = moe.clone(matmul='fprop')

  def gradients(moe):
    return jax.jit(jax.grad(lambda v: jnp.sum(jnp.sin(moe.instantiate().apply(v, X, PADDINGS)[0]))))(variables)

  for found, exact in zip(jax.tree.leaves(gradients(moe)), jax.tree.leaves(gradients(in_floats)), strict=True):
    np.testing.assert_allclose(found, exact, atol=0.05 * np.abs(exact).max())


def test_biases_decide_who_is_chosen_and_not_with_what_weight():
  variables = {**weights(), 'router': {**weights()['router'], 'bias': np.array([0, 5, 0, 5, 0], np.float32)}}
  y, side = run(config({'bias_update_rate': 0.5}), variables)
  scores = softmax(X @ weights()['router']['w'])
  choices = top_k(scores, 2, by=scores + variables['router']['bias'])
  np.testing.assert_allclose(y, combined(choices / np.maximum(choices.sum(-1, keepdims=True), 1e-30)), atol=1e-5)
  np.testing.assert_array_equal(
    side.updates['router']['bias'], variables['router']['bias'] + [0.5, -0.5, 0.5, -0.5, 0.5]
  )
  assert not run(config({'bias_update_rate': 0.5}), variables, do_eval=True)[1].updates


def test_a_full_expert_takes_first_choices_in_order():
  factor = 0.8  # C = 2 of the 6 tokens of a row.
  y, side = run(config(dispatch='capacity', capacity_factor=factor))
  scores = softmax(X @ weights()['router']['w'])
  order = np.argsort(-scores, axis=-1)[..., :2]
  kept, dropped = np.zeros((B, T, E)), 0
  for row in range(B):
    free = np.full(E, 2)
    for k in range(2):
      for token in np.flatnonzero(~PADDINGS[row]):
        expert = order[row, token, k]
        kept[row, token, expert] = free[expert] > 0
        dropped += free[expert] == 0
        free[expert] -= free[expert] > 0
  chosen = top_k(scores, 2)
  choices = kept * chosen / np.maximum(chosen.sum(-1, keepdims=True), 1e-30)
  np.testing.assert_allclose(y, combined(choices), atol=1e-5)
  assert dropped > 0
  np.testing.assert_allclose(
    side.summaries['router/fraction_dropped'].value, dropped / (2 * (~PADDINGS).sum()), rtol=1e-6
  )


def test_experts_that_choose_take_the_best_tokens_of_a_row():
  y, side = run(config({'choice': 'expert'}, dispatch='capacity', capacity_factor=0.8))
  scores = np.where(PADDINGS[..., None], 0, softmax(X @ weights()['router']['w']))
  best = -np.sort(-scores, axis=1)[:, 1:2]  # C = 2.
  choices = np.where(scores >= best, scores, 0)
  np.testing.assert_allclose(y, combined(choices), atol=1e-5)
  without = ((choices.sum(-1) == 0) & ~PADDINGS).sum() / (~PADDINGS).sum()
  np.testing.assert_allclose(side.summaries['router/fraction_dropped'].value, without, rtol=1e-6)


@pytest.mark.parametrize('dispatch', ['dropless', 'capacity'])
@pytest.mark.parametrize('gated', [True, False])
def test_biases_limits_and_offsets_of_experts_and_a_bias_of_the_router(gated, dispatch):
  moe = config({'use_bias': True}, use_bias=True, gated=gated, activation='gelu_sigmoid', dispatch=dispatch)
  moe.set(capacity_factor=9.0, **({'hidden_limit': 0.4, 'up_offset': 1.0} if gated else {}))
  layer = moe.instantiate()
  rng, declared = np.random.default_rng(0), layer.abstract_init()
  assert declared['up_bias'].num_active == 2 * F and declared['down_bias'].shape == (E, D)
  drawn = jax.tree.map(lambda w: rng.normal(size=w.shape).astype(np.float32), declared)
  y = jax.jit(lambda v: layer.apply(v, X, PADDINGS)[0])(drawn)

  def product(x, name, axes):
    return np.einsum(axes, x, drawn[name]) + drawn[f'{name}_bias']

  def fn(x):
    return x / (1 + np.exp(-1.702 * x))

  up = product(X, 'up', 'btd,edf->btef')
  if gated:
    gate = np.minimum(product(X, 'gate', 'btd,edf->btef'), 0.4)
    hidden = fn(gate) * (np.clip(up, -0.4, 0.4) + 1)
  else:
    hidden = fn(up)
  choices = top_k(softmax(X @ drawn['router']['w'] + drawn['router']['b']), 2)
  choices /= np.maximum(choices.sum(-1, keepdims=True), 1e-30)
  expected = np.einsum('bte,bted->btd', choices, product(hidden, 'down', 'btef,efd->bted'))
  np.testing.assert_allclose(y, expected, atol=2e-5)


@pytest.mark.parametrize('gated', [True, False])
def test_one_expert_is_the_dense_layer(gated):
  dense = Config(
    GatedFeedForward if gated else FeedForward, input_dims=D, hidden_dims=F, use_bias=False, activation='silu'
  )
  dense = dense.instantiate()
  variables = drawn_variables(dense.abstract_init())
  expected, _ = dense.apply(variables, X)
  own = {name: v['w'][None] for name, v in variables.items()} | {'router': {'w': np.ones((D, 1), np.float32)}}
  for dispatch in ('dropless', 'capacity'):
    moe = config(num_experts=1, num_experts_per_token=1, gated=gated, dispatch=dispatch)
    np.testing.assert_allclose(run(moe, own, paddings=None)[0], expected, atol=1e-5)


@pytest.mark.slow
def test_shared_experts_are_added():
  moe = config(num_shared_experts=2)
  layer = moe.instantiate()
  variables = drawn_variables(layer.abstract_init())
  assert variables['shared']['up']['w'].shape == (D, 2 * F)
  shared, _ = Config(GatedFeedForward, input_dims=D, hidden_dims=2 * F).instantiate().apply(variables['shared'], X)
  routed = {name: v for name, v in variables.items() if name != 'shared'}
  np.testing.assert_allclose(run(moe, variables)[0], run(config(), routed)[0] + shared, atol=1e-5)
  gated = {**variables, 'shared_gate': {'w': np.random.default_rng(1).normal(size=(D, 1)).astype(np.float32)}}
  share = 1 / (1 + np.exp(-X @ gated['shared_gate']['w']))
  y, _ = run(config(num_shared_experts=2, shared_expert_gate=True), gated)
  np.testing.assert_allclose(y, run(config(), routed)[0] + share * shared, atol=1e-5)


@pytest.mark.parametrize(
  'fields', [{}, {'dispatch': 'capacity'}, {'dispatch': 'capacity', 'router': {'choice': 'expert'}}]
)
def test_padding_changes_nothing(fields):
  layer = config(**fields).instantiate()
  call = jax.jit(lambda x, paddings: layer.apply(weights(), x, paddings)[0])
  other = np.where(PADDINGS[..., None], 100 * X[::-1], X)
  np.testing.assert_array_equal(call(X, PADDINGS)[~PADDINGS], call(other, PADDINGS)[~PADDINGS])
  assert not call(X, PADDINGS)[PADDINGS].any()


def test_tokens_are_padding_by_segment_and_after_the_last_weight():
  found = token_paddings(jnp.array([[0, 0, 1, 0, 0.5, 0], [0] * 6]), jnp.array([[1, 1, 1, 0, 2, 2], [1] * 6]))
  np.testing.assert_array_equal(found, [[0, 0, 0, 1, 0, 1], [1] * 6])
  assert token_paddings(None, None) is None


def test_padding_of_a_language_model_takes_no_slots():
  # First choices of padding at the end would come before second choices of real tokens.
  experts = Config(MoeFeedForward, num_experts=4, dispatch='capacity', capacity_factor=0.5)
  lm = transformer_lm(vocab_size=9, model_dims=D, num_layers=2, num_heads=2, hidden_dims=F, experts=experts).lm_tpl
  lm.set(vocab_size=9, model_dims=D, num_layers=2, num_heads=2, hidden_dims=F)
  lm = lm.instantiate()
  variables = drawn_variables(lm.abstract_init())
  weights = np.array([[0, 1, 1, 0, 1, 0, 0, 0]], np.float32)  # The first token is a prompt, the last three are padding.
  segments = np.array([[1, 1, 0, 1, 1, 1, 1, 1]], np.int32)
  real = np.array([[True, True, False, True, True, False, False, False]])
  losses = jax.jit(lambda ids: lm.apply(variables, ids, ids, weights, segment_ids=segments)[0].xent)
  ids = np.arange(8)[None]
  for other in range(9):
    np.testing.assert_array_equal(losses(ids)[real], losses(np.where(real, ids, other))[real])


def test_blocks_decode_step_by_step_as_in_one_pass():
  block = Config(TransformerBlock, input_dims=D, hidden_dims=F, num_heads=2)
  block.attention_tpl.set(causal=True, rotary_tpl=Config(RotaryPositions))
  block.ff_tpl = Config(MoeFeedForward, num_experts=E)
  block = Config(RepeatedTransformer, layers_tpl=block, num_layers=2).instantiate()
  variables = drawn_variables(block.abstract_init())

  @jax.jit
  def both(x_TBD):
    def extend(state, now):
      x_BD, i = now
      pos = jnp.full((B, 1), i)
      y, side = block.apply(variables, x_BD[:, None], pos, decode_state=state, method='extend_step')
      return side.decode_state, y[:, 0]

    _, side = block.apply(variables, B, T, method='init_decode_state')
    return block.apply(variables, X)[0], jax.lax.scan(extend, side.decode_state, (x_TBD, jnp.arange(T)))[1]

  whole, steps = both(X.swapaxes(0, 1))
  np.testing.assert_allclose(steps.swapaxes(0, 1), whole, atol=1e-5)


# ---------------------------------------------------------------- meshes


def on_mesh(moe, shape):
  """(layer, mesh, function for `GuardedJit`) of loss, its gradients, and what else comes out."""
  layer = moe.clone(mesh_axis_names=AXES).instantiate()
  mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[: int(np.prod(shape))])

  def fn(variables, x):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return step(layer, variables, x)

  return layer, mesh, fn


def step(layer, variables, x):
  def loss(variables, x):
    y, side = layer.apply(variables, x, PADDINGS[: len(x)] if len(x) == B else None)
    aux = sum(value * weight for value, weight in side.aux_losses.values())
    summaries = {name: s.value for name, s in side.summaries.items()}
    return jnp.mean(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))) + aux, (y, side.updates, summaries)

  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(variables, x)


LOSSES = {'z_loss_weight': 0.1, 'load_balance_loss_weight': 0.1}
ON_MESHES = {
  'tokens over data and mdl, exchanged over both': (
    {'dispatch': 'dropless', 'expert_axis': ('data', 'mdl'), 'router': LOSSES, 'num_shared_experts': 1}
    | {'shared_expert_gate': True},
    (('data', 'mdl'), None, 'replica'),
    (('replica', 'data'), None, None),
    (2, 2, 2),
  ),
  'D fully sharded, F gathered, exchanged over an axis without tokens, with biases': (
    {'dispatch': 'capacity', 'capacity_factor': 0.8, 'expert_axis': 'mdl', 'router': LOSSES, 'use_bias': True},
    ('mdl', 'replica', 'data'),
    (('replica', 'data'), None, 'mdl'),
    (2, 2, 2),
  ),
  'T split, experts choose': (
    {'dispatch': 'capacity', 'expert_axis': 'data', 'router': {'choice': 'expert'}},
    ('data', None, 'mdl'),
    ('replica', 'data', None),
    (2, 2, 2),
  ),
  'T split, not exchanged': (
    {'router': {'bias_update_rate': 0.1, **LOSSES}},
    (None, 'data', 'mdl'),
    ('replica', ('data', 'mdl'), None),
    (2, 2, 2),
  ),
  'biases, F split over 3 devices, experts over 2': (
    {'use_bias': True, 'hidden_limit': 0.5, 'up_offset': 1.0, 'expert_axis': 'data', 'router': {'use_bias': True}},
    ('data', None, 'mdl'),
    ('data', None, None),
    (1, 2, 3),
  ),
  'in int8, F split over 3 devices': (
    {'matmul': 'int8', 'expert_axis': 'data'},
    ('data', None, 'mdl'),
    ('data', None, None),
    (1, 2, 3),
  ),
  'in int8, F split over 2 devices, with capacity': (
    {'matmul': 'int8', 'dispatch': 'capacity', 'capacity_factor': 0.8, 'use_bias': True},
    (None, 'data', 'mdl'),
    (('replica', 'data'), None, None),
    (2, 2, 2),
  ),
  '8 devices for 5 experts': ({'expert_axis': 'data'}, None, ('data', None, None), (1, 8, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', ON_MESHES)
def test_values_and_gradients_are_those_of_one_device(name):
  fields, wt, out, shape = ON_MESHES[name]
  moe = config(**fields)
  moe.weight_split_dims_mapping.wt = wt
  moe.activation_split_dims_mapping.out = out
  layer, mesh, fn = on_mesh(moe, shape)
  variables = drawn_variables(layer.abstract_init())
  expected = jax.jit(functools.partial(step, moe.instantiate()))(variables, X)
  found = GuardedJit(fn)(*jax.device_put((variables, X), NamedSharding(mesh, PartitionSpec())))
  for a, one in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, one, rtol=0, atol=1e-5 * (1e-3 + np.abs(one).max()))


def compiled(moe, shape, fn=None, rows=8):
  """The program of `fn`, by default the step, of a layer on a mesh, its weights split as declared."""
  layer, mesh, of_step = on_mesh(moe, shape)

  def placed(weight):
    spec = to_partition_spec(weight.full_split_dims_mapping, AXES, rank=len(weight.shape))
    return jax.ShapeDtypeStruct(weight.shape, jnp.float32, sharding=NamedSharding(mesh, spec))

  variables = jax.tree.map(placed, layer.abstract_init())
  x = jax.ShapeDtypeStruct((rows, T, D), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(('replica', 'data'))))

  def forward(variables, x):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return layer.apply(variables, x)[0]

  def recomputed(variables, x):
    again = jax.checkpoint(lambda variables, x: jnp.sum(forward(variables, x)))
    return jax.value_and_grad(again, argnums=(0, 1))(variables, x)

  chosen = {'forward': forward, 'recomputed': recomputed, None: of_step}[fn]
  return GuardedJit(chosen).lower(variables, x).compile()


def parallel(**fields):
  moe = config({'z_loss_weight': 0.1}, num_experts=4, expert_axis='data', **fields)
  moe.weight_split_dims_mapping.wt = ('data', None, 'mdl')
  moe.activation_split_dims_mapping.out = (('replica', 'data'), None, None)
  return moe


@pytest.mark.slow
def test_all_to_alls_of_tokens_weights_and_outputs():
  moe = parallel(dispatch='capacity')
  # One all-reduce sums the parts of F, one the numbers of tokens and of choices.
  expected = {'all-to-all': 3, 'all-reduce': 2, 'all-gather': 0, 'reduce-scatter': 0, 'collective-permute': 0}
  assert_collectives(compiled(moe, (2, 2, 2), 'forward'), {**expected, 'all-reduce': 1})
  whole = compiled(moe, (2, 2, 2))
  assert_collectives(whole, {**expected, 'all-to-all': 6, 'all-reduce': collectives(whole)['all-reduce'].count})
  # The gradients of weights need outputs only where these are computed, so they are not sent again.
  again = collectives(compiled(moe, (2, 2, 2), 'recomputed'))['all-to-all']
  assert again.count == 8, again


@pytest.mark.slow
def test_rows_beyond_the_bound_of_an_exchange_are_dropped_and_reported():
  moe = config(expert_axis='data', exchange_factor=0.5)
  moe.activation_split_dims_mapping.out = ('data', None, None)
  layer, mesh, fn = on_mesh(moe, (1, 2, 1))
  x = np.tile(X, (8, 4, 1))  # 576 choices on each device, of which at most 144 are sent to each.
  arguments = jax.device_put((drawn_variables(layer.abstract_init()), x), NamedSharding(mesh, PartitionSpec()))
  (_, (_, _, summaries)), grads = GuardedJit(fn)(*arguments)
  assert 0.5 <= summaries['router/fraction_dropped'] < 0.7
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'num_experts': 0}, r'MoeFeedForward\.num_experts: expected at least 1, got 0'),
    (
      {'num_experts_per_token': 6},
      r'MoeFeedForward\.num_experts_per_token: expected 1 to num_experts, which is 5, got 6',
    ),
    ({'num_experts_per_token': 0}, r'num_experts_per_token: expected 1 to'),
    ({'capacity_factor': 0.0}, r'MoeFeedForward\.capacity_factor: expected more than 0, got 0\.0'),
    ({'exchange_factor': -1.0}, r'MoeFeedForward\.exchange_factor: expected more than 0'),
    ({'dispatch': 'dropped'}, r"MoeFeedForward\.dispatch: expected 'dropless' or 'capacity', got 'dropped'"),
    ({'activation': 'swish'}, r'MoeFeedForward\.activation: unknown activation'),
    ({'hidden_limit': 0.0}, r'MoeFeedForward\.hidden_limit: expected more than 0, got 0\.0'),
    ({'gated': False, 'up_offset': 1.0}, r'MoeFeedForward\.up_offset: only gated experts have it; leave it 0'),
    ({'num_shared_experts': -1}, r'MoeFeedForward\.num_shared_experts: expected at least 0'),
    ({'router': {'choice': 'expert'}}, r"MoeFeedForward\.dispatch: with router_tpl\.choice='expert'"),
  ],
)
def test_mistakes_in_fields(fields, message):
  with pytest.raises(ConfigError, match=message):
    config(**fields).instantiate()


def test_mistakes_in_axes():
  with pytest.raises(ShardingError, match=r"expert_axis.*'dat' is not a mesh axis.*Did you mean 'data'"):
    config(expert_axis='dat', mesh_axis_names=AXES).instantiate()
  moe = config(expert_axis='data', mesh_axis_names=AXES)
  moe.weight_split_dims_mapping.wt = ('mdl', None, None)
  with pytest.raises(ConfigError, match=r"wt: .* over 'mdl', and expert_axis='data' exchanges tokens over 'data'"):
    moe.instantiate()
