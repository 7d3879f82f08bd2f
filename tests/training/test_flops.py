"""Operations counted in a jaxpr, against counts by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from praxis_lite.experiments.long_context import AXES, RingLmTiny
from praxis_lite.layers.attention_spec import AttentionSpec
from praxis_lite.layers.blockwise import blockwise_attention
from praxis_lite.layers.context_parallel import SequenceSplit, context_parallel_attention
from praxis_lite.layers.masks import Visibility
from praxis_lite.training import PartitionedTask
from praxis_lite.training.flops import count_flops, model_flops

ROWS, DIMS, LAYERS = 32, 64, 7
ONE_PRODUCT = 2 * ROWS * DIMS * DIMS
X = jnp.ones((ROWS, DIMS))
WS = jnp.ones((LAYERS, DIMS, DIMS))


def layers(ws, x):
  return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0].sum()


def flops(fn, *args):
  return count_flops(jax.make_jaxpr(fn)(*args))


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
  assert flops(layers, WS, X) == LAYERS * ONE_PRODUCT
  assert flops(jax.jit(layers), WS, X) == LAYERS * ONE_PRODUCT


def test_xla_counts_it_once_which_is_why_its_own_count_is_not_used():
  compiled = jax.jit(layers).lower(WS, X).compile().cost_analysis()
  assert compiled['flops'] < 2 * ONE_PRODUCT


def test_backward_is_twice_forward():
  assert flops(jax.grad(layers, argnums=(0, 1)), WS, X) == 3 * LAYERS * ONE_PRODUCT


def test_rematerialization_does_not_change_the_forward_count():
  def remat(ws, x):
    return jax.lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None)), x, ws)[0].sum()

  assert flops(remat, WS, X) == LAYERS * ONE_PRODUCT


def test_batched_products_and_attention():
  q = jnp.ones((2, 16, 4, 8))
  assert flops(lambda q: jax.nn.dot_product_attention(q, q, q), q) == 2 * (2 * 2 * 4 * 16 * 16 * 8)


def test_convolutions_also_grouped():
  x, kernel = jnp.ones((2, 10, 10, 4)), jnp.ones((3, 3, 4, 6))
  conv = lambda x, k, groups: jax.lax.conv_general_dilated(  # noqa: E731
    x, k, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'), feature_group_count=groups
  )
  assert flops(lambda x, k: conv(x, k, 1), x, kernel) == 2 * (2 * 10 * 10 * 6) * (3 * 3 * 4)
  assert flops(lambda x, k: conv(x, k, 2), x, kernel[:, :, :2]) == 2 * (2 * 10 * 10 * 6) * (3 * 3 * 2)


def test_of_two_branches_the_more_expensive_counts():
  def branch(p, x):
    return jax.lax.cond(p, lambda x: x @ WS[0], lambda x: x, x)

  assert flops(branch, True, X) == ONE_PRODUCT


def test_shard_map_counts_all_devices():
  mesh = jax.make_mesh((4,), ('d',), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
  spec = PartitionSpec('d')
  product = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
  assert flops(product, X, WS[0]) == ONE_PRODUCT


def test_rows_of_experts_count_once_each():
  sizes = jnp.array([5, 20, 7])

  def experts(x, ws):
    return jax.lax.ragged_dot(x, ws, sizes).sum()

  assert flops(experts, X, WS[:3]) == ONE_PRODUCT
  assert flops(jax.grad(experts, argnums=(0, 1)), X, WS[:3]) == 3 * ONE_PRODUCT


def test_shard_map_over_some_axes_counts_these():
  mesh = jax.make_mesh((2, 2), ('d', 'e'), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
  spec = PartitionSpec('d')
  product = jax.shard_map(
    lambda x, w: x @ w, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, axis_names={'d'}, check_vma=False
  )
  assert flops(product, X, WS[0]) == ONE_PRODUCT


def test_a_while_counts_as_often_as_it_may_run():
  def until(limit, x):
    return jax.lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1, jnp.tanh(c[1] @ WS[0])), (2, x))[1]

  def for_each(mask, x):
    return jax.lax.fori_loop(0, jnp.sum(mask & (np.arange(8) > 4), dtype=jnp.int32), lambda _, x: x @ WS[0], x)

  assert flops(lambda x: until(7, x), X) == 5 * ONE_PRODUCT
  assert flops(jax.jit(lambda x: until(7, x)), X) == 5 * ONE_PRODUCT
  assert flops(for_each, jnp.ones(8, bool), X) == 3 * ONE_PRODUCT
  assert flops(until, 7, X) == ONE_PRODUCT  # Nothing says how often.


def test_attention_in_blocks_and_in_a_ring_is_counted_like_dense_attention():
  """Causal attention in blocks computes half, and the blocks on the diagonal; segments and rings count no less."""
  q, segments = jnp.ones((2, 64, 4, 8)), jnp.ones((2, 64), jnp.int32)
  dense = flops(lambda q: jax.nn.dot_product_attention(q, q, q), q)
  mesh = jax.make_mesh((4,), ('context',), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
  for causal, packed, share in ((False, False, 1), (False, True, 1), (True, False, 9 / 16), (True, True, 9 / 16)):
    mask = Visibility(causal, None, None, *(segments, segments) * packed)
    fields = {'mask': mask, 'spec': AttentionSpec(block_size=8)}
    assert flops(lambda q, fields=fields: blockwise_attention(q, q, q, **fields), q) == share * dense
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      assert (
        flops(lambda q, fields=fields: context_parallel_attention(q, q, q, split=SequenceSplit('context'), **fields), q)
        == dense
      )


def test_a_model_whose_sequences_go_round_a_ring_has_the_operations_of_one_that_does_not():
  counts = []
  for context_axis in ('context', None):
    config = RingLmTiny().task().set(mesh_axis_names=AXES, ici_mesh_shape=RingLmTiny.ici_mesh_shape)
    attention = config.model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl
    attention.set(implementation='blockwise', context_axis=context_axis)
    batch = {name: jax.ShapeDtypeStruct((4, 45), jnp.int32) for name in ('ids', 'labels', 'segment_ids', 'segment_pos')}
    batch['weights'] = jax.ShapeDtypeStruct((4, 45), jnp.float32)
    counts.append(model_flops(PartitionedTask(config.instantiate(), batch)))
  assert counts[0] == counts[1]
