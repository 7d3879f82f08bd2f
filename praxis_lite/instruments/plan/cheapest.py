"""cheapest: finds the chips, their number and the settings with which a run costs little money and time.

    offers       each kind of chip at its price, in several numbers of chips
    estimates    by formulas, two settings on each offer: the experiment's own, and the best setting of a smaller offer
                 with its mesh adapted; then a search on each of the most promising offers
    compiled     the most promising offers, one after the other; each corrects the estimates of its kind of chip

The batch size stays the same, because changing it would change the trained model. So a batch of few rows limits the
number of chips.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import format_bytes
from praxis_lite.instruments.explain.report import Explained, task_and_inputs
from praxis_lite.instruments.plan.compilers import missing_compiler
from praxis_lite.instruments.plan.fitting import made_to_fit
from praxis_lite.instruments.plan.goodput import EXPECTED, Interruptions
from praxis_lite.instruments.plan.knobs import Configured, configure_task
from praxis_lite.instruments.plan.loss_goal import LossGoal
from praxis_lite.instruments.plan.lowered_steps import LoweredSteps
from praxis_lite.instruments.plan.memory import state_bytes
from praxis_lite.instruments.plan.planning import Plan, plan
from praxis_lite.instruments.plan.price import Price, chinchilla_tokens, price_of
from praxis_lite.instruments.plan.searching import Correction, search
from praxis_lite.instruments.plan.topology import TimeFactors, Topology, parse_topology, time_factors
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.training.partitioned_task import PartitionedTask

# A function that returns `plan`'s argument `elsewhere`, given the chips and the overrides.
ElsewhereOf = Callable[[Topology, Sequence[str]], Callable[[], None] | None]

_MOST_ESTIMATES = 16  # Settings to estimate in one search on an offer.
_FOR_ESTIMATES = 0.5  # The share of the time limit that estimates may take.


class Offer(NamedTuple):
  """Chips that can be rented, and the price of each for an hour."""

  topology: Topology
  per_chip_hour: float


class Goal(NamedTuple):
  """What a run has to reach.

  Attributes:
    tokens: number of tokens to train on; None means 20 for each active parameter.
    budget: the highest price; None means no limit.
    seconds: the longest time; None means no limit.
    loss: the loss to reach, from which `tokens` follows; None if only the number of tokens is given.
  """

  tokens: float | None = None
  budget: float | None = None
  seconds: float | None = None
  loss: LossGoal | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
  """An offer, the best known setting on it, and what the run takes.

  Attributes:
    topology: the chips.
    overrides: overrides that apply the setting.
    plan: plan of the step, compiled or by formulas.
    step_seconds, peak: seconds of a step and peak bytes of a device. If the step was not compiled, they are estimates
      that the compiled steps on this kind of chip have corrected.
    price: time and money of the run.
    failure: why compiling failed, if not for lack of memory; '' if it did not fail or was not tried.
    tokens_range: the least and the largest number of tokens that may be needed to reach the goal's loss, divided by the
      number in `price`.
  """

  topology: Topology
  overrides: tuple[str, ...]
  plan: Plan
  step_seconds: float
  peak: float
  price: Price
  failure: str = ''
  tokens_range: tuple[float, float] = (1.0, 1.0)

  @property
  def seconds(self) -> float:
    return self.price.seconds

  @property
  def money(self) -> float:
    assert self.price.money is not None  # An offer always has a price of its chip.
    return self.price.money

  @property
  def is_compiled(self) -> bool:
    return self.plan.mode == 'compiled'

  @property
  def factors(self) -> TimeFactors | None:
    """The least and the largest ratio of real to planned time, and so of real to planned price; None if not known."""
    known, tokens = time_factors(self.topology, self.is_compiled), self.tokens_range
    if tokens == (1.0, 1.0):
      return known
    least, largest = known or (1.0, 1.0)
    return TimeFactors(least * tokens[0], largest * tokens[1])

  def largest(self, value: float) -> float:
    """Returns a planned time or price times the largest of `factors`; unchanged if `factors` is None."""
    return value * (self.factors.largest if self.factors else 1.0)

  def is_beaten_by(self, other: Option) -> bool:
    """Whether another option is faster or cheaper, and is neither slower nor more expensive."""
    mine, theirs = (self.seconds, self.money), (other.seconds, other.money)
    return theirs != mine and theirs[0] <= mine[0] and theirs[1] <= mine[1]


@dataclasses.dataclass(frozen=True)
class CheapestRun:
  """The result of `find_cheapest`.

  Attributes:
    goal: the goal, with its number of tokens.
    options: one option for each offer on which a setting fits, the cheapest first.
    left_out: for each other offer, by its name, why it has no option.
    estimates: the number of settings that were estimated.
  """

  goal: Goal
  options: tuple[Option, ...]
  left_out: Mapping[str, str]
  estimates: int

  @functools.cached_property
  def frontier(self) -> list[Option]:
    """The options that no other option beats, the cheapest first."""
    return frontier_of(self.options)

  @functools.cached_property
  def best(self) -> Option | None:
    """The option to take; if none reaches the goal, the one nearest to it. None if no setting fits on any offer."""
    return next(iter(order_options(self.options, self.goal)), None)

  @property
  def is_reached(self) -> bool:
    return self.best is not None and excess(self.best, self.goal) <= 1


def excess(option: Option, goal: Goal, *, at_most: bool = False) -> float:
  """Returns the larger of money / budget and time / limit, which is at most 1 if the option reaches the goal.

  With `at_most`, time and money are the most that they may become; see `Option.largest`.
  """
  factor = option.largest(1.0) if at_most else 1.0
  shares = [option.money / goal.budget] if goal.budget is not None else []
  shares += [option.seconds / goal.seconds] if goal.seconds is not None else []
  return factor * max(shares, default=0.0)


def frontier_of(options: Sequence[Option]) -> list[Option]:
  """Returns those of the options that none of the others beats, in the same order."""
  return [option for option in options if not any(option.is_beaten_by(other) for other in options)]


def order_options(options: Sequence[Option], goal: Goal) -> list[Option]:
  """Returns options, the best first: those that reach the goal, the cheapest first, and then those that miss it least.

  If the goal has a budget and no other limit, the options that reach it are ordered by time instead of price.
  """

  def key(option: Option) -> tuple[float, float, float]:
    missed, fastest_first = excess(option, goal), goal.budget is not None and goal.seconds is None
    costs = (option.seconds, option.money) if fastest_first else (option.money, option.seconds)
    return (missed if missed > 1 else 0.0, *costs)

  return sorted(options, key=key)


def offers_of(kinds: Sequence[Offer], numbers: Sequence[int]) -> list[Offer]:
  """Returns an offer for each kind and number of chips, except numbers in which a kind is not available.

  `kinds` has an offer of each kind, with any number of chips.
  """
  pairs = itertools.product(kinds, sorted({*numbers}))
  found = ((kind.topology.change_chips(number), kind.per_chip_hour) for kind, number in pairs)
  return [Offer(topology, price) for topology, price in found if topology is not None]


def find_cheapest(
  task: Explained,
  inputs: Mapping[str, object] | None,
  offers: Sequence[Offer],
  goal: Goal,
  *,
  interruptions: Interruptions = EXPECTED,
  verify: int = 6,
  seconds: float = 480.0,
  cache: Path | None = None,
  elsewhere: ElsewhereOf | None = None,
  report: Callable[[str], object] = lambda stage: None,
) -> CheapestRun:
  """Returns the time and price of a run on each offer, with the best known setting on it.

  Args:
    task, inputs, cache, report: see `plan`.
    offers: chips and their prices.
    goal: what the run has to reach. Its limits decide which settings are compiled first.
    interruptions: how often the run stops, and for how long.
    verify: number of steps to compile; 0 compiles nothing.
    seconds: approximate time limit; half of it is for estimates.
    elsewhere: makes another process compile; see `ElsewhereOf`. None compiles in this process.

  Raises:
    UserError: the batches have no tokens, or the experiment cannot be planned on any of the offers.
  """
  found = _Search(configure_task(task, inputs), goal, interruptions, cache, elsewhere, report)
  return found.run(offers, verify, seconds)


class _Setting(NamedTuple):
  """A setting on an offer, with its plan by formulas."""

  offer: Offer
  overrides: tuple[str, ...]
  estimate: Plan


@dataclasses.dataclass(eq=False)
class _Search:
  """The state of a search; see `find_cheapest` for arguments."""

  config: Configured
  goal: Goal
  interruptions: Interruptions
  cache: Path | None
  elsewhere: ElsewhereOf | None
  report: Callable[[str], object]

  def __post_init__(self) -> None:
    self._settings: dict[str, list[_Setting]] = {}  # The settings that may fit, by the name of the offer.
    self._compiled: dict[tuple[str, tuple[str, ...]], Plan] = {}
    self._failed: dict[tuple[str, tuple[str, ...]], str] = {}
    self._corrections: dict[str, Correction] = {}  # The correction of estimates, by the name of the chip.
    self._left_out: dict[str, str] = {}
    self._estimates = 0
    self._lowered = LoweredSteps()  # Shared by different kinds of GPUs, and by all searches on an offer.

  def run(self, offers: Sequence[Offer], verify: int, seconds: float) -> CheapestRun:
    start = time.monotonic()
    self._estimate_all(offers)
    self._estimate_more(start + _FOR_ESTIMATES * seconds)
    longest = 0.0
    while len(self._compiled) + len(self._failed) < verify:
      left = (o for o in self._promising() if not (o.is_compiled or o.failure or missing_compiler(o.topology)))
      option = next(left, None)
      if option is None or (self._compiled and time.monotonic() + longest > start + seconds):
        break
      longest = max(longest, self._compile(option))
    options = sorted(self._options().values(), key=lambda option: (option.money, option.seconds))
    return CheapestRun(self.goal, tuple(options), dict(self._left_out), self._estimates)

  # ---------------------------------------------------------------- estimates

  def _estimate_all(self, offers: Sequence[Offer]) -> None:
    """Estimates a setting for each offer, in ascending order of chips, and more settings if that one does not fit."""
    least, before = self._state_bytes(), dict[str, tuple[str, ...]]()
    given_up: dict[str, str] = {}
    first_error: UserError | None = None
    for offer in sorted(offers, key=lambda offer: offer.topology.num_devices):
      topology, kind = offer.topology, offer.topology.target.name
      room = topology.target.device_memory * topology.num_devices
      if kind in given_up or least > room:
        too_much = f'the state takes {format_bytes(least)}, which is more than all chips together have'
        self._left_out[topology.name] = given_up.get(kind, too_much)
        continue
      try:
        self._estimate_first(offer, before.get(kind, ()))
      except UserError as error:  # The batch has fewer rows than there are devices, or an axis does not fit.
        first_error, given_up[kind] = first_error or error, str(error)
        self._left_out[topology.name] = str(error)
      if settings := self._settings.get(topology.name):
        before[kind] = settings[0].overrides
    kinds = {offer.topology.target.name for offer in offers}
    if first_error is not None and not self._settings and len(given_up) == len(kinds):
      raise first_error

  def _estimate_first(self, offer: Offer, before: tuple[str, ...]) -> None:
    """Estimates the experiment's own setting and the best one of a smaller offer; if neither fits, more settings."""
    try:
      found = self._estimate(offer, (), 1)
    except UserError:
      if not before:
        raise
      self._estimate(offer, before, 1)
      return
    if before:
      with contextlib.suppress(UserError):
        found |= self._estimate(offer, before, 1)
    if not found:
      self._estimate(offer, before, _MOST_ESTIMATES)

  def _estimate_more(self, end: float) -> None:
    """Estimates more settings of the most promising offers, until the time `end`."""
    done: set[str] = set()
    while time.monotonic() < end:
      name = next((option.topology.name for option in self._promising() if option.topology.name not in done), None)
      if name is None:
        break
      done.add(name)
      setting = self._settings[name][0]
      self._estimate(setting.offer, setting.overrides, _MOST_ESTIMATES)

  def _estimate(self, offer: Offer, before: tuple[str, ...], number: int) -> bool:
    """Estimates `number` settings on an offer; the first one has the overrides `before`.

    Returns whether any of them fits. Returns True as well if their times are not known.
    """
    name, config = offer.topology.name, self.config.change(before)
    self.report(f'estimating {name}, {self._estimates} settings so far')
    found = search(config.explained, config.inputs, offer.topology, verify=0, estimates=number, lowered=self._lowered)
    self._estimates += len(found)
    settings = [_Setting(offer, _last_of_each((*before, *r.overrides)), r.estimate) for r in found if r.fits]
    if not found[0].plan.is_time_known:
      self._left_out[name] = 'its time is not known: how often some loops run depends on data'
      return True
    if self._price(found[0].estimate, offer, found[0].seconds) is None:
      raise UserError('the batches of this experiment have no tokens, so a number of tokens has no price')
    if settings:
      known = {setting.overrides: setting for setting in (*self._settings.get(name, ()), *settings)}
      self._settings[name] = sorted(known.values(), key=lambda setting: self._option(setting).seconds)
      self._left_out.pop(name, None)
    elif name not in self._settings:
      self._left_out[name] = f'no setting fits: at least {format_bytes(found[0].peak)} on each device'
    return bool(settings)

  def _state_bytes(self) -> float:
    """Returns the bytes of the whole state in device memory; 0 if they are not known."""
    try:
      one = self.config.change(made_to_fit(self.config.task, parse_topology('cpu:1'))[0])
      task, inputs = task_and_inputs(one.explained, one.inputs)
      state = state_bytes(PartitionedTask(task, dict(inputs or {}), mesh=abstract_mesh(task.mesh_sizes(1))))
    except (UserError, ValueError):  # For example, pipeline stages need their mesh axis.
      return 0.0
    return float(state.parameters + state.slots + state.averages)

  # ---------------------------------------------------------------- what is compiled

  def _promising(self) -> list[Option]:
    """Returns all options, first those that are most useful to compile before the decision."""
    ordered = order_options([*self._options().values()], self.goal)
    if self.goal.budget is not None or self.goal.seconds is not None or not ordered:
      return ordered
    frontier = frontier_of(ordered)
    return list(dict.fromkeys([frontier[0], frontier[-1], *frontier, *ordered]))

  def _compile(self, option: Option) -> float:
    """Compiles an option and returns the seconds that this took."""
    start, topology = time.monotonic(), option.topology
    setting = next(s for s in self._settings[topology.name] if s.overrides == option.overrides)
    config = self.config.change(setting.overrides)
    number = len(self._compiled) + len(self._failed) + 1
    found = plan(
      *(config.explained, config.inputs, topology),
      cache=self.cache,
      elsewhere=None if self.elsewhere is None else self.elsewhere(topology, setting.overrides),
      report=lambda stage: self.report(f'{stage} number {number}, for {topology.name}'),
    )
    key = topology.name, setting.overrides
    if found.mode == 'compiled' or found.is_refused:
      self._compiled[key] = found
      correction = self._corrections.setdefault(topology.target.name, Correction())
      correction.add(setting.estimate, found, (topology.num_chips,))
    else:
      self._failed[key] = found.failure
    return time.monotonic() - start

  # ---------------------------------------------------------------- options

  def _options(self) -> dict[str, Option]:
    """Returns the best known setting of each offer, by the offer's name; notes why it leaves out other offers."""
    found = {}
    for name, settings in self._settings.items():
      options = [option for option in map(self._option, settings) if option.peak <= option.plan.memory.capacity]
      if not options:
        self._left_out[name] = 'no setting fits, as compiled'
      elif math.isinf(options[0].seconds):
        self._left_out[name] = 'a chip fails sooner than the run restarts and saves'
      else:
        found[name] = min(options, key=lambda option: (not option.is_compiled, option.seconds))
    return found

  def _option(self, setting: _Setting) -> Option:
    topology, key = setting.offer.topology, (setting.offer.topology.name, setting.overrides)
    best = self._compiled.get(key, setting.estimate)
    if key in self._compiled:
      seconds, peak = best.step_seconds, float(best.memory.peak) if best.fits else math.inf
    else:
      correction = self._corrections.get(topology.target.name, Correction())
      seconds, peak = correction.expect(best, (topology.num_chips,))
    price, loss = self._price(best, setting.offer, seconds), self.goal.loss
    assert price is not None  # `_estimate` has checked that there is a price.
    tokens = (1.0, 1.0) if loss is None else (loss.least / loss.tokens, loss.most / loss.tokens)
    return Option(topology, setting.overrides, best, seconds, peak, price, self._failed.get(key, ''), tokens)

  def _price(self, found: Plan, offer: Offer, step_seconds: float) -> Price | None:
    if self.goal.tokens is None and found.work.tokens is not None:
      self.goal = self.goal._replace(tokens=chinchilla_tokens(found))
    return price_of(found, self.goal.tokens, offer.per_chip_hour, self.interruptions, step_seconds)


def _last_of_each(overrides: Sequence[str]) -> tuple[str, ...]:
  """Returns the overrides without those that a later override of the same field replaces."""
  return tuple({line.partition('=')[0]: line for line in overrides}.values())
