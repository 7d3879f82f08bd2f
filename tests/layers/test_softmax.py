"""Embeddings, softmax layers and cross entropy, against NumPy in float64 and plain autodiff."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import Embedding, FullSoftmax, SharedEmbeddingSoftmax, cross_entropy
from praxis_lite.sharding.weights import WeightHParamsCollection, WeightInit

B, T, D, V = 2, 3, 4, 5


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def labels():
  return np.random.default_rng(1).integers(0, V, (B, T)).astype(np.int32)


def reference(logits, labels, smoothing=0.0):
  """Cross entropy and log normalizer from probabilities, in float64."""
  logits = logits.astype(np.float64)
  logits -= (top := logits.max(-1, keepdims=True))
  normalizer = np.log(np.exp(logits).sum(-1))
  target = (1 - smoothing) * np.eye(logits.shape[-1])[labels] + smoothing / logits.shape[-1]
  return normalizer - (target * logits).sum(-1), normalizer + top[..., 0]


# ---------------------------------------------------------------- cross entropy


@pytest.mark.parametrize('prob', [0.1, 0.5])
def test_label_smoothing_of_praxis_is_that_of_more(prob):
  """It gives the probability to the other V - 1 classes; see docs/from-pax.md."""
  logits = normal(B, T, V)
  target = np.where(np.eye(V)[labels()] == 1, 1 - prob, prob / (V - 1))
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  xent, _ = cross_entropy(jnp.asarray(logits), labels(), prob * V / (V - 1))
  np.testing.assert_allclose(xent, -(target * log_probs).sum(-1), rtol=1e-5)


@pytest.mark.parametrize('smoothing', [0.0, 0.2])
@pytest.mark.parametrize('size', [1.0, 1e4])
def test_cross_entropy_and_normalizer(size, smoothing):
  logits = size * normal(B, T, V)
  actual, expected = cross_entropy(logits, labels(), smoothing), reference(logits, labels(), smoothing)
  for a, e in zip(actual, expected):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5 * size)


@pytest.mark.parametrize('smoothing', [0.0, 0.2])
@pytest.mark.parametrize('transform', [jax.jit, jax.checkpoint, jax.vmap], ids=['jit', 'checkpoint', 'vmap'])
def test_gradient_is_that_of_the_formula(smoothing, transform):
  """Of both results at once, against autodiff of the definition."""
  logits, of_xent, of_normalizer = normal(B, T, V), normal(B, T, seed=2), normal(B, T, seed=3)

  def definition(logits, labels):
    log_probs = jax.nn.log_softmax(logits)
    target = (1 - smoothing) * jax.nn.one_hot(labels, V) + smoothing / V
    return -jnp.sum(target * log_probs, -1), jax.nn.logsumexp(logits, -1)

  def loss(fn):
    def weighed(logits):
      xent, normalizer = transform(fn)(logits, labels())
      return jnp.sum(xent * of_xent + normalizer * of_normalizer)

    return weighed

  actual = jax.jit(jax.grad(loss(lambda x, y: cross_entropy(x, y, smoothing))))(logits)
  np.testing.assert_allclose(actual, jax.jit(jax.grad(loss(definition)))(logits), atol=1e-5)


def test_second_derivatives_are_those_of_the_formula():
  def hessian_of(fn):
    return jax.jit(jax.jacrev(jax.grad(lambda x: fn(x, labels()[0])[0].sum())))(normal(T, V))

  def definition(x, y):
    return (jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, y[:, None], -1)[:, 0],)

  np.testing.assert_allclose(hessian_of(cross_entropy), hessian_of(definition), atol=1e-5)


def test_extreme_logits_have_finite_gradients():
  logits = np.array([[1e30, -1e30, 0.0], [-np.inf, 0.0, 0.0]], np.float32)
  gradient = jax.grad(lambda x: cross_entropy(x, jnp.array([1, 1]))[0].sum())(logits)
  np.testing.assert_allclose(gradient, [[1, -1, 0], [0, -0.5, 0.5]], atol=1e-6)


@pytest.mark.parametrize('label', [-1, V, -V, 10**6])
def test_impossible_labels_show(label):
  xent, normalizer = cross_entropy(normal(2, V), jnp.array([1, label]))
  np.testing.assert_array_equal(np.isnan(xent), [False, True])
  assert np.isfinite(normalizer).all()


def test_bfloat16_logits_are_summed_in_float32():
  """4096 equal logits: in bfloat16, the sum would stop growing at 256."""
  _, normalizer = cross_entropy(jnp.zeros((1, 4096), jnp.bfloat16), jnp.array([0]))
  np.testing.assert_allclose(normalizer, np.log(4096), rtol=1e-6)


def test_a_step_needs_memory_for_the_logits_once():
  """Autodiff of the definition needs it twice, to keep the exponentials as well."""
  x, w, y = jnp.zeros((64, 8)), jnp.zeros((8, 4096)), jnp.zeros((64,), jnp.int32)
  step = jax.jit(jax.grad(lambda x, w: cross_entropy(x @ w, y)[0].sum(), argnums=(0, 1))).lower(x, w).compile()
  assert step.memory_analysis().temp_size_in_bytes < 1.5 * 64 * 4096 * 4


def test_vocabulary_split_unevenly_is_reduced_in_place():
  """No device ever holds the whole vocabulary: what crosses devices are sums and maxima over it."""
  mesh = jax.make_mesh((8,), ('mdl',), axis_types=(AxisType.Auto,))
  config = Config(FullSoftmax, input_dims=D, num_classes=1021, mesh_axis_names=('mdl',))
  config.weight_split_dims_mapping.wt = (None, 'mdl')
  config.activation_split_dims_mapping.out = (None, None, 'mdl')
  layer = config.instantiate()
  variables, x, y = layer.init(jax.random.key(0)), normal(B, T, D), labels()

  def loss(variables, x):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return layer.apply(variables, x, y)[0].xent.sum()

  with jax.set_mesh(mesh):
    sharding = jax.NamedSharding(mesh, jax.P())
    inputs = jax.device_put((variables, x), sharding)
    step = jax.jit(jax.value_and_grad(loss, argnums=1), out_shardings=sharding).lower(*inputs).compile()
    value, gradient = step(*inputs)
  text = step.as_text()
  assert 'all-reduce' in text and 'all-gather' not in text and 'all-to-all' not in text
  assert f'f32[{B},{T},1021]' not in text
  expected = jax.value_and_grad(lambda v, x: layer.apply(v, x, y)[0].xent.sum(), argnums=1)(variables, x)
  np.testing.assert_allclose(value, expected[0], rtol=1e-5)
  np.testing.assert_allclose(gradient, expected[1], atol=1e-5)


# ---------------------------------------------------------------- softmax layers


def softmax(cls=FullSoftmax, **fields):
  layer = Config(cls, input_dims=D, num_classes=V, **fields).instantiate()
  rng = np.random.default_rng(4)
  return layer, jax.tree.map(lambda w: rng.standard_normal(w.shape).astype(np.float32), layer.abstract_init())


@pytest.mark.parametrize('cls', [FullSoftmax, SharedEmbeddingSoftmax])
@pytest.mark.parametrize('use_bias', [True, False])
def test_softmax_layer(cls, use_bias):
  layer, v = softmax(cls, use_bias=use_bias)
  w = v['w'] if cls is FullSoftmax else v['w'].T
  x = normal(B, T, D)
  expected = x @ w + v.get('b', 0)
  out, side = layer.apply(v, x, labels())
  np.testing.assert_allclose(out.logits, expected, atol=1e-5)
  np.testing.assert_allclose(out.xent, reference(expected, labels())[0], atol=1e-5)
  np.testing.assert_array_equal(layer.apply(v, x, method='get_logits')[0], out.logits)
  assert not side.aux_losses


def test_label_smoothing_is_that_of_the_cross_entropy():
  layer, v = softmax(label_smoothing=0.3)
  out, _ = layer.apply(v, normal(B, T, D), labels())
  np.testing.assert_allclose(out.xent, reference(np.asarray(out.logits), labels(), 0.3)[0], atol=1e-5)


def test_soft_cap_bounds_logits_and_leaves_small_ones():
  plain, v = softmax()
  capped, _ = softmax(soft_cap=2.0)
  x = normal(B, T, D)
  logits = np.asarray(plain.apply(v, x, method='get_logits')[0])
  np.testing.assert_allclose(capped.apply(v, x, method='get_logits')[0], 2 * np.tanh(logits / 2), atol=1e-5)
  np.testing.assert_allclose(
    capped.apply(v, 1e-3 * x, method='get_logits')[0], 1e-3 * logits, rtol=1e-4
  )  # tanh(a) = a - a^3 / 3 + ...


def test_z_loss_is_the_mean_square_of_the_normalizer_over_labels_that_count():
  layer, v = softmax(z_loss_weight=0.01)
  x, weights = normal(B, T, D), np.array([[1, 1, 0], [0.5, 0, 0]], np.float32)
  out, side = layer.apply(v, x, labels(), weights)
  normalizer = reference(np.asarray(out.logits), labels())[1]
  value, weight = side.aux_losses['FullSoftmax/z_loss']
  np.testing.assert_allclose(value, np.average(normalizer**2, weights=weights), rtol=1e-5)
  np.testing.assert_allclose(weight, 0.01)
  _, side = layer.apply(v, x, labels())
  np.testing.assert_allclose(side.aux_losses['FullSoftmax/z_loss'][0], (normalizer**2).mean(), rtol=1e-5)
  _, side = layer.apply(v, x, labels(), np.zeros((B, T), np.float32))
  assert side.aux_losses['FullSoftmax/z_loss'][0] == 0


def test_bias_is_not_regularized_and_split_as_the_classes():
  for cls, wt in ((FullSoftmax, ('data', 'mdl')), (SharedEmbeddingSoftmax, ('mdl', 'data'))):
    config = Config(cls, input_dims=D, num_classes=V, use_bias=True)
    config.weight_split_dims_mapping.wt = wt
    weights = config.instantiate().abstract_init()
    assert weights['b'].tensor_split_dims_mapping == ('mdl',)
    assert weights['b'].collections == {WeightHParamsCollection.SKIP_REGULARIZATION}
    assert not weights['w'].collections


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'label_smoothing': 1.0}, 'label_smoothing: expected at least 0 and less than 1, got 1.0'),
    ({'soft_cap': 0.0}, 'soft_cap: expected more than 0, or None, got 0.0'),
  ],
)
def test_impossible_hyperparameters_are_refused(fields, message):
  with pytest.raises(ConfigError, match=message):
    softmax(**fields)


# ---------------------------------------------------------------- embeddings


@pytest.mark.parametrize('style', ['gather', 'matmul'])
def test_embedding_takes_rows(style):
  layer = Config(Embedding, num_classes=V, input_dims=D, lookup_style=style).instantiate()
  table = normal(V, D)
  np.testing.assert_array_equal(layer.apply({'w': table}, labels())[0], table[labels()])
  scaled = Config(Embedding, num_classes=V, input_dims=D, scale_sqrt_depth=True).instantiate()
  np.testing.assert_allclose(scaled.apply({'w': table}, labels())[0], 2 * table[labels()], rtol=1e-6)


@pytest.mark.parametrize('style', ['gather', 'matmul'])
def test_gradient_of_an_embedding_is_the_sum_over_its_uses(style):
  layer = Config(Embedding, num_classes=V, input_dims=D, lookup_style=style).instantiate()
  ids, of_y = np.array([1, 3, 1], np.int32), normal(3, D)
  gradient = jax.grad(lambda w: jnp.sum(layer.apply({'w': w}, ids)[0] * of_y))(normal(V, D))
  np.testing.assert_allclose(gradient, np.eye(V)[ids].T @ of_y, atol=1e-6)


@pytest.mark.parametrize('style', ['gather', 'matmul'])
@pytest.mark.parametrize('ids', [[0, V], [-1, 0], [0, -V]])
def test_ids_out_of_range_show(ids, style):
  layer = Config(Embedding, num_classes=V, input_dims=D, lookup_style=style).instantiate()
  y, _ = layer.apply({'w': normal(V, D)}, np.array(ids))
  np.testing.assert_array_equal(np.isnan(y).all(-1), [i not in range(V) for i in ids])


@pytest.mark.parametrize('cls', [Embedding, SharedEmbeddingSoftmax])
def test_unknown_lookup_style_is_refused(cls):
  with pytest.raises(ConfigError, match=r"lookup_style: expected 'gather' or 'matmul', got 'index'"):
    Config(cls, num_classes=V, input_dims=D, lookup_style='index').instantiate()


def test_vectors_have_a_norm_of_about_one_at_first():
  for init in (WeightInit.GaussianFanIn(), WeightInit.UniformFanIn(3**0.5)):
    layer = Config(Embedding, num_classes=50, input_dims=400, params_init=init).instantiate()
    norms = np.linalg.norm(layer.init(jax.random.key(0))['w'], axis=-1)
    np.testing.assert_allclose(norms, np.ones(50), atol=0.2)


def test_both_ends_of_a_model_share_one_table():
  layer, v = softmax(SharedEmbeddingSoftmax, scale_sqrt_depth=True)
  ids = labels()
  vectors, _ = layer.apply(v, ids, method='emb_lookup')
  np.testing.assert_allclose(vectors, 2 * v['w'][ids], rtol=1e-6)
  logits, _ = layer.apply(v, v['w'], method='get_logits')
  np.testing.assert_allclose(logits, v['w'] @ v['w'].T, atol=1e-5)
