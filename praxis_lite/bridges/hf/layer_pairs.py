"""Pairs of tensors of the layers that several families store alike: linear layers, norms, and attention."""

from __future__ import annotations

from praxis_lite.bridges.hf.tensors import Pair


def linear_pairs(theirs: str, ours: str) -> list[Pair]:
  """Returns the pairs of a linear layer with a bias, stored as [out, in]."""
  return [Pair(f'{theirs}.weight', f'{ours}.w', 'I O -> O I'), Pair(f'{theirs}.bias', f'{ours}.b')]


def norm_pairs(theirs: str, ours: str) -> list[Pair]:
  """Returns the pairs of a LayerNorm."""
  return [Pair(f'{theirs}.weight', f'{ours}.scale'), Pair(f'{theirs}.bias', f'{ours}.bias')]


def projection_pairs(theirs: str, ours: str) -> list[Pair]:
  """Returns the pairs of a projection to heads with a bias, stored as [heads x dims, in]."""
  weight = Pair(f'{theirs}.weight', f'{ours}.w', 'D N H -> (N H) D')
  return [weight, Pair(f'{theirs}.bias', f'{ours}.b', 'N H -> (N H)')]


def out_projection_pairs(theirs: str, ours: str) -> list[Pair]:
  """Returns the pairs of a projection from heads with a bias, stored as [out, heads x dims]."""
  return [Pair(f'{theirs}.weight', f'{ours}.w', 'N H D -> D (N H)'), Pair(f'{theirs}.bias', f'{ours}.b')]


def attention_pairs(theirs: str, ours: str, *, has_key_bias: bool = True) -> list[Pair]:
  """Returns the pairs of attention whose projections are `q_proj`, `k_proj`, `v_proj` and `out_proj`."""
  key = projection_pairs(f'{theirs}.k_proj', f'{ours}.key')
  return [
    *projection_pairs(f'{theirs}.q_proj', f'{ours}.query'),
    *(key if has_key_bias else key[:1]),
    *projection_pairs(f'{theirs}.v_proj', f'{ours}.value'),
    *out_projection_pairs(f'{theirs}.out_proj', f'{ours}.out'),
  ]
