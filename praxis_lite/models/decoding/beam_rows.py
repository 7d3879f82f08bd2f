"""BeamRows: a decoding state with K rows for each prompt. Beam search repeats rows for all beams, and reorders them.

A state is any tree of arrays. Most arrays have a dimension of rows, but it is not always the first: the caches of a
scan over layers begin with the dimension of layers.

Reordering copies the state for each token. On a CPU this may take as long as the model itself. So on a CPU, KV caches
are copied in place, page by page. Only slots that were filled after the prompts had been read are copied, because the
beams of a prompt agree in all other slots. A row whose parent is the row itself is not written. Keys and values of the
sources of an encoder-decoder are not copied.

B prompts, K beams, S slots; the row of beam k of prompt b is b K + k, so the beams of a prompt are on one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import leaves_by_path, map_with_path, path_name
from praxis_lite.layers.decode_caches import places_of_caches
from praxis_lite.layers.kv_cache import KVCache, axis_of_slots
from praxis_lite.models.decoding.steps import DecodingState, DecodingSteps
from praxis_lite.sharding.mesh import platform

NO_ROWS = -1
_LEAST_PAGE, _MOST_PAGE = 16, 32  # Slots.


def find_row_axes(few: Any, many: Any) -> Any:
  """Returns the dimension of rows in each array of a state; -1 for arrays that all rows share.

  Args:
    few, many: a state, and a state of twice as many rows; trees of arrays, or of their shapes.

  Raises:
    ConfigError: more than one dimension of an array depends on the number of rows.
  """

  def axis(path: tuple[str, ...], few: jax.Array, many: jax.Array) -> int:
    axes = [i for i, (a, b) in enumerate(zip(few.shape, many.shape, strict=True)) if a != b]
    if len(axes) > 1:
      raise ConfigError(
        f'beam search: {path_name(path)} of the decoding state has shape {few.shape}, and {many.shape} for twice as '
        'many rows; only one of its dimensions may be that of rows'
      )
    return axes[0] if axes else NO_ROWS

  return map_with_path(axis, few, many)


def _row_axes(steps: DecodingSteps[DecodingState], state: DecodingState, num_rows: int, num_slots: int) -> list[int]:
  """Returns the dimension of rows in each array of a state made by `steps.start`; `NO_ROWS` for shared arrays."""
  known: Callable[[int, int], Any] | None = getattr(steps, 'row_axes', None)
  if known is not None:
    return jax.tree.leaves(known(num_rows, num_slots))
  arrays = leaves_by_path(state)
  for path, x in arrays.items():
    if jnp.shape(x)[:1] != (num_rows,):
      raise ConfigError(
        f'beam search: {path_name(path) or "an array"} of the decoding state has shape {jnp.shape(x)}; its first '
        f'dimension must be that of the {number_of(num_rows, "row")}, or {type(steps).__name__} needs a method row_axes'
      )
  return [0] * len(arrays)


class _Pages(NamedTuple):
  """Arrays of KV caches that are reordered together."""

  slot_axes: dict[int, int]  # The dimension of slots of each array, by the array's index in the flattened state.
  counts: list[int]  # The indices of the arrays that count the slots that are taken.
  size: int  # Slots in a page, a divisor of `num_slots`.
  num_slots: int  # S.

  def num_taken(self, arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the largest number of slots taken in any row; S if all caches are ring buffers, which keep no count."""
    most = jnp.max(jnp.stack([jnp.max(arrays[i]) for i in self.counts]))
    return jnp.where(most == 0, self.num_slots, jnp.minimum(most, self.num_slots))

  def num_equal(self, arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the largest n such that the first n slots are taken in all rows of all caches; 0 if a cache has no count.

    While beams have read only prompts, these slots are equal in all rows of a prompt.
    """
    return jnp.min(jnp.stack([jnp.min(arrays[i]) for i in self.counts]))


@dataclasses.dataclass(frozen=True)
class BeamRows:
  """How the arrays of a state hold the rows of beams."""

  beams: int  # K.
  axes: tuple[int, ...]  # The dimension of rows in each array; `NO_ROWS` for arrays that all rows share.
  pages: tuple[_Pages, ...]  # Arrays that are reordered page by page.

  @classmethod
  def make(
    cls, steps: DecodingSteps[DecodingState], state: DecodingState, num_rows: int, num_slots: int, beams: int
  ) -> BeamRows:
    """Returns the `BeamRows` that put `beams` rows in place of each row of `state`, a result of `steps.start`."""
    axes = _row_axes(steps, state, num_rows, num_slots)
    return cls(beams, tuple(axes), _find_pages(state) if _copies_pages() else ())

  def spread(self, state: DecodingState) -> DecodingState:
    """Returns the state with each row repeated K times, one for each beam of the prompt."""
    return self._map(lambda x, axis: x if axis == NO_ROWS else jnp.repeat(x, self.beams, axis=axis), state)

  def put(self, state: DecodingState, of_beam: DecodingState, beam: jax.Array) -> DecodingState:
    """Returns the state with the rows of one beam of each prompt replaced by `of_beam`."""

    def put(x: jax.Array, axis: int, new: jax.Array) -> jax.Array:
      if axis == NO_ROWS:
        return new
      split = self._split(x, axis)
      return jax.lax.dynamic_update_index_in_dim(split, new, beam, axis + 1).reshape(x.shape)

    return self._map(put, state, of_beam)

  def equal_slots(self, state: DecodingState) -> list[jax.Array]:
    """Returns, for each of `pages`, the largest n such that the first n slots are equal in all rows of a prompt.

    Call this when all beams have read only the prompts; `take` needs the result later.
    """
    arrays = jax.tree.leaves(state)
    return [pages.num_equal(arrays) for pages in self.pages]

  def take(self, state: DecodingState, parent_BK: jax.Array, equal: Sequence[jax.Array]) -> DecodingState:
    """Returns the state in which each beam k has the row that beam `parent_BK[:, k]` of the same prompt had before.

    A beam that is a parent must be its own parent too, as `keep_places` ensures. `equal` is from `equal_slots`.
    """
    arrays, structure = jax.tree.flatten(state)
    in_pages = {i for pages in self.pages for i in pages.slot_axes}
    for i, axis in enumerate(self.axes):
      if axis != NO_ROWS and i not in in_pages:
        arrays[i] = _gather(self._split(arrays[i], axis), axis, parent_BK).reshape(arrays[i].shape)
    for pages, first in zip(self.pages, equal, strict=True):
      end = -(-pages.num_taken(arrays) // pages.size)
      self._copy_pages(arrays, pages, parent_BK, first // pages.size, end)
    return jax.tree.unflatten(structure, arrays)

  def _copy_pages(
    self, arrays: list[jax.Array], pages: _Pages, parent_BK: jax.Array, first: jax.Array, end: jax.Array
  ) -> None:
    """Copies pages `first` to `end` - 1 of the parent into each row whose parent is another row; changes `arrays`."""
    parent_R = (jnp.arange(len(parent_BK))[:, None] * self.beams + parent_BK).reshape(-1)
    is_copied_R = parent_R != jnp.arange(len(parent_R))
    copied_R = jnp.argsort(~is_copied_R)  # Rows to copy come first.
    count = jnp.maximum(end - first, 0)

    def copy_page(number: jax.Array, whole: list[jax.Array]) -> list[jax.Array]:
      row, start, after = copied_R[number // count], (first + number % count) * pages.size, []
      for x, (i, slot_axis) in zip(whole, pages.slot_axes.items()):
        axis, sizes = self.axes[i], list(x.shape)
        sizes[axis], sizes[slot_axis] = 1, pages.size

        def starts(row: jax.Array, axis: int = axis, slot_axis: int = slot_axis, rank: int = x.ndim) -> list[Any]:
          return [row if d == axis else start if d == slot_axis else 0 for d in range(rank)]

        part = jax.lax.dynamic_slice(x, starts(parent_R[row]), sizes)
        after.append(jax.lax.dynamic_update_slice(x, part, starts(row)))
      return after

    copied = jax.lax.fori_loop(0, jnp.sum(is_copied_R) * count, copy_page, [arrays[i] for i in pages.slot_axes])
    for i, x in zip(pages.slot_axes, copied):
      arrays[i] = x

  def _split(self, x: jax.Array, axis: int) -> jax.Array:
    """Reshapes [..., B K, ...] to [..., B, K, ...]."""
    return x.reshape(*x.shape[:axis], -1, self.beams, *x.shape[axis + 1 :])

  def _map(self, change: Callable[..., jax.Array], state: DecodingState, *others: DecodingState) -> DecodingState:
    arrays, structure = jax.tree.flatten(state)
    changed = map(change, arrays, self.axes, *map(jax.tree.leaves, others))
    return jax.tree.unflatten(structure, list(changed))


def _copies_pages() -> bool:
  """Whether to reorder page by page: only on one CPU, because copying single rows on a mesh would gather arrays."""
  return platform() == 'cpu' and jax.sharding.get_abstract_mesh().size <= 1


def _gather(x: jax.Array, axis: int, parent_BK: jax.Array) -> jax.Array:
  """Returns the rows [..., B, K, ...] of the parents; `axis` is the index of dimension B."""

  def gather_prompt(x: jax.Array, parent_K: jax.Array) -> jax.Array:
    return jnp.take(x, parent_K, axis=axis, mode='clip')

  return jax.vmap(gather_prompt, in_axes=(axis, 0), out_axes=axis)(x, parent_BK)


def keep_places(parent_BK: jax.Array) -> jax.Array:
  """Returns an order [B, K] of the new beams: the first child of each old beam gets the index of its parent.

  Other children get the indices of old beams without children. So few rows change, and no row is both read and written.
  """
  K = parent_BK.shape[1]
  is_equal_BKK = parent_BK[:, :, None] == parent_BK[:, None, :]
  is_first_BK = ~jnp.any(is_equal_BKK & jnp.tri(K, K, -1, dtype=bool), axis=2)
  has_child_BK = jnp.any(parent_BK[:, :, None] == jnp.arange(K), axis=1)
  free_BK = jnp.argsort(has_child_BK, axis=1)  # Free indices come first.
  others_BK = jnp.maximum(jnp.cumsum(~is_first_BK, axis=1) - 1, 0)
  place_BK = jnp.where(is_first_BK, parent_BK, jnp.take_along_axis(free_BK, others_BK, axis=1))
  return jnp.argsort(place_BK, axis=1)


def _find_pages(state: DecodingState) -> tuple[_Pages, ...]:
  """Returns a `_Pages` for each number of slots: the arrays of all KV caches in the state that have this many slots."""
  arrays = leaves_by_path(state)
  numbers, found = {path: i for i, path in enumerate(arrays)}, dict[int, _Pages]()
  for place in places_of_caches(state):
    pos = arrays[*place, 'pos']
    slots = pos.shape[-1]
    size = next((size for size in range(_MOST_PAGE, _LEAST_PAGE - 1, -1) if slots % size == 0), slots)
    pages = found.setdefault(slots, _Pages({}, [], size, slots))
    pages.counts.append(numbers[*place, 'slot'])
    for path, x in arrays.items():
      if path[:-1] == place and path[-1] in KVCache._fields and path[-1] != 'slot':
        pages.slot_axes[numbers[path]] = axis_of_slots(x.ndim, pos.ndim)
  return tuple(found.values())
