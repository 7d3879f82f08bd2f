"""Cross entropy in chunks of the classes equals that of whole logits, in less memory, on one device and on meshes."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn_state import drawn_state
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import SyntheticLMInput
from praxis_lite.instruments.plan.hlo import parse
from praxis_lite.layers import FullSoftmax, SharedEmbeddingSoftmax
from praxis_lite.layers.chunked_loss import usual_chunk_size
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.sharding.padding import padded_shape, slice_to
from praxis_lite.sharding.specs import to_partition_spec
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

B, T, D, V = 2, 3, 4, 11
AXES = ('replica', 'data', 'mdl')
BATCH = ('replica', 'data')
EVERYTHING = {'use_bias': True, 'soft_cap': 3.0, 'label_smoothing': 0.1, 'z_loss_weight': 0.1}


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def labels(batch=B):
  y = np.random.default_rng(1).integers(0, V, (batch, T)).astype(np.int32)
  y[0, :2] = 0, V - 1
  return y


def softmax(cls=FullSoftmax, **fields):
  layer = Config(cls, input_dims=D, num_classes=V, **fields).instantiate()
  rng = np.random.default_rng(4)
  return layer, jax.tree.map(lambda w: rng.standard_normal(w.shape).astype(np.float32), layer.abstract_init())


def results(layer, y):
  """(variables, x) -> ((objective, (cross entropy, correct)), gradients of variables and x)."""

  def objective(variables, x):
    out, side = layer.apply(variables, x, y)
    aux = sum(value * weight for value, weight in side.aux_losses.values())
    return jnp.sum(out.xent * (1 + jnp.arange(y.size).reshape(y.shape))) / y.size + aux, (out.xent, out.correct)

  return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)


def assert_close(actual, expected, tolerance=1e-5):
  """Relative to the largest entry of each array."""
  for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    assert a.dtype == e.dtype
    a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
    np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * (1e-3 + np.abs(e).max()))


# ---------------------------------------------------------------- one device

OPTIONS = [{}, {'use_bias': True}, {'soft_cap': 2.0}, {'label_smoothing': 0.2}, {'z_loss_weight': 0.3}, EVERYTHING]


@pytest.mark.slow_cases
@pytest.mark.parametrize('cls', [FullSoftmax, SharedEmbeddingSoftmax])
@pytest.mark.parametrize('options', OPTIONS, ids=str)
def test_values_and_gradients_are_those_of_whole_logits(cls, options):
  """For chunks of one class, chunks that divide V and that do not, and one of all."""
  layer, variables = softmax(cls, chunk_size=None, **options)
  sizes = (1, 4, 11, 100) if options is EVERYTHING else (4,)
  chunked = [softmax(cls, chunk_size=size, **options)[0] for size in sizes]

  @jax.jit
  def all_of_them(variables, x):
    return [results(one, labels())(variables, x) for one in (layer, *chunked)]

  expected, *actual = all_of_them(variables, normal(B, T, D))
  for each in actual:
    assert_close(each, expected)


def test_correct_is_the_first_class_of_the_largest_logit():
  layer, variables = softmax(chunk_size=2)
  correct = jax.jit(lambda w, x, y: layer.apply({'w': w}, x, y)[0].correct)
  ties = np.zeros((D, V), np.float32)
  assert correct(ties, normal(3, D), np.array([0, 1, 10])).tolist() == [True, False, False]
  ties[0, 4:6] = 1
  x = np.eye(D, dtype=np.float32)[[0, 0, 0]]
  assert correct(ties, x, np.array([4, 5, 0])).tolist() == [True, False, False]
  best = np.argmax(normal(3, D) @ variables['w'], -1)
  assert correct(variables['w'], normal(3, D), best).all()


def test_extreme_logits_and_impossible_labels():
  """As of whole logits: infinite ones count as probability 0, and a label out of range shows as NaN."""
  layer, _ = softmax(chunk_size=3, use_bias=True)
  whole, _ = softmax(chunk_size=None, use_bias=True)
  b = np.array([-np.inf] * 6 + [1e30, -1e30, 0, 0, -np.inf], np.float32)
  variables, x = {'w': np.zeros((D, V), np.float32), 'b': b}, normal(4, D)
  y = np.array([7, -1, V, 6])
  (_, (xent, _)), gradients = jax.jit(results(layer, y))(variables, x)
  (_, (expected, _)), expected_gradients = jax.jit(results(whole, y))(variables, x)
  np.testing.assert_array_equal(np.isnan(xent), [False, True, True, False])
  np.testing.assert_array_equal(xent, expected)
  assert_close(gradients, expected_gradients)
  assert np.isfinite(gradients[0]['b']).all()


def test_bfloat16_is_summed_in_float32():
  """Nearer to float32 than whole logits are, which are rounded to bfloat16; gradients have the dtype of the weights."""
  layer, variables = softmax(chunk_size=4, fprop_dtype='bfloat16', use_bias=True)
  whole, _ = softmax(chunk_size=None, fprop_dtype='bfloat16', use_bias=True)
  exact, _ = softmax(chunk_size=None, use_bias=True)
  x = normal(B, T, D).astype(jnp.bfloat16)
  (_, (xent, _)), gradients = jax.jit(results(layer, labels()))(variables, x)
  assert xent.dtype == jnp.float32
  assert [g.dtype for g in jax.tree.leaves(gradients)] == [jnp.float32, jnp.float32, jnp.bfloat16]
  rounded = jax.tree.map(lambda v: v.astype(jnp.bfloat16).astype(np.float32), variables)
  (_, (expected, _)), expected_gradients = jax.jit(results(exact, labels()))(rounded, x.astype(np.float32))
  np.testing.assert_allclose(xent, expected, rtol=1e-5, atol=1e-5)
  (_, (coarse, _)), _ = jax.jit(results(whole, labels()))(variables, x)
  assert np.abs(coarse - expected).max() > 1e-3
  for a, e in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients)):
    np.testing.assert_allclose(a.astype(np.float32), e, atol=0.01 * np.abs(e).max())


def test_logits_are_never_in_memory_as_a_whole():
  """A step needs less than a fifth of the memory of the logits; with whole logits, more than all of it."""
  rows, classes = 256, 16384
  layer = Config(SharedEmbeddingSoftmax, input_dims=8, num_classes=classes, chunk_size=512)
  arguments = {'w': jnp.zeros((classes, 8))}, jnp.zeros((rows, 8))

  def temporaries(config):
    step = jax.jit(results(config.instantiate(), np.zeros(rows, np.int32))).lower(*arguments).compile()
    assert (f'[{rows},{classes}]' in step.as_text()) == (config.chunk_size is None)
    return step.memory_analysis().temp_size_in_bytes

  logits = 4 * rows * classes
  assert temporaries(layer) < logits / 5
  assert temporaries(layer.clone(chunk_size=None)) > logits


def test_auto_takes_chunks_where_whole_logits_take_much_memory():
  def output(num_classes, rows, **fields):
    layer = Config(FullSoftmax, input_dims=D, num_classes=num_classes, **fields).instantiate()
    arrays = ((D, num_classes), jnp.float32), ((rows, D), jnp.float32), ((rows,), jnp.int32)
    w, x, y = itertools.starmap(jax.ShapeDtypeStruct, arrays)
    return jax.eval_shape(lambda w, x, y: layer.apply({'w': w}, x, y)[0], w, x, y)

  assert output(1000, 100).logits.shape == (100, 1000)
  assert output(65536, 1023).whole_logits is not None
  assert output(65536, 1024).whole_logits is None
  assert output(65536, 1024, chunk_size=None).whole_logits is not None
  assert output(8, 3, chunk_size=4).whole_logits is None
  mesh = jax.make_mesh((2,), ('data',), axis_types=(AxisType.Auto,))
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    assert output(65536, 1024).whole_logits is not None, 'each device has half of them'
  for devices, rows, is_whole in (1, 16_384, True), (1, 32_768, False), (2, 16_384, False):  # 4 and 8 of 79 GiB.
    with jax.sharding.use_abstract_mesh(abstract_mesh({'data': devices}, 'gpu', 'NVIDIA H100 80GB HBM3')):
      assert (output(65536, rows).whole_logits is not None) == is_whole


@pytest.mark.parametrize('size', [0, -3, 2.5, True, 'all'])
def test_impossible_chunk_sizes_are_refused(size):
  with pytest.raises(ConfigError, match=r'FullSoftmax.chunk_size: expected (a number of classes, at least 1|int)'):
    softmax(chunk_size=size)


class Doubled(FullSoftmax):
  def get_logits(self, x):
    return 2 * super().get_logits(x)


def test_a_layer_with_logits_of_its_own_is_not_cut_into_chunks():
  layer = Config(Doubled, input_dims=D, num_classes=2**16).instantiate()
  arrays = ((D, 2**16), jnp.float32), ((2**20, D), jnp.float32), ((2**20,), jnp.int32)
  w, x, y = itertools.starmap(jax.ShapeDtypeStruct, arrays)
  assert jax.eval_shape(lambda w, x, y: layer.apply({'w': w}, x, y)[0].logits, w, x, y).shape == (2**20, 2**16)
  with pytest.raises(ConfigError, match=r'Doubled.chunk_size: Doubled has a get_logits of its own'):
    softmax(Doubled, chunk_size=3)[0].apply(softmax()[1], normal(B, T, D), labels())


def test_logits_that_are_not_there_are_asked_for_elsewhere():
  layer, variables = softmax(chunk_size=4)
  out, _ = layer.apply(variables, normal(B, T, D), labels())
  with pytest.raises(ConfigError, match=r'no logits: .* in chunks .* get_logits\(x\), or set its chunk_size=None'):
    _ = out.logits


# ---------------------------------------------------------------- meshes


def on_mesh(shape, cls, wt, out, batch, **options):
  """Returns a function that compiles the step on a mesh by a plain jit, its results in true shapes, and those of one
  device."""
  whole, variables = softmax(cls, chunk_size=None, **options)
  config = Config(cls, input_dims=D, num_classes=V, chunk_size=2, mesh_axis_names=AXES, **options)
  config.weight_split_dims_mapping.wt = wt
  config.activation_split_dims_mapping.out = out
  layer = config.instantiate()
  x, y = normal(batch, T, D), labels(batch)
  expected = jax.jit(results(whole, y))(variables, x)
  devices = jax.devices()[: int(np.prod(shape))]
  mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)

  def sharding(weight):
    spec = to_partition_spec(weight.full_split_dims_mapping, AXES, rank=len(weight.full_shape))
    return NamedSharding(mesh, spec)

  shardings = jax.tree.map(sharding, layer.abstract_init())

  def pad(value, sharding, pad=jnp.pad):
    to = padded_shape(value.shape, sharding.spec, mesh)
    return pad(value, [(0, p - d) for d, p in zip(value.shape, to)])

  def step(padded, x):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      values, (of_variables, of_x) = results(layer, y)(slice_to(padded, variables), x[:batch])
      of_variables = jax.tree.map(lambda g, s: jax.lax.with_sharding_constraint(pad(g, s), s), of_variables, shardings)
      return values, (of_variables, of_x)

  padded = jax.tree.map(lambda v, s: jax.device_put(pad(v, s, np.pad), s), variables, shardings)
  rows = shape[0] * shape[1]
  x = jax.device_put(np.pad(x, [(0, -batch % rows), (0, 0), (0, 0)]), NamedSharding(mesh, PartitionSpec(BATCH)))
  values, (of_variables, of_x) = jax.device_get(GuardedJit(step)(padded, x))
  return lambda: jax.jit(step).lower(padded, x).compile(), (values, (slice_to(of_variables, variables), of_x)), expected


OUT = (BATCH, None, 'mdl')
MESHES = {
  'classes over mdl, fully sharded': ((2, 2, 2), FullSoftmax, ('data', 'mdl'), OUT, 4),
  'a small batch': ((2, 2, 2), SharedEmbeddingSoftmax, ('mdl', 'data'), OUT, 1),
  'more parts than chunks': ((1, 1, 8), SharedEmbeddingSoftmax, ('mdl', None), OUT, 2),
  'three devices': ((1, 1, 3), FullSoftmax, ('data', 'mdl'), OUT, 3),
  'classes over two axes': ((2, 2, 2), FullSoftmax, (None, ('data', 'mdl')), ('replica', None, ('data', 'mdl')), 2),
  'rows over 3, an axis that splits nothing': ((2, 3, 1), FullSoftmax, ('data', 'mdl'), ('data', None, 'mdl'), 24),
  'rows and lengths, fully sharded': (
    (1, 2, 3),
    SharedEmbeddingSoftmax,
    (None, ('data', 'mdl')),
    ('data', 'mdl', None),
    8,
  ),
  'logits left to the compiler': ((1, 3, 1), SharedEmbeddingSoftmax, ('data', None), None, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', MESHES)
def test_classes_split_over_a_mesh_equal_one_device(name):
  """11 classes over 2, 3, 4 and 8 devices, in chunks of 2, with everything that a softmax has."""
  _, actual, expected = on_mesh(*MESHES[name], **EVERYTHING)
  assert_close(actual, expected)


@pytest.mark.slow
def test_only_sums_and_the_gradient_of_the_input_cross_the_axis_that_splits_the_classes():
  program, actual, expected = on_mesh((1, 1, 4), FullSoftmax, (None, 'mdl'), OUT, 2)
  assert_close(actual, expected)
  text = program().as_text()
  sent = re.findall(r'= \(?((?:f32\[[\d,]*\]\S* ?)+)\)? (all-\w+|reduce-scatter|collective-\w+)\(', text)
  assert {kind for _, kind in sent} == {'all-reduce'}
  shapes = [shape for arrays, _ in sent for shape in re.findall(r'f32\[([\d,]*)\]', arrays)]
  assert shapes.count(f'2,{T},{D}') == 1, 'dx is summed once, after the loop'
  assert set(shapes) == {f'2,{T},{D}', f'2,{T}'}


@pytest.mark.slow
@pytest.mark.parametrize(
  'batch, gathers, sums',
  [(4, [(3, (1, 4, 2)), (3, (1, 4, 2))], (3, {2, 4})), (32, [(1, (1, 4, 6))], (1, {4, 6}))],
  ids=str,
)
def test_a_fully_sharded_table_is_gathered_and_its_gradient_summed_at_once_where_rows_are_many(batch, gathers, sums):
  """6 classes of a part in chunks of 2: chunk by chunk in each pass where the table is large beside the logits."""
  program, actual, expected = on_mesh((1, 4, 2), FullSoftmax, ('data', 'mdl'), OUT, batch)
  assert_close(actual, expected)
  executed = [(n, i) for i, n in parse(program()).executed_instructions() if i.collective]
  assert [(n, i.collective_result[0].dims) for n, i in executed if i.collective == 'all-gather'] == gathers
  reduced = [(n, array.dims) for n, i in executed if 'reduce' in i.collective for array in i.collective_result]
  tables = [(n, {*dims} - {1}) for n, dims in reduced]
  assert [table for table in tables if table[1] in ({2, 4}, {4, 6})] == [sums], reduced


TRAINED = {
  'classes over mdl': ((2, 2, 2), {}),
  'explicit collectives': ((1, 3, 1), {'partitioning': 'shard_map'}),
}


def trained(mesh, chunk_size, **fields):
  """Variables after two steps of gradient descent, and the evaluation, of a language model of 37 tokens."""
  sizes = {'vocab_size': 37, 'model_dims': 10, 'num_layers': 1, 'num_heads': 2, 'hidden_dims': 9, 'style': 'gpt2'}
  model = set_sharding(transformer_lm(**sizes), mdl_axis=None if fields else 'mdl')
  model.lm_tpl.softmax_tpl.chunk_size = chunk_size
  task = Config(SingleTask, model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh, **fields)
  task.train.inputs_split_mapping = {'map_1d': (BATCH,), 'map_2d': (BATCH, None)}
  task.train.learner.set(optimizer=Config(optax.sgd), learning_rate=1.0)
  data = Config(SyntheticLMInput, seq_len=6, vocab_size=37, batch_size=5, is_training=True).instantiate()
  with jax.default_matmul_precision('highest'):
    built = PartitionedTask(task.instantiate(), data.batch_struct())
    state, key, losses = drawn_state(built), jax.random.key(1), []
    for _ in range(2):
      out = built.train_step(state, key, batch := data.get_next())
      state = out.state
      losses.append(out.weighted_loss)
    evaluated = built.eval_step(state.mdl_vars, key, state.step, batch)
  return built.unpad(state.mdl_vars), *jax.device_get((losses, evaluated.mean_metrics))


@pytest.fixture(scope='module')
def with_whole_logits():
  return trained((1, 1, 1), None)


@pytest.mark.slow
@pytest.mark.parametrize('name', TRAINED)
def test_a_language_model_trains_and_evaluates_as_with_whole_logits_on_one_device(name, with_whole_logits):
  mesh, fields = TRAINED[name]
  actual = trained(mesh, 5, **fields)
  assert_close(actual, with_whole_logits, 2e-5)
  assert with_whole_logits[2]['accuracy'][1] == 5 * 6


@pytest.mark.parametrize(
  'classes, size', [(50_304, 3_144), (128_256, 8_016), (50_257, 3_200), (8_192, 1_024), (96, 1_024)]
)
def test_chunks_are_equal_where_sixteen_divide_the_classes(classes, size):
  assert usual_chunk_size(classes) == size
