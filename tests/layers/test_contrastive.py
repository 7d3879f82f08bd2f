"""Contrastive losses: chunks against whole logits in NumPy and by autodiff, on meshes, and padding."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from padded_layers import place_variables, step_on_mesh

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import ContrastiveLoss

pytestmark = pytest.mark.usefixtures('shared_programs')

B, E = 7, 5
RNG = np.random.default_rng(0)
IMAGE, TEXT = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in RNG.standard_normal((2, B, E)).astype(np.float32))
WEIGHTS = np.array([1, 1, 0, 2, 0.5, 1, 1], np.float32)
VARIABLES = {
  'softmax': {'log_scale': np.float32(1.1)},
  'sigmoid': {'log_scale': np.float32(1.1), 'bias': np.float32(-1)},
}
KINDS = pytest.mark.parametrize('kind', VARIABLES)


def make(kind, **fields):
  return Config(ContrastiveLoss, kind=kind, **fields).instantiate()


def whole(kind, variables, image, text, weights, np=np):
  """The losses from whole logits."""
  logits = np.exp(variables['log_scale']) * image @ text.T + variables.get('bias', 0)
  is_pair = weights > 0
  own = np.diagonal(logits)
  if kind == 'sigmoid':
    signs = 2 * np.eye(len(image)) - 1
    return np.where(is_pair, (np.log1p(np.exp(-signs * logits)) * is_pair).sum(1), 0)
  among_texts = np.log((np.exp(logits) * is_pair).sum(1))
  among_images = np.log((np.exp(logits) * is_pair[:, None]).sum(0))
  return np.where(is_pair, (among_texts + among_images) / 2 - own, 0)


def step(layer, variables, args):
  """The weighted mean of the losses, and its gradients."""

  def loss(variables, image, text):
    output, _ = layer.apply(variables, image, text, args[2])
    return jnp.sum(output.loss * args[2]) / jnp.sum(args[2]), output

  return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(variables, *args[:2])


@functools.cache
def expected(kind):
  def loss(variables, image, text):
    return jnp.sum(whole(kind, variables, image, text, WEIGHTS, jnp) * WEIGHTS) / WEIGHTS.sum()

  return jax.value_and_grad(loss, argnums=(0, 1, 2))(VARIABLES[kind], IMAGE, TEXT)


def assert_close(found, wanted):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted)


@pytest.mark.slow_cases
@pytest.mark.parametrize('chunk_size', [3, None, 1, 7, 99])
@KINDS
def test_chunks_have_the_losses_and_gradients_of_whole_logits(kind, chunk_size):
  layer = make(kind, chunk_size=chunk_size)
  (loss, output), grads = step(layer, VARIABLES[kind], (IMAGE, TEXT, WEIGHTS))
  np.testing.assert_allclose(output.loss, whole(kind, VARIABLES[kind], IMAGE, TEXT, WEIGHTS), rtol=1e-5, atol=1e-6)
  assert_close((loss, grads), expected(kind))
  logits = IMAGE @ TEXT.T
  best = np.where(WEIGHTS > 0, logits, -9).argmax(1) == np.arange(B)
  np.testing.assert_array_equal(np.asarray(output.correct)[WEIGHTS > 0], best[WEIGHTS > 0])


@pytest.mark.slow_cases
@pytest.mark.parametrize('shape', [(1, 3), (2, 2), (2, 1)], ids=str)
@KINDS
def test_rows_split_over_a_mesh_have_the_losses_and_gradients_of_one_device(kind, shape):
  """Seven rows over axes of 3, of 2 x 2, and of 2; the last mesh has an axis that nothing uses."""
  mesh = jax.make_mesh((*shape, 1), ('replica', 'data', 'mdl'), axis_types=(AxisType.Auto,) * 3)
  config = Config(ContrastiveLoss, kind=kind, chunk_size=2, mesh_axis_names=mesh.axis_names)
  config.activation_split_dims_mapping.set(out=(('replica', 'data'),), logits=(('replica', 'data'), None))
  layer = config.instantiate()
  run = step_on_mesh(step, layer, VARIABLES[kind], mesh)
  (loss, _), grads = run(place_variables(layer, VARIABLES[kind], mesh), (IMAGE, TEXT, WEIGHTS))
  assert_close((loss, grads), expected(kind))


@KINDS
def test_logits_of_all_pairs_are_never_in_memory(kind):
  layer, rows, size = make(kind, chunk_size=8), 512, 8
  args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((rows, E), (rows, E), (rows,))]
  program = jax.jit(lambda v, *a: step(layer, v, a)).lower(VARIABLES[kind], *args).as_text()
  assert f'tensor<{rows}x{size}xf32>' in program
  assert f'{rows}x{rows}' not in program and f'tensor<{rows // size}x{rows}x{size}' not in program


@pytest.mark.parametrize('rows', [1, 2])
@KINDS
def test_few_rows_rows_of_padding_alone_and_bfloat16(kind, rows):
  layer = make(kind, chunk_size=4)
  args = IMAGE[:rows], TEXT[:rows], np.zeros(rows, np.float32)
  output, _ = layer.apply(VARIABLES[kind], *args)
  assert (np.asarray(output.loss) == 0).all()
  output, _ = layer.apply(VARIABLES[kind], *(jnp.asarray(x, jnp.bfloat16) for x in args[:2]))
  assert output.loss.dtype == np.float32
  np.testing.assert_allclose(output.loss, whole(kind, VARIABLES[kind], *args[:2], np.ones(rows)), atol=0.03)


def test_first_values_and_mistakes():
  softmax, sigmoid = (make(kind).init(jax.random.key(0)) for kind in VARIABLES)
  np.testing.assert_allclose(np.exp(softmax['log_scale']), 1 / 0.07, rtol=1e-6)
  np.testing.assert_allclose((np.exp(sigmoid['log_scale']), sigmoid['bias']), (10, -10), rtol=1e-6)
  with pytest.raises(ConfigError, match=r"kind.*'tanh'"):
    make('tanh')
  with pytest.raises(ConfigError, match='chunk_size: expected at least 1, got 0'):
    make('softmax', chunk_size=0)
