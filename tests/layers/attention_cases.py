"""Cases of attention that all its implementations compute alike: masks x windows x packing x heads x odd lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.layers.attention_spec import LogitBias, ProbabilityDropout
from praxis_lite.layers.dot_product import dot_product_attention
from praxis_lite.layers.positions import BucketedBias

B, N, H = 2, 6, 4


class Case(NamedTuple):
  """Lengths, kv heads, and arguments of `dot_product_attention`; `segments`, `prefix`, ... add arrays."""

  length: int = 37
  kv_heads: int = 6
  kv_length: int | None = None
  segments: bool = False
  prefix: bool = False
  relative_bias: bool = False
  dropout: bool = False
  sinks: bool = False
  fields: dict[str, Any] = {}


CASES = {
  'all': Case(),
  'causal': Case(fields={'causal': True}, kv_heads=2),
  'window': Case(fields={'window': 6}, kv_heads=3, length=41),
  'causal window': Case(fields={'causal': True, 'window': 7}, kv_heads=1, length=35),
  'packed': Case(fields={'causal': True}, segments=True, kv_heads=3),
  'packed window': Case(fields={'causal': True, 'window': 11, 'scale': 0.3}, segments=True, kv_heads=2, length=48),
  'prefix': Case(fields={'causal': True}, prefix=True, kv_heads=2, length=33),
  'packed prefix window': Case(fields={'causal': True, 'window': 9}, prefix=True, segments=True, length=31),
  'soft cap, bias, dropout': Case(
    fields={'causal': True, 'logit_soft_cap': 1.5}, relative_bias=True, dropout=True, kv_heads=3, length=32
  ),
  'packed positions': Case(segments=True, relative_bias=True, kv_heads=2, length=39),
  'cross': Case(kv_length=19, segments=True, kv_heads=3),
  'causal, sinks': Case(fields={'causal': True}, sinks=True, kv_heads=2),
  'packed window, sinks': Case(fields={'causal': True, 'window': 9}, segments=True, sinks=True, kv_heads=3, length=45),
  'soft cap, bias, dropout, sinks': Case(
    fields={'window': 8, 'logit_soft_cap': 1.5, 'scale': 0.7}, relative_bias=True, dropout=True, sinks=True, kv_heads=1
  ),
  'cross, sinks': Case(kv_length=19, sinks=True, kv_heads=6),
}


def arguments(case: Case) -> tuple[dict[str, jax.Array], dict[str, Any], jax.Array]:
  """Returns (what has gradients, all other arguments, a gradient of the result)."""
  rng = np.random.default_rng(case.length)

  def normal(*shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)

  T, S = case.length, case.kv_length or case.length
  floats = {'query': normal(B, T, N, H), 'key': normal(B, S, case.kv_heads, H), 'value': normal(B, S, case.kv_heads, H)}
  others: dict[str, Any] = dict(case.fields)
  if case.segments:
    kv_ids = packed(rng, S)
    others['kv_segment_ids'] = kv_ids
    others['segment_ids'] = kv_ids if case.kv_length is None else packed(rng, T)
  if case.prefix:
    others['prefix_lengths'] = jnp.array([5, 21], jnp.int32)
  if case.dropout:
    seeds = jax.random.bits(jax.random.key(5), (B, T, N), jnp.uint32)
    others['dropout'] = ProbabilityDropout(0.4, seeds)
  if case.sinks:  # From a head that attends to nearly nothing to one without a sink.
    floats['sinks'] = jnp.array([9, -20, 0.5, 1, -1, 2], jnp.float32)
  if case.relative_bias:
    floats['table'] = normal(8, N)
    others['positions'] = None
    if case.segments:  # Positions that start anew in each segment, and more.
      others['positions'] = jnp.asarray(np.cumsum(rng.integers(0, 3, (B, T)), axis=1), jnp.int32)
  return floats, others, normal(B, T, N, H)


def packed(rng: np.random.Generator, length: int) -> jax.Array:
  """Segment ids 1, 1, 2, 2, 2, 3, ..., and all ids are there, so that no query sees nothing."""
  starts = rng.permuted(np.tile(np.arange(length) < 3, (B, 1)), axis=1)
  return jnp.asarray(np.cumsum(starts, axis=1) + 1 - starts[:, :1], jnp.int32)


def attend(floats: dict[str, jax.Array], others: dict[str, Any], **more: Any) -> jax.Array:
  """`dot_product_attention` of what `arguments` returns."""
  others = dict(others)
  if 'table' in floats:
    pos = others.pop('positions')
    others['bias'] = LogitBias(BucketedBias(8, 16, True), floats['table'], pos, pos)
  return dot_product_attention(
    floats['query'], floats['key'], floats['value'], **others, **more, sinks=floats.get('sinks')
  )
