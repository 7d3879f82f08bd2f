"""AttentionHeads: queries, keys and values of an attention layer, and the output from the results of its heads.

    query = x W_q [D, N, H],  key = kv W_k [D, K, H],  value = kv W_v [D, K, H]
    out = context W_o [N, H, D],  or (context * sigmoid(x W_g [D, N, H])) W_o

B batch, T length, S length of keys and values, D model dims, N heads, K kv heads, G = N / K, H dims per head.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.attention_mesh import AttentionMesh
from praxis_lite.layers.base import ActivationSplit, Layer, WeightSplit
from praxis_lite.layers.base.facts import Exchange, InputSource
from praxis_lite.layers.normalizations import Norm
from praxis_lite.layers.positions import RotaryPositions
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.projections import PerDimScale, Projection, head_sizes, split_projection
from praxis_lite.layers.sequence_parts import ContextMethod, SequenceSplit
from praxis_lite.layers.stages import surrounding_stages
from praxis_lite.layers.value_residual import ValueResidual
from praxis_lite.sharding.weights import SplitDimsMapping

QueryKeyValue = tuple[jax.Array, jax.Array, jax.Array]  # [B, T, N, H], [B, S, K, H] and [B, S, K, H].


class AttentionActivationSplit(ActivationSplit):
  """`blnh`: queries and results by head, [B, T, N, H]; `blkh`: keys, values, caches, [B, S, K, H]; `out`: [B, T, D]."""

  blnh: SplitDimsMapping = None
  blkh: SplitDimsMapping = None


class AttentionHeads(Layer):
  """The part of an attention layer before and after the attention itself.

  Its fields are documented in `MultiHeadAttention`.
  """

  input_dims: int = REQUIRED
  num_heads: int = REQUIRED
  num_kv_heads: int | None = None
  dims_per_head: int | None = None
  kv_input_dims: int | None = None
  use_bias: bool = False
  use_out_bias: bool | None = None
  use_key_bias: bool | None = None
  combine_qkv: bool = False
  proj_tpl: Config = template(Projection)
  out_tpl: Config = template(Projection)
  rotary_tpl: Config | None = None
  qk_norm_tpl: Config | None = None
  qk_norm_over: str = 'head'
  per_dim_scale_tpl: Config | None = None
  value_residual_tpl: Config | None = None
  gate_output: bool = False
  context_axis: str | None = None
  context_method: ContextMethod = 'ring'
  weight_split_dims_mapping: Config = template(WeightSplit)
  activation_split_dims_mapping: Config = template(AttentionActivationSplit)

  query: Projection = child()
  key: Projection = child()
  value: Projection = child()
  qkv: Projection = child()
  query_norm: Norm = child()
  key_norm: Norm = child()
  rotary: RotaryPositions = child()
  per_dim_scale: PerDimScale = child()
  value_residual: ValueResidual = child()
  output_gate: Projection = child()
  out: Projection = child()

  def setup(self) -> None:
    D, N, K, H = self._complete()
    self._kv_heads = self._cache_heads = self._own_heads = K, H
    wt = self.weight_split_dims_mapping.wt
    self._resolve(wt, f'{self.path_name}.weight_split_dims_mapping.wt', rank=3)
    context_shape = self._create_projections(D, N, K, H)
    if self.per_dim_scale_tpl is not None:
      self.create_child('per_dim_scale', self.per_dim_scale_tpl.clone(dims=H))
    if self.value_residual_tpl is not None:
      mixed = self.value_residual_tpl.clone(num_heads=K)
      if mixed.weight_split_dims_mapping.wt is None and wt is not None:
        mixed.weight_split_dims_mapping.wt = wt.pick(1)
      self.create_child('value_residual', mixed)
    if self.gate_output:
      gate = self.proj_tpl.clone(in_shape=(D,), out_shape=context_shape, use_bias=self.use_bias)
      self.create_child('output_gate', split_projection(gate, wt, (0, 1, 2), rank_in=1))
    out = self.out_tpl.clone(in_shape=context_shape, out_shape=(D,), use_bias=self.use_out_bias)
    self.create_child('out', split_projection(out, wt, (1, 2, 0), rank_in=2))

  def _complete(self) -> tuple[int, int, int, int]:
    """Fills in the hyperparameters that follow from others, rejects inconsistent ones, and returns D, N, K, H."""
    D, N = self.input_dims, self.num_heads
    K, H = self.num_kv_heads, self.dims_per_head = head_sizes(
      self.path_name, D, N, self.num_kv_heads, self.dims_per_head
    )
    if self.combine_qkv and self.kv_input_dims not in (None, self.input_dims):
      raise ConfigError(f'{self.path_name}.combine_qkv: queries and keys of different dims cannot share a weight')
    if self.kv_input_dims is None:
      self.kv_input_dims = self.input_dims
    if self.use_out_bias is None:
      self.use_out_bias = self.use_bias
    if self.use_key_bias is None:
      self.use_key_bias = self.use_bias
    if self.combine_qkv and self.use_key_bias != self.use_bias:
      raise ConfigError(f'{self.path_name}.use_key_bias: combine_qkv gives keys the biases of use_bias; leave it None')
    split = self.activation_split_dims_mapping
    self._mesh = AttentionMesh(
      self.path_name,
      lambda mapping, field: self._resolve(mapping, field, rank=4),
      self.context_axis,
      self.context_method,
      split.blnh,
      split.blkh,
      surrounding_stages(),
    )
    return D, N, K, H

  def _create_projections(self, D: int, N: int, K: int, H: int) -> tuple[int, int]:
    """Creates the children that compute queries, keys and values; returns the number and dims of the results' heads."""
    wt = self.weight_split_dims_mapping.wt
    if self.combine_qkv:
      qkv = self.proj_tpl.clone(in_shape=(D,), out_shape=(K, N // K + 2, H), use_bias=self.use_bias)
      self.create_child('qkv', split_projection(qkv, wt, (0, 1, None, 2), rank_in=1))
    else:
      for name, dims, heads in (('query', D, N), ('key', self.kv_input_dims, K), ('value', self.kv_input_dims, K)):
        use_bias = self.use_key_bias if name == 'key' else self.use_bias
        proj = self.proj_tpl.clone(in_shape=(dims,), out_shape=(heads, H), use_bias=use_bias)
        self.create_child(name, split_projection(proj, wt, (0, 1, 2), rank_in=1))
    check_choice(f'{self.path_name}.qk_norm_over', self.qk_norm_over, ('head', 'heads'))
    if self.qk_norm_tpl is not None:
      for name, heads in (('query_norm', N), ('key_norm', K)):
        self.create_child(name, self.qk_norm_tpl.clone(dims=H if self.qk_norm_over == 'head' else heads * H))
    if self.rotary_tpl is not None:
      self.create_child('rotary', self.rotary_tpl.clone(dims=H))
    return N, H

  def first_values(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the values of these inputs, [B, T, K, H], for later layers with `value_residual_tpl`."""
    return self.qkv(x_BTD)[..., -1, :] if self.combine_qkv else self.value(x_BTD)

  def _project(
    self, x_BTD: jax.Array, kv_BSD: jax.Array, pos_BT: jax.Array | None, split: SequenceSplit | None = None
  ) -> QueryKeyValue:
    """Returns queries, keys and values, normalized and rotated."""
    if self.combine_qkv:
      qkv_BTKJH = self.qkv(x_BTD)
      query_BTNH = qkv_BTKJH[..., :-2, :].reshape(*x_BTD.shape[:2], self.num_heads, self.dims_per_head)
      key_BSKH, value_BSKH = qkv_BTKJH[..., -2, :], qkv_BTKJH[..., -1, :]
    else:
      query_BTNH, key_BSKH, value_BSKH = self.query(x_BTD), self.key(kv_BSD), self.value(kv_BSD)
    if self.qk_norm_tpl is not None:
      query_BTNH, key_BSKH = self._normalize(self.query_norm, query_BTNH), self._normalize(self.key_norm, key_BSKH)
    if self.rotary_tpl is not None:
      query_BTNH, key_BSKH = self.rotary(query_BTNH, pos_BT), self.rotary(key_BSKH, pos_BT)
    return self._split_heads((query_BTNH, key_BSKH, value_BSKH), split)

  def _mix_values(self, heads: QueryKeyValue, first_BSKH: jax.Array | None) -> QueryKeyValue:
    """Returns queries, keys and values; with a `value_residual`, the first layer's values are mixed into the values."""
    if self.value_residual_tpl is None:
      return heads
    if first_BSKH is None:
      raise ConfigError(
        f'{self.path_name}.value_residual_tpl: the call gives no first_values; a StackedTransformer and a '
        "RepeatedTransformer pass their first layer's values to the other layers"
      )
    query_BTNH, key_BSKH, value_BSKH = heads
    mixed_BSKH = self.value_residual(first_BSKH, value_BSKH.reshape(first_BSKH.shape[:2] + self._own_heads))
    return query_BTNH, key_BSKH, mixed_BSKH.reshape(value_BSKH.shape)

  def _normalize(self, norm: Norm, x_BTNH: jax.Array) -> jax.Array:
    """Returns queries or keys, normalized over each head or over all heads together."""
    if self.qk_norm_over == 'head':
      return norm(x_BTNH)
    return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)

  def _scale_queries(self, query_BTNH: jax.Array) -> jax.Array:
    return query_BTNH if self.per_dim_scale_tpl is None else self.per_dim_scale(query_BTNH)

  def _split_heads(self, heads: QueryKeyValue, split: SequenceSplit | None) -> QueryKeyValue:
    """Returns queries, keys and values, split over the mesh and tagged for rematerialization."""
    query_BTNH, key_BSKH, value_BSKH = heads
    query_BTNH = self._scale_queries(query_BTNH)
    blnh, blkh = ('blnh', 'blkh') if split is None else map(self._mesh.context_mapping, ('blnh', 'blkh'))
    return (
      checkpoint_name(self.shard(query_BTNH, blnh), 'query_proj'),
      checkpoint_name(self.shard(key_BSKH, blkh), 'key_proj'),
      checkpoint_name(self.shard(value_BSKH, blkh), 'value_proj'),
    )

  def _gate(self, x_BTD: jax.Array, split: SequenceSplit | None = None) -> jax.Array | None:
    """Returns the gate that the results of attention are multiplied by, [B, T, N, H]; None without `gate_output`."""
    if not self.gate_output:
      return None
    logits_BTNH = self.shard(self.output_gate(x_BTD), self._context_mapping(split))
    return jax.nn.sigmoid(to_sum_dtype(checkpoint_name(logits_BTNH, 'query_proj')))

  def _context_mapping(self, split: SequenceSplit | None) -> SplitDimsMapping | str:
    return 'blnh' if split is None else self._mesh.context_mapping('blnh')

  def _output(
    self,
    context_BTNH: jax.Array,
    gate_BTNH: jax.Array | None,
    split: SequenceSplit | None = None,
    *,
    remark: str = '',
    tagged: bool = False,
  ) -> jax.Array:
    """Returns the output of the layer, [B, T, D], given the results of attention and the gate that multiplies them.

    `remark` says how the results were computed, and `tagged` whether they already have the tag 'context'.
    """
    context_BTNH = self.shard(context_BTNH, self._context_mapping(split), remark=remark)
    if not tagged:
      context_BTNH = checkpoint_name(context_BTNH, 'context')
    if gate_BTNH is not None:
      context_BTNH = (gate_BTNH * context_BTNH).astype(context_BTNH.dtype)
    return checkpoint_name(self.shard(self.out(context_BTNH)), 'out_proj')

  def input_readers(self) -> tuple[str, ...]:
    gate = ('output_gate',) if self.gate_output else ()
    return (*(('qkv',) if self.combine_qkv else ('query', 'key', 'value')), *gate)

  def input_sources(self) -> tuple[InputSource, ...]:
    if self.combine_qkv or self.value_residual_tpl is not None:
      return ()
    return (InputSource('value', ('out',), self.num_heads // self._kv_heads[0]),)

  def exchanges(self) -> list[Exchange]:
    axes = self._resolve_axes('context_axis')
    return [Exchange('exchange of a sequence', 'context_axis', axes)] if axes else []
