"""Attention of sequences split over a mesh axis is attention on one device, in values and gradients."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from attention_cases import CASES, arguments, attend
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite.layers.blockwise import LogitBias
from praxis_lite.layers.context_parallel import SequenceSplit, context_parallel_attention
from praxis_lite.layers.masks import Visibility
from praxis_lite.layers.positions import BucketedBias
from praxis_lite.partitioning import GuardedJit


def mesh(**sizes):
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
  return context_parallel_attention(*heads, split=split, visible=Visibility(*rules), block_size=4, **others)


@functools.cache
def on_one_device(name):
  floats, others, gradient = arguments(CASES[name])

  @jax.jit
  def dense(floats, gradient):
    out, pull = jax.vjp(lambda f: attend(f, others, implementation='dense'), floats)
    return out, pull(gradient)[0]

  return dense(floats, gradient)


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('method', ['ring', 'all_to_all'])
def test_context_parallel_is_dense(name, method):
  devices = mesh(data=2, context=2, mdl=2) if len(name) % 2 else mesh(context=4, mdl=2)
  batch_axes = tuple(a for a in devices.axis_names if a == 'data')
  split = SequenceSplit('context', method, batch_axes, ('mdl',))
  floats, others, gradient = arguments(CASES[name])

  def both(floats, gradient):
    with jax.sharding.use_abstract_mesh(devices.abstract_mesh):
      out, pull = jax.vjp(lambda f: split_attend(f, others, split), floats)
      return out, pull(gradient)[0]

  replicated = NamedSharding(devices, PartitionSpec())
  found = GuardedJit(both)(*jax.device_put((floats, gradient), replicated))
  jax.tree.map(lambda d, b: np.testing.assert_allclose(b, d, atol=1e-5, rtol=1e-5), on_one_device(name), found)
