"""Masks: which keys a query attends to. Masks compose with `&` and `|`, and know which blocks they empty or fill.

    Causal() & SlidingWindow(512)                               up to the query's own position, and less than 512 away
    (Causal() | Prefix(lengths_B)) & Segments(ids_BT, ids_BT)   prefix-LM on packed rows

A mask is a pytree, so it can pass through transforms. Attention uses three of its methods:

    allows        the mask of given queries and keys, as an array
    some_allowed  in which pairs of blocks some key may be allowed; attention skips the other pairs
    some_masked   in which pairs of blocks some key may be masked; attention does not mask the other pairs

The fields of a mask say whether their arrays have a value for each query, each key or each row, so that attention can
cut them. A new kind of mask is a class with `allows`; the other two methods only save work.

B batch, N heads, T length of the queries, S length of the keys. In arrays that are cut into blocks: I blocks of Q
queries, and J blocks of S keys.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral
from typing import Any, NamedTuple, Self, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.errors import ConfigError

Array = jax.Array | np.ndarray


def query_array() -> Any:
  """Declares a field of a mask with a value for each query: [B, T, ...], or [1, T, ...] for all rows."""
  return dataclasses.field(metadata={'per': 'query'})


def key_array() -> Any:
  """Declares a field of a mask with a value for each key: [B, S, ...], or [1, S, ...] for all rows."""
  return dataclasses.field(metadata={'per': 'key'})


def row_array() -> Any:
  """Declares a field of a mask with a value for each row: [B, ...]."""
  return dataclasses.field(metadata={'per': 'row'})


def _part_masks() -> Any:
  """Declares a field with the masks that a mask is composed of."""
  return dataclasses.field(metadata={'per': 'part'})


class BlockRanges(NamedTuple):
  """The least and greatest index of each block: of queries [I, 1], of keys [J].

  `all_rows` says whether the mask's arrays contain all rows of the batch. If they do not, `some_allowed` and
  `some_masked` must not use values that differ by row, because devices would have to wait for each other.
  """

  query_low: Array
  query_high: Array
  key_low: Array
  key_high: Array
  all_rows: bool = True


@dataclasses.dataclass(frozen=True)
class Known:
  """What is known about a condition on pairs of blocks: two arrays of bool that broadcast to [I, J].

  An array is False only where the condition surely does not hold. None means True everywhere.

  Attributes:
    by_index: what follows from the indices of the blocks; a NumPy array if these are NumPy arrays.
    by_data: what follows from the arrays of the mask.
  """

  by_index: Array | None = None
  by_data: Array | None = None

  @property
  def both(self) -> Array | None:
    return combine_masks(self.by_index, self.by_data)

  def __and__(self, other: Known) -> Known:
    return Known(combine_masks(self.by_index, other.by_index), combine_masks(self.by_data, other.by_data))

  def __or__(self, other: Known) -> Known:
    unknown = self.by_index is None or other.by_index is None
    by_index = None if unknown else operator.or_(self.by_index, other.by_index)
    if (self.by_data is None and other.by_data is None) or self.both is None or other.both is None:
      return Known(by_index)
    return Known(by_index, operator.or_(self.both, other.both))


@dataclass_transform(
  frozen_default=True, eq_default=False, field_specifiers=(query_array, key_array, row_array, _part_masks)
)
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMask(abc.ABC):
  """Which keys a query attends to. Subclasses become frozen dataclasses and pytrees.

  Fields declared by `query_array`, `key_array` or `row_array` are arrays; other fields of a subclass are static.
  """

  def __init_subclass__(cls, **kwargs: object) -> None:
    super().__init_subclass__(**kwargs)
    dataclasses.dataclass(frozen=True, eq=False)(cls)
    data = [field.name for field in dataclasses.fields(cls) if 'per' in field.metadata]
    static = [field.name for field in dataclasses.fields(cls) if 'per' not in field.metadata]
    jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=static)

  @abc.abstractmethod
  def allows(self, query_T: jax.Array, key_S: jax.Array) -> Array | None:
    """Returns bool that broadcasts to [B, T, S], True where a query attends to a key; None if all do.

    Args:
      query_T, key_S: indices of queries and keys in a row, in the order of the arrays of this mask; or [B, T] and
        [B, S], if each row has its own. In decoding they are positions in the sequence. Results for negative indices
        are not used.
    """

  def some_allowed(self, at: BlockRanges) -> Known:
    """Returns the pairs of blocks in which some query attends to some key, and perhaps other pairs.

    Here and in `some_masked`, the arrays of this mask are in blocks: [I, B, Q, ...], [J, B, S, ...], and [B, ...].
    """
    return Known()

  def some_masked(self, at: BlockRanges) -> Known:
    """Returns the pairs of blocks in which some query does not attend to some key, and perhaps other pairs."""
    return Known()

  def map_arrays(self, **functions: Callable[[Any], Any]) -> Self:
    """Returns the mask with each array replaced by f(array); `query=f`, `key=f` and `row=f` set f for their kind."""
    changes = {}
    for field in dataclasses.fields(self):
      value, kind = getattr(self, field.name), field.metadata.get('per')
      if kind == 'part':
        changes[field.name] = tuple(part.map_arrays(**functions) for part in value)
      elif kind in functions and value is not None:
        changes[field.name] = functions[kind](value)
    return dataclasses.replace(self, **changes)

  def arrays(self, *kinds: str) -> list[jax.Array]:
    """Returns the mask's arrays of the given kinds, which are 'query', 'key' or 'row'."""
    found: list[jax.Array] = []

    def collect(x: jax.Array) -> jax.Array:
      found.append(x)
      return x

    self.map_arrays(**dict.fromkeys(kinds, collect))
    return found

  def replace_arrays(self, kind: str, arrays: Iterable[Any]) -> Self:
    """Returns the mask with its arrays of a kind replaced by `arrays`, in the order of the method `arrays`."""
    following = iter(arrays)
    return self.map_arrays(**{kind: lambda _: next(following)})

  def to_array(self, query_len: int, key_len: int) -> Array | None:
    """Returns the mask for all queries and keys, [B or 1, N or 1, T, S]; None if all keys are allowed."""
    parts = _parts(And, self)
    arrays = [part.allowed for part in parts if isinstance(part, ArrayMask)]
    rules = (p.allows(jnp.arange(query_len), jnp.arange(key_len)) for p in parts if not isinstance(p, ArrayMask))
    mask = combine_masks(*rules)
    if mask is not None:
      mask = jnp.broadcast_to(mask, (*mask.shape[:-2], query_len, key_len)).reshape(-1, 1, query_len, key_len)
    return combine_masks(mask, *(x[:, None] if x.ndim == 3 else x for x in arrays))

  def __and__(self, other: AttentionMask) -> AttentionMask:
    _check_operand(other, '&')
    parts = [*_parts(And, self), *_parts(And, other)]
    bands = [part for part in parts if isinstance(part, OffsetMask)]
    if bands:
      band, others = functools.reduce(_intersect, bands), [part for part in parts if not isinstance(part, OffsetMask)]
      allows_all = others and band.behind is None and band.ahead is None
      parts = others if allows_all else [band, *others]
    return parts[0] if len(parts) == 1 else And(tuple(parts))

  def __or__(self, other: AttentionMask) -> AttentionMask:
    _check_operand(other, '|')
    return Or((*_parts(Or, self), *_parts(Or, other)))


class And(AttentionMask):
  """Allows the keys that all parts allow. At most one part is an `OffsetMask`, and it is the first."""

  parts: tuple[AttentionMask, ...] = _part_masks()

  def allows(self, query_T: jax.Array, key_S: jax.Array) -> Array | None:
    return combine_masks(*(part.allows(query_T, key_S) for part in self.parts))

  def some_allowed(self, at: BlockRanges) -> Known:
    return functools.reduce(operator.and_, (part.some_allowed(at) for part in self.parts))

  def some_masked(self, at: BlockRanges) -> Known:
    return functools.reduce(operator.or_, (part.some_masked(at) for part in self.parts))


class Or(AttentionMask):
  """Allows the keys that any part allows."""

  parts: tuple[AttentionMask, ...] = _part_masks()

  def allows(self, query_T: jax.Array, key_S: jax.Array) -> Array | None:
    masks = [mask for part in self.parts if (mask := part.allows(query_T, key_S)) is not None]
    return functools.reduce(operator.or_, masks) if len(masks) == len(self.parts) else None

  def some_allowed(self, at: BlockRanges) -> Known:
    return functools.reduce(operator.or_, (part.some_allowed(at) for part in self.parts))

  def some_masked(self, at: BlockRanges) -> Known:
    return functools.reduce(operator.and_, (part.some_masked(at) for part in self.parts))


# ---------------------------------------------------------------- kinds that depend on indices only


class OffsetMask(AttentionMask):
  """Allows keys from `behind` indices before a query to `ahead` indices after it; None does not limit that side."""

  @property
  @abc.abstractmethod
  def behind(self) -> int | None: ...

  @property
  @abc.abstractmethod
  def ahead(self) -> int | None: ...

  def allows(self, query_T: jax.Array, key_S: jax.Array) -> Array | None:
    query_T1, key_1S = query_T[..., :, None], key_S[..., None, :]
    return combine_masks(_is_within(key_1S, query_T1, self.ahead), _is_within(query_T1, key_1S, self.behind))

  def some_allowed(self, at: BlockRanges) -> Known:
    after, before = (at.key_low, at.query_high, self.ahead), (at.query_low, at.key_high, self.behind)
    return Known(combine_masks(_is_within(*after), _is_within(*before)))

  def some_masked(self, at: BlockRanges) -> Known:
    after, before = (at.key_high, at.query_low, self.ahead), (at.query_high, at.key_low, self.behind)
    inside = combine_masks(_is_within(*after), _is_within(*before))
    return Known(np.zeros((1, 1), bool) if inside is None else ~inside)


class Band(OffsetMask):
  """An `OffsetMask` with given limits; `Band()` allows all keys."""

  behind: int | None = None
  ahead: int | None = None


class Causal(OffsetMask):
  """Allows keys up to the query's own index."""

  behind, ahead = None, 0


class SlidingWindow(OffsetMask):
  """Allows keys less than `window` away, before and after the query."""

  window: int

  def __post_init__(self) -> None:
    _check_size('SlidingWindow.window', self.window)

  @property
  def behind(self) -> int:
    return self.window - 1

  @property
  def ahead(self) -> int:
    return self.window - 1


class FunctionMask(AttentionMask):
  """Allows the keys for which a function of indices is True; attention cannot skip blocks because of it.

  Attributes:
    fn: (indices [..., T, 1] of queries, indices [..., 1, S] of keys) -> bool [..., T, S].
  """

  fn: Callable[[jax.Array, jax.Array], jax.Array]

  def allows(self, query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    return self.fn(query_T[..., :, None], key_S[..., None, :])


class LocalChunks(AttentionMask):
  """Allows keys in the chunk of the query: the chunk of index i is i // `chunk` (Llama 4)."""

  chunk: int

  def __post_init__(self) -> None:
    _check_size('LocalChunks.chunk', self.chunk)

  def allows(self, query_T: jax.Array, key_S: jax.Array) -> Array:
    return query_T[..., :, None] // self.chunk == key_S[..., None, :] // self.chunk

  def some_allowed(self, at: BlockRanges) -> Known:
    return Known(_may_be_equal(*(index // self.chunk for index in at[:4])))

  def some_masked(self, at: BlockRanges) -> Known:
    return Known(_may_differ(*(index // self.chunk for index in at[:4])))


# ---------------------------------------------------------------- kinds with arrays


class Prefix(AttentionMask):
  """Allows the first keys of each row: those before index `length_B`, int32 [B]."""

  length_B: jax.Array = row_array()

  def allows(self, query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    return key_S[..., None, :] < self.length_B[:, None, None]

  def some_allowed(self, at: BlockRanges) -> Known:
    return Known(by_data=at.key_low < jnp.max(self.length_B, initial=0))

  def some_masked(self, at: BlockRanges) -> Known:
    return Known(by_data=at.key_high >= jnp.min(self.length_B, initial=np.iinfo(np.int32).max))


class Segments(AttentionMask):
  """Allows keys with the query's segment id, int32. So a padding token, whose id is 0, attends only to padding."""

  ids_BT: jax.Array = query_array()
  key_ids_BS: jax.Array = key_array()

  def allows(self, query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    return self.ids_BT[:, :, None] == self.key_ids_BS[:, None, :]

  def some_allowed(self, at: BlockRanges) -> Known:
    return Known(by_data=jnp.any(_may_be_equal(*self._ranges()), axis=-1)) if at.all_rows else Known()

  def some_masked(self, at: BlockRanges) -> Known:
    return Known(by_data=jnp.any(_may_differ(*self._ranges()), axis=-1)) if at.all_rows else Known()

  def _ranges(self) -> tuple[jax.Array, ...]:
    """Returns the least id and the greatest id of each block of queries, both [I, 1, B], and of keys, both [J, B]."""
    q_low, q_high = self.ids_BT.min(-1)[:, None], self.ids_BT.max(-1)[:, None]
    return q_low, q_high, self.key_ids_BS.min(-1), self.key_ids_BS.max(-1)


class Paddings(AttentionMask):
  """Allows keys that are not padding: those where `paddings_BS` is 0."""

  paddings_BS: jax.Array = key_array()

  def allows(self, query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    return (self.paddings_BS == 0)[:, None, :]

  def some_allowed(self, at: BlockRanges) -> Known:
    return Known(by_data=jnp.any(self.paddings_BS == 0, axis=(1, 2))) if at.all_rows else Known()

  def some_masked(self, at: BlockRanges) -> Known:
    return Known(by_data=jnp.any(self.paddings_BS != 0, axis=(1, 2))) if at.all_rows else Known()


class ArrayMask(AttentionMask):
  """Allows keys by an array: bool [B or 1, T, S], or for dense attention only, [B or 1, N, T, S]."""

  allowed: jax.Array = query_array()

  def allows(self, query_T: jax.Array, key_S: jax.Array) -> jax.Array:
    if self.allowed.ndim == 4:
      raise ConfigError('an array mask that differs by head is for dense attention only, and cannot be joined by `|`')
    if key_S.ndim == 1:
      return jnp.take(self.allowed, key_S, axis=-1, mode='clip')
    return jnp.take_along_axis(self.allowed, key_S[:, None, :], axis=-1, mode='clip')


# ---------------------------------------------------------------- helpers


def _check_size(name: str, size: object) -> None:
  """Raises ConfigError unless a number of tokens is an integer of at least 1."""
  if not isinstance(size, Integral) or size < 1:
    raise ConfigError(f'{name}: expected an integer of at least 1, got {size!r}')


def to_mask(mask: AttentionMask | Array | None) -> AttentionMask:
  """Returns an array, None or a mask as a mask.

  An array is bool and broadcasts to [B, N, T, S]; None allows all keys. Raises ConfigError for the class of a mask.
  """
  if isinstance(mask, AttentionMask):
    return mask
  if isinstance(mask, type):
    raise ConfigError(f'expected a mask, got the class {mask.__name__}; call it, as in {mask.__name__}()')
  if mask is None:
    return Band()
  array = jnp.asarray(mask)
  array = array.reshape((1,) * (4 - array.ndim) + array.shape)
  return ArrayMask(array[:, 0] if array.shape[1] == 1 else array)


def make_mask(
  causal: bool = False,
  window: int | None = None,
  prefix_B: jax.Array | None = None,
  segments_BT: jax.Array | None = None,
  key_segments_BS: jax.Array | None = None,
) -> AttentionMask:
  """Returns the conjunction of the usual masks.

  Args:
    causal: allow only keys up to the query's own index.
    window: allow only keys less than this far away; None disables the limit.
    prefix_B: int32, the length of the prefix of each row that all queries attend to, if `causal`; None disables it.
    segments_BT, key_segments_BS: allow only keys with the query's own segment id; if one is None, neither is used.
  """
  mask: AttentionMask = Causal() if causal else Band()
  if causal and prefix_B is not None:
    mask = mask | Prefix(prefix_B)
  if window is not None:
    mask = mask & SlidingWindow(window)
  if segments_BT is not None and key_segments_BS is not None:
    mask = mask & Segments(segments_BT, key_segments_BS)
  return mask


def local_chunks(
  chunk: int, segment_ids: jax.Array | None, key_segment_ids: jax.Array | None, pos_BT: jax.Array | None
) -> AttentionMask:
  """Returns the mask of a sequence that attends to itself, in chunks that begin where its segments begin.

  Args:
    chunk: number of positions of a chunk.
    segment_ids, key_segment_ids: int32 [B, T]; with None for either, only `pos_BT` says where a segment begins.
    pos_BT: int32 positions in the segment; None means that indices are positions.
  """
  if pos_BT is None:
    return LocalChunks(chunk)
  ids_BT = jnp.maximum(pos_BT, 0) // chunk
  if segment_ids is not None and key_segment_ids is not None:  # One mask, because kernels take only one kind of ids.
    most = jnp.max(ids_BT, axis=1, keepdims=True, initial=0) + 1
    return Segments(segment_ids * most + ids_BT, key_segment_ids * most + ids_BT)
  return Segments(ids_BT, ids_BT)


Visibility = make_mask
"""The name of `make_mask` in older versions."""


def split_offsets(mask: AttentionMask) -> tuple[OffsetMask, AttentionMask | None]:
  """Returns two masks whose conjunction is `mask`: an `OffsetMask`, and all other parts, or None without others.

  Kernels support causal masks and windows, which are offset masks, directly.
  """
  first, *others = _parts(And, mask)
  if not isinstance(first, OffsetMask):
    return Band(), mask
  return first, And(tuple(others)) if others else None


def mask_leaves(mask: AttentionMask) -> Iterator[AttentionMask]:
  """Yields all masks in `mask` that are not composed of others; the mask itself if it is not composed."""
  if isinstance(mask, And | Or):
    for part in mask.parts:
      yield from mask_leaves(part)
  else:
    yield mask


def has_array_mask(mask: AttentionMask) -> bool:
  """Whether a mask is an `ArrayMask`, or contains one."""
  return any(isinstance(leaf, ArrayMask) for leaf in mask_leaves(mask))


def has_causal(mask: AttentionMask) -> bool:
  """Whether a mask is causal, or contains a causal mask, like the mask of a prefix-LM."""
  return any(isinstance(leaf, OffsetMask) and leaf.ahead == 0 for leaf in mask_leaves(mask))


def combine_masks(*masks: Array | None) -> Array | None:
  """Returns the conjunction of the masks that are not None, or None if all of them are."""
  given = [mask for mask in masks if mask is not None]
  return functools.reduce(operator.and_, given) if given else None


def _check_operand(other: object, operator: str) -> None:
  if not isinstance(other, AttentionMask):
    raise ConfigError(
      f'expected an AttentionMask after {operator!r}, got {type(other).__name__}; to_mask makes a mask of an array'
    )


def _parts(kind: type[And] | type[Or], mask: AttentionMask) -> tuple[AttentionMask, ...]:
  return mask.parts if isinstance(mask, kind) else (mask,)


def _intersect(a: OffsetMask, b: OffsetMask) -> OffsetMask:
  def least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)

  return Band(least(a.behind, b.behind), least(a.ahead, b.ahead))


def _may_be_equal(q_low: Array, q_high: Array, k_low: Array, k_high: Array) -> Array:
  """Returns whether a query and a key may have the same number, for blocks with numbers in these ranges."""
  return (q_low <= k_high) & (k_low <= q_high)


def _may_differ(q_low: Array, q_high: Array, k_low: Array, k_high: Array) -> Array:
  return (q_low != q_high) | (k_low != k_high) | (q_low != k_low)


def _is_within(index: Array, start: Array, distance: int | None) -> Array | None:
  """Returns whether an index is at most `distance` after `start`; None if `distance` is None."""
  if distance is None:
    return None
  return index - start < distance + 1 if distance else index <= start
