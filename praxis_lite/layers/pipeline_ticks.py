"""The loop over ticks of a pipeline, on arrays that `pipeline.py` has cut into stages and microbatches.

B batch, M microbatches, mb rows in each, S stages, R rounds, P repetitions in a round (all repetitions / R), c
repetitions in a group, a stage's share of a round (P / S, rounded up).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, Path, leaves, map_with_path, merge, node_at
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.call import Surroundings
from praxis_lite.layers.pipeline_arrays import (
  Stacks,
  broadcast_to_stages,
  entry_at,
  is_float,
  read_outside,
  replace_entry,
  shift,
  take,
  unzip,
  where,
)
from praxis_lite.layers.pipeline_inputs import TAPPED_ROWS, SideInputs
from praxis_lite.layers.pipeline_reports import Place, Reported, TickResults
from praxis_lite.layers.pipeline_schedule import PipelineSchedule

T = TypeVar('T')


class _TickState(NamedTuple):
  """The arrays that a tick passes to the next tick."""

  carried: Any  # The result of each stage, a tree of arrays [S, mb, ...].
  queue: Any  # The microbatches, [S, M, mb, ...]: stage 0 reads new ones, stage S - 1 writes finished ones.
  weight_gradients: NestedDict  # See `Stacks.gradients`.
  side_gradients: list[Any]
  others: NestedDict  # Variables that are not trained, [S, R, c, ...].
  caches: NestedDict  # [S, R, c, ...]


class _TickInputs(NamedTuple):
  """The arrays that all ticks read."""

  stages: jax.Array  # 0, 1, ..., S - 1
  key: jax.Array | None
  held: jax.Array | None  # [M] bool, False for microbatches that contain only padding; None if nothing marks padding.
  weights: NestedDict  # Trained variables, [S, R, c, ...], in the dtypes that layers use.
  side_rows: list[jax.Array]  # Rows of side inputs, [M, mb, ...].
  shared: list[jax.Array]  # Side inputs that have no rows but may have gradients, [S, ...].


@dataclasses.dataclass(frozen=True)
class Ticks:
  """The loop over ticks of one call."""

  name: str  # Path of the pipeline, for messages.
  layers: Mapping[str, Layer]  # The layers repeated in turn, by the names in trees of variables, caches and reports.
  method: str  # The method of the layers to call.
  num_first: int  # The number of layers before the repeated ones, from which layers are counted.
  repetitions: int
  in_group: int  # c
  schedule: PipelineSchedule
  side: SideInputs
  surroundings: Surroundings  # The surroundings of each layer.
  bubble: float  # The value that fills the input of stages without a microbatch.
  folds_microbatch: bool  # Whether the key of a layer depends on the microbatch.
  unroll: int  # How many repetitions of a group the inner loop runs in one iteration.
  constrain: Callable[[jax.Array], jax.Array]  # Splits dimension 0 of an array [S, ...] over the stage axis.
  # Both add rematerialisation: to the function of a layer, with its number in `layers`, and to the function of a stage.
  remat_layer: Callable[[Callable[..., Any], int], Callable[..., Any]]
  remat_stage: Callable[[Callable[..., Any]], Callable[..., Any]]
  changed: set[Path] = dataclasses.field(default_factory=set)  # Receives the paths of variables that layers update.

  def run(
    self,
    key: jax.Array | None,
    held: jax.Array | None,
    weights: Stacks,
    others: NestedDict,
    caches: NestedDict,
    shared: list[jax.Array],
    queue: T,
    side_rows: list[jax.Array],
    probes: NestedDict,
  ) -> TickResults:
    """Runs all ticks. `_TickInputs` and `_TickState` describe the arguments; probes are [1, ticks, S, c, ...]."""
    S, M, _ = self.schedule
    stages = jnp.arange(S)
    carried = jax.tree.map(lambda q: self.constrain(jnp.zeros_like(q[:, 0])), queue)
    side_gradients = [self.constrain(broadcast_to_stages(v, S)) if is_float(v) else None for v in side_rows]
    if M == 1:  # All stages read the same rows, but each needs its own copy; see `mask_gradients`.
      side_rows = [self.constrain(broadcast_to_stages(v, S)) for v in side_rows]
    inputs = _TickInputs(stages, key, held, weights.values, side_rows, shared)
    start = _TickState(carried, queue, weights.gradients, side_gradients, others, caches)
    tick = functools.partial(self._tick, inputs)
    xs = jnp.arange(self.schedule.num_ticks), jax.tree.map(lambda v: v[0], probes)
    end, (places, reported) = jax.lax.scan(tick, start, xs)
    return TickResults(end.queue, end.others, end.caches, places, reported)

  def _tick(
    self, inputs: _TickInputs, state: _TickState, xs: tuple[jax.Array, NestedDict]
  ) -> tuple[_TickState, tuple[Place, dict[str, Reported]]]:
    """Returns the state after a tick, what each stage did in it, and what layers report."""
    (S, M, _), stages, (now, probes) = self.schedule, inputs.stages, xs
    microbatch = self.schedule.microbatch(now, stages)
    real = (microbatch >= 0) & (microbatch < M)
    counts = real if inputs.held is None else real & inputs.held[microbatch % M]
    at = Place(stages, self.schedule.round(now, stages), microbatch % M, real, counts)
    with jax.named_scope('shift'):
      first = self.schedule.microbatch(now, 0) % M
      new, queue = unzip(lambda v: take(v, first), state.queue)
      starts = (stages == 0) & (at.round == 0)
      carried = where(starts, new, jax.tree.map(shift, state.carried))
    # spmd_axis_name is not set, because a `shard_map` inside a layer, such as that of experts, does not support it.
    # Constraints of layers do not affect the dimension of stages; `_constrain_to_stages` does.
    run_stages = jax.vmap(
      self.remat_stage(functools.partial(self._run_stage, inputs.key)),
      in_axes=(0, 0, Stacks(0, 0), Stacks(None if M > 1 else 0, 0), 0, 0, 0, 0),
    )
    (carried, weight_gradients, side_gradients, others, caches), reported = run_stages(
      at,
      carried,
      Stacks(inputs.weights, state.weight_gradients),
      Stacks(inputs.side_rows, state.side_gradients),
      inputs.shared,
      state.others,
      state.caches,
      probes,
    )
    carried, others, caches = jax.tree.map(self.constrain, (carried, others, caches))
    last = jnp.clip(self.schedule.microbatch(now, S - 1), 0, M - 1)
    # A bubble writes too, but to an entry that a later tick overwrites.
    queue = jax.tree.map(lambda q, s: jax.lax.dynamic_update_index_in_dim(q, s, last, 1), queue, carried)
    return _TickState(carried, queue, weight_gradients, side_gradients, others, caches), (at, reported)

  def _run_stage(
    self,
    key: jax.Array | None,
    at: Place,
    x: Any,
    weights: Stacks,
    side_rows: Stacks,
    shared: list[jax.Array],
    others: NestedDict,
    caches: NestedDict,
    probes: NestedDict,
  ) -> tuple[tuple[Any, NestedDict, list[Any], NestedDict, NestedDict], dict[str, Reported]]:
    """Runs the layers of one stage and round, one after the other, on one microbatch."""
    own, weight_gradients = weights.read(at.round, at.real)
    rows, side_gradients = side_rows.read(at.microbatch, at.real)
    if key is not None and self.folds_microbatch:
      key = jax.random.fold_in(key, at.microbatch)

    def run_layer(kind: int, x: Any, *of_layer: Any) -> tuple[Any, tuple[NestedDict, NestedDict, Reported]]:
      return self._run_layer(kind, key, at, rows, shared, x, *of_layer)

    bodies = [self.remat_layer(functools.partial(run_layer, kind), kind) for kind in range(len(self.layers))]

    def repetition(x: Any, xs: tuple[Any, ...]) -> tuple[Any, tuple[dict[str, Any], ...]]:
      *trees, index = xs
      done = []
      for body, name in zip(bodies, self.layers):
        x, of_layer = body(x, *(tree[name] for tree in trees), index)
        done.append(of_layer)
      return x, tuple(dict(zip(self.layers, of_kinds)) for of_kinds in zip(*done))

    xs = (own, entry_at(others, at.round), entry_at(caches, at.round), probes, jnp.arange(self.in_group))
    x, (new_others, new_caches, reported) = jax.lax.scan(repetition, x, xs, length=self.in_group, unroll=self.unroll)
    others, caches = replace_entry(others, new_others, at.round), replace_entry(caches, new_caches, at.round)
    return (x, weight_gradients, side_gradients, others, caches), reported

  def _run_layer(
    self,
    kind: int,
    key: jax.Array | None,
    at: Place,
    rows: list[jax.Array],
    shared: list[jax.Array],
    x: Any,
    weights: NestedDict,
    others: NestedDict,
    cache: NestedDict,
    probes: NestedDict,
    index: jax.Array,
  ) -> tuple[Any, tuple[NestedDict, NestedDict, Reported]]:
    """Runs layer `kind` of repetition `index` of a group.

    Returns its result, its new `others` and cache, and what it reports.
    """
    name, layer = list(self.layers.items())[kind]
    position, P = at.stage * self.in_group + index, self.repetitions // self.schedule.rounds
    real = at.real & (position < P)
    if key is not None:
      number = self.num_first + (at.round * P + position) * len(self.layers) + kind
      key = jax.random.fold_in(key, number)
    args, kwargs, real_rows = self.side.layer_arguments(rows, shared, real)
    taps = self.surroundings.taps
    if taps is not None:
      taps = taps.narrow_to_microbatch(kwargs.pop(TAPPED_ROWS, taps.real), real_rows)
    if layer.takes_paddings and real_rows is not None and self.side.lacks('paddings'):
      tokens = jax.tree.leaves(x)[0].shape[:2]
      kwargs['paddings'] = jnp.broadcast_to(~real_rows.reshape(-1, *(1,) * (len(tokens) - 1)), tokens)
    y, out = layer.apply(
      merge(merge(weights, jax.lax.stop_gradient(others)), probes),
      where(real, x, jax.tree.map(lambda v: jnp.full_like(v, self.bubble if is_float(v) else 0), x)),
      *args,
      key=key,
      decode_state=cache,
      method=self.method,
      surroundings=dataclasses.replace(
        self.surroundings,
        real_rows=None if real_rows is None else lambda: real_rows,
        read_outside=functools.partial(read_outside, at.stage, real),
        taps=taps,
      ),
      **kwargs,
    )
    self._check_result(layer, x, y)
    counts = at.counts & (position < P)
    self.changed.update((name, *path) for path in leaves(out.updates))

    def update(path: Path, old: jax.Array) -> jax.Array:
      new = node_at(out.updates, path)
      return where(counts, old if new is None else new, old)

    aux = {name: (v, where(counts, w, jnp.zeros_like(w))) for name, (v, w) in out.aux_losses.items()}
    reported, kept = Reported(out.summaries, aux), map_with_path(update, others)
    return where(real, y, x), (kept, where(real, out.decode_state if cache else {}, cache), reported)

  def _check_result(self, layer: Layer, x: object, y: object) -> None:
    given, got = (jax.tree.map(lambda v: jax.typeof(v).str_short(), tree) for tree in (x, y))
    if given != got:
      raise ConfigError(
        f'{self.name}.layers_tpl: a layer of a pipeline returns what it is given, {given} for a microbatch, and '
        f'{type(layer).__name__} returns {got}'
      )
