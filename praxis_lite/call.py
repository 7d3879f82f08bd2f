"""The pure call: one `Frame` per `Layer.apply`, holding what goes in and collecting what comes out beside the result.

    inputs of a frame                    side outputs of a frame
      variables    weights by path         summaries     named scalars, histograms, images
      key          PRNG key or None        aux_losses    (value, weight) pairs the task adds to the loss
      do_eval      train or evaluate       updates       new values of non-trainable variables
      decode_state caches by path          decode_state  caches after the call

Frames nest: a layer that transforms another one (scan, remat, pipeline) calls `sub.apply(...)` inside the transform,
and `absorb`s the side outputs that the transform returns. No tracer outlives its frame, so ordinary JAX transforms
apply.

Randomness is derived from paths. A layer's key is the frame's key folded with the layer's path and a count of its own
draws, so adding a layer does not change what the others draw.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.errors import ConfigError

Path = tuple[str, ...]
NestedDict = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Summary:
  """A named value to log: a 'scalar', 'histogram', 'image' or 'text'. Layers repeated by scan add leading axes."""

  value: jax.Array
  kind: str = 'scalar'


jax.tree_util.register_dataclass(Summary, data_fields=['value'], meta_fields=['kind'])


class SideOutputs(NamedTuple):
  """What a call yields beside its result: all trees of arrays, keyed by variable path or by name."""

  summaries: dict[str, Summary]
  aux_losses: dict[str, tuple[jax.Array, jax.Array]]
  updates: NestedDict
  decode_state: NestedDict


def path_name(path: Path) -> str:
  """'lm.softmax.w' of ('lm', 'softmax', 'w'): the one spelling of a path in messages, tables and summaries."""
  return '.'.join(path)


def fold_in_path(key: jax.Array, path: Path) -> jax.Array:
  """Returns `key` folded with a stable hash of `path`: the same on every machine and in every run."""
  return jax.random.fold_in(key, zlib.crc32('/'.join(path).encode()))


class Frame:
  """One call in progress. Paths are absolute; the trees start at `root`."""

  def __init__(
    self,
    root: Path,
    variables: NestedDict,
    *,
    key: jax.Array | None = None,
    do_eval: bool = False,
    decode_state: NestedDict | None = None,
  ):
    self.root = root
    self.variables = variables
    self.key = key
    self.do_eval = do_eval
    self.summaries: dict[str, Summary] = {}
    self.aux_losses: dict[str, tuple[jax.Array, jax.Array]] = {}
    self.updates: NestedDict = {}
    self.decode_state: NestedDict = dict(decode_state or {})
    self._draws: dict[Path, int] = {}

  def holds(self, path: Path) -> bool:
    return path[: len(self.root)] == self.root

  def variable(self, path: Path) -> Any:
    """The subtree or array at `path`; a value updated earlier in this call is returned as updated."""
    updated = _lookup(self.updates, path[len(self.root) :])
    value = _lookup(self.variables, path[len(self.root) :])
    if updated is None:
      return value
    return _overlay(value, updated)

  def update(self, path: Path, value: Any) -> None:
    _insert(self.updates, path[len(self.root) :], value)

  def cached(self, path: Path) -> Any:
    return _lookup(self.decode_state, path[len(self.root) :])

  def cache(self, path: Path, value: Any) -> None:
    self.decode_state = _inserted(self.decode_state, path[len(self.root) :], value)

  def next_key(self, path: Path) -> jax.Array:
    if self.key is None:
      where = path_name(path) or 'the layer'
      raise ConfigError(
        f'{where} draws random numbers; pass key= to apply(), or do_eval=True where it has no randomness'
      )
    count = self._draws.get(path, 0)
    self._draws[path] = count + 1
    return jax.random.fold_in(fold_in_path(self.key, path[len(self.root) :]), count)

  def add_aux_loss(self, name: str, value: jax.Array, weight: jax.Array) -> None:
    """Adds weight * value to the auxiliary losses; what a name has already, as of a layer used twice, stays in it."""
    if name in self.aux_losses:
      old_value, old_weight = self.aux_losses[name]
      total = old_weight + weight
      value = (old_weight * old_value + weight * value) / jnp.where(total == 0, 1, total)
      weight = total
    self.aux_losses[name] = (value, weight)

  def side_outputs(self) -> SideOutputs:
    return SideOutputs(self.summaries, self.aux_losses, self.updates, self.decode_state)

  def absorb(self, path: Path, side: SideOutputs) -> None:
    """Takes over the side outputs of a nested call whose root is the layer at `path`."""
    self.summaries.update(side.summaries)
    for name, aux_loss in side.aux_losses.items():
      self.add_aux_loss(name, *aux_loss)
    if side.updates:
      self.update(path, _overlay(_lookup(self.updates, path[len(self.root) :]) or {}, side.updates))
    if side.decode_state:
      self.cache(path, side.decode_state)


_frames: contextvars.ContextVar[tuple[Frame, ...]] = contextvars.ContextVar('praxis_lite_frames', default=())


@contextlib.contextmanager
def entered(frame: Frame) -> Iterator[Frame]:
  """Makes `frame` the innermost one."""
  token = _frames.set((*_frames.get(), frame))
  try:
    yield frame
  finally:
    _frames.reset(token)


def current_frame() -> Frame | None:
  """The innermost frame, or None outside any call."""
  frames = _frames.get()
  return frames[-1] if frames else None


def frame_holding(path: Path) -> Frame | None:
  """The innermost frame whose tree contains `path`: a layer inside a scan may read a weight shared from outside it."""
  return next((f for f in reversed(_frames.get()) if f.holds(path)), None)


def _lookup(tree: Any, path: Path) -> Any:
  for part in path:
    if not isinstance(tree, dict) or part not in tree:
      return None
    tree = tree[part]
  return tree


def _insert(tree: NestedDict, path: Path, value: Any) -> None:
  if not path:
    tree.update(value)
    return
  for part in path[:-1]:
    tree = tree.setdefault(part, {})
  tree[path[-1]] = value


def _inserted(tree: NestedDict, path: Path, value: Any) -> NestedDict:
  """As `_insert`, leaving `tree` as it is: a caller's cache is not changed under its feet."""
  if not path:
    return value
  return {**tree, path[0]: _inserted(tree.get(path[0], {}), path[1:], value)}


def _overlay(base: Any, updated: Any) -> Any:
  if not isinstance(updated, dict) or not isinstance(base, dict):
    return updated
  return {**base, **{k: _overlay(base.get(k), v) for k, v in updated.items()}}


def merge_updates(variables: NestedDict, updates: NestedDict) -> NestedDict:
  """Returns `variables` with the entries of `updates` (a partial tree) replaced."""
  return _overlay(variables, updates)
