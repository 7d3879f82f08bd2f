"""Finds what can be saved by changing an experiment, and which changes make a step fit, without compiling each one.

    state           moments in other dtypes, moving averages, offloading: exact
    batch, length   the largest that fits, by estimates that are extrapolated linearly; then compiled, at most twice
    ways out        if the step does not fit, the nearest settings that fit; estimated from their lowered programs
    less waiting    if communication is exposed, the neighbouring mesh with the least time
    more chips      if no such setting fits, twice as many chips, doubled again until the step fits

All estimates are corrected by one difference: that between the compiled program of the plan and the estimate for the
same step. If the compiler refused this step, the memory in its error message is used.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import format_bytes, number_of
from praxis_lite.instruments.explain.report import task_and_inputs
from praxis_lite.instruments.plan.fitting import made_to_fit
from praxis_lite.instruments.plan.knobs import Configured, batch_path, knobs_of
from praxis_lite.instruments.plan.memory import state_bytes
from praxis_lite.instruments.plan.planning import Plan, plan
from praxis_lite.instruments.plan.report import format_table
from praxis_lite.instruments.plan.searching import Correction, Elsewhere
from praxis_lite.instruments.plan.topology import Topology
from praxis_lite.layers.base.facts import KnobKind
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.training.learning.moments import MOMENTS
from praxis_lite.training.learning.multi_learner import has_averages, nested_learners
from praxis_lite.training.partitioned_task import PartitionedTask

# If less than this share of a step is exposed communication, no other mesh is proposed.
_WORTH_CHANGING = 0.1
_MOST_WAYS = 3
_MOST_COMBINED = 2
# Extrapolation is uncertain. So a size is at most `_MOST_GROWTH` times as large as the largest one before it, and at
# most `_MOST_SIZES` sizes are tried.
_MOST_GROWTH = {'batch_size': 16, 'seq_len': 4}
_MOST_SIZES = 6
_MOST_COMPILES = 2
_MOST_CHIPS = 4096


@dataclasses.dataclass(frozen=True)
class Change:
  """A change of an experiment, and its effect on each device.

  Attributes:
    what: the change in words.
    overrides: the overrides that apply it.
    peak: peak bytes of memory after the change.
    time: time for the same tokens after the change, divided by the time before; None if it is not known.
    how: how the effect is known: 'exact', 'estimated' or 'compiled'.
  """

  what: str
  overrides: tuple[str, ...]
  peak: float
  time: float | None
  how: str


@dataclasses.dataclass(eq=False)
class WhatIf:
  """Finds changes of an experiment that is planned; see `search` for `cache`, `elsewhere` and `report`."""

  config: Configured
  planned: Plan
  _: dataclasses.KW_ONLY
  cache: Path | None = None
  elsewhere: Elsewhere | None = None
  report: Callable[[str], object] = lambda stage: None

  @property
  def _is_of_a_compiler(self) -> bool:
    return self.planned.mode == 'compiled' or self.planned.is_refused

  def __post_init__(self) -> None:
    learners = nested_learners(self.config.task.train.learner)
    self._learners = list(learners.values())
    self._learner_path = 'task.train.learner' if '' in learners else 'task.train.learner.rules[*].learner'

  @functools.cached_property
  def _own(self) -> Plan:
    return self._analytic(()) if self._is_of_a_compiler else self.planned

  @functools.cached_property
  def _correction(self) -> Correction:
    correction = Correction()
    if self._is_of_a_compiler:
      correction.add(self._own, self.planned)
    return correction

  def _analytic(self, overrides: Sequence[str]) -> Plan:
    config = self.config.change(overrides)
    return plan(config.explained, config.inputs, self.planned.topology, compile=False)

  def _estimate_change(self, what: str, overrides: Sequence[str]) -> Change | None:
    """Returns the estimated change; None if the experiment cannot be changed in this way."""
    self.report(f'estimating: {what}')
    try:
      found = self._analytic(overrides)
    except (UserError, ValueError, TypeError):
      return None
    seconds, peak = self._correction(found)
    share = seconds / self._correction(self._own)[0] / found.work.ratio_to(self._own.work)
    return Change(what, tuple(overrides), peak, share, 'estimated')

  # ---------------------------------------------------------------- state

  def state_changes(self) -> list[Change]:
    """Returns changes of settings: the dtype of moments, moving averages, offloading. Their effect is exact."""
    found = []
    before = self.planned.memory.state.total
    for what, override in self._state_changes():
      try:
        after = state_bytes(self._partition([override])).total
      except UserError:  # The optimizer or the mesh does not support this change.
        continue
      if after != before:
        found.append(Change(what, (override,), self.planned.memory.peak + after - before, None, 'exact'))
    return found

  def _partition(self, overrides: Sequence[str]) -> PartitionedTask:
    config = self.config.change(overrides)
    task, struct = task_and_inputs(config.explained, config.inputs)
    mesh = abstract_mesh(task.mesh_sizes(self.planned.topology.num_devices))
    return PartitionedTask(task, dict(struct or {}), mesh=mesh)

  def _state_changes(self) -> Iterator[tuple[str, str]]:
    train, learners = self.config.task.train, self._learners
    for dtype in MOMENTS:
      if any(learner.moments != dtype for learner in learners):
        yield f'moments in {dtype}', f'{self._learner_path}.moments={dtype}'
    if any(learner.ema_decay for learner in learners):
      yield 'without moving averages', f'{self._learner_path}.ema_decay=0.0'
    elif not has_averages(train.learner):
      yield 'with moving averages', f'{self._learner_path}.ema_decay=0.9999'
    if not train.offload_optimizer_state:
      yield 'slots in the memory of the host', 'task.train.offload_optimizer_state=True'

  # ---------------------------------------------------------------- batch and length

  def largest_batch(self) -> Change | None:
    """Returns the largest batch that fits; None if no batch fits, or if no field of a dataset sets the batch size."""
    where = batch_path(self.config)
    if where is None:
      return None
    path, rows = where
    # A batch is padded to a multiple of this number of rows.
    step = self._partition(()).row_parts * self.config.task.train.learner.num_microbatches
    return self._largest('batch_size', rows, step, lambda size: [f'{path}={size}'])

  def largest_length(self) -> Change | None:
    """Returns the largest sequence length that fits; None if none fits, or if no field of a dataset sets it."""
    datasets = self.config.roots.get('datasets', ())
    training = next((i for i, dataset in enumerate(datasets) if getattr(dataset, 'is_training', False)), None)
    length = None if training is None else getattr(datasets[training], 'seq_len', None)
    if not isinstance(length, int) or self.config.inputs is not None:
      return None
    model = self.config.task.instantiate().model
    fields = [f'{layer.path_name}.{field}' for layer in model.descendants() for field in layer.length_fields]
    paths = [f'datasets[{training}].seq_len', *(f'task.model.{field}' for field in fields)]
    return self._largest('seq_len', length, 128, lambda size: [f'{path}={size}' for path in paths])

  def _largest(self, what: str, size: int, step: int, overrides: Callable[[int], list[str]]) -> Change | None:
    """Returns the largest size that fits, by linear extrapolation of memory; compiles at most two sizes to check."""
    capacity = self.planned.memory.capacity
    sizes = {size: self._correction(self._own)[1]}
    best: Change | None = None
    guess = 2 * size
    for _ in range(_MOST_SIZES):
      found = self._estimate_change(f'{what} {guess:,}', overrides(guess))
      if found is None:
        break
      sizes[guess] = found.peak
      if found.peak <= capacity and (best is None or guess > _size(best)):
        best = found
      guess = min(_interpolate(sizes, capacity), _MOST_GROWTH[what] * max(sizes)) // step * step
      if guess in sizes or guess < step:
        break
    else:
      if best is not None and guess > _size(best):
        best = dataclasses.replace(best, what=f'{best.what} or more')
    if best is None or self.planned.mode != 'compiled':
      return best
    return self._compiled_largest(best, what, size, step, overrides)

  def _compiled_largest(
    self, best: Change, what: str, size: int, step: int, overrides: Callable[[int], list[str]]
  ) -> Change:
    capacity, sizes = self.planned.memory.capacity, {size: float(self.planned.memory.peak)}
    guess, name, failure = _size(best), best.what, 'which the compiler did not confirm'
    for _ in range(_MOST_COMPILES):
      config = self.config.change(overrides(guess))
      self.report(f'compiling: {what} {guess:,}')
      elsewhere = None if self.elsewhere is None else self.elsewhere(overrides(guess))
      found = plan(config.explained, config.inputs, self.planned.topology, cache=self.cache, elsewhere=elsewhere)
      if found.mode == 'compiled':
        sizes[guess] = found.memory.peak
        if found.fits:
          share = found.step_seconds / self.planned.step_seconds / found.work.ratio_to(self.planned.work)
          name = name if guess == _size(best) else f'{what} {guess:,}'
          return Change(name, tuple(overrides(guess)), found.memory.peak, share, 'compiled')
      elif not found.is_refused:
        failure = f'not compiled: {found.failure}'
        break
      guess = min(_interpolate(sizes, capacity) if len(sizes) > 1 else int(0.8 * guess), guess - step) // step * step
      if guess <= size:
        break
    return dataclasses.replace(best, what=f'{best.what}, {failure}')

  # ---------------------------------------------------------------- ways out

  def ways_out(self) -> list[Change]:
    """Returns at most three settings that fit, with one or two changes each; the fastest comes first.

    It tries neighbouring meshes, more rematerialisation and smaller moments. It also tries enough microbatches, or a
    small enough batch, for the temporaries to fit: first as the only change, and then together with each of the changes
    that save most memory.
    """
    capacity = self.planned.memory.capacity
    estimated = [self._estimate_change(_describe(overrides), overrides) for overrides in self._single_changes()]
    alone = [change for change in estimated if change is not None]
    fitting = [change for change in alone if change.peak <= capacity]
    for saving in [(), *(c.overrides for c in sorted(alone, key=lambda c: c.peak)[:_MOST_COMBINED])]:
      if len(fitting) < _MOST_WAYS or not saving:
        fitting += self._largest_parts(saving)
    return sorted(fitting, key=lambda change: change.time or 0.0)[:_MOST_WAYS]

  def _single_changes(self) -> Iterator[tuple[str, ...]]:
    for knob in knobs_of(self.config):
      if knob.kind is not KnobKind.MICROBATCHES:
        is_policy = knob.kind is KnobKind.REMATERIALISATION
        yield from (tuple(knob.overrides(v)) for v in knob.neighbours(knob.own) if v == 'full' or not is_policy)
    least = min(MOMENTS.index(learner.moments) for learner in self._learners)
    for dtype in MOMENTS[least + 1 :]:
      yield (f'{self._learner_path}.moments={dtype}',)
    if any(learner.ema_decay for learner in self._learners):
      yield (f'{self._learner_path}.ema_decay=0.0',)

  def _largest_parts(self, others: tuple[str, ...]) -> list[Change]:
    """Returns changes that make the step fit, on top of `others`: more microbatches, or a smaller batch."""
    capacity, found = self.planned.memory.capacity, list[Change]()
    before = self._analytic(others) if others else self._own
    room = capacity - before.memory.state.total
    if room <= 0:
      return []
    temporaries = self._correction(before)[1] - before.memory.state.total
    parts = 2 ** max(math.ceil(math.log2(temporaries / room)), 1)
    microbatches = [knob for knob in knobs_of(self.config) if knob.kind is KnobKind.MICROBATCHES]
    ways = [[knob.overrides(knob.own * n) for n in (parts, 2 * parts)] for knob in microbatches]
    if (where := batch_path(self.config)) and where[1] >= 2 * parts:
      ways.append([[f'{where[0]}={where[1] // n}'] for n in (parts, 2 * parts)])
    for way in ways:
      for lines in way:
        overrides = (*others, *lines)
        change = self._estimate_change(_describe(overrides), overrides)
        if change is not None and change.peak <= capacity:
          found.append(change)
          break
    return found

  # ---------------------------------------------------------------- communication

  def less_waiting(self) -> Change | None:
    """Returns the neighbouring mesh with the least time.

    Returns None if little communication is exposed, if the time is not known, or if no neighbouring mesh that fits
    saves more than 2 % of the time.
    """
    planned = self.planned
    if not planned.is_time_known or planned.cost.exposed_seconds < _WORTH_CHANGING * planned.step_seconds:
      return None
    mesh = knobs_of(self.config)[0]
    found = [self._estimate_change(f'mesh {shape}', mesh.overrides(shape)) for shape in mesh.neighbours(mesh.own)]
    fitting = [change for change in found if change is not None and change.peak <= planned.memory.capacity]
    best = min(fitting, key=lambda change: change.time or 1.0, default=None)
    return best if best is not None and (best.time or 1.0) < 0.98 else None


def _describe(overrides: Sequence[str]) -> str:
  return ', '.join(line.rpartition('.')[2] for line in overrides)


def _size(change: Change) -> int:
  return int(change.overrides[0].rpartition('=')[2])


def _interpolate(sizes: dict[int, float], capacity: float) -> int:
  """Returns the size that fills `capacity`, by a line through the two sizes with the nearest memory.

  If this line does not rise, returns the larger of the two sizes.
  """
  (a, at_a), (b, at_b) = sorted(sizes.items(), key=lambda pair: abs(pair[1] - capacity))[:2]
  slope = (at_b - at_a) / (b - a)
  return int(a + (capacity - at_a) / slope) if slope > 0 else max(a, b)


def format_changes(changes: Sequence[Change], before: float, head: str) -> str:
  """Returns a table of changes; `before` is the memory without changes, in bytes."""
  rows = [(head, 'memory', 'saved', 'time', 'how', 'set')]
  for change in changes:
    saved = ('-' if before < change.peak else '') + format_bytes(abs(before - change.peak))
    time = '-' if change.time is None else f'{change.time:.0%}'
    lines = ' '.join(f"--set '{line}'" for line in change.overrides)
    rows.append((change.what, format_bytes(change.peak), saved, time, change.how, lines))
  return format_table(rows, right=(1, 2, 3))


def plan_on_more_chips(config: Configured, topology: Topology) -> Plan | None:
  """Returns the plan, by formulas, on the fewest chips on which a step fits; None if it fits on none.

  It tries twice as many chips each time. The axis that splits the batch takes the additional devices.
  """
  chips = topology.num_chips
  while (chips := 2 * chips) <= _MOST_CHIPS:
    if (larger := topology.change_chips(chips)) is None:
      continue
    try:
      changed = config.change(made_to_fit(config.task, larger)[0])
      found = plan(changed.explained, changed.inputs, larger, compile=False)
    except UserError:  # The batch has fewer rows than there are devices, or an axis does not fit.
      return None
    if found.fits:
      return found
  return None


def format_more_chips(found: Plan) -> str:
  """Returns how many chips suffice, and the flags to plan for them, as text."""
  return (
    f'by formulas, it fits on {number_of(found.topology.num_chips, "chip")}: {format_bytes(found.memory.peak)} on each '
    f'device. To plan that: --topology={found.topology.name} '
    f"--set 'task.ici_mesh_shape={tuple(found.mesh.values())}'"
  )
