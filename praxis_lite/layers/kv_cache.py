"""KV caches: keys and values of the tokens so far, and attention to them, for decoding.

    growing   every row takes the next T slots. Padding leaves slots empty; the next tokens take the slots that are
              empty in all rows
    ring      W slots, for a sliding window of W: the token at position p is in slot p mod W of its row
    placed    the token at position p is in slot p of its row, also with a window. So rows may have different lengths,
              and a row may go back: tokens that are read again replace those of their positions; none sees later ones

The cost depends on the number of cached tokens, not on the size of the cache, for two reasons. A growing cache is read
page by page, up to the last page with a token, with the online softmax of `blocks.py`. And a prompt longer than a page
is read in steps of a page, so that no array has the size prompt length x cache length.

On TPUs, the kernel of `decode_kernel.py` computes attention of a single token where it can.

Entries may be stored in int8: each vector has a scale, max |x| / 127.

A loop over layers passes on the stacked caches of all layers. Each layer writes its tokens into the stack, and reads
its pages from there; a scan that slices and stacks the caches would copy all of them. Only for a prompt longer than a
page does a layer take its cache out of the stack, and put it back.

L layers of a loop, B batch, T new tokens, S slots, N heads, K kv heads, G = N / K, H dims per head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, Path, insert, leaves_by_path, merge, node_at, path_name, select
from praxis_lite.layers import blocks
from praxis_lite.layers.attention_spec import DEFAULT_SPEC, AttentionSpec
from praxis_lite.layers.base.expected_trips import expected_trips
from praxis_lite.layers.blocks import Formula, Sums
from praxis_lite.layers.blockwise import RowSplit
from praxis_lite.layers.dot_product import dot_product_attention, group_heads, has_kernels_in
from praxis_lite.layers.masks import ArrayMask, AttentionMask, combine_masks, split_offsets
from praxis_lite.layers.precision import sum_dtype
from praxis_lite.sharding.mesh import platform

T = TypeVar('T')
_KERNEL_FROM = 256  # Slots of a cache from which on a single token is computed by the kernel.
PositionBias = Callable[[jax.Array, jax.Array], jax.Array]  # Positions of queries and keys -> bias [B, N, T, S].


class KVCache(NamedTuple):
  """The slots of a cache, or new tokens that are not written yet.

  In a cache, the slots of a head are contiguous, as the products of attention need them. New tokens have the layout in
  which the layer computes them, [B, T, K, H].

  Attributes:
    key, value: [B, K, S, H], in the dtype of the cache. A value of None means that the values are the keys.
    pos: [B, S] int32 position of the token in each slot; -1 for an empty slot.
    slot: the number of slots taken, in a growing cache; None for new tokens. In a placed cache [B]: how many first
      slots of each row the last tokens may attend to.
    key_scale, value_scale: [B, K, S] float32, factors of int8 entries; None for other dtypes.
    turn: int32, the number of the layer in a loop; all arrays then begin with the dimension L. None for the cache of a
      single layer.
  """

  key: jax.Array
  value: jax.Array | None
  pos: jax.Array
  slot: jax.Array | None = None
  key_scale: jax.Array | None = None
  value_scale: jax.Array | None = None
  turn: jax.Array | None = None

  def unstack(self) -> KVCache:
    """Returns only the cache of this layer from the stack."""
    turn = self.turn
    if turn is None:
      return self
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, turn, keepdims=False), self._replace(turn=None))

  def restack(self, own: KVCache) -> KVCache:
    """Returns the stack with `own` as the cache of this layer."""
    turn = self.turn
    assert turn is not None
    after = jax.tree.map(
      lambda x, own: jax.lax.dynamic_update_index_in_dim(x, own, turn, 0), self._replace(turn=None), own
    )
    return after._replace(turn=turn)

  def page(self, start: jax.Array, size: int) -> KVCache:
    """Returns `size` slots of this layer, beginning at `start`."""

    def take(x: jax.Array) -> jax.Array:
      if self.turn is None:
        return jax.lax.dynamic_slice_in_dim(x, start, size, _slot_axis(x.ndim))
      axis = 1 + _slot_axis(x.ndim - 1)
      starts: list[jax.Array | int] = [self.turn, *[0] * (x.ndim - 1)]
      starts[axis] = start
      return jax.lax.dynamic_slice(x, starts, (1, *x.shape[1:axis], size, *x.shape[axis + 1 :]))[0]

    return jax.tree.map(take, self._replace(slot=None, turn=None))

  def read(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns the keys and values of slots, [B, S, K, H], in `dtype`."""

    def vectors(entries: jax.Array, scale: jax.Array | None) -> jax.Array:
      scaled = entries if scale is None else entries * scale[..., None]
      return jnp.swapaxes(scaled.astype(dtype), 1, 2)

    key = vectors(self.key, self.key_scale)
    return key, key if self.value is None else vectors(self.value, self.value_scale)

  @property
  def num_slots(self) -> int:
    return self.pos.shape[-1]

  @property
  def is_placed(self) -> bool:
    """Whether the slot of a token is its position, see the top of this file."""
    return self.slot is not None and self.slot.ndim > (self.turn is not None)

  @property
  def taken(self) -> jax.Array:
    """How many first slots of this layer may have tokens that the last ones attend to."""
    assert self.slot is not None
    return jnp.max(self.slot if self.turn is None else self.slot[self.turn])


@dataclasses.dataclass(frozen=True)
class CachedAttention:
  """How an attention layer stores and reads its cache."""

  dtype: DTypeLike  # Of the entries; int8 stores a scale for each vector.
  window: int | None = None  # Number of last tokens that are kept, which makes the cache a ring; None keeps all.
  page_size: int | None = None  # Slots, or tokens of a prompt, that are read at once; None means all.
  most_slots: int = 0  # Slots that a single token may read at once, if more than `page_size`.
  spec: AttentionSpec = DEFAULT_SPEC  # How attention is computed; its `implementation` is not used.
  bias: PositionBias | None = None  # Bias of the logits; None disables it.
  sinks: jax.Array | None = None  # [N], see `dot_product_attention`.
  has_values: bool = True  # False if the values are the keys, which are stored once.
  # Returns how a kernel is mapped over the mesh, for a number of rows or None, and why it cannot be.
  kernel_split: Callable[[int | None], tuple[RowSplit | None, str]] = lambda rows: (None, '')

  def empty(self, batch_size: int, max_len: int, num_kv_heads: int, dims_per_head: int) -> KVCache:
    """Returns an empty cache for sequences of up to `max_len` tokens, padding between them included."""
    slots = max_len
    if self.window is not None:
      slots = min(max_len, self.window)
    elif self.page_size is not None and max_len > self.page_size:
      pages = -(-max_len // max(self.most_slots, self.page_size))  # Of a single token; each has several of a prompt.
      slots = -(-max_len // (pages * self.page_size)) * pages * self.page_size
    vectors = jnp.zeros((batch_size, slots, num_kv_heads, dims_per_head))
    no_token = jnp.full((batch_size, slots), -1, jnp.int32)
    return _to_slots(self._to_entries(vectors, vectors, no_token))._replace(slot=jnp.zeros((), jnp.int32))

  def extend(
    self,
    query_BTNH: jax.Array,
    key_BTKH: jax.Array,
    value_BTKH: jax.Array,
    pos_BT: jax.Array,
    cache: KVCache,
    mask: AttentionMask,
  ) -> tuple[jax.Array, KVCache]:
    """Appends tokens to the cache; returns the results of attention, [B, T, N, H], and the cache.

    Args:
      query_BTNH, key_BTKH, value_BTKH: queries, keys and values of the new tokens; no values if not `has_values`.
      pos_BT: int32 positions, which grow along each row; -1 is padding, to which no token attends.
      cache: a cache with room for T tokens; a full growing cache overwrites its last slots.
      mask: which positions each token attends to, among the cached and the new tokens.

    Raises:
      ConfigError: the mask has arrays of queries or keys, which a cache does not keep.
    """
    if mask.arrays('query', 'key'):
      raise ConfigError(
        'a mask with arrays of queries or keys cannot be used with a cache, which keeps positions only; in decoding, '
        'return one that goes by positions'
      )
    sees_later = split_offsets(mask)[0].ahead != 0
    new = self._to_entries(key_BTKH, value_BTKH, pos_BT)
    page = self.page_size
    is_ring = self.window is not None and not cache.is_placed
    if page is None or page >= pos_BT.shape[1] or (is_ring and sees_later):
      return self._extend(query_BTNH, new, cache, mask)
    pages = -(-pos_BT.shape[1] // page)
    if cache.turn is not None:  # XLA would copy a stack that a loop over pages reads and writes.
      context_BTNH, own = self.extend(query_BTNH, key_BTKH, value_BTKH, pos_BT, cache.unstack(), mask)
      return context_BTNH, cache.restack(own)
    if sees_later:  # Tokens of the first page may attend to tokens of the last one.
      cache = _append(cache, new)

      def attend(carry: None, page_of: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        return None, self._attend(*page_of, cache, mask, pages)

      return _scan_pages(attend, None, (query_BTNH, pos_BT), page)[1], cache

    def step(cache: KVCache, page_of: tuple[jax.Array, KVCache]) -> tuple[KVCache, jax.Array]:
      context_BTNH, cache = self._extend(*page_of, cache, mask, (1 + pages) / 2)
      return cache, context_BTNH

    cache, context_BTNH = _scan_pages(step, cache, (query_BTNH, new), page)
    return context_BTNH, cache

  def write(self, cache: KVCache, key_BTKH: jax.Array, value_BTKH: jax.Array, pos_BT: jax.Array) -> KVCache:
    """Returns a growing cache with tokens in its next slots; the arguments are the same as for `extend`."""
    return _append(cache, self._to_entries(key_BTKH, value_BTKH, pos_BT))

  def attend(self, query_BTNH: jax.Array, pos_BT: jax.Array, cache: KVCache, mask: AttentionMask) -> jax.Array:
    """Returns the results of attention to the tokens in a growing cache, [B, T, N, H]; see `extend`."""
    return self._attend(query_BTNH, pos_BT, cache, mask, None)

  def kernel_obstacle(self, dtype: DTypeLike, num_slots: int, num_rows: int | None = None) -> str:
    """Returns why the kernel does not compute attention of a single token, as the end of a sentence; '' if it does.

    Args:
      dtype: dtype of the queries.
      num_slots: S.
      num_rows: B; None if it is not known yet.
    """
    if platform() != 'tpu':
      return f'is for TPUs, and the platform is {platform()!r}'
    if num_slots < _KERNEL_FROM:
      return f'is for caches of at least {_KERNEL_FROM} slots, not {num_slots}'
    for name in (jnp.dtype(d).name for d in (dtype, self.dtype)):
      if name not in ('bfloat16', 'float32'):
        return f'takes bfloat16 and float32, not {name}'
    if not has_kernels_in(dtype):
      return f'does not compute in {jnp.dtype(dtype).name} on this chip'
    if self.bias is not None:
      return 'has no bias that depends on positions'
    if not self.has_values:
      return 'needs values that are not the keys'
    return self.kernel_split(num_rows)[1]

  def _extend(
    self, query_BTNH: jax.Array, new: KVCache, cache: KVCache, mask: AttentionMask, pages: float | None = None
  ) -> tuple[jax.Array, KVCache]:
    """Like `extend`, for tokens that are read at once; see `_attend_by_page` for `pages`."""
    if self.window is None or cache.is_placed:
      cache = _append(cache, new)
      return self._attend(query_BTNH, new.pos, cache, mask, pages), cache
    # In a ring, the first of several new tokens may attend to slots that the last one overwrites.
    after = _write_ring(cache, new)
    if new.num_slots == 1:
      attend = self._attend_by_kernel if self._has_kernel(query_BTNH, after) else self._attend_at_once
      return attend(query_BTNH, new.pos, after, mask), after
    seen = jax.tree.map(_join_slots, cache.unstack()._replace(slot=None), _to_slots(new))
    return self._attend_at_once(query_BTNH, new.pos, seen, mask), after

  def _to_entries(self, key_BTKH: jax.Array, value_BTKH: jax.Array, pos_BT: jax.Array) -> KVCache:
    """Returns tokens in the form in which the cache stores them."""

    def entries(vectors_BTKH: jax.Array) -> tuple[jax.Array, jax.Array | None]:
      return _quantize(vectors_BTKH) if jnp.dtype(self.dtype) == jnp.int8 else (vectors_BTKH.astype(self.dtype), None)

    key, key_scale = entries(key_BTKH)
    value, value_scale = entries(value_BTKH) if self.has_values else (None, None)
    return KVCache(key, value, pos_BT, key_scale=key_scale, value_scale=value_scale)

  def _attend(
    self, query_BTNH: jax.Array, pos_BT: jax.Array, cache: KVCache, mask: AttentionMask, pages: float | None
  ) -> jax.Array:
    if self._has_kernel(query_BTNH, cache):
      return self._attend_by_kernel(query_BTNH, pos_BT, cache, mask)
    page = self._page(query_BTNH.shape[1], cache.num_slots)
    if page == cache.num_slots:
      return self._attend_at_once(query_BTNH, pos_BT, cache, mask)
    return self._attend_by_page(query_BTNH, pos_BT, cache, mask, page, pages or cache.num_slots / page)

  def _page(self, tokens: int, slots: int) -> int:
    """Returns how many slots are read at once, a divisor of `slots`; for a prompt, a page, which limits its logits."""
    if self.page_size is None or slots <= self.page_size:
      return slots
    most = max(self.most_slots, self.page_size) if tokens == 1 else self.page_size
    return next(slots // n for n in range(1, slots + 1) if slots % n == 0 and slots // n <= most)

  def _has_kernel(self, query_BTNH: jax.Array, cache: KVCache) -> bool:
    rows, tokens = query_BTNH.shape[:2]
    return tokens == 1 and not self.kernel_obstacle(query_BTNH.dtype, cache.num_slots, rows)

  def _attend_by_kernel(
    self, query_BTNH: jax.Array, pos_BT: jax.Array, cache: KVCache, mask: AttentionMask
  ) -> jax.Array:
    from praxis_lite.layers.decode_kernel import attend_by_kernel  # Its import takes long, and only TPUs need it.

    (B, _, N, H), S, turn = query_BTNH.shape, cache.num_slots, cache.turn
    pos_BS = cache.pos if turn is None else cache.pos[turn]
    assert cache.value is not None
    key, value = (cache.key[None], cache.value[None]) if turn is None else (cache.key, cache.value)
    return attend_by_kernel(
      query_BTNH.reshape(B, N, H),
      key,
      value,
      jnp.broadcast_to(_mask_slots(mask, pos_BT, pos_BS)[:, 0], (B, S)),
      0 if turn is None else turn,
      formula=Formula(H**-0.5 if self.spec.scale is None else self.spec.scale, self.spec.logit_soft_cap),
      sinks=self.sinks,
      split=self.kernel_split(B)[0],
    )[:, None]

  def _attend_at_once(self, query_BTNH: jax.Array, pos_BT: jax.Array, cache: KVCache, mask: AttentionMask) -> jax.Array:
    cache = cache.unstack()
    return dot_product_attention(
      query_BTNH,
      *cache.read(query_BTNH.dtype),
      ArrayMask(_mask_slots(mask, pos_BT, cache.pos)),
      spec=dataclasses.replace(self.spec, implementation='dense'),
      bias=None if self.bias is None else self.bias(pos_BT, cache.pos),
      sinks=self.sinks,
    )

  def _attend_by_page(
    self, query_BTNH: jax.Array, pos_BT: jax.Array, cache: KVCache, mask: AttentionMask, page_size: int, pages: float
  ) -> jax.Array:
    """Computes attention with an online softmax over the pages with tokens; plans expect this number of `pages`."""
    (B, T, N, H), K = query_BTNH.shape, cache.key.shape[-3]
    query_BTKGH = query_BTNH.reshape(B, T, K, N // K, H)
    scale, wide = H**-0.5 if self.spec.scale is None else self.spec.scale, sum_dtype(query_BTNH)

    def add_page(index: jax.Array, sums: Sums) -> Sums:
      page = cache.page(index * page_size, page_size)
      key_BSKH, value_BSKH = page.read(query_BTNH.dtype)
      logits = scale * jnp.einsum('BTKGH,BSKH->BKGTS', query_BTKGH, key_BSKH, preferred_element_type=wide)
      if (cap := self.spec.logit_soft_cap) is not None:
        logits = cap * jnp.tanh(logits / cap)
      if self.bias is not None:
        logits += group_heads(self.bias(pos_BT, page.pos), K)
      seen = group_heads(_mask_slots(mask, pos_BT, page.pos)[:, None], K)
      return blocks.add_keys(sums, jnp.where(seen, logits, blocks.MASKED), jnp.moveaxis(value_BSKH, 1, 2))

    num_pages = jnp.minimum(-(-cache.taken // page_size), cache.num_slots // page_size)
    with expected_trips(pages):
      sums = jax.lax.fori_loop(0, num_pages, add_page, blocks.zero_sums((B, K, N // K, T, H), wide))
    context_BKGTH, _ = blocks.finish_sums(sums, blocks.group_sinks(self.sinks, K))
    return jnp.moveaxis(context_BKGTH, 3, 1).reshape(B, T, N, H).astype(query_BTNH.dtype)


def check_cache_dtype(path: str, dtype: DTypeLike | None) -> None:
  """Raises ConfigError, which names the field's path, if entries cannot have this dtype."""
  if dtype is not None and jnp.dtype(dtype) != jnp.int8 and not jnp.issubdtype(dtype, jnp.floating):
    raise ConfigError(f'{path}: expected int8 or a floating dtype, got {jnp.dtype(dtype)}')


def _mask_slots(mask: AttentionMask, pos_BT: jax.Array, key_pos_BS: jax.Array) -> jax.Array:
  """Returns bool [B, T, S], True for taken slots, whose positions are at least 0, that the mask allows."""
  return jnp.asarray(combine_masks((key_pos_BS >= 0)[:, None, :], mask.allows(pos_BT, key_pos_BS)))


def _scan_pages(
  step: Callable[[T, tuple[Any, ...]], tuple[T, jax.Array]], carry: T, arrays: tuple[Any, ...], page: int
) -> tuple[T, jax.Array]:
  """Runs `step` for each page of arrays [B, T, ...]; returns the carry, and the results [B, T, ...].

  The first page may be shorter than the others.
  """

  def to_pages(x: jax.Array) -> jax.Array:
    """[B, n page, ...] to [n, B, page, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, page, *x.shape[2:]), 1, 0)

  first, results = arrays[0].shape[1] % page, []
  if first:
    carry, result = step(carry, jax.tree.map(lambda x: x[:, :first], arrays))
    results.append(result)
  carry, stacked = jax.lax.scan(step, carry, jax.tree.map(lambda x: to_pages(x[:, first:]), arrays))
  stacked = jnp.moveaxis(stacked, 0, 1)
  results.append(stacked.reshape(stacked.shape[0], -1, *stacked.shape[3:]))
  return carry, jnp.concatenate(results, axis=1)


def _quantize(x_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns int8 vectors and their float32 scales, [B, T, K]."""
  scale_BTK = jnp.max(jnp.abs(x_BTKH), axis=-1).astype(jnp.float32) / 127
  return jnp.round(x_BTKH / jnp.maximum(scale_BTK, 1e-30)[..., None]).astype(jnp.int8), scale_BTK


def _slot_axis(rank: int) -> int:
  """Returns the dimension of slots in an array of one cache.

  The arrays are positions [B, S], scales [B, K, S], and vectors [B, K, S, H].
  """
  return min(rank - 1, 2)


def _to_slots(new: KVCache) -> KVCache:
  """Returns new tokens, [B, T, K, ...], in the layout of slots."""
  return jax.tree.map(lambda x: x if x.ndim == 2 else jnp.swapaxes(x, 1, 2), new)


def _join_slots(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.concatenate([a, b], axis=_slot_axis(a.ndim))


def _append(cache: KVCache, new: KVCache) -> KVCache:
  """Writes tokens to the next slots of a growing cache; columns of padding at the end take no slots.

  In a placed cache, it writes them to the slots of their positions.
  """
  turn, columns = cache.turn, new.num_slots
  assert cache.slot is not None
  if cache.is_placed:
    seen_B = jnp.max(new.pos, axis=1) + 1  # Of a row that is padding, nothing is looked at.
    return _write_ring(cache, new)._replace(slot=seen_B if turn is None else cache.slot.at[turn].set(seen_B))
  slot = cache.slot if turn is None else cache.slot[turn]
  taken: jax.Array | int = 1
  if columns > 1:
    taken = jnp.max(jnp.where(new.pos >= 0, jnp.arange(1, columns + 1, dtype=jnp.int32), 0))

  def write(slots: jax.Array, tokens: jax.Array) -> jax.Array:
    starts: list[jax.Array | int] = [0] * tokens.ndim
    starts[_slot_axis(tokens.ndim)] = slot
    if turn is not None:
      starts, tokens = [turn, *starts], tokens[None]
    return jax.lax.dynamic_update_slice(slots, tokens, starts)

  after = slot + taken if turn is None else cache.slot.at[turn].add(taken)
  return _write_arrays(write, cache, _to_slots(new))._replace(slot=after)


def _write_ring(cache: KVCache, new: KVCache) -> KVCache:
  """Writes the last tokens of each row to their slots.

  It leaves out padding, and tokens whose slot a later token takes.
  """
  num_slots = cache.num_slots
  last_B1 = jnp.max(new.pos, axis=1, keepdims=True)
  stays_BT = (new.pos >= 0) & (new.pos > last_B1 - num_slots)
  slot_BT = jnp.where(stays_BT, new.pos % num_slots, num_slots)

  row_B1 = jnp.arange(slot_BT.shape[0])[:, None]

  def write(slots: jax.Array, tokens: jax.Array) -> jax.Array:
    heads = () if tokens.ndim == 2 else (slice(None),)  # The indexed shape is [B, T, K, ...], like the tokens.
    turn = () if cache.turn is None else (cache.turn,)
    return slots.at[*turn, row_B1, *heads, slot_BT].set(tokens, mode='drop')

  return _write_arrays(write, cache, new)


def _write_arrays(write: Callable[[jax.Array, jax.Array], jax.Array], cache: KVCache, new: KVCache) -> KVCache:
  """Returns the cache with its arrays changed by `write(slots, tokens)`."""
  slots = cache._replace(slot=None, turn=None)
  return jax.tree.map(write, slots, new)._replace(slot=cache.slot, turn=cache.turn)


# -------------------------------------------------------------------- caches in the decode state of several layers


def places_of_caches(state: object) -> list[Path]:
  """Returns the paths of the KV caches in a decode state, whose nodes have the fields of `KVCache` as names."""
  paths = leaves_by_path(state).keys()
  places = [path[:-1] for path in paths if path[-1:] == ('pos',)]
  return [place for place in places if all((*place, name) in paths for name in ('key', 'slot'))]


def axis_of_slots(rank: int, rank_of_pos: int) -> int:
  """Returns the dimension of slots in an array of caches that may be stacked, given the ranks of it and of `pos`."""
  stacked = rank_of_pos - 2
  return stacked + _slot_axis(rank - stacked)


def place_caches(state: NestedDict, num_slots: int) -> NestedDict:
  """Returns a decode state without tokens in which all KV caches are placed, see the top of this file.

  Args:
    state: what `init_decode_state` has made.
    num_slots: the largest number of tokens of a row.

  Raises:
    ConfigError: a layer has another state than a KV cache, which cannot go back to an earlier token.
  """
  places = places_of_caches(state)
  for path in leaves_by_path(state):
    if path[:-1] not in places:
      raise ConfigError(
        f'{path_name(path)}: this state of a layer cannot go back to an earlier token, as caches of keys and values '
        'can; so this model has no speculative decoding and no batcher'
      )
  for place in places:
    cache = node_at(state, place)
    rank = jnp.ndim(cache['pos'])

    def pad_slots(name: str, x: jax.Array, rank: int = rank) -> jax.Array:
      axis = axis_of_slots(x.ndim, rank)
      more = max(num_slots - x.shape[axis], 0)
      widths = [(0, more if i == axis else 0) for i in range(x.ndim)]
      return jnp.pad(x, widths, constant_values=-1 if name == 'pos' else 0)

    arrays = {name: pad_slots(name, x) for name, x in cache.items() if name != 'slot'}
    state = insert(state, place, {**arrays, 'slot': jnp.zeros(jnp.shape(cache['pos'])[:-1], jnp.int32)})
  return state


class StackedCaches:
  """The stacked caches in the decode state of a loop over layers, which each iteration passes on to the next.

  Caches of a loop inside one of these layers are not included, because they have several dimensions of layers.

  Args:
    state: the decode state of the loop, stacked.

  Attributes:
    arrays: arrays of the caches, by path.
    others: all other arrays of the state.
  """

  def __init__(self, state: NestedDict):
    self._places = {place for place in places_of_caches(state) if jnp.ndim(node_at(state, place)['pos']) == 3}
    self.arrays, self.others = self.split(state)

  def split(self, state: NestedDict) -> tuple[NestedDict, NestedDict]:
    """Splits the state of the loop, or the state after an iteration, into the arrays of caches and all others."""
    arrays = select(state, lambda path: path[:-1] in self._places and path[-1] != 'turn')
    return arrays, select(state, lambda path: path[:-1] not in self._places)

  def turn_state(self, arrays: NestedDict, others: NestedDict, turn: jax.Array) -> NestedDict:
    """Returns the decode state of the layer in one iteration, which contains the caches of all layers."""
    state = merge(others, arrays)
    for place in self._places:
      state = insert(state, (*place, 'turn'), turn)
    return state
