"""The compilers of TPUs make kernels of attention, and programs without an array of the size of all logits."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.instruments.plan.compilers import devices_of, missing_compiler
from praxis_lite.instruments.plan.topology import parse_topology
from praxis_lite.layers import MultiHeadAttention
from praxis_lite.layers.implementations import describe_implementations

WHY_NOT = missing_compiler(parse_topology('v5e:2x2'))
LENGTH = 2048
AXES = ('data', 'context', 'mdl')


@pytest.fixture(autouse=True)
def _no_flags_that_the_compiler_lacks(monkeypatch):
  """This process has its devices already; the compiler ends a process with flags that it does not know."""
  jax.devices()
  monkeypatch.delenv('XLA_FLAGS', raising=False)


def compiled(topology, sizes, **fields):
  """What the layer says about its implementation, and the program of its gradients."""
  config = Config(MultiHeadAttention, input_dims=256, num_heads=4, num_kv_heads=2, dims_per_head=128, causal=True)
  config.activation_split_dims_mapping.set(blnh=('data', None, 'mdl', None))
  layer = config.set(mesh_axis_names=AXES, fprop_dtype=jnp.bfloat16, **fields).instantiate()
  mesh = Mesh(np.array(devices_of(parse_topology(topology))[: math.prod(sizes)]).reshape(sizes), AXES)

  def placed(x, *spec):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

  def step(variables, x, ids):
    def loss(variables, x):
      return jnp.sum(layer.apply(variables, x, segment_ids=ids)[0].astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1))(variables, x)

  variables = jax.tree.map(placed, jax.eval_shape(lambda: layer.init(jax.random.key(0))))
  x = placed(jax.ShapeDtypeStruct((2, LENGTH, 256), jnp.bfloat16), 'data', 'context')
  ids = placed(jax.ShapeDtypeStruct((2, LENGTH), jnp.int32), 'data', 'context')
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    (line,) = describe_implementations(layer, LENGTH, False)
    return line, jax.jit(step).lower(variables, x, ids).compile().as_text()


def largest_array(program):
  return max(math.prod(map(int, dims.split(','))) for dims in re.findall(r'\b\w+\[([\d,]+)\]', program))


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize('topology', ['v5p:2x2x1', 'v5e:2x2', 'v6e:2x2'])
@pytest.mark.parametrize(
  'sizes, fields, kernels',
  [
    ((2, 1, 2), {'logit_soft_cap': 30.0, 'sliding_window': 300, 'use_sinks': True}, 3),
    ((1, 2, 2), {'context_axis': 'context', 'block_size': 512, 'use_sinks': True}, 6),
    ((1, 2, 2), {'context_axis': 'context', 'context_method': 'all_to_all', 'block_size': 512}, 3),
  ],
  ids=['rows and heads, window, soft cap, sinks', 'ring, sinks', 'all-to-all'],
)
def test_attention_is_kernels_without_an_array_of_all_logits(topology, sizes, fields, kernels):
  line, program = compiled(topology, sizes, **fields)
  assert 'splash on tpu' in line
  assert program.count('custom_call_target="tpu_custom_call"') >= kernels
  assert largest_array(program) < LENGTH * LENGTH


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_dense_attention_has_such_an_array():
  assert largest_array(compiled('v5e:2x2', (1, 1, 1), implementation='dense')[1]) >= LENGTH * LENGTH
