"""Attention of sequences split over a mesh axis is attention on one device, in values and gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, arguments, attend
from drawn_state import drawn_variables
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, ShardingError
from praxis_lite.instruments.testing import collectives
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.attention_spec import AttentionSpec, LogitBias
from praxis_lite.layers.context_parallel import SequenceSplit, aligned_heads, context_parallel_attention
from praxis_lite.layers.masks import Visibility
from praxis_lite.layers.positions import BucketedBias
from praxis_lite.layers.sequence_parts import SequencePlan
from praxis_lite.sharding import GuardedJit


def mesh_of(**sizes):
  return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def split_attend(floats, others, split):
  """`attend`, of arrays split over a mesh."""
  others = dict(others)
  if 'table' in floats:
    pos = others.pop('positions')
    others['bias'] = LogitBias(BucketedBias(8, 16, True), floats['table'], pos, pos)
  fields = ('causal', 'window', 'prefix_lengths', 'segment_ids', 'kv_segment_ids')
  rules = [others.pop(name, default) for name, default in zip(fields, (False, None, None, None, None))]
  heads = (floats['query'], floats['key'], floats['value'])
  spec = AttentionSpec(
    **{name: others.pop(name) for name in ('scale', 'logit_soft_cap') if name in others}, block_size=4
  )
  return context_parallel_attention(
    *heads, Visibility(*rules), split=split, spec=spec, sinks=floats.get('sinks'), **others
  )


@functools.cache
def on_one_device(name):
  floats, others, gradient = arguments(CASES[name])

  @jax.jit
  def dense(floats, gradient):
    out, pull = jax.vjp(lambda f: attend(f, others, implementation='dense'), floats)
    return out, pull(gradient)[0]

  return dense(floats, gradient)


# Nothing divides: 2 rows are even, but lengths, and in most cases 6 heads in groups, are not.
MESHES = {
  'with data and tensor axes': {'data': 2, 'context': 2, 'mdl': 2},
  'of four devices': {'context': 4, 'mdl': 2},
  'of three devices': {'context': 3},
  'of three devices, and copies': {'context': 3, 'spare': 2},
}
IN_A_RING = {
  'all': 'of three devices',
  'causal': 'with data and tensor axes',
  'window': 'of four devices',
  'causal window': 'of four devices',
  'packed': 'of three devices',
  'packed prefix window': 'of four devices',
  'prefix': 'with data and tensor axes',
  'soft cap, bias, dropout': 'with data and tensor axes',
  'cross': 'of four devices',
  'packed window, sinks': 'of three devices, and copies',
  'soft cap, bias, dropout, sinks': 'with data and tensor axes',
}
ALL_TO_ALL = {
  'causal': 'of four devices',
  'packed window': 'with data and tensor axes',
  'packed prefix window': 'of three devices',
  'soft cap, bias, dropout': 'of four devices',
  'packed positions': 'with data and tensor axes',
  'cross': 'with data and tensor axes',
  'causal, sinks': 'of three devices, and copies',
  'cross, sinks': 'of four devices',
  'soft cap, bias, dropout, sinks': 'with data and tensor axes',
}


@pytest.mark.slow
@pytest.mark.parametrize(
  'method, name, mesh',
  [('ring', *case) for case in IN_A_RING.items()] + [('all_to_all', *case) for case in ALL_TO_ALL.items()],
)
def test_context_parallel_is_dense(method, name, mesh):
  mesh = mesh_of(**MESHES[mesh])
  batch_axes, head_axes = (tuple(a for a in mesh.axis_names if a == wanted) for wanted in ('data', 'mdl'))
  split = SequenceSplit('context', method, batch_axes, head_axes)
  floats, others, gradient = arguments(CASES[name])

  def both(floats, gradient):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      out, pull = jax.vjp(lambda f: split_attend(f, others, split), floats)
      return out, pull(gradient)[0]

  found = GuardedJit(both)(*jax.device_put((floats, gradient), NamedSharding(mesh, PartitionSpec())))
  jax.tree.map(lambda d, b: np.testing.assert_allclose(b, d, atol=1e-5, rtol=1e-5), on_one_device(name), found)


def counted(method, *, backward=False, **rules):
  """The collectives of attention over 32 tokens whose rows and lengths divide, as {kind: count}."""
  mesh = mesh_of(data=2, context=4)
  split, stored = SequenceSplit('context', method, ('data',)), NamedSharding(mesh, PartitionSpec('data', 'context'))

  def attend(*heads):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return context_parallel_attention(*heads, Visibility(**rules), split=split, spec=AttentionSpec(block_size=4))

  def gradients(do, *heads):
    out, pull = jax.vjp(attend, *heads)
    return out, pull(do)

  x = jax.ShapeDtypeStruct((2, 32, 4, 8), jnp.float32, sharding=stored)
  step = GuardedJit(gradients if backward else attend, out_shardings=stored)
  program = step.lower(*[x] * (4 if backward else 3)).compile()
  return {kind: c.count for kind, c in collectives(program).items() if c.count}


@pytest.mark.parametrize('devices', [2, 3, 4, 8])
def test_devices_of_a_causal_ring_have_equal_work_in_each_round(devices):
  split, size = SequenceSplit('context'), 4
  plan = SequencePlan(split, 2 * size * devices, 2 * size * devices, size, devices, True, 0, devices - 1)
  parts = [plan.indices(plan.query_len, device) for device in range(devices)]
  assert sorted(np.concatenate(parts).ravel()) == [*range(plan.query_len)]
  for offset in range(devices):
    met = [np.sum(q.reshape(-1, 1) >= parts[d - offset].ravel()) for d, q in enumerate(parts)]
    assert len({*met}) == 1


@pytest.mark.slow
def test_collectives_are_those_that_are_meant():
  """A ring of 4 sends each block on 3 times; halves of parts cost a permute, there and back."""
  assert counted('ring') == {'collective-permute': 3}
  assert counted('ring', causal=True) == {'collective-permute': 1 + 3 + 1}
  # Of 4 parts of 8, a window of 8 reaches into one.
  assert counted('ring', causal=True, window=8) == {'collective-permute': 1}
  # Backward, queries, keys and values, gradients of the output, and one number a query are exchanged, and their
  # gradients back; blocks go round again, and their gradients with them, one step farther, home.
  assert counted('ring', backward=True) == {'collective-permute': 3 + 3 + 4}
  assert counted('all_to_all', causal=True) == {'all-to-all': 2}
  assert counted('all_to_all', causal=True, backward=True) == {'all-to-all': 2 + 2}


def test_devices_of_a_ring_take_as_many_iterations_if_the_compiler_may_split_the_rows():
  """It may put communication of all devices into a loop, so that a device which takes fewer would make them wait."""
  mesh, name = mesh_of(context=4, mdl=2), 'causal'
  floats, others, gradient = arguments(CASES[name])

  def both(split, floats, gradient):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      out, pull = jax.vjp(lambda f: split_attend(f, others, split), floats)
      return out, pull(gradient)[0]

  for others_split in (False, True):
    split = functools.partial(both, SequenceSplit('context', others_split=others_split))
    program = str(jax.make_jaxpr(split)(floats, gradient))
    assert ('while[' in program) == (not others_split)
  placed = jax.device_put((floats, gradient), NamedSharding(mesh, PartitionSpec()))
  found = GuardedJit(split)(*placed)
  jax.tree.map(lambda d, b: np.testing.assert_allclose(b, d, atol=1e-5, rtol=1e-5), on_one_device(name), found)


@pytest.mark.parametrize(
  'heads, kv_heads, parts, repeats, padded',
  [
    (8, 8, 4, 1, 8),
    (8, 2, 4, 2, 4),
    (8, 1, 4, 4, 4),
    (6, 3, 2, 2, 6),
    (6, 3, 4, 1, 4),
    (3, 3, 2, 1, 4),
    (8, 8, 1, 1, 8),
  ],
)
def test_heads_divide_with_the_least_padding(heads, kv_heads, parts, repeats, padded):
  assert aligned_heads(heads, kv_heads, parts) == (repeats, padded)


# ---------------------------------------------------------------- the layer


def layer(mesh=None, **fields):
  config = Config(MultiHeadAttention, input_dims=12, num_heads=6, num_kv_heads=3, causal=True, context_axis='context')
  config.set(**{'mesh_axis_names': None if mesh is None else mesh.axis_names, 'sliding_window': 9, **fields})
  config.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  config.activation_split_dims_mapping.set(
    blnh=('data', None, 'mdl', None), blkh=('data', None, 'mdl', None), out=('data', 'context', None)
  )
  return config


@pytest.mark.slow
def test_one_field_of_the_layer_splits_the_length_and_decoding_stays_as_it_is():
  mesh = mesh_of(data=2, context=2, mdl=2)
  one, many = layer(gate_output=True).instantiate(), layer(mesh, gate_output=True).instantiate()
  x = np.random.default_rng(1).standard_normal((3, 13, 12)).astype(np.float32)
  variables = drawn_variables(one.abstract_init())

  def gradients(layer, variables, x):
    return jax.value_and_grad(lambda v, x: jnp.sum(layer.apply(v, x)[0] ** 2), argnums=(0, 1))(variables, x)

  def decoded(layer, variables, x):
    _, side = layer.apply(variables, 3, 13, method='init_decode_state')
    pos = jnp.broadcast_to(jnp.arange(13), (3, 13))
    return layer.apply(variables, x, pos, decode_state=side.decode_state, method='extend_step')[0]

  def everything(layer, variables, x):
    return gradients(layer, variables, x), decoded(layer, variables, x)

  def on_mesh(variables, x):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return everything(many, variables, x)

  placed = jax.device_put((variables, x), NamedSharding(mesh, PartitionSpec()))
  step = GuardedJit(on_mesh)
  assert 'collective_permute' in step.lower(*placed).as_text()
  expected = jax.jit(functools.partial(everything, one))(variables, x)
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=1e-4, rtol=1e-5), step(*placed), expected)


@pytest.mark.parametrize(
  'fields, error, message',
  [
    ({'context_axis': 'contxt'}, ShardingError, r"context_axis.*'contxt' is not a mesh axis.*Did you mean 'context'"),
    ({'context_axis': 'mdl'}, ShardingError, r'context_axis.*twice'),
    ({'context_method': 'rings'}, ConfigError, r"context_method.*Did you mean 'ring'"),
    ({'implementation': 'dense'}, ConfigError, r"context_axis: .*implementation is 'dense'; set it to 'auto'"),
  ],
)
def test_what_does_not_fit_is_named(fields, error, message):
  with pytest.raises(error, match=message):
    layer(mesh_of(data=2, context=2, mdl=2), **fields).instantiate()


def test_a_length_that_is_split_otherwise_is_named():
  config = layer(mesh_of(data=2, context=2, mdl=2))
  config.activation_split_dims_mapping.blnh = (None, 'data', 'mdl', None)
  with pytest.raises(ConfigError, match=r"blnh: it splits the length over 'data', and .*context_axis is 'context'"):
    config.instantiate()
