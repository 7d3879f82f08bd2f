"""Attention to a KV cache, for decoding.

The cost depends on the number of cached tokens, not on the size of the cache, for two reasons. A growing cache is read
page by page, up to the last page with a token, with the online softmax of `blocks.py`. And a prompt longer than a page
is read in steps of a page, so that no array has the size prompt length x cache length.

A kernel computes attention of one token, where it is supported: on TPUs, the kernel in `decode_kernel.py`, which also
takes a few tokens; on a single GPU, the kernel in `gpu_decode_kernel.py`.

B batch, T new tokens, S slots, N heads, K kv heads, G = N / K, H dims per head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import export
from jax.typing import DTypeLike

from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import blocks
from praxis_lite.layers.attention_spec import DEFAULT_SPEC, AttentionSpec
from praxis_lite.layers.base.expected_trips import expected_trips
from praxis_lite.layers.blocks import Sums
from praxis_lite.layers.blockwise import RowSplit
from praxis_lite.layers.dot_product import dot_product_attention, first_of, group_heads, has_kernels_in
from praxis_lite.layers.grouped_matmul import why_no_kernel_for
from praxis_lite.layers.kv_cache import KVCache, append_tokens, join_slots, to_entries, to_slots, write_to_ring
from praxis_lite.layers.masks import ArrayMask, AttentionMask, combine_masks, split_offsets
from praxis_lite.layers.precision import sum_dtype
from praxis_lite.sharding.mesh import device_kind, memory_of_single_gpu, platform

T = TypeVar('T')
_KERNEL_FROM = 256  # The kernel is used for caches of at least this many slots.
# Dtypes of entries that the kernel takes; queries have one of the first two.
_KERNEL_DTYPES = 'bfloat16', 'float32', 'int8', 'float8_e4m3fn', 'float8_e5m2'
_GPU_KERNEL_DTYPES = 'bfloat16', 'float32'
_FEWEST_GPU_DIMS = 16
_MOST_KERNEL_QUERIES = 128  # The kernel computes several tokens at once up to this number of queries of a kv head.
_MOST_LOGITS = 2**26  # The most float32 logits that several tokens may have at once if `most_slots` is set.
PositionBias = Callable[[jax.Array, jax.Array], jax.Array]  # Positions of queries and keys -> bias [B, N, T, S].


@dataclasses.dataclass(frozen=True)
class CachedAttention:
  """How an attention layer stores and reads its cache."""

  dtype: DTypeLike  # The dtype of cached vectors; with int8, the cache also stores a scale for each vector.
  window: int | None = None  # Number of last tokens that are kept, which makes the cache a ring; None keeps all.
  # How many slots are read at once, and how many tokens of a prompt are computed at once; None means all.
  page_size: int | None = None
  # A single token reads up to this number of slots at once, if this is more than `page_size`. Several tokens do the
  # same if they have few logits; see `_MOST_LOGITS`.
  most_slots: int = 0
  spec: AttentionSpec = DEFAULT_SPEC  # How attention is computed; its `implementation` is not used.
  bias: PositionBias | None = None  # Bias of the logits; None disables it.
  sinks: jax.Array | None = None  # [N], see `dot_product_attention`.
  has_values: bool = True  # False if the keys are also the values, and stored only once.
  # (number of rows, or None if unknown) -> the split of the kernel and an obstacle; see
  # `AttentionMesh.cache_kernel_split`.
  kernel_split: Callable[[int | None], tuple[RowSplit | None, str]] = lambda rows: (None, '')

  def empty(self, batch_size: int, max_len: int, num_kv_heads: int, dims_per_head: int) -> KVCache:
    """Returns an empty cache for sequences of up to `max_len` tokens, padding between them included."""
    slots = max_len
    if self.window is not None:
      slots = min(max_len, self.window)
    elif self.page_size is not None and max_len > self.page_size:
      # The number of pages in which a single token reads the cache. Each is one or several pages of a prompt.
      pages = -(-max_len // max(self.most_slots, self.page_size))
      slots = -(-max_len // (pages * self.page_size)) * pages * self.page_size
    vectors = jnp.zeros((batch_size, slots, num_kv_heads, dims_per_head))
    no_token = jnp.full((batch_size, slots), -1, jnp.int32)
    return to_slots(self._to_entries(vectors, vectors, no_token))._replace(slot=jnp.zeros((), jnp.int32))

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
      query_BTNH, key_BTKH, value_BTKH: projections of the new tokens; values are only used if `has_values`.
      pos_BT: int32 positions, which grow along each row; -1 is padding, to which no token attends.
      cache: a cache with room for T tokens; a full growing cache overwrites its last slots.
      mask: which positions each token attends to, among the cached and the new tokens.

    Raises:
      ConfigError: the mask has arrays of queries or keys, which a cache does not keep.
    """
    if mask.arrays('query', 'key'):
      raise ConfigError(
        'a mask with arrays of queries or keys cannot be used with a cache, which keeps positions only; in decoding, '
        'return one that depends on positions only'
      )
    sees_later = split_offsets(mask)[0].ahead != 0
    new = self._to_entries(key_BTKH, value_BTKH, pos_BT)
    page = self.page_size
    is_ring = self.window is not None and not cache.is_placed
    T, S = pos_BT.shape[1], cache.num_slots
    fits = self._fits_at_once(query_BTNH, S + is_ring * T) or (not is_ring and self._has_kernel(query_BTNH, cache))
    if page is None or page >= T or (is_ring and sees_later) or fits:
      return self._extend(query_BTNH, new, cache, mask)
    pages = -(-T // page)
    if cache.turn is not None:  # XLA would copy a stack that a loop over pages reads and writes.
      context_BTNH, own = self.extend(query_BTNH, key_BTKH, value_BTKH, pos_BT, cache.unstack(), mask)
      return context_BTNH, cache.restack(own)
    if sees_later:  # Tokens of the first page may attend to tokens of the last one, so all are appended first.
      cache = append_tokens(cache, new)

      def attend(carry: None, page_of: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        return None, self._attend(*page_of, cache, mask, pages)

      return _scan_pages(attend, None, (query_BTNH, pos_BT), page)[1], cache

    def step(cache: KVCache, page_of: tuple[jax.Array, KVCache]) -> tuple[KVCache, jax.Array]:
      context_BTNH, cache = self._extend(*page_of, cache, mask, (1 + pages) / 2)
      return cache, context_BTNH

    cache, context_BTNH = _scan_pages(step, cache, (query_BTNH, new), page)
    return context_BTNH, cache

  def write(self, cache: KVCache, key_BTKH: jax.Array, value_BTKH: jax.Array, pos_BT: jax.Array) -> KVCache:
    """Returns the cache with further tokens; the arguments are the same as for `extend`."""
    write = append_tokens if self.window is None or cache.is_placed else write_to_ring
    return write(cache, self._to_entries(key_BTKH, value_BTKH, pos_BT))

  def attend(self, query_BTNH: jax.Array, pos_BT: jax.Array, cache: KVCache, mask: AttentionMask) -> jax.Array:
    """Returns the results of attention to the tokens in a growing cache, [B, T, N, H]; see `extend`."""
    return self._attend(query_BTNH, pos_BT, cache, mask, None)

  def kernel_obstacle(self, dtype: DTypeLike, num_slots: int, dims: int, num_rows: int | None = None) -> str:
    """Returns why no kernel computes attention to a cache, as the end of a sentence; '' if one does.

    Queries have this dtype. `num_rows` is None if it is not known yet.
    """
    if platform() not in ('tpu', 'gpu'):
      return f'is for TPUs and GPUs, and the platform is {platform()!r}'
    if num_slots < _KERNEL_FROM:
      return f'is for caches of at least {_KERNEL_FROM} slots, not {num_slots}'
    if platform() == 'gpu':
      return self._gpu_kernel_obstacle(dtype, dims, num_rows)
    for of, known in ((dtype, _KERNEL_DTYPES[:2]), (self.dtype, _KERNEL_DTYPES)):
      if (name := jnp.dtype(of).name) not in known:
        return f'takes {", ".join(known[:-1])} and {known[-1]}, not {name}'
    if not has_kernels_in(dtype):
      return f'does not compute in {jnp.dtype(dtype).name} on this chip'
    return self.kernel_split(num_rows)[1]

  def _gpu_kernel_obstacle(self, dtype: DTypeLike, dims: int, num_rows: int | None) -> str:
    takes_dtype = jnp.dtype(dtype) == jnp.dtype(self.dtype) and jnp.dtype(dtype).name in _GPU_KERNEL_DTYPES
    least = _FEWEST_GPU_DIMS
    obstacle = first_of(
      (num_rows is not None and export.is_symbolic_dim(num_rows), 'takes a fixed number of rows on GPUs'),
      (not memory_of_single_gpu(), 'is for a single GPU that is known'),
      (self.bias is not None, 'adds no bias to logits on GPUs'),
      (not self.has_values, 'takes keys with values on GPUs'),
      (not takes_dtype, f'takes queries and a cache in {" or in ".join(_GPU_KERNEL_DTYPES)} on GPUs'),
      (
        dims < least or dims & (dims - 1),
        f'takes heads whose dims are a power of 2, of at least {least}, on GPUs, not {dims}',
      ),
    )
    return obstacle or self.kernel_split(None)[1] or why_no_kernel_for(device_kind())

  def describe(self, dtype: DTypeLike, num_slots: int, dims: int) -> str:
    """Returns in words how, on TPUs and GPUs, the next token attends to a cache with queries of this dtype."""
    obstacle = self.kernel_obstacle(dtype, min(num_slots, self.window or num_slots), dims)
    return f'in plain JAX, because its kernel {obstacle}' if obstacle else 'a kernel for each token'

  def _extend(
    self, query_BTNH: jax.Array, new: KVCache, cache: KVCache, mask: AttentionMask, pages: float | None = None
  ) -> tuple[jax.Array, KVCache]:
    """Does what `extend` does, for tokens that fit into one step; see `_attend_by_page` for `pages`."""
    if self.window is None or cache.is_placed:
      cache = append_tokens(cache, new)
      return self._attend(query_BTNH, new.pos, cache, mask, pages), cache
    # In a ring, the first of several new tokens may attend to slots that the last one overwrites.
    after = write_to_ring(cache, new)
    if new.num_slots == 1:
      attend = self._attend_by_kernel if self._has_kernel(query_BTNH, after) else self._attend_at_once
      return attend(query_BTNH, new.pos, after, mask), after
    seen = jax.tree.map(join_slots, cache.unstack()._replace(slot=None), to_slots(new))
    return self._attend_at_once(query_BTNH, new.pos, seen, mask), after

  def _to_entries(self, key_BTKH: jax.Array, value_BTKH: jax.Array, pos_BT: jax.Array) -> KVCache:
    return to_entries(key_BTKH, value_BTKH if self.has_values else None, pos_BT, self.dtype)

  def _attend(
    self, query_BTNH: jax.Array, pos_BT: jax.Array, cache: KVCache, mask: AttentionMask, pages: float | None
  ) -> jax.Array:
    if self._has_kernel(query_BTNH, cache):
      return self._attend_by_kernel(query_BTNH, pos_BT, cache, mask)
    page = self._page(query_BTNH, cache.num_slots)
    if page == cache.num_slots:
      return self._attend_at_once(query_BTNH, pos_BT, cache, mask)
    return self._attend_by_page(query_BTNH, pos_BT, cache, mask, page, pages or cache.num_slots / page)

  def _page(self, query_BTNH: jax.Array, slots: int) -> int:
    """Returns how many slots are read at once, a divisor of `slots`.

    Several tokens read at most `page_size` slots, to limit the number of their logits, unless all slots can be read at
    once; see `_fits_at_once`.
    """
    if self.page_size is None or slots <= self.page_size or self._fits_at_once(query_BTNH, slots):
      return slots
    most = max(self.most_slots, self.page_size) if query_BTNH.shape[1] == 1 else self.page_size
    return next(slots // n for n in range(1, slots + 1) if slots % n == 0 and slots // n <= most)

  def _fits_at_once(self, query_BTNH: jax.Array, slots: int) -> bool:
    """Whether logits are few enough to compute at once.

    That is faster than a loop, because a GPU waits for the host in each iteration of a loop.
    """
    return slots <= self.most_slots and math.prod(query_BTNH.shape[:3]) * slots <= _MOST_LOGITS

  def _has_kernel(self, query_BTNH: jax.Array, cache: KVCache) -> bool:
    (B, T, N, H), K = query_BTNH.shape, cache.key.shape[-3]
    several = platform() == 'tpu' and T * N // K <= _MOST_KERNEL_QUERIES
    return (T == 1 or several) and not self.kernel_obstacle(query_BTNH.dtype, cache.num_slots, H, B)

  def _attend_by_kernel(
    self, query_BTNH: jax.Array, pos_BT: jax.Array, cache: KVCache, mask: AttentionMask
  ) -> jax.Array:
    (B, T, _, H), turn = query_BTNH.shape, cache.turn
    pos_BS = cache.pos if turn is None else cache.pos[turn]
    seen_BTS = jnp.broadcast_to(_mask_slots(mask, pos_BT, pos_BS), (B, T, cache.num_slots))
    formula = self.spec.formula(H)
    if platform() == 'gpu':
      from praxis_lite.layers.gpu_decode_kernel import attend_one_token  # Importing Pallas takes long.

      own = cache.unstack()
      assert own.value is not None
      return attend_one_token(query_BTNH[:, 0], own.key, own.value, seen_BTS[:, 0], formula, self.sinks)[:, None]

    from praxis_lite.layers.decode_kernel import attend_by_kernel

    return attend_by_kernel(
      query_BTNH,
      cache,
      seen_BTS,
      formula=formula,
      bias=None if self.bias is None else self.bias(pos_BT, pos_BS),
      sinks=self.sinks,
      split=self.kernel_split(B)[0],
    )

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
    """Returns attention, [B, T, N, H], by online softmax over the pages that contain tokens.

    Plans assume that `pages` pages contain tokens.
    """
    (B, T, N, H), K = query_BTNH.shape, cache.key.shape[-3]
    query_BTKGH = query_BTNH.reshape(B, T, K, N // K, H)
    formula, wide = self.spec.formula(H), sum_dtype(query_BTNH)

    def add_page(index: jax.Array, sums: Sums) -> Sums:
      page = cache.page(index * page_size, page_size)
      key_BSKH, value_BSKH = page.read(query_BTNH.dtype)
      products = jnp.einsum('BTKGH,BSKH->BKGTS', query_BTKGH, key_BSKH, preferred_element_type=wide)
      logits = formula.to_logits(products)
      if self.bias is not None:
        logits += group_heads(self.bias(pos_BT, page.pos), K)
      seen = group_heads(_mask_slots(mask, pos_BT, page.pos)[:, None], K)
      return blocks.add_keys(sums, jnp.where(seen, logits, blocks.MASKED), jnp.moveaxis(value_BSKH, 1, 2))

    num_pages = jnp.minimum(-(-cache.taken // page_size), cache.num_slots // page_size)
    with expected_trips(pages):
      sums = jax.lax.fori_loop(0, num_pages, add_page, blocks.zero_sums((B, K, N // K, T, H), wide))
    context_BKGTH, _ = blocks.finish_sums(sums, blocks.group_sinks(self.sinks, K))
    return jnp.moveaxis(context_BKGTH, 3, 1).reshape(B, T, N, H).astype(query_BTNH.dtype)


def _mask_slots(mask: AttentionMask, pos_BT: jax.Array, key_pos_BS: jax.Array) -> jax.Array:
  """Returns bool [B, T, S], True where the slot holds a token (its position is at least 0) and the mask allows it."""
  return jnp.asarray(combine_masks((key_pos_BS >= 0)[:, None, :], mask.allows(pos_BT, key_pos_BS)))


def _scan_pages(
  step: Callable[[T, tuple[Any, ...]], tuple[T, jax.Array]], carry: T, arrays: tuple[Any, ...], page: int
) -> tuple[T, jax.Array]:
  """Runs `step` for each page of `page` tokens of arrays [B, T, ...]; returns the last carry and results [B, T, ...].

  The first page is shorter if `page` does not divide T.
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
