"""BeamRows: a state with K rows for each prompt, which beam search spreads and reorders.

A state is any tree of arrays. Rows are a dimension of most of them, but not always the first: the caches of a loop over
layers begin with the dimension of layers.

Reordering copies the state for each token. On a CPU this may take as long as the model. So there, of KV caches only
those slots are copied in which the beams of a prompt may differ, because they were taken after the prompts had been
read, and only to rows whose parent is another row. They are copied in place, page by page. Keys and values of the
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
    few, many: the state, and that of twice as many rows; trees of arrays, or of their shapes.

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
  """Returns the dimension of rows in each array of the state that `steps.start` has returned."""
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
  """Arrays of KV caches that are reordered together.

  Attributes:
    slot_axes: their dimensions of slots, by the number of the array in the state.
    counts: the numbers of the arrays that say how many slots are taken.
    size: slots in a page, a divisor of `num_slots`.
    num_slots: S.
  """

  slot_axes: dict[int, int]
  counts: list[int]
  size: int
  num_slots: int

  def num_taken(self, arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns how many slots are taken; a ring, which does not count them, may have taken all."""
    most = jnp.max(jnp.stack([jnp.max(arrays[i]) for i in self.counts]))
    return jnp.where(most == 0, self.num_slots, jnp.minimum(most, self.num_slots))

  def num_equal(self, arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns how many slots are taken if all caches count them, otherwise 0."""
    return jnp.min(jnp.stack([jnp.min(arrays[i]) for i in self.counts]))


@dataclasses.dataclass(frozen=True)
class BeamRows:
  """How the arrays of a state hold the rows of beams.

  Attributes:
    beams: K.
    axes: the dimension of rows in each array, `NO_ROWS` if it has none.
    pages: arrays that are reordered page by page.
  """

  beams: int
  axes: tuple[int, ...]
  pages: tuple[_Pages, ...]

  @classmethod
  def make(
    cls, steps: DecodingSteps[DecodingState], state: DecodingState, num_rows: int, num_slots: int, beams: int
  ) -> BeamRows:
    """Returns how a state of `beams` rows for each row of `state` holds them; `state` is what `steps.start` returned.

    Raises:
      ConfigError: the steps do not say what the dimension of rows is, and it is not the first.
    """
    axes = _row_axes(steps, state, num_rows, num_slots)
    return cls(beams, tuple(axes), _find_pages(state) if _copies_pages() else ())

  def spread(self, state: DecodingState) -> DecodingState:
    """Returns the state of K equal rows for each prompt."""
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
    """Returns for each of `pages` how many first slots are taken now, after the same tokens were read for all beams."""
    arrays = jax.tree.leaves(state)
    return [pages.num_equal(arrays) for pages in self.pages]

  def take(self, state: DecodingState, parent_BK: jax.Array, equal: Sequence[jax.Array]) -> DecodingState:
    """Returns the state in which the row of beam k is the one of beam `parent_BK[:, k]` of the same prompt.

    Args:
      state: the state.
      parent_BK: int32 in [0, K); a beam that is the parent of any is also its own, as after `keep_places`.
      equal: for each of `pages` a number of first slots in which the rows of each prompt are equal.
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
    """Copies some pages of the arrays to the rows whose parent is another row."""
    parent_R = (jnp.arange(len(parent_BK))[:, None] * self.beams + parent_BK).reshape(-1)
    is_copied_R = parent_R != jnp.arange(len(parent_R))
    copied_R = jnp.argsort(~is_copied_R)  # Begins with the rows that are copied.
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
    """[..., B K, ...] to [..., B, K, ...]."""
    return x.reshape(*x.shape[:axis], -1, self.beams, *x.shape[axis + 1 :])

  def _map(self, change: Callable[..., jax.Array], state: DecodingState, *others: DecodingState) -> DecodingState:
    arrays, structure = jax.tree.flatten(state)
    changed = map(change, arrays, self.axes, *map(jax.tree.leaves, others))
    return jax.tree.unflatten(structure, list(changed))


def _copies_pages() -> bool:
  """Whether states are reordered page by page: on one CPU. Copies of single rows would gather arrays on a mesh."""
  return platform() == 'cpu' and jax.sharding.get_abstract_mesh().size <= 1


def _gather(x: jax.Array, axis: int, parent_BK: jax.Array) -> jax.Array:
  """Returns the rows of the parents, [..., B, K, ...]; `axis` is the dimension B."""

  def gather_prompt(x: jax.Array, parent_K: jax.Array) -> jax.Array:
    return jnp.take(x, parent_K, axis=axis, mode='clip')

  return jax.vmap(gather_prompt, in_axes=(axis, 0), out_axes=axis)(x, parent_BK)


def keep_places(parent_BK: jax.Array) -> jax.Array:
  """Returns an order of the beams, [B, K], in which each beam that goes on has its first child in its place.

  The other children take the places of beams that have none. So few rows change, and no row that is read is written.

  Args:
    parent_BK: int32, the parent of each new beam.
  """
  K = parent_BK.shape[1]
  is_equal_BKK = parent_BK[:, :, None] == parent_BK[:, None, :]
  is_first_BK = ~jnp.any(is_equal_BKK & jnp.tri(K, K, -1, dtype=bool), axis=2)
  has_child_BK = jnp.any(parent_BK[:, :, None] == jnp.arange(K), axis=1)
  free_BK = jnp.argsort(has_child_BK, axis=1)  # Begins with the places that are free.
  others_BK = jnp.maximum(jnp.cumsum(~is_first_BK, axis=1) - 1, 0)
  place_BK = jnp.where(is_first_BK, parent_BK, jnp.take_along_axis(free_BK, others_BK, axis=1))
  return jnp.argsort(place_BK, axis=1)


def _find_pages(state: DecodingState) -> tuple[_Pages, ...]:
  """Returns the arrays of the KV caches in a state, those of caches of the same number of slots together."""
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
