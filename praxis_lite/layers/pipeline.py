"""Pipelined: a stack of layers cut into stages, which work on different microbatches at the same time.

The program is a loop over ticks. In each tick, one function is mapped over the stages. The compiler splits the
dimension of stages over a mesh axis. So in each tick, each device computes its own stages, and sends one microbatch to
the next device (Xu et al., 2021, GSPMD, section 3.3).

    queue = microbatches                                     [S, M, mb, ...], read at stage 0, written at stage S - 1
    for tick in range(M + S - 1):
      state = shift(state), queue[tick] at stage 0           [S, mb, ...]: one collective-permute
      ids = (tick - arange(S)) mod M                         the microbatch of each stage
      state = vmap(stage)(weights, state, side_inputs[ids])
      queue = queue with state of stage S - 1 at tick - S + 1

With R = `circular_repeat` > 1, stage s has the R groups of layers s, S + s, 2 S + s, ...; see `pipeline_schedule.py`.

All stages run the same program, so each stage has whole repetitions of a pattern of several layers. The first layers,
and those that are left over, run before and after the loop, on the whole batch.

A bubble is a stage without a microbatch in a tick, or a layer that only pads the group of a later stage. It computes
on `BUBBLE`, and its results reach no output, gradient, variable or cache. A select replaces the inputs of a bubble
and, in the backward pass, the gradients of everything that the bubble read: weights, side inputs, and weights of
layers outside of the pipeline. A multiplication by 0 would let NaNs pass.

Weights are stored as `Repeat` stores them, so a checkpoint depends neither on stages nor on microbatches. Inside a step
they have the shape [S, R, c, ...]. If the repetitions do not fill all stages, repetitions with weights of zeros are
added. Their results are dropped.

The gradient of a weight is a sum over rows, so devices with different rows have to sum their gradients. The compiler
does this in each tick. With `batch_axes`, the loop is in a `shard_map` over these axes: each device has its own rows of
each microbatch, and gradients are summed once, after the loop.

B batch, M microbatches, mb rows in each, S stages, R rounds, P = repetitions / R, c = P / S rounded up: repetitions in
a group.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.common.config import REQUIRED, Config, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import number_of
from praxis_lite.common.statistics import PartKind, kind_of_part
from praxis_lite.common.trees import NestedDict, Path, leaves, map_with_path, path_name, select
from praxis_lite.layers.base import Layer, SplitMapping
from praxis_lite.layers.base.call import SideOutputs, Summary, Surroundings, part_kind
from praxis_lite.layers.base.facts import Exchange, Knob, KnobKind, LayerProblem, PipelineStages, double_or_halve
from praxis_lite.layers.base.taps import is_probe
from praxis_lite.layers.pipeline_arrays import Stacks, batch, broadcast_to_stages, is_float, microbatches, take_last
from praxis_lite.layers.pipeline_inputs import TAPPED_ROWS, SideInputs, argument_names, num_rows
from praxis_lite.layers.pipeline_reports import Place, map_over_rows, mean_over_microbatches
from praxis_lite.layers.pipeline_schedule import PipelineSchedule
from praxis_lite.layers.pipeline_ticks import Ticks
from praxis_lite.layers.remat import Remat
from praxis_lite.layers.repeat import Repeat, StackCall, pattern
from praxis_lite.layers.stages import Stages, building_stages
from praxis_lite.sharding.constraints import unmapped_axes
from praxis_lite.sharding.specs import UNCONSTRAINED, Placement, all_axes, drop_axes
from praxis_lite.sharding.weights import DeclaredSplit, SplitDimsMapping, WeightHParams

T = TypeVar('T')

# The value of inputs of stages without a microbatch. Tests set it to NaN.
BUBBLE = 0.0


class PipelineWeightSplit(SplitMapping):
  """`stages`: one entry, the mesh axis that splits the stages, and so the stacked weights."""

  stages: SplitDimsMapping = None


class Pipelined(Repeat):
  """Computes the same as `Repeat`, in microbatches, with its layers in the stages of a pipeline.

  The arguments of a call have the batch as dimension 0. Rows that fill up the last microbatches are copies of other
  rows, and are dropped at the end. Sums and means over rows in a layer must leave these rows out; see
  `Layer.real_rows`. A side input whose name is in the layers' `marks_of_padding` marks these rows as padding.

  In contrast to `Repeat`, a layer sees one microbatch at a time. Floating scalar summaries are averaged over
  microbatches, and other summaries have the value of the last microbatch. Each microbatch in turn updates non-trainable
  variables. The weight of an auxiliary loss does not depend on the number of microbatches. A microbatch whose rows are
  all marked as padding by side inputs affects no summary, variable or auxiliary loss, unless all microbatches are
  padding. The key of a layer's random numbers depends on the layer and the microbatch, not on the stage or the round.
  First layers, and layers that remain after whole repetitions of a pattern, are in no stage: they see the whole batch.

  Only reverse-mode differentiation is supported, not forward mode (`jax.jvp`).

  Attributes: the same as for `Repeat`, where `remat` applies to each layer, and
    num_stages: S.
    num_microbatches: M, but at most the number of rows of the batch. Set either this or `microbatch_size`.
    microbatch_size: number of rows of a microbatch on all devices together.
    circular_repeat: R, the number of groups of layers in each stage, a divisor of the number of repetitions.
    batch_axes: mesh or logical axes that split the batch, along which each device runs its own rows; see the top of
      this file. As under `partitioning='shard_map'`, a layer then sees the rows of one device. A layer that computes a
      mean over rows must use `surroundings.sum_over_rows`; otherwise the result is the mean of the devices' means.
      Devices draw different random numbers. Weights that are split over these axes are gathered before the loop. None
      means that layers see whole microbatches.
    gather_axes: mesh or logical axes over which weights are gathered once, before the loop. Each device then holds the
      weights of its stages whole, in the dtype in which layers compute. Weights without a declared split are gathered
      over all axes except the stage axis. None means that weights are gathered in each tick.
    stage_remat: rematerialisation policy of a stage in a tick; 'full' keeps only the stage's input.
    stage_remat_save_names, stage_remat_offload_names: tags of values that stages keep in addition; see `remat.py`.
    weight_split_dims_mapping: `stages`, the mesh axis of the stages; `layers` splits the other dimensions.
  """

  _stack: ClassVar[str] = 'stages'
  has_microbatches: ClassVar[bool] = True
  count_fields: ClassVar[tuple[str, ...]] = ('num_microbatches', 'microbatch_size', 'circular_repeat')

  num_stages: int = REQUIRED
  num_microbatches: int | None = None
  microbatch_size: int | None = None
  circular_repeat: int = 1
  batch_axes: str | tuple[str, ...] | None = None
  gather_axes: str | tuple[str, ...] | None = None
  stage_remat: str = 'none'
  stage_remat_save_names: tuple[str, ...] = ()
  stage_remat_offload_names: tuple[str, ...] = ()
  weight_split_dims_mapping: Config = template(PipelineWeightSplit)

  def setup(self) -> None:
    self._check_microbatches()
    self._stage_remat = Remat.read(self, field='stage_remat')
    field = f'{self.path_name}.weight_split_dims_mapping.stages'
    self._stages = self._resolve(self.weight_split_dims_mapping.stages, field, rank=1)
    self.stage_axes: tuple[str, ...] = () if self._stages is None else tuple(all_axes(self._stages.spec))
    super().setup()
    self._row_axes, self._gather_axes = self._resolve_axes('batch_axes'), self._resolve_axes('gather_axes')
    if both := {*self._row_axes} & {*self.stage_axes}:
      raise ConfigError(f'{self.path_name}.batch_axes: {min(both)!r} splits the stages, so it cannot split the batch')
    if both := {*self._gather_axes} & {*self.stage_axes}:
      raise ConfigError(
        f'{self.path_name}.gather_axes: {min(both)!r} splits the stages, and weights of other stages are not gathered'
      )
    for layer in self._layers_in_stages():
      self._check_apart(layer)

  def _create_blocks(self) -> list[Layer]:
    self._check_repetitions()
    with building_stages(Stages(self.num_stages, self.stage_axes)):
      return super()._create_blocks()

  def _layers_in_stages(self) -> Iterator[Layer]:
    """Yields the repeated layers, and all layers below them."""
    return itertools.chain.from_iterable(layer.descendants() for layer in self._blocks)

  def _check_microbatches(self) -> None:
    self._check_range('num_stages', 'num_microbatches', 'microbatch_size', 'circular_repeat', least=1)
    if (self.num_microbatches is None) == (self.microbatch_size is None):
      given = 'neither is' if self.num_microbatches is None else 'both are'
      raise ConfigError(
        f'{self.path_name}.num_microbatches: give this or microbatch_size, and {given} set; with {self.num_stages} '
        f'stages, {number_of(4 * self.num_stages, "microbatch")} leave stages idle for a fifth of the time'
      )

  def _check_repetitions(self) -> None:
    if self._repetitions % self.circular_repeat:
      raise ConfigError(
        f'{self.path_name}.circular_repeat: {self.circular_repeat} does not divide the number of repetitions, '
        f'{self._repetitions}'
      )
    groups, period = self.num_stages * self.circular_repeat, len(pattern(self.layers_tpl))
    if self._repetitions < groups:
      rounds = f' of circular_repeat={self.circular_repeat} groups' if self.circular_repeat > 1 else ''
      least = number_of(groups * period + len(self.first_tpl), 'layer')
      raise ConfigError(
        f'{self.path_name}.num_stages: {number_of(self.num_stages, "stage")}{rounds} need at least {least}, and '
        f'num_layers is {self.num_layers}'
      )

  def _check_apart(self, layer: Layer) -> None:
    """Raises ConfigError if a layer inside of a stage splits an array over the stage axis."""
    for group in ('weight_split_dims_mapping', 'activation_split_dims_mapping'):
      for field, mapping in layer.split_mappings(group).items():
        placement = layer._resolve(mapping, field)
        taken = [] if placement is None else [axis for axis in all_axes(placement.spec) if axis in self.stage_axes]
        if taken:
          raise ConfigError(
            f'{field}: {taken[0]!r} splits the stages of {self.path_name} (weight_split_dims_mapping.stages), so '
            'nothing inside of a stage can be split over it; use another mesh axis'
          )

  def exchanges(self) -> list[Exchange]:
    field = 'weight_split_dims_mapping.stages'
    return [Exchange('pipeline stages', field, self.stage_axes, by_compiler=True)] if self.stage_axes else []

  def knobs(self) -> list[Knob]:
    M = self.num_microbatches
    own = [] if M is None else [Knob('num_microbatches', M, double_or_halve, KnobKind.MICROBATCHES)]
    return [*own, *super().knobs()]

  def problems(self, mesh_sizes: Mapping[str, int]) -> Iterator[LayerProblem]:
    parts = math.prod(mesh_sizes[axis] for axis in self.stage_axes)
    if self.num_stages % parts:
      yield LayerProblem(
        'uneven stages',
        f'{self.path_name}.num_stages',
        f'{number_of(self.num_stages, "stage")} over {parts} devices: some devices have fewer stages than others, and '
        'weights move between them at each step',
        f'make it a multiple of {parts}, or the mesh axis a divisor of {self.num_stages}',
      )

  def pipeline_stages(self) -> PipelineStages:
    return PipelineStages(self.num_stages, 'num_stages', self.stage_axes, self.circular_repeat, len(self._blocks))

  @property
  def _in_group(self) -> int:
    """c, the number of repetitions that a stage runs in a tick."""
    return -(-self._repetitions // (self.circular_repeat * self.num_stages))

  @property
  def layers_in_group(self) -> int:
    """The number of layers that a stage runs in a tick."""
    return self._in_group * len(self._blocks)

  def schedule(self, batch_size: int) -> PipelineSchedule:
    """Returns the schedule of a batch with this number of rows."""
    if self.microbatch_size is not None:
      M = -(-batch_size // self.microbatch_size)
    else:
      # The configured number, even if fewer microbatches would do, because auxiliary losses depend on it.
      M = min(self.num_microbatches or 1, batch_size)
    return PipelineSchedule(self.num_stages, M, self.circular_repeat)

  def _stack_weight(self, weight: WeightHParams) -> WeightHParams:
    if self.circular_repeat == 1:
      return super()._stack_weight(weight)
    split, P = (self._stack_mapping or (None,))[0], self._repetitions // self.circular_repeat
    rounds = DeclaredSplit((None,), [f'{self.path_name}.circular_repeat: a stage has layers of each round'])
    weight = weight.repeat(P, split, self._stack_field).repeat(self.circular_repeat)
    prefix = rounds.followed_by(weight.repeat_prefix_split_dims_mapping[1:])
    return dataclasses.replace(weight, repeat_prefix_split_dims_mapping=prefix)

  def __call__(self, x: T, *args: object, **kwargs: Any) -> T:
    """Returns the result of the last layer.

    Args:
      x: input of the first layer, an array or a tree of arrays with the batch as dimension 0.
      *args, **kwargs: side inputs: each layer gets the rows of its microbatch. Arrays have the batch, or 1, as
        dimension 0. Scalars, and values that are not arrays, are passed to all layers unchanged.

    Raises:
      DataError: dimension 0 of an array is neither the batch nor 1.
    """
    return super().__call__(x, *args, **kwargs)

  @property
  def _decodes_unrolled(self) -> bool:
    return False

  def _run_blocks(self, call: StackCall, carry: T) -> T:
    """Runs all repetitions in stages; in decoding, the whole batch goes from stage to stage."""
    if call.method == 'init_decode_state':
      self._allocate_caches(call.args)
      return carry
    schedule = PipelineSchedule(self.num_stages, 1, self.circular_repeat)
    if call.is_differentiated:
      schedule = self.schedule(num_rows(carry, self.path_name))
    return self._run_ticks(call, carry, schedule)

  def _allocate_caches(self, args: tuple[object, ...]) -> None:
    """Allocates the caches of all layers; the arguments are the same as for a repeated layer."""

    def one(variables: NestedDict) -> NestedDict:
      return {
        layer.name: layer.apply(variables[layer.name], *args, method='init_decode_state')[1].decode_state
        for layer in self._blocks
      }

    stacked: Callable[[NestedDict], NestedDict] = one
    for size in (self._in_group, self.circular_repeat, self.num_stages):
      stacked = jax.vmap(stacked, axis_size=size)
    caches = stacked(self._fill_in_blocks(self._variables_in_stages(self._variables_of_blocks())))
    for layer in self._blocks:
      layer.absorb(SideOutputs({}, {}, {}, jax.tree.map(self._to_layers, caches[layer.name])))

  def _run_ticks(self, call: StackCall, x: T, schedule: PipelineSchedule) -> T:
    S, M, _ = schedule
    B, trains, kwargs = num_rows(x, self.path_name), call.is_differentiated, call.kwargs
    self._check_placed_by_compiler()
    if (taps := self.surroundings.taps) is not None and taps.real is not None and len(taps.real) == B:
      kwargs = {**kwargs, TAPPED_ROWS: taps.real}
    side = self._side_inputs(call.method, call.args, kwargs, B)

    stored = self._variables_of_blocks()
    probes = select(stored, is_probe)
    own = select(stored, lambda path: not is_probe(path))
    variables = self._variables_in_stages(own)
    trainable = {path for path, weight in leaves(self._weights_of_blocks()).items() if weight.trainable}
    # Each tick reads all weights of a stage, so they are cast once, before they are gathered and before the loop.
    constant = jax.lax.stop_gradient(self._fill_in_blocks(own))
    cast = {layer.name: layer.cast_variables(constant[layer.name]) for layer in self._blocks}
    cast = self._variables_in_stages(cast, self._gather_axes)
    weights = Stacks(*(self._fill_in_blocks(select(tree, trainable.__contains__)) for tree in (cast, variables)))
    others = self._fill_in_blocks(select(variables, lambda path: path not in trainable))
    caches = {layer.name: layer.decode_state for layer in self._blocks}
    caches = jax.tree.map(lambda v: self._constrain_to_stages(self._to_stages(v)), caches)
    axes = tuple(axis for axis in self._row_axes if axis in unmapped_axes()) if trains else ()
    devices = math.prod(unmapped_axes()[axis] for axis in axes)
    parts = M * devices
    side_rows = side.cut(M, parts)
    queue = jax.tree.map(lambda v: self._constrain_to_stages(broadcast_to_stages(microbatches(v, M, parts), S)), x)
    held = side.held(side_rows, self.surroundings.sum_over_rows)
    num_counted = M if held is None else jnp.sum(held, dtype=jnp.float32)

    ticks = Ticks(
      name=self.path_name,
      layers={layer.name: layer for layer in self._blocks},
      method=call.method,
      num_first=len(self.first),
      repetitions=self._repetitions,
      in_group=self._in_group,
      schedule=schedule,
      side=side,
      surroundings=self._surroundings_of_rows(axes),
      bubble=BUBBLE,
      # Random keys must be the same on all meshes, so this must not depend on the mesh. M does: a mesh that pads the
      # batch makes several microbatches from one row.
      folds_microbatch=M > 1 or (trains and self.num_microbatches != 1),
      unroll=self._unroll_count(training=False),
      constrain=self._constrain_to_stages,
      remat_layer=lambda layer, kind: self._remat(layer, kind, in_scan=True) if trains else layer,
      remat_stage=functools.partial(self._add_remat, rounds=schedule.rounds if trains else 1),
    )
    run = map_over_rows(ticks.run, axes)
    # Each stage gets a copy of its own, so that gradients are masked before they are summed over stages.
    shared = [self._constrain_to_stages(broadcast_to_stages(v, S)) for v in side.shared]
    # Computing `held` takes an all-reduce, which the compiler leaves out if nothing uses `held`. So the loop gets it
    # only if layers update variables.
    of_updates = held if leaves(others) else None
    of_ticks = map_with_path(lambda path, x: self._probe_of_ticks(path, x, schedule, devices), probes)
    of_ticks = self._fill_in_blocks(of_ticks)
    results = run(call.key, of_updates, weights, others, caches, shared, queue, side_rows, of_ticks)
    queue, others, caches, places, reported = results
    if held is not None:
      places = places._replace(counts=places.real & held[places.microbatch])
    updates = self._fill_in_blocks(select(others, ticks.changed.__contains__))
    for layer in self._blocks:
      summaries, aux_losses = reported[layer.name]
      layer.absorb(
        SideOutputs(
          summaries={name: self._summary(s, places, schedule, held) for name, s in summaries.items()},
          aux_losses={name: mean_over_microbatches(*aux, places, num_counted) for name, aux in aux_losses.items()},
          updates=jax.tree.map(self._to_layers, updates[layer.name]),
          decode_state=jax.tree.map(self._to_layers, caches[layer.name]),
        )
      )
    return jax.tree.map(lambda q: batch(take_last(q))[:B], queue)

  def _side_inputs(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object], B: int) -> SideInputs:
    named: Layer = self._blocks[0]
    while isinstance(named, Repeat):  # A `Repeat` takes *args; the repeated layer names them.
      named = named.layers_by_turn()[0]
    marks: dict[str, int] = {}
    for layer in self._layers_in_stages():
      marks |= layer.marks_of_padding
    names = argument_names(getattr(named, method))
    return SideInputs(args, kwargs, names, marks, B, self.path_name, self.real_rows(B))

  def _surroundings_of_rows(self, axes: tuple[str, ...]) -> Surroundings:
    """Returns the surroundings of a layer that sees only its device's rows along `axes`."""
    outer, taps = self.surroundings, self.surroundings.taps
    if not axes:
      return outer
    return dataclasses.replace(
      outer,
      sum_over_rows=lambda x: jax.lax.psum(outer.sum_over_rows(x), axes),
      manual_axes=outer.manual_axes | {*axes},
      taps=None if taps is None else dataclasses.replace(taps, manual_axes=taps.manual_axes | {*axes}),
    )

  def _add_remat(self, stage: Callable[..., T], rounds: int) -> Callable[..., T]:
    if self.stage_remat != 'none':
      return self._stage_remat(stage, in_scan=True)
    # The weights of a round are read in each tick. If the backward pass kept them, there would be a copy for each tick.
    return jax.checkpoint(stage, policy=_save_all_but_moved, prevent_cse=False) if rounds > 1 else stage

  def _check_placed_by_compiler(self) -> None:
    manual = [axis for axis in self.stage_axes if axis in self.surroundings.manual_axes]
    if manual:
      raise ConfigError(
        f'{self._stack_field}: stages cannot be split over {manual[0]!r} inside of shard_map, where each device would '
        "run all of them; set task.partitioning='auto'"
      )

  # ---------------------------------------------------------------- stacks of layers and of stages

  def _variables_of_blocks(self) -> NestedDict:
    """Returns the variables of the repeated layers, by the name of the layer."""
    return {layer.name: layer.variables for layer in self._blocks}

  def _weights_of_blocks(self) -> NestedDict:
    """Returns the declarations of the repeated layers' variables, for one repetition."""
    return {layer.name: layer.abstract_init() for layer in self._blocks}

  def _fill_in_blocks(self, tree: NestedDict) -> NestedDict:
    """Returns a tree that has an entry for each repeated layer, also for those without a leaf in `tree`."""
    return {layer.name: tree.get(layer.name, {}) for layer in self._blocks}

  def _constrain_to_stages(self, x: jax.Array) -> jax.Array:
    """Constrains dimension 0 to be split over the stage axis, if there is one; the compiler may split the others."""
    if self._stages is None:
      return x
    spec = PartitionSpec(self._stages.spec[0], *(UNCONSTRAINED,) * (x.ndim - 1))
    return self._constrain(x, self._stack_field, Placement(spec, (self._stages.why[0],) * x.ndim))

  def _variables_in_stages(self, variables: NestedDict, gathered: tuple[str, ...] = ()) -> NestedDict:
    """Returns variables of the repeated layers, [repetitions, ...], as [S, R, c, ...], with S split over the stages.

    They are not split over the axes in `gathered`.
    """
    weights = leaves(self._weights_of_blocks())
    prefix = DeclaredSplit.make((*(self._stack_mapping or (None,)), None, None), self._stack_field)

    def place_in_stages(path: Path, x: jax.Array) -> jax.Array:
      name = path_name((*self.path, *path))
      if path not in weights:  # An array that a tool adds to the variables; each stage gets its own part.
        return self._constrain_to_stages(self._to_stages(x))
      own = weights[path].full_split_dims_mapping
      if weights[path].tensor_split_dims_mapping is None:
        own = DeclaredSplit((None if gathered else UNCONSTRAINED,) * len(own), own.sources)
      is_placed = gathered or self._stages is not None
      placement = self._resolve(prefix.followed_by(own), name) if is_placed else None
      if placement is not None and gathered:
        placement = dataclasses.replace(placement, spec=drop_axes(placement.spec, gathered))
      return self._constrain(self._to_stages(x), f'{name} (in stages)', placement)

    return map_with_path(place_in_stages, variables)

  def _to_stages(self, x: jax.Array) -> jax.Array:
    """Converts an array from [repetitions, ...], or with several rounds [R, P, ...], to [S, R, c, ...]."""
    S, R, c = self.num_stages, self.circular_repeat, self._in_group
    if R == 1:
      x = x[None]
    missing = S * c - x.shape[1]
    x = jnp.pad(x, [(0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)]) if missing else x
    return jnp.swapaxes(x.reshape(R, S, c, *x.shape[2:]), 0, 1)

  def _to_layers(self, x: jax.Array) -> jax.Array:
    """The inverse of `_to_stages`."""
    S, R, c = self.num_stages, self.circular_repeat, self._in_group
    x = jnp.swapaxes(x, 0, 1).reshape(R, S * c, *x.shape[3:])[:, : self._repetitions // R]
    return x[0] if R == 1 else x

  def _summary(self, summary: Summary, places: Place, schedule: PipelineSchedule, held: jax.Array | None) -> Summary:
    """Returns a summary with an entry for each repetition, from the summary of all ticks, [ticks, S, c, ...]."""
    x, M = summary.value, schedule.num_microbatches
    if (kind := part_kind(summary)) is not None:
      return Summary(self._combine_parts(kind, x, places.real, places.round), summary.kind)
    is_mean = summary.kind == 'scalar' and is_float(x)
    last: jax.Array | int = M - 1 if held is None else M - 1 - jnp.argmax(held[::-1])
    counts = places.counts if is_mean else places.counts & (places.microbatch == last)
    rounds = jnp.arange(schedule.rounds)[None, None] == places.round[..., None]
    mask = (counts[..., None] & rounds).reshape(*x.shape[:2], schedule.rounds, *(1,) * (x.ndim - 2))
    total = jnp.sum(jnp.where(mask, x[:, :, None], jnp.zeros_like(x[:, :, None])), axis=0, dtype=x.dtype)
    if is_mean:
      total = (total / (M if held is None else jnp.sum(held, dtype=jnp.float32))).astype(x.dtype)
    stacked = self._to_layers(total)
    return Summary(stacked.reshape(self._repetitions, *x.shape[3:]), summary.kind)

  def _combine_parts(self, kind: PartKind, x: jax.Array, real: jax.Array, round_: jax.Array) -> jax.Array:
    """Returns the statistics of each layer, [repetitions, ...], from their parts `x`, [ticks, S, c, ...].

    In each tick, each stage gives one part for each of its c layers. `real` and `round_`, [ticks, S], say whether the
    stage has a microbatch in the tick, and in which round the microbatch is.
    """
    R = self.circular_repeat
    here = real[..., None] & (jnp.arange(R) == round_[..., None])
    mask = here.reshape(*x.shape[:2], R, *(1,) * (x.ndim - 2))
    stacked = self._to_layers(kind.combine(jnp.where(mask, x[:, :, None], kind.neutral(x[:, :, None]))))
    return stacked.reshape(self._repetitions, *x.shape[3:])

  def _probe_of_ticks(self, path: Path, probe: jax.Array, schedule: PipelineSchedule, devices: int) -> jax.Array:
    """Returns zeros for each tick and layer, [devices, ticks, S, c, ...], in place of a probe, [repetitions, ...].

    Layers report statistics of gradients as the gradient with respect to a probe. Here, each tick reports a part of the
    statistics as the gradient with respect to its zeros. The backward pass combines the parts of real microbatches, and
    returns the result as the gradient of the probe; it drops the parts of bubbles.
    """
    microbatch, round_ = (np.concatenate([x] * devices) for x in schedule.work())
    real = (microbatch >= 0) & (microbatch < schedule.num_microbatches)
    sizes = (devices, schedule.num_ticks, self.num_stages, self._in_group)

    @jax.custom_vjp
    def spread(probe: jax.Array) -> jax.Array:
      return jnp.zeros((*sizes, *probe.shape[1:]), probe.dtype)

    def combine(_: None, parts: jax.Array) -> tuple[jax.Array]:
      by_tick = parts.reshape(-1, *parts.shape[2:])
      return (self._combine_parts(kind_of_part(path[-1]), by_tick, jnp.asarray(real), jnp.asarray(round_)),)

    spread.defvjp(lambda probe: (spread(probe), None), combine)
    return spread(probe)


def describe_pipelines(model: Layer, batch_size: int | None) -> list[str]:
  """Returns a line about each pipeline in a model, for batches with this number of rows."""
  lines = []
  for layer in model.descendants():
    if not isinstance(layer, Pipelined):
      continue
    R, in_group, outside = layer.circular_repeat, layer.layers_in_group, len(layer.first) + len(layer.rest)
    stages = f'{number_of(layer.num_stages, "stage")} x {f"{R} rounds x " if R > 1 else ""}'
    stages += number_of(in_group, 'layer') + (f' and {number_of(outside, "layer")} in no stage' if outside else '')
    if batch_size is None:
      lines.append(f'{layer.path_name}: {stages}')
      continue
    schedule = layer.schedule(batch_size)
    M = schedule.num_microbatches
    rows = -(-batch_size // M)
    lines.append(
      f'{layer.path_name}: {stages}, {number_of(M, "microbatch")} of {number_of(rows, "row")} in '
      f'{schedule.num_ticks} ticks, bubble {schedule.bubble_fraction:.1%}'
    )
  return lines


# ---------------------------------------------------------------- arrays


_MOVES = {
  *('broadcast_in_dim', 'concatenate', 'convert_element_type', 'copy', 'dynamic_slice', 'gather', 'name', 'reshape'),
  *('squeeze', 'transpose'),
}


def _save_all_but_moved(primitive: Any, *_: object, **__: object) -> bool:
  """A policy of `jax.checkpoint` that keeps all results except those of moves and casts."""
  return primitive.name not in _MOVES
