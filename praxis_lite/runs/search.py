"""Searches: sweeps whose points Optuna proposes, each based on the results of earlier trials.

    folder/000,learning_rate=0.0021/     a run, as in `sweep.py`
           search.json                   ranges and settings of all trials; for each trial, its values, its state and
                                         its result

`search.json` is replaced as a whole whenever a trial begins or ends, so a search that was killed can go on. The search
then begins with its unfinished trials, which resume from their checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from praxis_lite.common.config.overrides import alternatives
from praxis_lite.common.errors import ConfigError, UserError, did_you_mean
from praxis_lite.common.files import parse_json, read_plain, replace_file
from praxis_lite.runs.records.comparing import metric_to_compare, short_names
from praxis_lite.runs.records.runs import read_run
from praxis_lite.runs.sweep import Point, digest_of, directory_name

if TYPE_CHECKING:
  from optuna.trial import FrozenTrial, Trial as AskedTrial

_FILE = 'search.json'
_KINDS = ('log', 'uniform', 'int', 'log_int')
_RANGE = re.compile(r'\s*([^=\s]+)\s*=\s*(\w+)\(([^,()]+),([^,()]+)\)\s*')
_MOST_CHECKED = 16  # A range with at most this many integers is checked completely before anything is trained.
_FIRST_WHOLE = 4  # The number of first trials that are never pruned, so that others can be compared with them.


@dataclasses.dataclass(frozen=True)
class SearchRange:
  """The values of a field. With a kind of `_KINDS`, they are `low` to `high`; with 'choice', the texts `choices`."""

  path: str
  kind: str
  low: float = 0.0
  high: float = 0.0
  choices: tuple[str, ...] = ()

  @classmethod
  def parse(cls, text: str) -> SearchRange:
    """Parses 'path=log(1e-4,1e-2)', where log may be any of `_KINDS`, or 'path=a,b,c'.

    Raises:
      ConfigError: the text does not have this form, or the range is empty.
    """
    forms = 'path=log(1e-4,1e-2), path=uniform(0,0.5), path=int(1,8), path=log_int(64,1024) or path=a,b,c'
    if (match := _RANGE.fullmatch(text)) is None:
      choices = alternatives(text)
      path = choices[0].partition('=')[0]
      if len(choices) < 2:
        raise ConfigError(f'--search {text}: expected {forms}')
      return cls(path, 'choice', choices=tuple(choice.partition('=')[2] for choice in choices))
    path, kind, *ends = match.groups()
    if kind not in _KINDS:
      raise ConfigError(f'--search {text}: there is no {kind}(...).{did_you_mean(kind, _KINDS)} Write {forms}')
    try:
      low, high = map(float, ends)
    except ValueError:
      raise ConfigError(f'--search {text}: {ends[0]} and {ends[1]} are not two numbers') from None
    is_int = kind in ('int', 'log_int')
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
      raise ConfigError(f'--search {text}: expected two numbers, the lower one first')
    if kind in ('log', 'log_int') and low <= 0:
      raise ConfigError(f'--search {text}: {kind} needs numbers above 0; write {"int" if is_int else "uniform"}')
    if is_int and (low % 1 or high % 1):
      raise ConfigError(f'--search {text}: expected integers')
    return cls(path, kind, low, high)

  def distribution(self) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    match self.kind:
      case 'choice':
        return CategoricalDistribution(self.choices)
      case 'int' | 'log_int':
        return IntDistribution(int(self.low), int(self.high), log=self.kind == 'log_int')
    return FloatDistribution(self.low, self.high, log=self.kind == 'log')

  def round(self, value: Any) -> Any:
    """Rounds a drawn number to the four digits that names of runs show, unless the result would leave the range."""
    short = float(f'{value:.4g}') if isinstance(value, float) else value
    return short if self.kind == 'choice' or self.low <= short <= self.high else value

  def ends(self) -> tuple[Any, ...]:
    """Returns the values to check before training: all choices, all integers if they are few, otherwise both ends."""
    if self.choices:
      return self.choices
    if self.kind not in ('int', 'log_int'):
      return self.low, self.high
    low, high = int(self.low), int(self.high)
    return tuple(range(low, high + 1)) if high - low < _MOST_CHECKED else (low, high)


def parse_ranges(texts: Sequence[str]) -> list[SearchRange]:
  """Returns the ranges of a search; raises ConfigError if one is not valid, or a path is given twice."""
  ranges = [SearchRange.parse(text) for text in texts]
  paths = [each.path for each in ranges]
  if twice := [path for path in paths if paths.count(path) > 1]:
    raise ConfigError(f'--search {twice[0]} is given twice; write one range')
  return ranges


@dataclasses.dataclass
class Trial:
  """A point of a search.

  Attributes:
    values: the value of each field, by the field's path. The value of a choice is its text.
    state: 'running', 'complete', 'pruned' or 'failed'.
    reached: the best value of the metric, negated if the metric is maximized, so smaller is better; None if unknown.
  """

  values: dict[str, Any]
  state: str = 'running'
  reached: float | None = None


class Search:
  """The trials of a search, in `folder/search.json`.

  Args:
    prunes: whether trials end early if they are worse than the median of other trials at the same step.
    config: the text of the config that all trials share.

  Attributes:
    sign: 1 if lower values of the metric are better, -1 if higher ones are; known once a run has written the metric.

  Raises:
    UserError: Optuna is not installed; or the directory has a search with other ranges, overrides or config, or with
      results in another metric.
  """

  def __init__(
    self,
    folder: Path,
    ranges: Sequence[SearchRange],
    overrides: Sequence[str] = (),
    *,
    seed: int = 0,
    metric: str | None = None,
    mode: str | None = None,
    prunes: bool = True,
    config: str = '',
  ):
    optuna = import_optuna()
    self._path, self._folder, self._ranges, self._overrides = folder / _FILE, folder, list(ranges), tuple(overrides)
    self._metric, self._mode = metric, mode
    self._shared = {'overrides': [*overrides], 'metric': metric, 'mode': mode, 'config': digest_of(config)}
    self._is_over = False
    self.sign = 1
    self.trials = self._read()
    self._names = short_names([each.path for each in ranges])
    self._distributions = {each.path: each.distribution() for each in ranges}
    sampler = optuna.samplers.TPESampler(seed=seed + len(self.trials), constant_liar=True)
    pruner = optuna.pruners.MedianPruner(_FIRST_WHOLE) if prunes else optuna.pruners.NopPruner()
    self._study = optuna.create_study(sampler=sampler, pruner=pruner)
    self._asked: dict[str, tuple[int, AskedTrial]] = {}
    self._pruned: set[str] = set()
    self._reported: dict[str, int] = {}  # The last step reported to Optuna, by the name of the point.
    for number, trial in enumerate(self.trials):
      if trial.state != 'running':
        self._study.add_trial(self._to_frozen_trial(number, trial))

  def _read(self) -> list[Trial]:
    with contextlib.suppress(FileNotFoundError):
      try:
        record = parse_json(read_plain(self._path))
        ranges = [SearchRange(**{**each, 'choices': tuple(each['choices'])}) for each in record['ranges']]
        trials = [Trial(**trial) for trial in record['trials']]
      except (ValueError, TypeError, KeyError) as error:
        raise UserError(f'{self._path} cannot be read: {error}; remove it to begin a new search') from None
      if ranges != self._ranges:
        raise UserError(f'{self._path} has a search of other ranges; name another --job_log_dir for this one')
      self._check_shared(record, trials)
      return trials
    return []

  def _check_shared(self, record: Mapping[str, Any], trials: Sequence[Trial]) -> None:
    """Raises UserError if the recorded trials cannot be compared with trials of this search."""
    is_compared = any(trial.reached is not None for trial in trials)
    for name, mine in self._shared.items():
      theirs = record.get(name, mine)
      if theirs == mine or not trials or (name in ('metric', 'mode') and not is_compared):
        continue
      what = {'overrides': f'--set {theirs}, not {mine}', 'config': 'another config'}
      raise UserError(
        f'{self._path} has a search with {what.get(name, f"--{name}={theirs}, not {mine}")}, so its trials cannot be '
        'compared; name another --job_log_dir for this one'
      )

  def _write(self) -> None:
    record = {
      'ranges': [dataclasses.asdict(each) for each in self._ranges],
      **self._shared,
      'trials': [dataclasses.asdict(trial) for trial in self.trials],
    }
    replace_file(self._path, json.dumps(record, indent=1) + '\n')

  def points(self, num_trials: int) -> Iterator[Point]:
    """Yields the trials to run: first the ones that were interrupted, then new ones, up to `num_trials` in all."""
    interrupted = [number for number, trial in enumerate(self.trials) if trial.state == 'running']
    for number in interrupted:
      if self._is_over:
        return
      self._study.enqueue_trial(self.trials[number].values)
      yield self._begin(number)
    while len(self.trials) < num_trials and not self._is_over:
      yield self._begin(None)

  def _begin(self, number: int | None) -> Point:
    asked = self._study.ask(self._distributions)
    if number is None:
      number = len(self.trials)
      self.trials.append(Trial({each.path: each.round(asked.params[each.path]) for each in self._ranges}))
      self._write()
    point = self.point(number)
    self._asked[point.name] = number, asked
    return point

  def point(self, number: int) -> Point:
    """Returns the name and the overrides of the run of a trial."""
    values = self.trials[number].values
    shown = {path: str(value) for path, value in values.items()}
    overrides = (f'{path}={value}' for path, value in values.items())
    return Point(f'{number:03},{directory_name(shown, self._names)}', (*self._overrides, *overrides))

  def is_hopeless(self, point: Point) -> bool:
    """Whether a running trial was worse than the median of other trials at a step, by the metrics that it has written.

    Once `end` has found that the runs do not have the metric, all trials are hopeless.
    """
    if self._is_over:
      return True
    self._report(point)
    if self._asked[point.name][1].should_prune():
      self._pruned.add(point.name)
    return point.name in self._pruned

  def _report(self, point: Point) -> None:
    """Reports to Optuna the values that a running trial has written since the last report."""
    for step, value in self._curve(point):
      if step > self._reported.get(point.name, -1):
        self._asked[point.name][1].report(value, step)
        self._reported[point.name] = step

  def was_pruned(self, point: Point) -> bool:
    """Whether `is_hopeless` has returned True for a trial."""
    return point.name in self._pruned

  def end(self, point: Point, code: int) -> Trial:
    """Records that the run of a trial has ended with an exit code; returns the trial.

    This is called for a pruned trial, but not for any other trial that a signal stopped: that one stays 'running', and
    will resume.

    Raises:
      UserError: the run has trained to its end and does not have the metric. The search is then over; the trial stays
        'running', so that a search by another metric can use what it has written.
    """
    number, asked = self._asked[point.name]
    trial = self.trials[number]
    reached = [value for _, value in self._curve(point)]
    if code == 0 and not reached:
      try:
        metric_to_compare([read_run(self._folder / point.name)], self._metric, self._mode)
      except UserError:
        self._is_over = True
        raise
    trial.reached = min(reached, default=None)
    is_pruned = point.name in self._pruned and code != 0
    trial.state = 'pruned' if is_pruned else 'complete' if code == 0 and reached else 'failed'
    self._report(point)
    state = _states()[trial.state]
    self._study.tell(asked, trial.reached if trial.state == 'complete' else None, state=state)
    self._write()
    return trial

  def _curve(self, point: Point) -> list[tuple[int, float]]:
    """Returns (step, value) pairs of the metric of a trial, with smaller values better; [] before the first value."""
    run = read_run(self._folder / point.name)
    try:
      metric, mode = metric_to_compare([run], self._metric, self._mode)
    except UserError:  # The run has no value of the metric yet.
      return []
    if metric not in run.metrics:
      return []
    self.sign = sign = 1 if mode == 'min' else -1
    return [(int(s), sign * float(v)) for s, v in zip(*run.metrics.curve(metric)) if math.isfinite(v)]

  def _to_frozen_trial(self, number: int, trial: Trial) -> FrozenTrial:
    from optuna.trial import create_trial

    return create_trial(
      state=_states()[trial.state],
      value=trial.reached if trial.state != 'failed' else None,
      params=trial.values,
      distributions=self._distributions,
      intermediate_values=dict(self._curve(self.point(number))),
    )

  def importances(self) -> dict[str, float]:
    """Returns the importance of each field for the metric, as a share of 1, largest first; {} if it is not known."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    if sum(trial.state == 'complete' for trial in self.trials) <= _FIRST_WHOLE:
      return {}
    try:
      found = get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator())
    except (ValueError, RuntimeError):
      return {}
    return {path: float(share) for path, share in found.items()} if all(map(math.isfinite, found.values())) else {}

  def best(self) -> Trial | None:
    """Returns the complete trial with the best result; None if no trial is complete."""
    done = [trial for trial in self.trials if trial.state == 'complete' and trial.reached is not None]
    return min(done, key=lambda trial: trial.reached or 0.0, default=None)


def _states() -> dict[str, Any]:
  from optuna.trial import TrialState

  return {'complete': TrialState.COMPLETE, 'pruned': TrialState.PRUNED, 'failed': TrialState.FAIL}


def import_optuna() -> Any:
  """Imports Optuna, and makes it log only warnings; raises UserError if it is not installed."""
  try:
    import optuna
  except ModuleNotFoundError as error:
    if error.name != 'optuna':
      raise
    raise UserError('--search needs Optuna, which is not installed; pip install praxis_lite[search]') from None
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  return optuna
