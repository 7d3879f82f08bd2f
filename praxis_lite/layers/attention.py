"""Multi-head attention with grouped heads, causal or not: in one pass, or token by token with a cache.

    query = x W_q [D, N, H],  key = kv W_k [D, K, H],  value = kv W_v [D, K, H]
    out = softmax(query . key / sqrt(H)) . value  W_o [N, H, D]

With sinks [N], the softmax of head n has exp(sinks_n) as a further term of its denominator.

B batch, T length, S length of keys and values or of the cache, D model dims, N heads, K kv heads, G = N / K, H dims per
head.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.alibi import AlibiBias
from praxis_lite.layers.attention_mesh import AttentionMesh, surrounding_stage_axes
from praxis_lite.layers.attention_spec import AttentionImplementation, AttentionSpec, LogitBias, ProbabilityDropout
from praxis_lite.layers.base import ActivationSplit, Layer, WeightSplit
from praxis_lite.layers.base.facts import Exchange, TokenFlops
from praxis_lite.layers.blockwise import RowSplit
from praxis_lite.layers.cached_attention import CachedAttention, PositionBias
from praxis_lite.layers.dot_product import (
  IMPLEMENTATIONS,
  AttentionCase,
  AttentionChoice,
  choose_attention,
  dot_product_attention,
)
from praxis_lite.layers.kv_cache import KVCache, check_cache_dtype
from praxis_lite.layers.linears import bias_weight
from praxis_lite.layers.local_chunks import local_chunks
from praxis_lite.layers.masks import AttentionMask, make_mask, to_mask
from praxis_lite.layers.normalizations import Norm
from praxis_lite.layers.positions import RelativeBias, RotaryPositions
from praxis_lite.layers.projections import PerDimScale, Projection, head_sizes, split_projection
from praxis_lite.layers.sequence_parts import ContextMethod, SequenceSplit
from praxis_lite.layers.shared_bias import is_bias_shared
from praxis_lite.layers.value_residual import ValueResidual
from praxis_lite.sharding.mesh import platform
from praxis_lite.sharding.weights import SplitDimsMapping

QueryKeyValue = tuple[jax.Array, jax.Array, jax.Array]  # [B, T, N, H], [B, S, K, H] and [B, S, K, H].

# Slots of a cache that a single token reads at once on accelerators: there, few operations matter more than few slots.
_MOST_SLOTS = 4096


class AttentionActivationSplit(ActivationSplit):
  """`blnh`: queries and results by head, [B, T, N, H]; `blkh`: keys, values, caches, [B, S, K, H]; `out`: [B, T, D]."""

  blnh: SplitDimsMapping = None
  blkh: SplitDimsMapping = None


class MultiHeadAttention(Layer):
  """Attention of a sequence to itself or to another one (Vaswani et al., 2017; grouped heads: Ainslie et al., 2023).

  Attributes:
    input_dims: D.
    num_heads: N.
    num_kv_heads: K, a divisor of N; None means N.
    dims_per_head: H; None means D / N.
    kv_input_dims: in cross attention, dims of the sequence that is attended to; None means D.
    causal: whether a position attends only to positions up to its own.
    sliding_window: a position attends to positions less than this far away; None disables the limit.
    local_chunk: positions are cut into chunks of this size, and a position attends only to its own chunk (Llama 4);
      in packed rows, chunks begin where sequences begin. None does not cut them.
    use_bias: whether queries, keys and values have biases.
    use_out_bias: whether the output has a bias; None means the same as `use_bias`.
    combine_qkv: one weight [D, K, G + 2, H] computes the G queries, the key and the value of each kv head.
    proj_tpl: template of the children `query`, `key` and `value`, or `qkv`.
    out_tpl: template of the child `out`.
    rotary_tpl: template of the child `rotary`, rotary positions of queries and keys; None disables them.
    qk_norm_tpl: template of the children `query_norm` and `key_norm`, norms before rotary positions; None disables
      them.
    qk_norm_over: 'head': each head is normalized on its own, over H. 'heads': all heads together, over N H and K H
      (OLMo 2).
    relative_bias_tpl: template of the child `relative_bias`, a bias on logits that depends on the offset of positions,
      such as `RelativeBias` or `AlibiBias`; None disables it.
    per_dim_scale_tpl: template of the child `per_dim_scale`, which multiplies queries after rotary positions, such as
      `PerDimScale`; None disables it.
    value_residual_tpl: template of the child `value_residual`, a `ValueResidual`, which mixes the values with those of
      the first layer of a stack; None disables it. The stack gives the layer these.
    use_sinks: whether each head has a learned logit that takes part in the softmax and has no value, the variable
      `sinks` [N], zeros at first (attention sinks of GPT-OSS; OpenAI, 2025). A head can so attend to nothing. It is
      split like the heads of the weights.
    dropout_rate: share of the attention probabilities that is dropped in training.
    scale, logit_soft_cap, block_size: see `dot_product_attention`.
    implementation: 'dense' computes all logits at once; 'blockwise' needs memory linear in the length; 'cudnn' is a
      fused kernel for NVIDIA GPUs, 'tokamax' has others for them, and 'splash' is for TPUs; 'auto' chooses one of
      these, see `choose_attention`.
      Decoding is dense, or in pages; on TPUs, 'auto' and 'splash' compute a single token by the kernel of
      `decode_kernel.py` where it can.
    context_axis: mesh axis that splits the length in training and evaluation (context parallelism), evenly or not; None
      does not split it. The mappings `blnh` and `blkh` say how batch and heads are split.
    context_method: 'ring' sends keys and values around a ring of devices; 'all_to_all' gives each device some of the
      heads. See `context_parallel.py`.
    cache_dtype: dtype of keys and values in the cache; int8 stores a scale with each vector; None means `fprop_dtype`.
    cache_page_size: number of cache slots that decoding reads at once. It reads only pages that contain tokens. On GPU
      and TPU, where each page takes some 20 small operations, a single token reads up to 4,096 slots at once.
    weight_split_dims_mapping: `wt`, [D, N, H]: how the weights of queries, keys and values are split; the output's
      weight, [N, H, D], is split along the same dimensions.
  """

  input_dims: int = REQUIRED
  num_heads: int = REQUIRED
  num_kv_heads: int | None = None
  dims_per_head: int | None = None
  kv_input_dims: int | None = None
  causal: bool = False
  sliding_window: int | None = None
  local_chunk: int | None = None
  use_bias: bool = False
  use_out_bias: bool | None = None
  combine_qkv: bool = False
  proj_tpl: Config = template(Projection)
  out_tpl: Config = template(Projection)
  rotary_tpl: Config | None = None
  qk_norm_tpl: Config | None = None
  qk_norm_over: str = 'head'
  relative_bias_tpl: Config | None = None
  per_dim_scale_tpl: Config | None = None
  value_residual_tpl: Config | None = None
  use_sinks: bool = False
  dropout_rate: float = 0.0
  scale: float | None = None
  logit_soft_cap: float | None = None
  implementation: AttentionImplementation = 'auto'
  block_size: int | None = None
  context_axis: str | None = None
  context_method: ContextMethod = 'ring'
  cache_dtype: DTypeLike | None = None
  cache_page_size: int = 512
  weight_split_dims_mapping: Config = template(WeightSplit)
  activation_split_dims_mapping: Config = template(AttentionActivationSplit)

  _caches_values: ClassVar[bool] = True

  query: Projection = child()
  key: Projection = child()
  value: Projection = child()
  qkv: Projection = child()
  query_norm: Norm = child()
  key_norm: Norm = child()
  rotary: RotaryPositions = child()
  relative_bias: RelativeBias | AlibiBias = child()
  per_dim_scale: PerDimScale = child()
  value_residual: ValueResidual = child()
  out: Projection = child()

  def setup(self) -> None:
    D, N, K, H = self._complete()
    self._kv_heads = self._cache_heads = self._own_heads = K, H
    self._has_bias = self.relative_bias_tpl is not None or is_bias_shared()
    wt = self.weight_split_dims_mapping.wt
    self._resolve(wt, f'{self.path_name}.weight_split_dims_mapping.wt', rank=3)
    context_shape = self._create_projections(D, N, K, H)
    if self.relative_bias_tpl is not None:
      self.create_child('relative_bias', self.relative_bias_tpl.clone(num_heads=N))
    if self.per_dim_scale_tpl is not None:
      self.create_child('per_dim_scale', self.per_dim_scale_tpl.clone(dims=H))
    if self.value_residual_tpl is not None:
      mixed = self.value_residual_tpl.clone(num_heads=K)
      if mixed.weight_split_dims_mapping.wt is None and wt is not None:
        mixed.weight_split_dims_mapping.wt = wt.pick(1)
      self.create_child('value_residual', mixed)
    if self.use_sinks:
      self.create_variable('sinks', bias_weight(N, None if wt is None else wt.pick(1)))
    out = self.out_tpl.clone(in_shape=context_shape, out_shape=(D,), use_bias=self.use_out_bias)
    self.create_child('out', split_projection(out, wt, (1, 2, 0), rank_in=2))

  def _create_projections(self, D: int, N: int, K: int, H: int) -> tuple[int, int]:
    """Creates the children that compute queries, keys and values; returns the heads and dims of results."""
    wt = self.weight_split_dims_mapping.wt
    if self.combine_qkv:
      qkv = self.proj_tpl.clone(in_shape=(D,), out_shape=(K, N // K + 2, H), use_bias=self.use_bias)
      self.create_child('qkv', split_projection(qkv, wt, (0, 1, None, 2), rank_in=1))
    else:
      for name, dims, heads in (('query', D, N), ('key', self.kv_input_dims, K), ('value', self.kv_input_dims, K)):
        proj = self.proj_tpl.clone(in_shape=(dims,), out_shape=(heads, H), use_bias=self.use_bias)
        self.create_child(name, split_projection(proj, wt, (0, 1, 2), rank_in=1))
    check_choice(f'{self.path_name}.qk_norm_over', self.qk_norm_over, ('head', 'heads'))
    if self.qk_norm_tpl is not None:
      for name, heads in (('query_norm', N), ('key_norm', K)):
        self.create_child(name, self.qk_norm_tpl.clone(dims=H if self.qk_norm_over == 'head' else heads * H))
    if self.rotary_tpl is not None:
      self.create_child('rotary', self.rotary_tpl.clone(dims=H))
    return N, H

  def _complete(self) -> tuple[int, int, int, int]:
    """Fills in the hyperparameters that follow from others, rejects inconsistent ones, and returns D, N, K, H."""
    D, N = self.input_dims, self.num_heads
    self._check_range('num_heads', 'sliding_window', 'local_chunk', 'block_size', 'cache_page_size', least=1)
    self._check_range('dropout_rate', least=0, below=1)
    K, H = self.num_kv_heads, self.dims_per_head = head_sizes(
      self.path_name, D, N, self.num_kv_heads, self.dims_per_head
    )
    if self.implementation is None:  # Configs recorded by older versions may contain None.
      self.implementation = 'auto'
    check_choice(f'{self.path_name}.implementation', self.implementation, IMPLEMENTATIONS)
    self._mesh = self._attention_mesh()
    self._mesh.check(self.implementation)
    check_cache_dtype(f'{self.path_name}.cache_dtype', self.cache_dtype)
    if self.combine_qkv and self.kv_input_dims not in (None, self.input_dims):
      raise ConfigError(f'{self.path_name}.combine_qkv: queries and keys of different dims cannot share a weight')
    if self.kv_input_dims is None:
      self.kv_input_dims = self.input_dims
    if self.use_out_bias is None:
      self.use_out_bias = self.use_bias
    return D, N, K, H

  # ---------------------------------------------------------------- one pass

  def __call__(
    self,
    x_BTD: jax.Array,
    kv_BSD: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
    mask: jax.Array | None = None,
    logit_bias: jax.Array | LogitBias | None = None,
    first_values: jax.Array | None = None,
  ) -> jax.Array:
    """Returns [B, T, D].

    Args:
      x_BTD: the sequences that attend.
      kv_BSD: the sequences that are attended to; None means `x_BTD` itself.
      segment_ids: [B, T] int32, 0 for padding; positions attend within their segment. None means one segment without
        padding.
      kv_segment_ids: [B, S] int32, with `kv_BSD`. If this or `segment_ids` is None, segments do not mask.
      segment_pos: [B, T] int32, positions in the segment; None means 0, 1, 2, ...
      prefix_lengths: [B] int32, the length of the prefix of each row to which all positions of the row attend
        (prefix-LM), also if `causal`. None disables it.
      mask: bool, broadcasts to [B, N, T, S], True where a query may attend; applies in addition to the masks above, and
        makes attention dense.
      logit_bias: added to the logits: an array that broadcasts to [B, N, T, S], which makes attention dense, or a
        function of positions. Layers that share a bias get it so; a layer with its own has `relative_bias_tpl`.
      first_values: [B, T, K, H], the `first_values` of the first layer, with `value_residual_tpl`.
    """
    self._check_one_bias(logit_bias)
    if kv_BSD is not None:
      self._check_cross_attention()
    else:
      kv_BSD, kv_segment_ids = x_BTD, segment_ids
    rules = self.attention_mask(
      segment_ids=segment_ids, kv_segment_ids=kv_segment_ids, segment_pos=segment_pos, prefix_lengths=prefix_lengths
    )
    if mask is not None:
      rules = rules & to_mask(mask)
    split = self._mesh.sequence_split()
    heads = self._mix_values(self._project(x_BTD, kv_BSD, segment_pos, split), first_values)
    return self._attend(heads, rules, segment_pos, self._make_dropout(x_BTD), split, logit_bias)

  def first_values(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the values of these inputs, [B, T, K, H], for later layers with `value_residual_tpl`."""
    return self.qkv(x_BTD)[..., -1, :] if self.combine_qkv else self.value(x_BTD)

  def attention_mask(
    self,
    *,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
  ) -> AttentionMask:
    """Returns which keys each query attends to. A subclass may add its own: `super().attention_mask(**rows) & ...`.

    `__call__` passes its own arguments, and the mask's `allows` then receives indices in the row. In
    decoding, the only argument is `prefix_lengths`, `allows` receives positions in the sequence, and the mask must have
    no arrays of queries or keys.
    """
    mask = make_mask(self.causal, self.sliding_window, prefix_lengths, segment_ids, kv_segment_ids)
    if self.local_chunk is not None:
      mask = mask & local_chunks(self.local_chunk, segment_ids, kv_segment_ids, segment_pos)
    return mask

  # ---------------------------------------------------------------- token by token

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    """Allocates an empty cache for `batch_size` sequences of up to `max_len` tokens, padding between them included."""
    self._keep(self._cached_attention().empty(batch_size, max_len, *self._cache_heads))

  def extend_step(
    self,
    x_BTD: jax.Array,
    pos_BT: jax.Array,
    prefix_lengths: jax.Array | None = None,
    logit_bias: LogitBias | None = None,
    first_values: jax.Array | None = None,
  ) -> jax.Array:
    """Appends tokens to the cache and returns [B, T, D]; a token attends to all cached tokens up to its own position.

    The caller ensures that the cache has room; see `KVCache`.

    Args:
      x_BTD: the next token (T = 1) or tokens, such as a prompt, of each sequence.
      pos_BT: int32 position of each token in its sequence; -1 is padding, which no token attends to.
      prefix_lengths: [B] int32, the length of the prefix of each row to which all tokens of the row attend. The call
        that reads the prompt must contain the whole prefix. None disables it.
      logit_bias: a function of positions, which is added to the logits; its own positions are not used.
      first_values: see `__call__`; the cache keeps mixed values.
    """
    self._check_one_bias(logit_bias)
    if not self.causal:
      raise ConfigError(
        f'{self.path_name}.causal: extend_step needs causal attention, since later tokens do not exist yet'
      )
    if not self.decode_state:
      raise ConfigError(f'{self.path_name}: extend_step needs the decode state that init_decode_state allocates')
    mask = self.attention_mask(prefix_lengths=prefix_lengths)
    cached = self._cached_attention(logit_bias, self._sinks())
    return self._output(self._extend(cached, x_BTD, pos_BT, self._kept_cache(), mask, first_values))

  def _extend(
    self,
    cached: CachedAttention,
    x_BTD: jax.Array,
    pos_BT: jax.Array,
    cache: KVCache,
    mask: AttentionMask,
    first_BTKH: jax.Array | None = None,
  ) -> jax.Array:
    """Keeps the cache with these tokens appended; returns the results of attention, [B, T, N, H]."""
    heads = self._mix_values(self._project(x_BTD, x_BTD, pos_BT), first_BTKH)
    context_BTNH, cache = cached.extend(*heads, pos_BT, cache, mask)
    self._keep(cache)
    return context_BTNH

  def _kept_cache(self) -> KVCache:
    return KVCache(**{name: self.get_decode_state(name) for name in KVCache._fields})

  def _cached_attention(self, logit_bias: LogitBias | None = None, sinks: jax.Array | None = None) -> CachedAttention:
    bias: PositionBias | None = None if logit_bias is None else functools.partial(logit_bias.fn, logit_bias.params)
    if self.relative_bias_tpl is not None:
      bias = self.relative_bias
    slots_are_split = any((self.activation_split_dims_mapping.blkh or (None,) * 4)[1:2])
    dtype = self.fprop_dtype if self.cache_dtype is None else self.cache_dtype
    assert dtype is not None  # fprop_dtype is set once the layer is built.
    return CachedAttention(
      dtype,
      window=min((n for n in (self.sliding_window, self.local_chunk) if n is not None), default=None),
      page_size=None if slots_are_split else self.cache_page_size,
      most_slots=0 if platform() == 'cpu' else _MOST_SLOTS,
      spec=self._spec(),
      bias=bias,
      sinks=sinks,
      has_values=self._caches_values,
      kernel_split=self._cache_kernel_split,
    )

  def _cache_kernel_split(self, num_rows: int | None) -> tuple[RowSplit | None, str]:
    """Returns how a kernel that reads the cache is mapped over the mesh, and why it cannot be."""
    if self.implementation not in ('auto', 'splash'):
      return None, f"is chosen by 'auto' and 'splash', and {self.path_name}.implementation is {self.implementation!r}"
    K = self._cache_heads[0]
    split, obstacle = self._mesh.kernel_split(self.num_heads, K, num_rows)
    if obstacle or split is None:
      return split, obstacle
    return split, self._mesh.cache_obstacle(split, K)

  def _keep(self, cache: KVCache) -> None:
    for name, array in cache._asdict().items():
      if array is not None:
        if name in ('key', 'value'):
          array = self._constrain_slots(array) if cache.turn is None else jax.vmap(self._constrain_slots)(array)
        self.update_decode_state(name, array)

  def _constrain_slots(self, x_BKSH: jax.Array) -> jax.Array:
    """Splits vectors of a cache over the mesh."""
    return jnp.swapaxes(self.shard(jnp.swapaxes(x_BKSH, 1, 2), self._cache_mapping()), 1, 2)

  def _cache_mapping(self) -> SplitDimsMapping | str:
    """Returns how vectors of a cache, [B, S, K, H], are split."""
    return 'blkh'

  # ---------------------------------------------------------------- parts

  def _attention_mesh(self) -> AttentionMesh:
    split = self.activation_split_dims_mapping
    return AttentionMesh(
      self.path_name,
      lambda mapping, field: self._resolve(mapping, field, rank=4),
      self.context_axis,
      self.context_method,
      split.blnh,
      split.blkh,
      surrounding_stage_axes(),
    )

  def _spec(self, implementation: AttentionImplementation = 'auto') -> AttentionSpec:
    return AttentionSpec(self.scale, self.logit_soft_cap, implementation, self.block_size)

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
    """Returns queries, keys and values, with values of the first layer in the latter if the layer says so."""
    if self.value_residual_tpl is None:
      return heads
    if first_BSKH is None:
      raise ConfigError(
        f'{self.path_name}.value_residual_tpl: the call gives no first_values; a StackedTransformer and a '
        'RepeatedTransformer give their layers those of their first one'
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

  def _check_cross_attention(self) -> None:
    """Rejects fields that make no sense if queries attend to other sequences."""
    for field in (
      'combine_qkv',
      'causal',
      'sliding_window',
      'local_chunk',
      'rotary_tpl',
      'relative_bias_tpl',
      'value_residual_tpl',
    ):
      if getattr(self, field):
        raise ConfigError(f'{self.path_name}.{field}: cross attention does not support it; leave it unset')

  def _check_one_bias(self, logit_bias: object) -> None:
    if logit_bias is not None and self.relative_bias_tpl is not None:
      raise ConfigError(f'{self.path_name}.relative_bias_tpl: the call gives a bias too; set it to None, or give none')

  def _sinks(self) -> jax.Array | None:
    return self.theta.sinks if self.use_sinks else None

  def _make_dropout(self, x_BTD: jax.Array) -> ProbabilityDropout | None:
    if self.dropout_rate == 0 or self.do_eval:
      return None
    shape = (*x_BTD.shape[:2], self.num_heads)
    return ProbabilityDropout(self.dropout_rate, jax.random.bits(self.next_prng_key(), shape, jnp.uint32))

  def _attend(
    self,
    heads: QueryKeyValue,
    mask: AttentionMask,
    pos_BT: jax.Array | None,
    dropout: ProbabilityDropout | None,
    split: SequenceSplit | None,
    bias: jax.Array | LogitBias | None = None,
  ) -> jax.Array:
    """Returns the output, [B, T, D]. A relative bias uses `pos_BT` as the positions of both queries and keys."""
    (B, T, _, _), (_, S, K, _) = heads[0].shape, heads[1].shape
    over: RowSplit | SequenceSplit | None = split
    kernel_split, obstacle = self._kernel_split(split is not None, B)
    has_array = bias is not None and not isinstance(bias, LogitBias)
    name, reason = self._choose(T, S, mask, split is not None, obstacle, has_array)
    if self.relative_bias_tpl is not None:
      bias = LogitBias(self.relative_bias.bias_fn, self.relative_bias.bias_params, pos_BT, pos_BT)
      if name != 'blockwise':
        pos_BT = jnp.arange(T)[None] if pos_BT is None else pos_BT
        bias = self.relative_bias(pos_BT, pos_BT)
    if split is None and name in ('splash', 'tokamax'):
      over = kernel_split
    elif split is None and name == 'blockwise' and mask.arrays('query', 'key'):
      over = self._mesh.row_split(B, K)
    context_BTNH = dot_product_attention(
      *heads, mask, spec=self._spec(name), bias=bias, dropout=dropout, sinks=self._sinks(), split=over
    )
    # All but dense attention tag the values that they keep; see `remat.py` for cuDNN's kernel.
    return self._output(context_BTNH, split, remark=f'attention is {name}: {reason}', tagged=name != 'dense')

  def _output(
    self, context_BTNH: jax.Array, split: SequenceSplit | None = None, *, remark: str = '', tagged: bool = False
  ) -> jax.Array:
    """Returns [B, T, D].

    Args:
      context_BTNH: results of attention.
      split: how the mesh splits their length; None if it does not.
      remark: how the results were computed, for `explain`.
      tagged: whether the results already have the tag 'context'.
    """
    context_BTNH = self.shard(
      context_BTNH, 'blnh' if split is None else self._mesh.context_mapping('blnh'), remark=remark
    )
    if not tagged:
      context_BTNH = checkpoint_name(context_BTNH, 'context')
    return checkpoint_name(self.shard(self.out(context_BTNH)), 'out_proj')

  def _kernel_split(self, is_sequence_split: bool, num_rows: int | None = None) -> tuple[RowSplit | None, str]:
    """Returns how a kernel is mapped over the mesh, and why it cannot be; see `AttentionMesh.kernel_split`."""
    if not is_sequence_split:
      return self._mesh.kernel_split(self.num_heads, self._kv_heads[0], num_rows)
    undeclared = f'needs {self.path_name}.activation_split_dims_mapping.blnh, which says how the mesh splits the heads'
    return None, undeclared if self._mesh.blnh is None else ''

  def _choose(
    self,
    query_len: int,
    key_len: int,
    mask: AttentionMask,
    split: bool,
    mesh_obstacle: str,
    has_array: bool = False,
  ) -> AttentionChoice:
    """Returns how attention is computed, and why; see `AttentionCase`."""
    assert self.fprop_dtype is not None  # Set once the layer is built.
    case = AttentionCase.make(
      self.fprop_dtype,
      (query_len, key_len),
      self._kv_heads[1],
      mask,
      mesh_obstacle=mesh_obstacle,
      split=split,
      array_bias=has_array,
      logit_bias=self._has_bias and not has_array,
      soft_cap=self.logit_soft_cap is not None,
      dropout=self.dropout_rate > 0,
      sinks=self.use_sinks,
    )
    return choose_attention(self.implementation, case, f'{self.path_name}.implementation')

  def exchanges(self) -> list[Exchange]:
    axes = self._resolve_axes('context_axis')
    return [Exchange('exchange of a sequence', 'context_axis', axes)] if axes else []

  def token_flops(self, length: int) -> TokenFlops:
    return TokenFlops(attention=4.0 * self.num_heads * (self.dims_per_head or 0) * length)

  def implementation_of(self, length: int, packed: bool) -> str:
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if packed else None
    mask = jax.eval_shape(lambda ids: self.attention_mask(segment_ids=ids, kv_segment_ids=ids, segment_pos=ids), ids)
    is_split = self.context_axis is not None
    name, reason = self._choose(length, length, mask, is_split, self._kernel_split(is_split)[1])
    over = '' if self.context_axis is None else f', {self.context_method.replace("_", "-")} over {self.context_axis!r}'
    return f'{name} on {platform()}{over}: {reason}{self._describe_decoding(length)}'

  def _describe_decoding(self, length: int) -> str:
    """Returns the end of a line that says how a single token attends to a cache; '' where there is only one way."""
    if platform() != 'tpu' or not self.causal:
      return ''
    cached = self._cached_attention()
    assert self.fprop_dtype is not None  # Set once the layer is built.
    obstacle = cached.kernel_obstacle(self.fprop_dtype, min(length, cached.window or length))
    return f'; decoding: {f"in plain JAX, because its kernel {obstacle}" if obstacle else "a kernel for each token"}'
