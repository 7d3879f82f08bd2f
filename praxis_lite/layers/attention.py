"""Multi-head attention, also with grouped heads, causal or not: in one pass, or token by token with a cache.

    query = x W_q [D, N, H],  key = kv W_k [D, K, H],  value = kv W_v [D, K, H]
    out = softmax(query . key / sqrt(H)) . value  W_o [N, H, D]

With sinks [N], the softmax of head n has exp(sinks_n) as a further term of its denominator.

B batch, T length, S length of keys and values or of the cache, D model dims, N heads, K kv heads, G = N / K, H dims per
head.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from praxis_lite.common.config import Config, child
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.common.mistakes import check_arguments, defined_at, missing_return_hint, name_method
from praxis_lite.layers.alibi import AlibiBias
from praxis_lite.layers.attention_heads import AttentionHeads, QueryKeyValue
from praxis_lite.layers.attention_spec import AttentionImplementation, AttentionSpec, LogitBias, ProbabilityDropout
from praxis_lite.layers.base.facts import TokenFlops
from praxis_lite.layers.blockwise import RowSplit
from praxis_lite.layers.cached_attention import CachedAttention, PositionBias
from praxis_lite.layers.decode_caches import keep_cache, read_cache
from praxis_lite.layers.dot_product import (
  IMPLEMENTATIONS,
  AttentionCase,
  AttentionChoice,
  attention_entropy,
  choose_attention,
  dot_product_attention,
)
from praxis_lite.layers.kv_cache import KVCache, check_cache_dtype
from praxis_lite.layers.linears import bias_weight
from praxis_lite.layers.masks import AttentionMask, local_chunks, make_mask, to_mask
from praxis_lite.layers.packed_prompts import PackedPrompts
from praxis_lite.layers.positions import RelativeBias
from praxis_lite.layers.sequence_parts import SequenceSplit
from praxis_lite.layers.shared_bias import is_bias_shared
from praxis_lite.sharding.mesh import platform
from praxis_lite.sharding.weights import SplitDimsMapping

# On accelerators, a single token reads up to this many cache slots at once, even if most are empty: starting one more
# operation takes longer than reading empty slots.
_MOST_SLOTS = 4096
# Fields that cross attention does not support.
_OF_ONE_SEQUENCE = (
  *('combine_qkv', 'causal', 'sliding_window', 'local_chunk'),
  *('rotary_tpl', 'relative_bias_tpl', 'value_residual_tpl'),
)


class MultiHeadAttention(AttentionHeads):
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
    use_key_bias: whether keys have a bias; None means the same as `use_bias`. Without rotary positions and without
      norms of keys, this bias cancels in the softmax.
    combine_qkv: whether one weight [D, K, G + 2, H] computes the G queries, the key and the value of each kv head.
    proj_tpl: template of the children `query`, `key` and `value`, or `qkv`.
    out_tpl: template of the child `out`.
    rotary_tpl: template of the child `rotary`, rotary positions of queries and keys; None disables them.
    qk_norm_tpl: template of the children `query_norm` and `key_norm`, norms before rotary positions; None disables
      them.
    qk_norm_over: 'head' normalizes each head on its own, over H; 'heads' normalizes all heads together, over N H for
      queries and K H for keys (OLMo 2).
    relative_bias_tpl: template of the child `relative_bias`, a bias on logits that depends on the offset of positions,
      such as `RelativeBias` or `AlibiBias`; None disables it.
    per_dim_scale_tpl: template of the child `per_dim_scale`, which multiplies queries after rotary positions, such as
      `PerDimScale`; None disables it.
    value_residual_tpl: template of the child `value_residual`, a `ValueResidual`, which mixes the values with those of
      the first layer of a stack; None disables it. The stack passes the first layer's values to each layer.
    gate_output: whether the results of heads are multiplied by the sigmoid of a projection of the inputs, the child
      `output_gate`, before `out` (Qwen3-Next). Its weight is split like the weight of the queries, and it has a bias if
      they have one.
    use_sinks: whether the softmax of each head has a further, learned logit without a value, so that the head can
      attend to nothing (attention sinks of GPT-OSS; OpenAI, 2025). The variable `sinks`, [N], begins at 0 and is split
      like the heads of the weights.
    dropout_rate: share of the attention probabilities that is dropped in training.
    scale, logit_soft_cap, block_size: see `dot_product_attention`.
    implementation: 'dense' computes all logits at once; 'blockwise' needs memory linear in the length; 'cudnn' and
      'tokamax' are fused kernels for NVIDIA GPUs, and 'splash' is one for TPUs; 'auto' chooses one of these, see
      `choose_attention`.
      Decoding is dense, or page by page; with 'auto' and 'splash', a kernel computes one token, and on TPUs also a few
      tokens, where it is supported, see `cached_attention.py`.
    context_axis: mesh axis that splits the length in training and evaluation (context parallelism), evenly or not; None
      does not split it. The mappings `blnh` and `blkh` say how batch and heads are split.
    context_method: 'ring' sends keys and values around a ring of devices; 'all_to_all' gives each device some of the
      heads. See `context_parallel.py`.
    cache_dtype: dtype of keys and values in the cache; int8 stores a scale with each vector; None means `fprop_dtype`.
    cache_page_size: number of cache slots that decoding reads at once; pages without tokens are not read. On GPU and
      TPU, each page takes some 20 small operations. So there, a single token reads up to 4,096 slots at once. Several
      tokens of a prompt do so too if there are at most 2**26 logits.
    weight_split_dims_mapping: `wt`, [D, N, H]: how the weights of queries, keys and values are split; the output's
      weight, [N, H, D], is split along the same dimensions.
  """

  causal: bool = False
  sliding_window: int | None = None
  local_chunk: int | None = None
  relative_bias_tpl: Config | None = None
  use_sinks: bool = False
  dropout_rate: float = 0.0
  scale: float | None = None
  logit_soft_cap: float | None = None
  implementation: AttentionImplementation = 'auto'
  block_size: int | None = None
  cache_dtype: DTypeLike | None = None
  cache_page_size: int = 512

  _caches_values: ClassVar[bool] = True
  _has_array_bias: ClassVar[bool] = False  # Whether the class adds its own array to the logits.

  relative_bias: RelativeBias | AlibiBias = child()

  def setup(self) -> None:
    self._check_range('num_heads', 'sliding_window', 'local_chunk', 'block_size', 'cache_page_size', least=1)
    self._check_range('dropout_rate', least=0, below=1)
    self._check_range('logit_soft_cap', above=0)
    if self.implementation is None:  # Configs recorded by older versions may contain None.
      self.implementation = 'auto'
    check_choice(f'{self.path_name}.implementation', self.implementation, IMPLEMENTATIONS)
    check_cache_dtype(f'{self.path_name}.cache_dtype', self.cache_dtype)
    super().setup()
    self._grow_logits()
    self._mesh.check(self.implementation)
    self._has_bias = self.relative_bias_tpl is not None or is_bias_shared()
    if self.relative_bias_tpl is not None:
      self.create_child('relative_bias', self.relative_bias_tpl.clone(num_heads=self.num_heads))
    if self.use_sinks:
      wt = self.weight_split_dims_mapping.wt
      self.create_variable('sinks', bias_weight(self.num_heads, None if wt is None else wt.pick(1)))

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
      kv_segment_ids: [B, S] int32, with `kv_BSD`. If this or `segment_ids` is None, segments do not restrict attention.
      segment_pos: [B, T] int32, positions in the segment; None means 0, 1, 2, ...
      prefix_lengths: [B] int32, the length of the prefix of each row to which all positions of the row attend
        (prefix-LM), even if `causal`. None disables it.
      mask: bool, broadcasts to [B, N, T, S], True where a query may attend; applies in addition to the masks above, and
        makes attention dense. None masks nothing more.
      logit_bias: added to the logits: an array that broadcasts to [B, N, T, S], which makes attention dense, or a
        function of positions; None adds nothing. It is for a bias that several layers share; `relative_bias_tpl` is for
        a layer's own.
      first_values: [B, T, K, H], the `first_values` of the first layer; None without `value_residual_tpl`.
    """
    self._check_one_bias(logit_bias)
    if kv_BSD is not None:
      self._check_cross_attention()
    else:
      kv_BSD, kv_segment_ids = x_BTD, segment_ids
    rules = self._checked_mask(
      segment_ids=segment_ids, kv_segment_ids=kv_segment_ids, segment_pos=segment_pos, prefix_lengths=prefix_lengths
    )
    if mask is not None:
      rules = rules & to_mask(mask)
    split = self._mesh.sequence_split()
    heads = self._mix_values(self._project(x_BTD, kv_BSD, segment_pos, split), first_values)
    gate = self._gate(x_BTD, split)
    return self._attend(heads, rules, segment_pos, self._make_dropout(x_BTD), split, logit_bias, gate)

  def attention_mask(
    self,
    *,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
  ) -> AttentionMask:
    """Returns which keys each query attends to. A subclass may restrict it: `super().attention_mask(**rows) & ...`.

    `__call__` passes its own arguments, and the mask's `allows` then receives indices in the row. In decoding, the only
    argument is `prefix_lengths`, `allows` receives positions in the sequence, and the mask must have no arrays of
    queries or keys.
    """
    mask = make_mask(self.causal, self.sliding_window, prefix_lengths, segment_ids, kv_segment_ids)
    if self.local_chunk is not None:
      mask = mask & local_chunks(self.local_chunk, segment_ids, kv_segment_ids, segment_pos)
    return mask

  def _checked_mask(self, **rows: jax.Array | None) -> AttentionMask:
    """Returns `attention_mask(**rows)`; raises a `ConfigError` if a subclass returns a mask that cannot be used."""
    where = name_method(self, self.path_name, 'attention_mask')
    check_arguments(self.attention_mask, where, rows)
    mask = self.attention_mask(**rows)
    if mask is None:
      raise ConfigError(f'{where} {missing_return_hint(self.attention_mask)}')
    if not isinstance(mask, AttentionMask):
      kind = 'an array' if isinstance(mask, jax.Array) else type(mask).__name__
      raise ConfigError(
        f'{where} returned {kind}; it must return an AttentionMask, as super() does {defined_at(self.attention_mask)}'
      )
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
    packed: PackedPrompts | None = None,
  ) -> jax.Array:
    """Appends tokens to the cache and returns [B, T, D]; a token attends to all cached tokens up to its own position.

    The caller ensures that the cache has room; see `KVCache`.

    Args:
      x_BTD: the next token (T = 1) or tokens, such as a prompt, of each sequence.
      pos_BT: int32 position of each token in its sequence; -1 is padding, which no token attends to.
      prefix_lengths: [B] int32, the length of the prefix of each row to which all tokens of the row attend. The call
        that reads the prompt must contain the whole prefix. None disables it.
      logit_bias: a function of positions, added to the logits; its `query_pos` and `key_pos` are ignored. None adds
        nothing.
      first_values: see `__call__`; the cache stores the values after mixing.
      packed: where the tokens of each prompt are in packed rows; the cache must be empty, with a row for each prompt.
        None means that row b of `x_BTD` belongs to row b of the cache.
    """
    self._check_one_bias(logit_bias)
    if not self.causal:
      raise ConfigError(
        f'{self.path_name}.causal: extend_step needs causal attention, since later tokens do not exist yet'
      )
    if not self.decode_state:
      raise ConfigError(f'{self.path_name}: extend_step needs the decode state that init_decode_state allocates')
    if packed is not None:
      return self._read_packed(x_BTD, pos_BT, packed, first_values)
    mask = self._checked_mask(prefix_lengths=prefix_lengths)
    cached = self._cached_attention(logit_bias, self._sinks())
    context_BTNH = self._extend(cached, x_BTD, pos_BT, read_cache(self), mask, first_values)
    return self._output(context_BTNH, self._gate(x_BTD))

  def _extend(
    self,
    cached: CachedAttention,
    x_BTD: jax.Array,
    pos_BT: jax.Array,
    cache: KVCache,
    mask: AttentionMask,
    first_BTKH: jax.Array | None = None,
  ) -> jax.Array:
    """Stores the cache with these tokens appended; returns the results of attention, [B, T, N, H]."""
    heads = self._mix_values(self._project(x_BTD, x_BTD, pos_BT), first_BTKH)
    context_BTNH, cache = cached.extend(*heads, pos_BT, cache, mask)
    self._keep(cache)
    return context_BTNH

  def _read_packed(
    self, x_RTD: jax.Array, pos_RT: jax.Array, packed: PackedPrompts, first_RTKH: jax.Array | None
  ) -> jax.Array:
    """Attends in one pass, and writes the tokens of each prompt to its own row of the cache."""
    heads = self._mix_values(self._project(x_RTD, x_RTD, pos_RT), first_RTKH)
    key, value = (packed.unpack(x) for x in self._entries_of(x_RTD, pos_RT, heads))
    self._keep(self._cached_attention().write(read_cache(self), key, value, packed.row_pos))
    ids_RT = packed.segment_ids
    mask = self._checked_mask(segment_ids=ids_RT, kv_segment_ids=ids_RT, segment_pos=pos_RT)
    return self._attend(heads, mask, pos_RT, None, None, gate_BTNH=self._gate(x_RTD))

  def _entries_of(self, x_BTD: jax.Array, pos_BT: jax.Array, heads: QueryKeyValue) -> tuple[jax.Array, jax.Array]:
    """Returns the entries that the cache stores for these tokens: keys and values."""
    return heads[1:]

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
    """Returns the split of a kernel that reads the cache, and why the kernel cannot run; see `cache_kernel_split`."""
    if self.implementation not in ('auto', 'splash'):
      return None, f"is chosen by 'auto' and 'splash', and {self.path_name}.implementation is {self.implementation!r}"
    mapping = self._cache_mapping()
    mesh = self._mesh if isinstance(mapping, str) else dataclasses.replace(self._mesh, blkh=mapping)
    return mesh.cache_kernel_split(self.num_heads, self._cache_heads[0], num_rows)

  def _keep(self, cache: KVCache) -> None:
    keep_cache(self, cache, self._cache_mapping())

  def _cache_mapping(self) -> SplitDimsMapping | str:
    """Returns the mapping of a cache's vectors, [B, S, K, H], or the name of the field with the mapping."""
    return 'blkh'

  # ---------------------------------------------------------------- parts

  @property
  def logit_scale(self) -> float:
    """The factor of the logits."""
    assert self.dims_per_head is not None  # Set once the layer is built.
    return self.dims_per_head**-0.5 if self.scale is None else self.scale

  def _grow_logits(self) -> None:
    """Sets `scale` to the smaller model's scale divided by the growth of H, unless the models set different scales."""
    growth = self.growth_of('dims_per_head')
    if growth != 1 and self._counterpart is not None:
      smaller: Any = self._counterpart.layer
      if self.scale is None or self.scale == smaller.scale:
        self.scale = smaller.logit_scale / growth

  def growth_multipliers(self) -> dict[str, float]:
    growth = self.growth_of('dims_per_head')
    return {} if growth == 1 else {'logits of attention': growth**-0.5}

  def _spec(self, implementation: AttentionImplementation = 'auto') -> AttentionSpec:
    return AttentionSpec(self.scale, self.logit_soft_cap, implementation, self.block_size)

  def _check_cross_attention(self) -> None:
    for field in _OF_ONE_SEQUENCE:
      if getattr(self, field):
        raise ConfigError(f'{self.path_name}.{field}: cross attention does not support it; leave it unset')

  def _check_one_bias(self, logit_bias: object) -> None:
    if logit_bias is not None and self.relative_bias_tpl is not None:
      raise ConfigError(f'{self.path_name}.relative_bias_tpl: the call gives a logit_bias too; set one of them to None')

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
    gate_BTNH: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the output, [B, T, D]. A relative bias uses `pos_BT` as the positions of both queries and keys."""
    (B, T, _, _), (_, S, K, _) = heads[0].shape, heads[1].shape
    over: RowSplit | SequenceSplit | None = split
    kernel_split, obstacle = self._mesh.pass_split(split is not None, self.num_heads, self._kv_heads[0], B)
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
    self.add_tap('entropy', lambda: attention_entropy(*heads[:2], mask, bias, self._sinks(), self._spec(name)))
    context_BTNH = dot_product_attention(
      *heads, mask, spec=self._spec(name), bias=bias, dropout=dropout, sinks=self._sinks(), split=over
    )
    # All implementations except 'dense' tag what the backward pass needs; `remat.py` says how cuDNN's kernel is found.
    remark = f'attention is {name}: {reason}'
    return self._output(context_BTNH, gate_BTNH, split, remark=remark, tagged=name != 'dense')

  def _choose(
    self,
    query_len: int,
    key_len: int,
    mask: AttentionMask,
    split: bool,
    mesh_obstacle: str,
    has_array: bool,
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

  def token_flops(self, length: int) -> TokenFlops:
    return TokenFlops(attention=4.0 * self.num_heads * (self.dims_per_head or 0) * length)

  def implementation_of(self, length: int, packed: bool) -> str:
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if packed else None
    mask = jax.eval_shape(lambda ids: self._checked_mask(segment_ids=ids, kv_segment_ids=ids, segment_pos=ids), ids)
    is_split = self.context_axis is not None
    _, obstacle = self._mesh.pass_split(is_split, self.num_heads, self._kv_heads[0])
    name, reason = self._choose(length, length, mask, is_split, obstacle, self._has_array_bias)
    over = '' if self.context_axis is None else f', {self.context_method.replace("_", "-")} over {self.context_axis!r}'
    line = f'{name} on {platform()}{over}: {reason}'
    if platform() == 'cpu' or not self.causal:
      return line
    assert self.fprop_dtype is not None and self.dims_per_head is not None  # Set once the layer is built.
    return f'{line}; decoding: {self._cached_attention().describe(self.fprop_dtype, length, self.dims_per_head)}'
