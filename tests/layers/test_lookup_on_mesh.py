"""Rows looked up by ids that are split unevenly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite.layers import embeddings
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
