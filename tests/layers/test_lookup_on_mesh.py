"""Lookups on a mesh: ids that are split unevenly, and vectors that are exchanged instead of the table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.instruments.testing import collectives
from praxis_lite.layers import Embedding, SharedEmbeddingSoftmax, embeddings
from praxis_lite.layers.base.call import Surroundings
from praxis_lite.sharding import GuardedJit


@pytest.mark.parametrize('split', [('data', None), (None, 'mdl'), ('mdl', 'data')])
def test_gradient_of_a_table_does_not_see_the_padding_of_ids(split):
  """XLA pads ids that are split unevenly, and its partitioned scatter would add the padding's gradient to row 0."""
  mesh = jax.make_mesh((2, 4), ('data', 'mdl'), axis_types=(AxisType.Auto,) * 2)
  rows, length, vocab, dims = 3, 6, 5, 4
  ids = np.random.default_rng(0).integers(0, vocab, (rows, length)).astype(np.int32)
  table = np.random.default_rng(1).standard_normal((vocab, dims)).astype(np.float32)

  def loss(table):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      spec = NamedSharding(mesh, PartitionSpec(*split, None))
      vectors = jax.lax.with_sharding_constraint(embeddings.lookup_rows(table, ids), spec)
      return jnp.sum(jax.lax.with_sharding_constraint(jnp.exp(vectors), spec))

  counts = np.bincount(ids.ravel(), minlength=vocab)
  np.testing.assert_allclose(GuardedJit(jax.grad(loss))(table), counts[:, None] * np.exp(table), rtol=1e-5)


AXES = ('replica', 'data', 'mdl')
BATCH = ('replica', 'data')
ROWS, TABLE = (BATCH, None, None), ('mdl', 'data')
# Mesh, splits of the table and of the vectors, shapes of ids and table; whether vectors are exchanged.
LOOKUPS = {
  'an axis of 3': ((1, 3, 1), TABLE, ROWS, (6, 2), (37, 6), True),
  'classes over 3, unevenly': ((1, 2, 3), TABLE, ROWS, (4, 3), (37, 8), True),
  'an axis of the rows that does not split the table': ((2, 3, 1), TABLE, ROWS, (6, 2), (37, 6), True),
  'an axis that splits nothing': ((2, 2, 2), TABLE, ('data', None, None), (4, 2), (37, 6), True),
  'both axes of the rows': ((2, 2, 2), ('mdl', BATCH), ROWS, (4, 2), (37, 8), True),
  'lengths too, unevenly': ((1, 2, 2), (None, 'data'), (BATCH, 'mdl', None), (4, 3), (37, 6), True),
  'lengths only': ((1, 2, 2), (None, 'mdl'), (BATCH, 'mdl', None), (2, 4), (37, 6), True),
  'ids without lengths': ((1, 4, 1), TABLE, ROWS[:2], (8,), (37, 8), True),
  'a small table': ((1, 2, 1), TABLE, ROWS, (8, 4), (11, 6), False),
  'dims that do not divide evenly': ((1, 2, 2), TABLE, ROWS, (4, 2), (37, 7), False),
  'rows that do not divide evenly': ((1, 2, 2), TABLE, ROWS, (3, 2), (37, 6), False),
  'the axis of the table comes first': ((2, 2, 1), ('mdl', 'replica'), ROWS, (4, 2), (37, 6), False),
  'classes and rows over the same axis': ((2, 2, 1), ('replica', 'data'), ROWS, (4, 2), (37, 6), False),
}


def lookup(cls, dtype, table, vectors, shape, table_shape, mesh=None):
  """The vectors, sums that depend on them with their gradient, and what the layer says about its split."""
  field = 'emb' if cls is SharedEmbeddingSoftmax else 'out'
  config = Config(cls, input_dims=table_shape[1], num_classes=table_shape[0], fprop_dtype=dtype)
  config.set(scale_sqrt_depth=True, mesh_axis_names=AXES if mesh else None)
  if mesh:
    config.weight_split_dims_mapping.wt = table
    config.activation_split_dims_mapping.set(**{field: vectors})
  layer, rng, told = config.instantiate(), np.random.default_rng(0), []
  ids = rng.integers(0, table_shape[0], shape).astype(np.int32)
  ids.flat[:2] = -1, table_shape[0]
  weights = rng.standard_normal((*shape, table_shape[1])).astype(np.float32)

  def objective(w):
    call = {
      'method': 'emb_lookup' if field == 'emb' else '__call__',
      'surroundings': Surroundings(listener=told.append),
    }
    y, _ = layer.apply({'w': w}, ids, **call)
    return jnp.sum(jnp.where(jnp.isnan(y), 0, jnp.sin(y.astype(jnp.float32)) * weights)), y

  def step(w):
    with jax.sharding.use_abstract_mesh((mesh or jax.make_mesh((1, 1, 1), AXES)).abstract_mesh):
      return jax.value_and_grad(objective, has_aux=True)(w)

  w = rng.standard_normal(table_shape).astype(np.float32)
  if mesh:
    w = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))
  return GuardedJit(step), w, told


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', LOOKUPS)
def test_vectors_are_exchanged_where_that_sends_less_than_the_table(name):
  shape, *declared, exchanged = LOOKUPS[name]
  devices = jax.devices()[: int(np.prod(shape))]
  mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
  cls = SharedEmbeddingSoftmax if len(name) % 2 else Embedding
  plain, w, _ = lookup(cls, jnp.float32, *declared)
  step, placed, told = lookup(cls, jnp.float32, *declared, mesh=mesh)
  (expected, vectors), gradient = plain(w)
  (found, of_mesh), of_table = step(placed)
  assert np.isnan(vectors).any()
  np.testing.assert_array_equal(of_mesh, vectors)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  np.testing.assert_allclose(of_table, gradient, rtol=1e-5, atol=1e-5)
  assert any(c.exchange for c in told) == exchanged
  assert all(('exchanged after the lookup over' in c.remark) == exchanged for c in told if c.remark)
  if exchanged:
    assert collectives(step.lower(placed).compile())['all-to-all'].count == 2, 'of vectors, and of their gradients'


def test_gradients_of_exchanged_vectors_are_added_in_float32():
  """A sum of ones in bfloat16 does not exceed 256."""
  mesh = jax.make_mesh((1, 2, 1), AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:2])
  config = Config(Embedding, input_dims=2, num_classes=1000, fprop_dtype=jnp.bfloat16, mesh_axis_names=AXES)
  config.weight_split_dims_mapping.wt, config.activation_split_dims_mapping.out = TABLE, ROWS
  layer, ids = config.instantiate(), np.zeros((2, 300), np.int32)

  def total(w):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      y, _ = layer.apply({'w': w}, ids)
      assert y.dtype == jnp.bfloat16
      return jnp.sum(y)

  w = jax.device_put(np.zeros((1000, 2), np.float32), NamedSharding(mesh, PartitionSpec()))
  assert GuardedJit(jax.grad(total))(w)[0].tolist() == [600, 600]
