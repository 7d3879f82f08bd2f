"""KV caches in the decode state: of one layer, and of several.

A loop over layers passes on the stacked caches of all layers. Each layer writes its tokens into the stack, and reads
its pages from there; a scan that slices and stacks the caches would copy all of them. A layer takes its cache
out of the stack, and puts it back, only for a prompt longer than a page. For [B, S, K, H], see `kv_cache.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, Path, insert, leaves_by_path, merge, node_at, path_name, select
from praxis_lite.layers.base import Layer
from praxis_lite.layers.kv_cache import KVCache, axis_of_slots
from praxis_lite.sharding.weights import SplitDimsMapping


def read_cache(layer: Layer) -> KVCache:
  """Returns the cache that an attention layer has stored in its decode state."""
  return KVCache(**{name: layer.get_decode_state(name) for name in KVCache._fields})


def keep_cache(layer: Layer, cache: KVCache, mapping: SplitDimsMapping | str) -> None:
  """Stores a cache in the decode state of an attention layer, with its vectors, [B, S, K, H], split over the mesh."""

  def split_slots(x_BKSH: jax.Array) -> jax.Array:
    return jnp.swapaxes(layer.shard(jnp.swapaxes(x_BKSH, 1, 2), mapping), 1, 2)

  for name, array in cache._asdict().items():
    if array is not None:
      if name in ('key', 'value'):
        array = split_slots(array) if cache.turn is None else jax.vmap(split_slots)(array)
      layer.update_decode_state(name, array)


def places_of_caches(state: object) -> list[Path]:
  """Returns the paths of the KV caches in a decode state: the nodes whose children are the fields of a `KVCache`."""
  paths = leaves_by_path(state).keys()
  places = [path[:-1] for path in paths if path[-1:] == ('pos',)]
  return [place for place in places if all((*place, name) in paths for name in ('key', 'slot'))]


def place_caches(state: NestedDict, num_slots: int, layers_of_sources: str | None = None) -> NestedDict:
  """Returns a decode state without tokens in which all KV caches are placed, see `kv_cache.py`.

  Args:
    state: the decode state that `init_decode_state` makes.
    num_slots: the largest number of tokens of a row.
    layers_of_sources: the name of the layers that cache sources. Their caches stay as they are, because sources do not
      grow.

  Raises:
    ConfigError: a layer has a state that is not a KV cache, so it cannot go back to an earlier token.
  """
  places = places_of_caches(state)
  for path in leaves_by_path(state):
    if path[:-1] not in places:
      raise ConfigError(
        f'{path_name(path)}: this state of a layer cannot go back to an earlier token, as caches of keys and values '
        'can; so this model has no speculative decoding and no batcher'
      )
  for place in places:
    if place[-1] == layers_of_sources:
      continue
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

  Caches of a loop inside one of these layers are among the `others`, because they have several dimensions of layers.
  """

  def __init__(self, state: NestedDict):
    self._places = {place for place in places_of_caches(state) if jnp.ndim(node_at(state, place)['pos']) == 3}
    self.arrays, self.others = self.split(state)

  def split(self, state: NestedDict) -> tuple[NestedDict, NestedDict]:
    """Splits a decode state, of the whole loop or of one iteration; returns the arrays of the caches, and the rest."""
    arrays = select(state, lambda path: path[:-1] in self._places and path[-1] != 'turn')
    return arrays, select(state, lambda path: path[:-1] not in self._places)

  def turn_state(self, arrays: NestedDict, others: NestedDict, turn: jax.Array) -> NestedDict:
    """Returns the decode state for the layer of iteration `turn`: `others`, and the stacked caches of all layers."""
    state = merge(others, arrays)
    for place in self._places:
      state = insert(state, (*place, 'turn'), turn)
    return state
