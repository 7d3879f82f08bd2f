"""The pure call: one `Frame` per `Layer.apply`, which holds the inputs and collects the outputs besides the result.

    inputs of a frame                    side outputs of a frame
      variables    weights by path         summaries     named scalars, histograms, images
      key          PRNG key or None        aux_losses    (value, weight) pairs the task adds to the loss
      do_eval      train or evaluate       updates       new values of non-trainable variables
      decode_state caches by path          decode_state  caches after the call
      surroundings how weights are read, how sums over rows are completed, the listener; see `Surroundings`

Frames nest: a layer that transforms another one (scan, remat, pipeline) calls `sub.apply(...)` inside the transform,
and `absorb`s the side outputs that the transform returns. No tracer outlives its frame, so ordinary JAX transforms
work.

Randomness is derived from paths. For each draw, a layer folds the frame's key with its own path and with the number of
its draws so far. So adding a layer does not change what the others draw.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.jax_internals.programs import current_trace
from praxis_lite.common.trees import NestedDict, Path, insert, merge, node_at, path_name
from praxis_lite.common.weighted import WeightedScalars, mean_of_means
from praxis_lite.layers.base.summaries import (
  Summary as Summary,
  part_kind as part_kind,
  summary_over_devices as summary_over_devices,
)
from praxis_lite.layers.base.taps import Taps
from praxis_lite.sharding.specs import Placement


class SideOutputs(NamedTuple):
  """The outputs of a call besides its result: trees of arrays, keyed by variable path or by name."""

  summaries: dict[str, Summary]
  aux_losses: WeightedScalars
  updates: NestedDict
  decode_state: NestedDict


class Exchange(NamedTuple):
  """Communication that a layer programs itself, such as a gather inside `shard_map`."""

  purpose: str  # Why the layer communicates, in a few words: 'exchange between experts'.
  field: str  # The field of the layer that causes the communication: 'expert_axis'.
  axes: tuple[str, ...]  # The mesh axes over which the layer communicates.
  # Whether XLA adds the collectives, for example where the layer rolls an array along a split dimension. Otherwise only
  # collectives inside `shard_map` belong to the exchange.
  by_compiler: bool = False
  kinds: tuple[str, ...] = ()  # The kinds of its collectives, such as 'all-to-all'; () stands for all.


class SplitConstraint(NamedTuple):
  """A sharding constraint that a layer has put on an array."""

  field: str  # The field that names the array, as in 'lm.softmax.activation_split_dims_mapping.out'.
  placement: Placement | None  # How the array is split, and why; None leaves that to the compiler.
  shape: tuple[int, ...]
  dtype: jnp.dtype
  manual_axes: frozenset[str] = frozenset()  # Mesh axes along which the array is one device's part.
  remark: str = ''  # What `explain` says about the array besides its split.
  exchange: Exchange | None = None  # Communication that XLA adds for this split, as the layer intends.


def _cast(path: Path, stored: jax.Array, dtype: DTypeLike | None) -> jax.Array:
  return stored if dtype is None else stored.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Surroundings:
  """What a call needs to know about its environment. The defaults mean one device with all rows and whole weights.

  A layer that runs another one inside a transform, such as `shard_map`, passes changed surroundings to its `apply`.

  Attributes:
    read_weight: (path, stored array, dtype or None) -> the weight as layers use it: cast, gathered or sliced. Inside a
      scan over layers, the stored array lacks the leading dimensions that the scan has taken.
    reading_gathers: whether `read_weight` communicates. Then the backward pass should gather again, instead of keeping
      the gathered weights.
    sum_over_rows: completes a sum over the local rows of a batch to the sum over all its rows.
    real_rows: returns [B] bool for the B local rows: False for rows that only fill up a microbatch; they are copies of
      other rows, and statistics must not count them. None means that all rows are real. Layers call `Layer.real_rows`.
    read_outside: converts a weight from outside of this call's variable tree to the form that a layer reads.
    manual_axes: mesh axes along which arrays are one device's part.
    listener: called with each sharding constraint of a layer while the call is traced; None disables it.
    taps: listen to the values between layers; None disables them. See `taps.py`.
    edited: if the variables contain edits, collects the shape of each value at a point, by name; otherwise None.
    without_adapters: whether layers with adapters compute as if they had none.
    adapters: [B] int32, which of several adapters each row of the batch uses; -1 for none. None means that no row uses
      one.
  """

  read_weight: Callable[[Path, jax.Array, DTypeLike | None], jax.Array] = _cast
  reading_gathers: bool = False
  sum_over_rows: Callable[[jax.Array], jax.Array] = lambda x: x
  real_rows: Callable[[], jax.Array] | None = None
  read_outside: Callable[[jax.Array], jax.Array] | None = None
  manual_axes: frozenset[str] = frozenset()
  listener: Callable[[SplitConstraint], object] | None = None
  taps: Taps | None = None
  edited: dict[str, tuple[int, ...]] | None = None
  without_adapters: bool = False
  adapters: jax.Array | None = None


def fold_in_path(key: jax.Array, path: Path) -> jax.Array:
  """Returns `key` folded with a stable hash of `path`, which is the same on every machine and in every run."""
  return jax.random.fold_in(key, _path_hash(path))


def fold_in_paths(key: jax.Array, paths: Sequence[Path]) -> dict[Path, jax.Array]:
  """Returns `fold_in_path(key, path)` for each path; in a traced program, by one operation, which compiles faster."""
  # With PRNG implementations other than threefry, `vmap` may return other keys than one `fold_in_path` after another.
  together = isinstance(key, jax.core.Tracer) and jax.random.key_impl(key) == 'threefry2x32'
  if not (paths and together):
    return {path: fold_in_path(key, path) for path in paths}
  hashes = np.array([_path_hash(path) for path in paths], np.uint32)
  return dict(zip(paths, jax.vmap(jax.random.fold_in, (None, 0))(key, hashes)))


def _path_hash(path: Path) -> int:
  return zlib.crc32('/'.join(path).encode())


@dataclasses.dataclass(eq=False)
class Frame:
  """One call in progress. Paths begin at the model, but trees contain only what is below the layer at the path `root`.

  `active` is the layer whose method is running, and `trace` the trace of JAX in which the call began.
  """

  root: Path
  variables: NestedDict
  _: dataclasses.KW_ONLY
  key: jax.Array | None = None
  do_eval: bool = False
  decode_state: NestedDict | None = None
  surroundings: Surroundings = dataclasses.field(default_factory=Surroundings)
  active: object = None
  summaries: dict[str, Summary] = dataclasses.field(default_factory=dict)
  aux_losses: WeightedScalars = dataclasses.field(default_factory=dict)
  updates: NestedDict = dataclasses.field(default_factory=dict)
  draws: dict[Path, int] = dataclasses.field(default_factory=dict)
  trace: object = dataclasses.field(default_factory=current_trace)

  def variable(self, path: Path) -> Any:
    """Returns the subtree or array at `path`, as stored; variables updated in this call have their new values."""
    updated = node_at(self.updates, self._below(path))
    value = node_at(self.variables, self._below(path))
    if updated is None:
      return value
    return merge(value, updated) if isinstance(value, dict) and isinstance(updated, dict) else updated

  def update(self, path: Path, value: Any) -> None:
    self.updates = insert(self.updates, self._below(path), value)

  def read_cache(self, path: Path) -> Any:
    return node_at(self.decode_state, self._below(path))

  def write_cache(self, path: Path, value: Any) -> None:
    self.decode_state = insert(self.decode_state or {}, self._below(path), value)

  def next_key(self, path: Path) -> jax.Array:
    if self.key is None:
      where = path_name(path) or 'the layer'
      raise ConfigError(
        f'{where} draws random numbers; pass key= to apply(), or do_eval=True where it has no randomness'
      )
    count = self.draws.get(path, 0)
    self.draws[path] = count + 1
    return jax.random.fold_in(fold_in_path(self.key, self._below(path)), count)

  def add_summary(self, name: str, summary: Summary) -> None:
    """Adds a summary; if the layer is used several times, later summaries are called `name_1`, `name_2`, ..."""
    unique, count = name, 0
    while unique in self.summaries:
      count += 1
      unique = f'{name}_{count}'
    self.summaries[unique] = summary

  def has_summary(self, name: str) -> bool:
    """Whether this call, or one that it is nested in, has a summary of this name."""
    return any(name in frame.summaries for frame in (self, *_frames.get()))

  def add_aux_loss(self, name: str, value: jax.Array, weight: jax.Array) -> None:
    """Adds weight * value to the auxiliary losses; if the layer is used several times, keeps the weighted mean."""
    if name in self.aux_losses:
      values, weights = zip(self.aux_losses[name], (value, weight))
      value, weight = mean_of_means(jnp.stack(values), jnp.stack(weights))
    self.aux_losses[name] = (value, weight)

  def side_outputs(self) -> SideOutputs:
    return SideOutputs(self.summaries, self.aux_losses, self.updates, self.decode_state or {})

  def absorb(self, path: Path, side: SideOutputs) -> None:
    """Takes over the side outputs of a nested call whose root is the layer at `path`."""
    for name, summary in side.summaries.items():
      self.add_summary(name, summary)
    for name, aux_loss in side.aux_losses.items():
      self.add_aux_loss(name, *aux_loss)
    if side.updates:
      self.update(path, merge(node_at(self.updates, self._below(path)) or {}, side.updates))
    if side.decode_state:
      self.write_cache(path, side.decode_state)

  def _below(self, path: Path) -> Path:
    return path[len(self.root) :]


_frames: contextvars.ContextVar[tuple[Frame, ...]] = contextvars.ContextVar('praxis_lite_frames', default=())


@contextlib.contextmanager
def enter(frame: Frame) -> Iterator[Frame]:
  """Makes `frame` the innermost frame."""
  token = _frames.set((*_frames.get(), frame))
  try:
    yield frame
  finally:
    _frames.reset(token)


def current_frame() -> Frame | None:
  """Returns the innermost frame, or None outside of any call."""
  frames = _frames.get()
  return frames[-1] if frames else None


def variables_of_call() -> NestedDict:
  """Returns the variables of the outermost call in progress, such as those of the whole model; {} outside of calls."""
  frames = _frames.get()
  return frames[0].variables if frames else {}


def frame_holding(path: Path) -> Frame | None:
  """Returns the innermost frame whose tree contains `path`, for example one outside of a scan; None if none does."""
  return next((f for f in reversed(_frames.get()) if path[: len(f.root)] == f.root), None)


def read_through(frame: Frame, value: jax.Array) -> jax.Array:
  """Returns a weight of `frame`, given its stored `value`, as the innermost call reads it.

  The `read_outside` of each call inside of `frame` converts it, the outermost call first.
  """
  frames = _frames.get()
  for inner in frames[frames.index(frame) + 1 :]:
    if inner.surroundings.read_outside is not None:
      value = inner.surroundings.read_outside(value)
  return value
