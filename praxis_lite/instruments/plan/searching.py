"""search: finds the best mesh, rematerialisation and microbatches for an experiment on some chips.

    estimates       start at the experiment's own setting, then take the neighbours of the best setting so far, and so
                    on; an estimate reads a lowered program and takes a second or two
    verification    compiles the experiment's own setting, and then one setting after the other: each time the one that
                    would be the fastest if its estimate were too long by the largest known error; ends when no other
                    setting may be faster than the best compiled one

A setting is better if a token takes less time. Any setting that fits is better than one that does not. The search keeps
the experiment's batch size unless the caller gives others, because the batch size changes what the experiment learns.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import format_bytes, format_seconds
from praxis_lite.instruments.explain.explanation import format_mesh
from praxis_lite.instruments.explain.report import Explained
from praxis_lite.instruments.plan.compilers import missing_compiler
from praxis_lite.instruments.plan.fitting import made_to_fit
from praxis_lite.instruments.plan.knobs import Configured, Setting, configure_task, knobs_of, neighbours, overrides_of
from praxis_lite.instruments.plan.lowered_steps import LoweredSteps
from praxis_lite.instruments.plan.planning import Plan, doubts, plan
from praxis_lite.instruments.plan.report import format_table
from praxis_lite.instruments.plan.topology import Topology, parse_topology

# A function that returns `plan`'s argument `elsewhere` for some overrides.
Elsewhere = Callable[[Sequence[str]], Callable[[], None] | None]

_MOST_PROMISING = 5  # Estimates end when all neighbours of the best settings have one; this many count as the best.
# If more than the share `_NEARLY_FULL` of memory is filled, XLA recomputes more. Estimated times then grow with the
# filled share, by a factor of up to `_FULL` for a full memory.
_NEARLY_FULL, _FULL = 0.85, 1.25
# The share of the time limit that estimates may take, and the number of estimates to make even if they take longer.
_FOR_ESTIMATES = 0.4
_LEAST_ESTIMATES = 8
# The smallest known ratio of the time of a compiled setting to its estimate; see `docs/planning-figures.md`.
_LEAST_OF_ESTIMATE = 0.92


@dataclasses.dataclass(frozen=True)
class Ranked:
  """A setting and its cost.

  Attributes:
    overrides: overrides that apply the setting; empty for the experiment's own, unless its mesh had to be fitted.
    estimate: plan from the lowered program.
    verified: plan from the compiled program; None if it was not compiled.
    seconds, peak: seconds of a step and peak bytes on each device, compiled or from the corrected estimate, which
      expects that XLA recomputes more if memory is nearly full.
    least: the shortest time of a step in seconds, if its estimate is too long by the largest known error; equal to
      `seconds` if the setting was compiled.
    is_own: whether this is the experiment's own setting, with a fitted mesh.
    failure: why compiling failed, if not for lack of memory; '' if it did not fail or was not tried.
  """

  overrides: tuple[str, ...]
  estimate: Plan
  verified: Plan | None
  seconds: float
  peak: float
  least: float
  is_own: bool
  failure: str = ''

  @property
  def plan(self) -> Plan:
    return self.verified or self.estimate

  @property
  def fits(self) -> bool:
    return self.verified.fits if self.verified else self.peak <= self.estimate.memory.capacity

  @property
  def seconds_for_work(self) -> float:
    """Seconds of a step per FLOP of the model, so that batches of different sizes can be compared."""
    return self.seconds / self.estimate.work.flops

  @property
  def least_for_work(self) -> float:
    return self.least / self.estimate.work.flops

  @property
  def order(self) -> tuple[bool, bool, bool, float]:
    """The sort key: first settings that fit, then those with a known time, then compiled ones, then faster ones."""
    is_unknown = not self.plan.is_time_known
    return (not self.fits, is_unknown, self.verified is None, self.seconds_for_work if self.fits else self.peak)


def search(
  task: Explained,
  inputs: Mapping[str, object] | None,
  topology: str | Topology,
  *,
  verify: int = 6,
  estimates: int = 200,
  seconds: float = 480.0,
  batch_sizes: Sequence[int] = (),
  cache: Path | None = None,
  elsewhere: Elsewhere | None = None,
  report: Callable[[str], object] = lambda stage: None,
  lowered: LoweredSteps | None = None,
) -> list[Ranked]:
  """Returns settings of an experiment on a topology, the best first.

  Args:
    task: a config of a task, an experiment class, or the result of `configure` for one.
    inputs, topology, cache, report, lowered: see `plan`.
    verify: number of settings to compile, including the experiment's own; 0 compiles nothing.
    estimates: largest number of settings to estimate.
    seconds: approximate time limit; the experiment's own setting and one other are compiled even if that takes longer.
    batch_sizes: more sizes of a global batch to try, in rows.
    elsewhere: makes another process compile; see `Elsewhere`. None compiles in this process.

  Raises:
    ConfigError: `task` is not a config, or the topology does not exist.
    UserError: the experiment itself cannot be planned.
  """
  topology = parse_topology(topology) if isinstance(topology, str) else topology
  config = configure_task(task, inputs)
  fitted, _ = made_to_fit(config.task, topology)
  found = _Search(config.change(fitted), fitted, topology, batch_sizes, cache, elsewhere, report, lowered)
  return found.run(verify, estimates, seconds)


@dataclasses.dataclass(eq=False)
class _Search:
  """The state of a search; see `search` for arguments. `fitted` are the overrides that fit the mesh to the topology."""

  config: Configured
  fitted: Sequence[str]
  topology: Topology
  batch_sizes: Sequence[int]
  cache: Path | None
  elsewhere: Elsewhere | None
  report: Callable[[str], object]
  lowered: LoweredSteps | None

  def __post_init__(self) -> None:
    self._knobs = knobs_of(self.config, self.batch_sizes)
    self._own: Setting = tuple(knob.own for knob in self._knobs)
    self._estimates: dict[Setting, Plan | None] = {}
    self._verified: dict[Setting, Plan] = {}
    self._failed: dict[Setting, str] = {}
    self._correction = Correction()

  def run(self, verify: int, estimates: int, seconds: float) -> list[Ranked]:
    start = time.monotonic()
    own = self._estimate(self._own, must=True)
    assert own is not None
    longest = 0.0
    if missing_compiler(self.topology):
      verify = 0
    if verify:
      longest = self._verify(self._own)
    self._explore(estimates, start + _FOR_ESTIMATES * seconds)
    while len(self._verified) + len(self._failed) < verify:
      setting = self._most_promising()
      in_time = time.monotonic() + longest < start + seconds or len(self._verified) < 2
      if setting is None or not in_time:
        break
      longest = max(longest, self._verify(setting))
    return [ranked for _, ranked in self._rank()]

  def _most_promising(self) -> Setting | None:
    """Returns the setting to compile next; None if no other may take less time than the best compiled one."""
    ranked = self._rank()
    left = [pair for pair in ranked if pair[0] not in self._verified and pair[0] not in self._failed]

    def order(pair: tuple[Setting, Ranked]) -> tuple[float, ...]:
      return *pair[1].order[:2], pair[1].least_for_work if pair[1].fits else pair[1].peak

    if not left:
      return None
    setting, first = min(left, key=order)
    best = ranked[0][1]
    return None if best.verified and best.fits and not may_be_faster(first, best) else setting

  def _explore(self, most: int, end: float) -> None:
    """Estimates neighbours of the most promising settings until all are estimated or a limit is reached."""
    expanded: set[Setting] = set()

    def may_go_on() -> bool:
      count = len(self._estimates)
      return count < most and (count < _LEAST_ESTIMATES or time.monotonic() < end)

    while may_go_on():
      promising = [setting for setting, _ in self._rank(by_estimate=True)[:_MOST_PROMISING]]
      unexpanded = [setting for setting in promising if setting not in expanded]
      if not unexpanded:
        break
      expanded.add(unexpanded[0])
      for setting in neighbours(self._knobs, unexpanded[0]):
        if setting not in self._estimates and may_go_on():
          self._estimate(setting)

  def _estimate(self, setting: Setting, must: bool = False) -> Plan | None:
    """Returns an estimate of a setting; None if an earlier setting, such as one with 'auto', gives the same program.

    For a setting that is not valid, returns None; with `must`, raises the error.
    """
    self.report(f'estimating, {len(self._estimates) + 1} settings')
    try:
      config = self.config.change(overrides_of(self._knobs, setting))
      found: Plan | None = plan(config.explained, config.inputs, self.topology, compile=False, lowered=self.lowered)
    except (UserError, ValueError, TypeError):
      if must:
        raise
      found = None
    if any(found and other and _is_same(found, other) for other in self._estimates.values()):
      found = None
    self._estimates[setting] = found
    return found

  def _verify(self, setting: Setting) -> float:
    """Compiles a setting and returns the seconds that this took."""
    start, overrides = time.monotonic(), overrides_of(self._knobs, setting)
    config = self.config.change(overrides)
    number = len(self._verified) + len(self._failed) + 1
    found = plan(
      *(config.explained, config.inputs, self.topology),
      cache=self.cache,
      elsewhere=None if self.elsewhere is None else self.elsewhere([*self.fitted, *overrides]),
      report=lambda stage: self.report(f'{stage} the setting number {number}'),
    )
    estimate = self._estimates[setting]
    if found.mode == 'compiled' or found.is_refused:
      self._verified[setting] = found
      if estimate is not None:
        self._correction.add(estimate, found, setting)
    else:
      self._failed[setting] = found.failure
    return time.monotonic() - start

  def _rank(self, by_estimate: bool = False) -> list[tuple[Setting, Ranked]]:
    """Returns all settings in `Ranked.order`. With `by_estimate`, it does not matter which ones are compiled."""
    found = []
    for setting, estimate in self._estimates.items():
      if estimate is None:
        continue
      if (verified := self._verified.get(setting)) is None:
        times = *self._correction.expect(estimate, setting), self._correction.least(estimate, setting)
      else:
        times = verified.step_seconds, float(verified.memory.peak), verified.step_seconds
      overrides, failure = (*self.fitted, *overrides_of(self._knobs, setting)), self._failed.get(setting, '')
      found.append((setting, Ranked(overrides, estimate, verified, *times, setting == self._own, failure)))
    if by_estimate:
      return sorted(found, key=lambda pair: (*pair[1].order[:2], pair[1].order[-1]))
    return sorted(found, key=lambda pair: pair[1].order)


class Correction:
  """Corrects estimates of operations, collectives and temporaries: multiplies them by ratios.

  A ratio divides a compiled figure by its estimate. The ratios for a setting come from the nearest compiled
  settings: those that differ from it in the fewest knobs, not counting the first knob, the mesh. If some of the nearest
  settings are on the same mesh, only these are taken.
  """

  def __init__(self) -> None:
    self._pairs: list[tuple[Setting, Plan, Plan]] = []

  def add(self, estimate: Plan, compiled: Plan, setting: Setting = ()) -> None:
    self._pairs.append((setting, estimate, compiled))

  def __call__(self, estimate: Plan, setting: Setting = ()) -> tuple[float, float]:
    """Returns the corrected seconds of a step and the corrected peak bytes on each device."""
    differences = [_differences(other, setting) for other, _, _ in self._pairs]
    near = [pair[1:] for pair, count in zip(self._pairs, differences) if count == min(differences)]
    exposed = estimate.cost.exposed_seconds
    seconds = _factor(near, lambda p: p.cost.exposed_seconds) * exposed
    seconds += _factor(near, lambda p: p.cost.seconds - p.cost.exposed_seconds) * (estimate.cost.seconds - exposed)
    temporaries = _factor(near, lambda p: p.memory.temporaries)
    return seconds, estimate.memory.peak + (temporaries - 1) * estimate.memory.temporaries

  def expect(self, estimate: Plan, setting: Setting = ()) -> tuple[float, float]:
    """Returns the corrected seconds and peak bytes, assuming that XLA recomputes more if memory is nearly full."""
    seconds, peak = self(estimate, setting)
    return seconds * _recomputing(peak / estimate.memory.capacity), peak

  def least(self, estimate: Plan, setting: Setting = ()) -> float:
    """Returns the shortest time that a step may take, in seconds, if its estimate is as wrong as the worst known one.

    If no compiled setting differs only in its mesh, the correction may be wrong, so this uses the shorter of the
    corrected and the uncorrected time.
    """
    seconds, peak = self(estimate, setting)
    if all(other[1:] != setting[1:] for other, _, _ in self._pairs):
      seconds = min(seconds, estimate.cost.seconds)
    return _LEAST_OF_ESTIMATE * seconds * _recomputing(peak / estimate.memory.capacity)


def may_be_faster(estimated: Ranked, best: Ranked) -> bool:
  """Whether a setting that was not compiled may be faster than the best one, given how much estimates err."""
  is_open = estimated.fits and estimated.verified is None and not estimated.failure
  return is_open and estimated.least_for_work < best.seconds_for_work


def _is_same(one: Plan, other: Plan) -> bool:
  return (one.mesh, one.memory, one.cost) == (other.mesh, other.memory, other.cost)


def _differences(one: Setting, other: Setting) -> tuple[int, bool]:
  return sum(a != b for a, b in zip(one[1:], other[1:])), one[:1] != other[:1]


def _recomputing(filled: float) -> float:
  """Returns how many times as long a step takes because XLA recomputes; `filled` is the filled share of memory."""
  return 1 + (_FULL - 1) * min(max(filled - _NEARLY_FULL, 0) / (1 - _NEARLY_FULL), 1)


def _factor(pairs: Sequence[tuple[Plan, Plan]], what: Callable[[Plan], float]) -> float:
  """Returns the geometric mean of the ratios between compiled programs and their estimates."""
  ratios = [what(compiled) / what(estimate) for estimate, compiled in pairs if what(estimate) > 0 < what(compiled)]
  return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0


def format_search(found: Sequence[Ranked], most: int = 12) -> str:
  """Returns a table of settings, the best first: all compiled settings, and the best of the others."""
  shown = [ranked for ranked in found if ranked.verified or ranked.failure or ranked.is_own]
  shown = sorted([*shown, *[r for r in found if r not in shown][: max(most - len(shown), 2)]], key=lambda r: r.order)
  own = next(ranked for ranked in found if ranked.is_own)
  rows = [('', 'memory', 'step', 'MFU', 'tokens/s', 'time', 'mesh, and what else differs')]
  for ranked in shown:
    plan, share = ranked.plan, ranked.seconds_for_work / own.seconds_for_work
    scale = plan.step_seconds / ranked.seconds
    tokens = '-' if plan.tokens_per_second is None else f'{plan.tokens_per_second * scale:,.0f}'
    mark = 'compiled' if ranked.verified else 'compiler failed' if ranked.failure else 'estimated'
    changes = [line.rpartition('.')[2] for line in ranked.overrides if 'mesh_shape' not in line]
    what = ', '.join([format_mesh(plan.mesh), *changes]) + (' (its own)' if ranked.is_own else '')
    memory = 'refused' if plan.is_refused else format_bytes(int(ranked.peak))
    speed, time = (format_seconds(ranked.seconds), f'{plan.mfu * scale:.1%}', tokens), f'{share:.0%}'
    if not (plan.is_time_known and own.plan.is_time_known):
      speed, time = ('not known', '-', '-'), '-'
    time = time if ranked.fits else 'does not fit'
    rows.append((mark, memory, *speed, time, what))
  return '\n'.join([format_table(rows, right=(1, 2, 3, 4, 5)), '', *_verdict(found, own)])


def _verdict(found: Sequence[Ranked], own: Ranked) -> list[str]:
  """Returns lines that say which setting is best, how many were compared, and how to use it."""
  best, compiled = found[0], [ranked for ranked in found if ranked.verified]
  if not best.fits:
    return [f'no setting fits: {_looked_at(found)}']
  if notes := doubts(best.plan.cost):
    return ['which setting is the fastest is not known', *(f'note: {note}' for note in notes)]
  of = f'the best of the {len(compiled):,} that were compiled' if best.verified else 'the best by estimates only'
  if best.is_own:
    lines = [f"the experiment's own setting is {of}; {_looked_at(found)}"]
  else:
    gain = f'{1 - best.seconds_for_work / own.seconds_for_work:.0%} less time than its own setting'
    gain = gain if own.fits else 'its own setting does not fit'
    lines = [f'{of}: {gain}; {_looked_at(found)}. To use it:', *(f"  --set '{line}'" for line in best.overrides)]
  promising = [r for r in found if may_be_faster(r, best)]
  if best.verified and promising:
    share = min(r.least_for_work for r in promising) / best.seconds_for_work
    lines.append(
      f'{len(promising):,} that were only estimated may take less time, down to {share:.0%} of this by the errors of '
      f'earlier estimates; --verify={len(compiled) + len(promising)} --search_seconds=1800 compiles more'
    )
  elif best.verified and len(found) > len(compiled):
    lines.append('by the errors of earlier estimates, none that was only estimated takes less time')
  return lines


def _looked_at(found: Sequence[Ranked]) -> str:
  compiled, failed = sum(r.verified is not None for r in found), sum(r.failure != '' for r in found)
  text = f'{len(found):,} settings were estimated, {compiled:,} of them compiled'
  return text + (f', and the compiler failed for {failed:,}' if failed else '')
