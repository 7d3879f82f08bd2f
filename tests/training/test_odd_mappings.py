"""Gradients on a mesh are those of one device under mappings that XLA's partitioner computes wrongly without guards.

Each case was wrong, or did not compile, in some version of this package; losses were right in most of them.
"""

import functools

import jax
import numpy as np
import optax
import pytest
from drawn_state import drawn_state

from praxis_lite.common.config import Config
from praxis_lite.common.trees import leaves_by_path, path_name
from praxis_lite.layers import ConvNet
from praxis_lite.layers.images import Pooling
from praxis_lite.models import ClassificationModel, set_sharding, transformer_lm
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

AXES = ('replica', 'data', 'mdl')
ROWS = ('replica', 'data')


def task_of(model, mesh, inputs):
  task = Config(SingleTask, model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh)
  task.train.learner.set(optimizer=Config(optax.sgd), learning_rate=1.0)
  if mesh and inputs:
    task.train.inputs_split_mapping = inputs
  return task


def after_a_step(task, batch):
  """The loss, and the variables after one step of SGD: their first values less their gradients."""
  partitioned = PartitionedTask(task.instantiate(), jax.eval_shape(lambda: batch))
  out = partitioned.train_step(drawn_state(partitioned), jax.random.key(1), batch)
  return float(out.weighted_loss), partitioned.unpad(out.state).mdl_vars


@functools.cache
def on_one_device(make, batch, options):
  return after_a_step(make(None, **dict(options)), batch())


def check(make, batch, mesh, options=(), **mappings):
  """Compares a step on a mesh, with mappings, and on one device, with the same options."""
  loss, found = after_a_step(make(mesh, **dict(options), **mappings), batch())
  true_loss, expected = on_one_device(make, batch, options)
  np.testing.assert_allclose(loss, true_loss, rtol=1e-5)
  for (path, a), b in zip(leaves_by_path(found).items(), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=path_name(path))


# ---------------------------------------------------------------- images


def images(rows=8, size=8):
  image = np.random.default_rng(0).standard_normal((rows, size, size, 8)).astype(np.float32)
  return {'image': image, 'label': np.arange(rows, dtype=np.int32) % 8}


def few_images():
  return images(rows=5)


def classifier(mesh, groups=1, pooling=None, rows='data', out=None, wt=None, softmax=None):
  pool = None if pooling is None else Config(Pooling, **dict(zip(('window', 'strides', 'padding'), pooling)))
  network = Config(ConvNet, input_channels=8, channels=(8, 8), norm_tpl=None, pooling_tpl=pool)
  network.conv_tpl.groups = groups
  model = Config(ClassificationModel, num_classes=8, network_tpl=network)
  if mesh:
    network.conv_tpl.activation_split_dims_mapping.out = out
    network.conv_tpl.weight_split_dims_mapping.wt = wt
    model.softmax_tpl.weight_split_dims_mapping.wt = softmax
  return task_of(model, mesh, rows and {f'map_{n}d': (rows, *(None,) * (n - 1)) for n in (1, 2, 3, 4)})


CHANNELS = {'out': ('data', None, None, 'mdl'), 'wt': (None, None, None, 'mdl')}


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  ('groups', 'mesh', 'mappings'),
  [
    (8, (1, 2, 2), {}),
    (8, (1, 2, 4), {}),
    (2, (1, 2, 2), {}),
    (8, (2, 2, 2), {'rows': ROWS}),
    (8, (1, 2, 2), CHANNELS),
    (8, (2, 2, 2), CHANNELS),
  ],
  ids=['depthwise', 'depthwise 2x4', 'grouped', 'rows over two axes', 'channels split', 'an unused axis'],
)
def test_grouped_convolutions(groups, mesh, mappings):
  check(classifier, images, mesh, (('groups', groups),), **mappings)


@pytest.mark.slow_cases
@pytest.mark.parametrize('pooling', [((3, 3), (2, 2), 'SAME'), ((2, 2), (1, 1), 'VALID')], ids=['3/2', '2/1'])
@pytest.mark.parametrize(('mesh', 'rows', 'height'), [((1, 2, 2), 'data', 'mdl'), ((1, 2, 1), None, 'data')])
def test_pooling_of_split_images(pooling, mesh, rows, height):
  check(classifier, images, mesh, (('pooling', pooling),), rows=rows, out=(rows, height, None, None))


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'mappings',
  [
    {'softmax': ('data', 'mdl')},
    {'wt': (None, None, 'data', 'mdl')},
    {'softmax': ('data', 'mdl'), 'wt': (None, None, 'data', 'mdl'), 'rows': ROWS},
  ],
  ids=['softmax', 'filters', 'both'],
)
def test_weights_over_an_axis_of_the_rows(mappings):
  check(classifier, few_images, (2, 2, 2), out=(ROWS, None, None, 'mdl'), **mappings)


# ---------------------------------------------------------------- language models


def tokens(rows=4, length=4):
  rng = np.random.default_rng(0)
  ids, labels = rng.integers(0, 16, (2, rows, length)).astype(np.int32)
  return {'ids': ids, 'labels': labels, 'weights': np.ones((rows, length), np.float32)}


def more_tokens():
  return tokens(rows=8)


def odd_tokens():
  return tokens(rows=7, length=19)


def uniform_lm(mesh, rows=None, time=None, dims='mdl'):
  """Fully sharded and tensor parallel, with every activation split alike."""
  model = transformer_lm(vocab_size=16, model_dims=16, num_layers=1, num_heads=2, hidden_dims=64)
  if mesh:
    set_sharding(model, batch_axes=rows)
    lm = model.lm_tpl
    block = lm.transformer_tpl.layers_tpl
    for layer in (lm, block, block.attention_tpl, block.ff_tpl, lm.embedding_tpl):
      layer.activation_split_dims_mapping.out = (rows, time, dims)
    if time is not None:
      block.ff_tpl.activation_split_dims_mapping.hidden = (rows, time, 'mdl')
      block.attention_tpl.activation_split_dims_mapping.set(
        blnh=(rows, time, 'mdl', None), blkh=(rows, time, 'mdl', None)
      )
      lm.softmax_tpl.activation_split_dims_mapping.out = (rows, time, 'mdl')
  return task_of(model, mesh, {'map_2d': (rows, time)})


@pytest.mark.slow
@pytest.mark.parametrize(
  ('rows', 'time'),
  [(ROWS, None), (('data', 'replica'), None), ('data', 'replica'), (None, ROWS)],
  ids=['rows over two axes', 'the other order', 'rows and length', 'length over two axes'],
)
def test_activations_that_are_split_in_every_dimension(rows, time):
  check(uniform_lm, tokens, (2, 2, 2), rows=rows, time=time)


def attention_lm(mesh, heads=4, head_dims=4, x=None, w=None, q=None, k=None):
  model = transformer_lm(vocab_size=16, model_dims=16, num_layers=1, num_heads=heads, hidden_dims=64)
  block = model.lm_tpl.transformer_tpl.layers_tpl
  block.attention_tpl.dims_per_head = head_dims
  if mesh:
    for layer in (model.lm_tpl, block):
      layer.activation_split_dims_mapping.out = x
    block.attention_tpl.weight_split_dims_mapping.wt = w
    block.attention_tpl.activation_split_dims_mapping.set(blnh=q, blkh=k, out=x)
  return task_of(model, mesh, x and x[0] and {'map_2d': (x[0], None)})


R, D, M, N = 'replica', 'data', 'mdl', None


@pytest.mark.slow
@pytest.mark.parametrize(
  ('batch', 'options', 'mappings'),
  [
    (more_tokens, (), {'x': (R, N, (D, M)), 'w': (N, N, D), 'q': (R, N, N, D), 'k': (R, M, D, N)}),
    (tokens, (('head_dims', 8),), {'x': (D, N, R), 'w': (N, N, (R, M)), 'q': (D, M, R, N), 'k': (N, (D, M), N, N)}),
    (more_tokens, (('heads', 8),), {'x': ((D, R), N, M), 'w': (N, M, N), 'q': ((D, R), N, N, M), 'k': (N, R, D, N)}),
    (tokens, (('heads', 8),), {'x': (N, M, D), 'w': (M, (R, D), N), 'q': (N, M, N, D), 'k': (D, N, (R, M), N)}),
  ],
  ids=['rows over replica', 'rows over data', 'whole weights', 'whole batch'],
)
def test_keys_and_queries_that_are_split_in_different_ways(batch, options, mappings):
  check(attention_lm, batch, (2, 2, 2), options, **mappings)


def permuted_lm(mesh):
  """The gradient of attention.out.w came back with its rows permuted."""
  model = transformer_lm(vocab_size=16, model_dims=30, num_layers=2, num_heads=3, dims_per_head=10, hidden_dims=16)
  attention = model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl
  if mesh:
    attention.weight_split_dims_mapping.wt = ((M, D), N, N)
    attention.activation_split_dims_mapping.set(blnh=(M, N, (R, D), N), out=(N, R, N))
  return task_of(model, mesh, None)


def hidden_lm(mesh):
  """A hidden activation whose length is split over two axes, and a weight over one of them."""
  model = transformer_lm(vocab_size=16, model_dims=30, num_layers=1, num_heads=1, dims_per_head=10, hidden_dims=77)
  block = model.lm_tpl.transformer_tpl.layers_tpl
  if mesh:
    block.ff_tpl.weight_split_dims_mapping.set(wt=(N, M))
    block.ff_tpl.activation_split_dims_mapping.hidden = (N, (D, M), R)
    block.activation_split_dims_mapping.out = (M, N, R)
  return task_of(model, mesh, None)


def table_lm(mesh):
  """A table and ids that one axis splits did not compile."""
  model = transformer_lm(vocab_size=97, model_dims=30, num_layers=1, num_heads=1, dims_per_head=8, hidden_dims=16)
  if mesh:
    model.lm_tpl.embedding_tpl.weight_split_dims_mapping.wt = (N, D)
  return task_of(model, mesh, {'map_2d': (M, D)})


@pytest.mark.slow_cases
@pytest.mark.parametrize('make', [permuted_lm, hidden_lm, table_lm])
def test_uneven_models_whose_steps_were_wrong(make):
  check(make, odd_tokens, (1, 4, 2) if make is table_lm else (2, 2, 2))
