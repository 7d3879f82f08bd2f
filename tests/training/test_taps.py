"""Taps: statistics of activations, gradients, updates and weights are those of plain NumPy, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn_state import drawn_state, drawn_variables

from praxis_lite.common import statistics
from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.statistics import STATISTICS, bin_edges, compute_parts, kind_of_part, to_statistics
from praxis_lite.common.weighted import weighted_mean
from praxis_lite.layers import Causal, Pipelined, Repeat, pipeline
from praxis_lite.layers.base import Layer, WeightSplit, scope
from praxis_lite.layers.base.summaries import Summary
from praxis_lite.layers.base.taps import Taps, raw_name
from praxis_lite.layers.dot_product import attention_entropy
from praxis_lite.models import BaseModel, transformer_lm
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.tasks.language_modelling import LanguageModelTask
from praxis_lite.training.learning import Learner, LearnerRule, MultiLearner
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.taps import Tap, TappedParts, finish_summaries, step_taps
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

B, T, D, LAYERS = 4, 3, 5, 3


class Block(Layer):
  weight_split_dims_mapping: Config = template(WeightSplit)

  def setup(self):
    mapping = self.weight_split_dims_mapping.wt
    self.create_variable('w', WeightHParams((D, D), tensor_split_dims_mapping=mapping))

  def __call__(self, x_BTD, paddings=None):
    return jnp.maximum(x_BTD @ self.theta.w + 0.1, 0)


class Looping(Layer):
  """Calls a layer in a loop of its own, where nobody can listen."""

  inner: Block = child()

  def setup(self):
    self.create_child('inner', Config(Block))

  def __call__(self, x_BTD):
    return jax.lax.map(self.inner, x_BTD)


class Stacked(BaseModel):
  stack_tpl: Config = REQUIRED
  loops: bool = False

  stack: Repeat = child()
  loop: Looping = child()

  def setup(self):
    self.create_child('stack', self.stack_tpl)
    if self.loops:
      self.create_child('loop', Config(Looping))
    self.create_variable('v', WeightHParams((D,)))
    self.create_variable('fixed', WeightHParams((1,)), trainable=False)

  def compute_predictions(self, batch):
    x_BTD = self.stack(batch['x'])
    return (self.loop(x_BTD) if self.loops else x_BTD) @ self.theta.v

  def compute_loss(self, predictions, batch):
    return {'loss': weighted_mean((predictions - batch['y']) ** 2, batch['weights'])}, {}


def batch(rows=B):
  """Rows whose last tokens are padding, with huge values there, and whose first token has no weight but is real."""
  rng = np.random.default_rng(0)
  weights = np.ones((rows, T), np.float32)
  weights[:, 0] = 0
  if rows > 1:
    weights[0] = [1, 0, 0]
  x = rng.standard_normal((rows, T, D)).astype(np.float32)
  x[0, 1:] = 1e6 if rows > 1 else x[0, 1:]
  return {'x': x, 'y': rng.standard_normal((rows, T)).astype(np.float32), 'weights': weights}


def make(mesh=(1, 1), taps=(), rows=B, pipeline=None, loops=False, trains=True, split=False, **fields):
  block = Config(Block)
  if split:
    block.weight_split_dims_mapping.wt = ('data', 'mdl')
  kind, more = (Repeat, {'remat': fields.pop('remat', 'none')}) if pipeline is None else (Pipelined, pipeline)
  model = Config(Stacked, stack_tpl=Config(kind, layers_tpl=block, num_layers=LAYERS, **more), loops=loops)
  names = ('data', 'mdl', 'unused')[: len(mesh)]
  config = Config(SingleTask, model=model, mesh_axis_names=names, ici_mesh_shape=mesh)
  config.train.learner.set(optimizer=Config(optax.sgd), learning_rate=0.5, num_microbatches=fields.pop('parts', 1))
  if pipeline is not None:
    config.train.inputs_split_mapping = {'map_2d': ('data', None), 'map_3d': ('data', None, None)}
  task = config.set(**fields).instantiate()
  return PartitionedTask(task, batch(rows), taps=step_taps(task, taps, trains=trains) if taps else None)


def found(partitioned, rows=B):
  out = partitioned.train_step(drawn_state(partitioned), jax.random.key(1), batch(rows))
  return {name: np.asarray(s.value) for name, s in finish_summaries(jax.device_get(out.summaries)).items()}


ALL = f'stack.layers:{",".join(STATISTICS)}'
TAPS = (
  ALL,
  'stack:mean',
  'stack.layers.in:rms',
  f'stack.layers.grad:{",".join(STATISTICS)}',
  'stack.layers.in.grad:max_abs',
  'grad(*):rms,max_abs',
  'update(stack.*):rms,ratio',
  'weight(*):min,hist',
)


def of_numpy(x, names=STATISTICS):
  """Statistics of [entries, units], in NumPy."""
  a = np.abs(x)
  every = {'rms': np.sqrt(np.mean(x**2)), 'mean': x.mean(), 'std': x.std(), 'min': x.min(), 'max': x.max()}
  every |= {'max_abs': a.max(), 'frac_zero': np.mean(x == 0), 'dead': np.mean(a.max(0) == 0)}
  every['hist'] = bins_of_numpy(x)
  return {name: every[name] for name in names}


def bins_of_numpy(x):
  """Counts by the edges of the bins; an edge belongs to the bin that is farther from zero."""
  right, middle = bin_edges(), len(bin_edges()) // 2
  left = np.append(-np.inf, right[:-1])
  count = [
    np.sum((x > low) & (x <= high)) if i <= middle else np.sum((x >= low) & (x < high))
    for i, (low, high) in enumerate(zip(left, right))
  ]
  return np.array(count)


def expected(rows=B):
  """What the taps of `TAPS` are, in plain NumPy and by `jax.grad` of a plain function."""
  model = make(rows=rows).jax_task.model
  variables, data = drawn_variables(model.abstract_init()), batch(rows)
  last = np.where(data['weights'] > 0, np.arange(T), -1).max(1)
  real = np.arange(T) <= last[:, None]

  def forward(ws, v, probes=(0,) * (1 + LAYERS)):
    xs = [data['x'] + probes[0]]
    for i in range(LAYERS):
      xs.append(jnp.maximum(xs[-1] @ ws[i] + 0.1, 0) + probes[1 + i])
    error, weights = (xs[-1] @ v - data['y']) ** 2, data['weights']
    return jnp.sum(jnp.where(weights > 0, error * weights, 0)) / weights.sum(), xs

  ws, v = variables['stack']['layers']['w'], variables['v']
  (_, xs), (of_ws, of_v) = jax.value_and_grad(forward, (0, 1), has_aux=True)(ws, v)
  by_xs = jax.grad(lambda probes: forward(ws, v, probes)[0])([jnp.zeros_like(x) for x in xs])
  layers = [of_numpy(np.asarray(x, np.float64)[real]) for x in xs[1:]]
  of_gradients = [of_numpy(np.asarray(x, np.float64)[real]) for x in by_xs]
  made = {'stack.layers.in.grad/max_abs': np.array([each['max_abs'] for each in of_gradients[:-1]])}
  for name, of_layers in (('stack.layers', layers), ('stack.layers.grad', of_gradients[1:])):
    made |= {f'{name}/{n}': np.array([layer[n] for layer in of_layers]) for n in STATISTICS if n != 'hist'}
    made |= {f'{name}/hist/{i}': layer['hist'] for i, layer in enumerate(of_layers)}
  made['stack/mean'] = layers[-1]['mean']
  made['stack.layers.in/rms'] = np.array([of_numpy(np.asarray(x, np.float64)[real])['rms'] for x in xs[:-1]])
  for name, g in (('stack.layers.w', np.asarray(of_ws)), ('v', np.asarray(of_v)[None])):
    rms, peak = np.sqrt(np.mean(g.reshape(len(g), -1) ** 2, 1)), np.abs(g.reshape(len(g), -1)).max(1)
    is_stack = name != 'v'
    made |= {f'grad({name})/rms': rms if is_stack else rms[0], f'grad({name})/max_abs': peak if is_stack else peak[0]}
  made['update(stack.layers.w)/rms'] = 0.5 * made['grad(stack.layers.w)/rms']
  scale = np.sqrt(np.mean(ws.reshape(LAYERS, -1) ** 2, 1))
  made['update(stack.layers.w)/ratio'] = made['update(stack.layers.w)/rms'] / scale
  made |= {'weight(v)/min': v.min(), 'weight(v)/hist': of_numpy(v[:, None])['hist']}
  made |= {
    'weight(fixed)/min': variables['fixed'][0],
    'weight(fixed)/hist': of_numpy(variables['fixed'][:, None])['hist'],
  }
  made['weight(stack.layers.w)/min'] = ws.min((1, 2))
  return made | {f'weight(stack.layers.w)/hist/{i}': of_numpy(w)['hist'] for i, w in enumerate(ws)}


def assert_as_expected(got, rows=B, left_out=(), rtol=1e-4):
  wanted = {name: x for name, x in expected(rows).items() if not any(part in name for part in left_out)}
  assert got.keys() == wanted.keys()
  for name, value in wanted.items():
    np.testing.assert_allclose(got[name], value, rtol=rtol, atol=1e-5, err_msg=name)


PIPELINE = {'num_stages': 2, 'num_microbatches': 3}
WAYS = {
  'mesh': {'mesh': (3, 2), 'split': True},
  'pipeline': {'mesh': (2, 2), 'pipeline': {**PIPELINE, 'batch_axes': 'data'}},
  'one device': {},
  'unused axis': {'mesh': (2, 2, 2), 'split': True},
  'unused axis, as on GPUs': {'mesh': (2, 2, 2), 'split': True},
  'few rows': {'mesh': (3, 2), 'rows': 1, 'split': True},
  'microbatches': {'mesh': (3, 1), 'parts': 2},
  'shard_map': {'mesh': (3, 1), 'split': True, 'partitioning': 'shard_map'},
  'shard_map, microbatches': {'mesh': (2, 2), 'split': True, 'partitioning': 'shard_map', 'parts': 2},
  'pipeline, microbatches': {'mesh': (3, 2), 'parts': 2, 'pipeline': {**PIPELINE, 'batch_axes': 'data'}},
  'pipeline, few rows': {'mesh': (2, 2), 'rows': 1, 'pipeline': {**PIPELINE, 'remat': 'full', 'stage_remat': 'full'}},
  'remat': {'mesh': (2, 1), 'remat': 'full'},
  'rounds': {'pipeline': {'num_stages': 1, 'num_microbatches': 3, 'circular_repeat': 3}},
}


@pytest.mark.slow_cases
@pytest.mark.parametrize('way', WAYS)
def test_statistics_are_those_of_numpy(way, monkeypatch):
  monkeypatch.setattr(pipeline, 'BUBBLE', np.nan)
  if way.endswith('as on GPUs'):
    compute_as_gpus_do(monkeypatch)
  fields = WAYS[way]
  rows, left_out = fields.get('rows', B), ['('] if way == 'rounds' else []  # Weights of rounds are stacked twice.
  taps = [tap for tap in TAPS if not any(part in tap for part in left_out)]
  assert_as_expected(found(make(taps=taps, **fields), rows), rows, left_out)


def test_a_step_without_taps_is_the_program_of_layers_that_nobody_can_listen_to(monkeypatch):
  def lowered(**fields):
    step = make(**fields).train_step
    return step.jitted.lower(*step.arguments).as_text()

  text = lowered()
  assert text != lowered(taps=('stack:rms',))
  monkeypatch.setattr(scope, 'edit_and_tap', lambda frame, path, method, value, side='': value)
  assert text == lowered()


@pytest.mark.parametrize(
  'tap, message',
  [
    ('stack.layer:rms', r"tap 'stack.layer:rms' matches no layer that the step calls. Near paths: stack.layers"),
    ('*.attention:rms', 'matches no layer that the step calls. There are stack.layers'),
    ('loop.inner:rms', 'loop.inner cannot be tapped: it is computed in a function that a transform of JAX traces'),
    ('grad(stack.layers.v):rms', r'matches no variable. Near paths: v'),
    ('grad(stack):rms', r'its variables are grad\(stack.\*\). The gradient of its result is stack.grad'),
    ('stack.layer.grad', r"tap 'stack.layer.grad' matches no layer that the step calls. Near paths: stack.layers"),
    ('loop.inner.grad:rms', 'loop.inner.grad cannot be tapped: it is computed in a function that a transform of JAX'),
    ('grad(fixed):rms', 'fixed is not trained, so it has no grad'),
    ('stack:rsm', "there is no statistic 'rsm'. Did you mean 'rms'"),
    ('stack:ratio', r"there is no statistic 'ratio'. It is a statistic of update\(path\)"),
    ('gradient(v)', r"there is no gradient\(...\). Did you mean 'grad'"),
    ('stack:', 'name statistics after the colon'),
    ('', 'expected path:statistics'),
    ('a b:rms', 'expected path:statistics'),
  ],
)
def test_mistakes_are_told_before_anything_is_compiled(tap, message):
  with pytest.raises(ConfigError, match=message):
    make(taps=(tap,), loops=True).train_step.trace()


def test_what_cannot_be_tapped_is_left_out_of_a_pattern():
  partitioned = make(taps=('*:rms',), loops=True)
  partitioned.train_step.trace()
  assert [line.partition(' is left out')[0] for line in partitioned.taps.left_out] == ['tap: loop.inner']


def test_an_evaluation_has_no_gradients():
  with pytest.raises(ConfigError, match='is of a train step'):
    make(taps=('update(v)',), trains=False)
  with pytest.raises(ConfigError, match=r"tap 'stack.grad': gradients are of a train step"):
    make(taps=('stack.grad',), trains=False)


@pytest.mark.slow_cases
@pytest.mark.parametrize('way', ['one device', 'pipeline', 'mesh', 'shard_map, microbatches', 'rounds', 'few rows'])
def test_each_call_of_a_layer_has_gradients_of_its_own(monkeypatch, way):
  monkeypatch.setattr(Stacked, 'compute_predictions', lambda self, b: self.stack(self.stack(b['x'])) @ self.theta.v)
  rows = WAYS[way].get('rows', B)
  data = batch(rows)
  variables = drawn_variables(make(rows=rows).jax_task.model.abstract_init())
  real = np.arange(T) <= np.where(data['weights'] > 0, np.arange(T), -1).max(1)[:, None]

  def loss(probes):
    x = data['x']
    for i in range(2 * LAYERS):
      x = jnp.maximum(x @ variables['stack']['layers']['w'][i % LAYERS] + 0.1, 0) + probes[i]
    error, weights = (x @ variables['v'] - data['y']) ** 2, data['weights']
    return jnp.sum(jnp.where(weights > 0, error * weights, 0)) / weights.sum()

  gradients = np.asarray(jax.grad(loss)(jnp.zeros((2 * LAYERS, rows, T, D))))
  each = [of_numpy(np.float64(g)[real], ('rms', 'max')) for g in gradients]
  wanted = {
    f'stack.layers.grad{call}/{n}': [g[n] for g in each[start : start + LAYERS]]
    for call, start in (('', 0), ('_1', LAYERS))
    for n in ('rms', 'max')
  }
  got = found(make(taps=('*.layers.grad:rms,max',), **WAYS[way]), rows)
  assert got.keys() == wanted.keys()
  for name, value in wanted.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_gradients_of_activations_need_one_loss():
  rules = (
    Config(
      LearnerRule,
      name='v',
      regex='v',
      loss='other',
      learner=Config(Learner, optimizer=Config(optax.sgd), learning_rate=0.1),
    ),
    Config(LearnerRule, name='others', learner=Config(Learner, optimizer=Config(optax.sgd), learning_rate=0.1)),
  )
  model = Config(Stacked, stack_tpl=Config(Repeat, layers_tpl=Config(Block), num_layers=LAYERS))
  config = Config(SingleTask, model=model)
  config.train.learner = Config(MultiLearner, rules=rules)
  task = config.instantiate()
  with pytest.raises(ConfigError, match=r"tap 'stack.grad': rules of the learner have losses of their own"):
    PartitionedTask(task, batch(), taps=step_taps(task, ['stack.grad'])).train_step.trace()


def test_a_tap_of_gradients_changes_no_step_and_is_none_of_an_evaluation():
  tapped, plain = make(taps=('stack.layers.grad:rms', 'stack:rms')), make()
  data, key = batch(), jax.random.key(1)
  states = [each.train_step(drawn_state(each), key, data).state for each in (tapped, plain)]
  jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, states))
  out = tapped.eval_step(drawn_state(tapped).mdl_vars, key, jnp.int32(0), data)
  assert list(finish_summaries(jax.device_get(out.summaries))) == ['stack/rms']


# ---------------------------------------------------------------- statistics


def compute_as_gpus_do(monkeypatch):
  monkeypatch.setattr(jax.lax, 'platform_dependent', lambda *xs, cuda, **others: cuda(*xs))


@pytest.mark.slow_cases
@pytest.mark.parametrize('shape, first', [((7, 3), 0), ((1,), 0), ((2, 7, 3), 1), ((2, 2, 3, 4), 2)])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('as_gpu', [False, True])
def test_parts_of_two_halves_make_the_statistics_of_the_whole(shape, first, dtype, as_gpu, monkeypatch):
  if as_gpu:
    compute_as_gpus_do(monkeypatch)
  x = np.asarray(jnp.asarray(np.random.default_rng(0).standard_normal(shape) * (np.arange(shape[-1]) > 0), dtype))
  parts = [compute_parts(jnp.asarray(x[..., i::2, :] if x.ndim > 1 else x), None, STATISTICS, first) for i in range(2)]
  combined = {name: kind_of_part(name).combine_on_host([np.asarray(p[name]) for p in parts]) for name in parts[0]}
  if x.ndim == 1:
    combined |= {name: combined[name] / 2 for name in combined if kind_of_part(name) == 'sum'}
  got = to_statistics(combined, STATISTICS)
  for index in np.ndindex(shape[:first]):
    wanted = of_numpy(np.asarray(x[index], np.float64).reshape(-1, shape[-1]))
    for name, value in wanted.items():
      np.testing.assert_allclose(got[name][index], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_gpu_reads_a_value_once_as_it_is_stored():
  """Each reduction is a pass; and XLA could write a value in float32 for what reads it converted from bfloat16."""

  def of_cuda(*names):
    compute = jax.jit(lambda x, real: compute_parts(x, real, names))
    lowered = compute.trace(jnp.zeros((2, 3, 8), jnp.bfloat16), jnp.ones((2, 3, 1), bool))
    return lowered.lower(lowering_platforms=('cuda',)).as_text()

  text = of_cuda('rms', 'max_abs', 'frac_zero')
  assert text.count('stablehlo.reduce(') == of_cuda('rms').count('stablehlo.reduce(')
  assert not [line for line in text.splitlines() if 'stablehlo.convert' in line and 'bf16' in line]


@pytest.mark.parametrize('as_gpu', [False, True])
def test_entries_that_do_not_count_may_be_anything_and_none_make_nan(as_gpu, monkeypatch):
  if as_gpu:
    compute_as_gpus_do(monkeypatch)
  x, real = jnp.array([1.0, jnp.nan, -3.0, jnp.inf]), jnp.array([True, False, True, False])
  got = to_statistics(compute_parts(x, real, STATISTICS), STATISTICS)
  wanted = of_numpy(np.array([[1.0], [-3.0]]))
  assert all(np.allclose(got[name], wanted[name]) for name in STATISTICS if name != 'dead')
  empty = to_statistics(compute_parts(x, jnp.zeros(4, bool), STATISTICS), STATISTICS)
  assert all(np.isnan(empty[name]) for name in STATISTICS if name != 'hist')
  assert empty['hist'].sum() == 0


@pytest.mark.parametrize('mean', [0.0, 1e3, -1e4])
def test_a_large_mean_does_not_hide_the_spread(mean):
  x = (mean + np.random.default_rng(0).standard_normal((3, 8, 50))).astype(np.float32)
  x[1] += 2  # The means of parts differ.
  real = np.arange(8)[:, None] < 5
  parts = [compute_parts(jnp.asarray(each), jnp.asarray(real), ['std']) for each in x]
  kind = kind_of_part('moments')
  stacked = jnp.stack([part['moments'] for part in parts])
  wanted = x.astype(np.float64)[:, :5].std()
  for moments in (
    kind.combine_on_host([np.asarray(each) for each in stacked]),
    kind.combine(jnp.concatenate([stacked, kind.neutral(stacked)])),
    jax.vmap(lambda part: kind.combine_devices(part, ('parts',)), axis_name='parts')(stacked)[2],
  ):
    got = to_statistics({'n': np.float32(750), 'moments': np.asarray(moments)}, ['std'])['std']
    np.testing.assert_allclose(got, wanted, rtol=1e-3)
  one = to_statistics(compute_parts(jnp.asarray(x.reshape(3, -1)), None, ['std'], 1), ['std'])['std']
  np.testing.assert_allclose(one, x.astype(np.float64).std((1, 2)), rtol=1e-3)


def test_a_scalar_is_a_unit():
  for x, first in ((np.float32(0), 0), (np.array([0, -2, 3], np.float32), 1)):
    got = to_statistics(compute_parts(jnp.asarray(x), None, STATISTICS, first), STATISTICS)
    for index in np.ndindex(x.shape):
      for name, value in of_numpy(np.asarray(x[index], np.float64).reshape(1, 1)).items():
        np.testing.assert_allclose(got[name][index], value, rtol=1e-6, err_msg=name)


def test_counts_of_more_entries_than_an_int32_do_not_wrap(monkeypatch):
  x = jnp.arange(24.0).reshape(2, 3, 4)
  whole = compute_parts(x, None, ['hist'], 1)['bins']
  monkeypatch.setattr(statistics, '_MOST_COUNTED', 5)
  np.testing.assert_array_equal(compute_parts(x, None, ['hist'], 1)['bins'], whole)
  most = jnp.full((3, 4), 2**30).astype(whole.dtype)
  assert np.all(np.asarray(kind_of_part('bins').combine(most), np.float64) == 3 * 2.0**30)


def test_a_pooled_value_has_no_tokens():
  real = jnp.array([[True, False, False], [True, True, False], [False, False, False]])
  entries = Taps(lambda name: (), {}, real)._entries_that_count
  np.testing.assert_array_equal(entries(jnp.ones((3, 3)))[0], [[True], [True], [False]])
  np.testing.assert_array_equal(entries(jnp.ones((3, 3, 2)))[0], real[..., None])


def test_each_tap_must_match_a_variable_that_is_trained():
  with pytest.raises(ConfigError, match=r"tap 'grad\(fixed\)': fixed is not trained, so it has no grad"):
    make(taps=('grad(v)', 'grad(fixed)'))
  make(taps=('grad(v)', 'weight(fixed)'))


def test_batches_are_combined_on_the_host_as_they_come():
  parts = TappedParts()
  for number in range(5):
    made = compute_parts(jnp.full((2, 3), float(number)), None, ['mean', 'std'])
    parts.add({raw_name(p, ('mean', 'std'), 'a'): Summary(x, str(kind_of_part(p))) for p, x in made.items()})
    assert all(isinstance(value, np.ndarray) for value in parts._parts.values())
    assert len(parts._parts) == (3 if number else 0)
  found = {name: s.value for name, s in parts.statistics().items()}
  assert found == pytest.approx({'a/mean': 2.0, 'a/std': np.std(np.arange(5.0))})


def test_a_tap_is_read_from_its_text():
  assert Tap.parse('a.*.b: rms, max,rms') == Tap('a.*.b: rms, max,rms', '', 'a.*.b', ('rms', 'max'))
  assert Tap.parse('update(a.w)').statistics == ('rms',)
  assert Tap.parse('a.*').matches('a.b.c') and not Tap.parse('a.b').matches('a.b.c')


def test_steps_that_are_not_logged_have_no_taps():
  tapped, plain = make(taps=('stack:rms',)), make()
  assert tapped.untapped.taps is None and tapped.untapped is tapped.untapped and plain.untapped is plain
  assert tapped.untapped.layout is tapped.layout


@pytest.mark.parametrize('sinks', [False, True])
def test_entropy_of_attention_is_that_of_numpy(sinks):
  """With grouped heads, a causal mask and a sink; uniform logits have the logarithm of the number of keys."""
  rng = np.random.default_rng(0)
  query, key = rng.standard_normal((2, 4, 6, 3)), rng.standard_normal((2, 4, 3, 3))
  sink = rng.standard_normal(6).astype(np.float32) if sinks else None
  found = attention_entropy(jnp.float32(query), jnp.float32(key), Causal(), sinks=sink)
  logits = np.einsum('BTNH,BSNH->BTNS', query, key.repeat(2, axis=2)) / np.sqrt(3)
  for t in range(4):
    terms = logits[:, t, :, : t + 1]
    if sinks:
      terms = np.concatenate([terms, np.broadcast_to(sink[None, :, None], (2, 6, 1))], -1)
    p = np.exp(terms) / np.exp(terms).sum(-1, keepdims=True)
    np.testing.assert_allclose(found[:, t], -(p * np.log(p)).sum(-1), rtol=1e-4, atol=1e-6)
  if not sinks:
    flat = attention_entropy(jnp.zeros((2, 4, 6, 3)), jnp.float32(key), Causal())
    np.testing.assert_allclose(flat, np.broadcast_to(np.log([1, 2, 3, 4])[None, :, None], flat.shape), rtol=1e-5)


@pytest.mark.slow
def test_entropy_of_attention_is_tapped_by_its_name_alone_on_any_mesh():
  model = transformer_lm(vocab_size=11, model_dims=12, num_layers=2, num_heads=2).set(packed=False)
  ids = np.random.default_rng(0).integers(0, 11, (4, 6)).astype(np.int32)
  weights = np.ones((4, 6), np.float32)
  weights[0, 3:] = 0
  data, seen = {'ids': ids, 'labels': ids, 'weights': weights}, []
  for mesh in ((1, 1), (2, 3)):
    task = Config(LanguageModelTask, model=model, mesh_axis_names=('data', 'mdl'), ici_mesh_shape=mesh).instantiate()
    taps = step_taps(task, ['lm.transformer.*attention.entropy:mean,max', 'lm.*:rms'])
    partitioned = PartitionedTask(task, data, taps=taps)
    out = partitioned.train_step(drawn_state(partitioned), jax.random.key(1), data)
    seen.append({name: s.value for name, s in finish_summaries(jax.device_get(out.summaries)).items()})
  names = [name for name in seen[0] if 'entropy' in name]
  assert sorted(names) == [f'lm.transformer.layers.attention.entropy/{name}' for name in ('max', 'mean')]
  assert seen[0][names[0]].shape == (2,) and 0 < np.min(seen[0][names[0]]) < np.log(6)
  for name in names:
    np.testing.assert_allclose(seen[1][name], seen[0][name], rtol=1e-4)
