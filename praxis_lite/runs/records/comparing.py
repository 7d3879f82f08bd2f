"""Compares runs by a metric and by the differences of their configs, in groups of similar runs."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from praxis_lite.common.errors import UserError, did_you_mean, first_lines
from praxis_lite.runs.records.metric_modes import mode_of_metric
from praxis_lite.runs.records.runs import RunState, format_number


class RunGroup(NamedTuple):
  """The runs of one experiment and one class of models.

  The last group may have runs that are each the only one of their experiment and class.

  Attributes:
    title: the experiment and the class of the model.
    metric, mode: the metric for comparing them, and 'min' or 'max'; see `metric_to_compare`.
    columns: the names of the requested fields, or of those that differ in the group; important fields come first.
    values: for each run, its values by column.
  """

  title: str
  runs: list[RunState]
  metric: str
  mode: str
  columns: list[str]
  values: Sequence[Mapping[str, str]]


def group_runs(
  runs: Sequence[RunState],
  metric: str | None = None,
  mode: str | None = None,
  *,
  sort: str = 'best',
  columns: Sequence[str] = (),
) -> list[RunGroup]:
  """Returns the runs in groups of one experiment and one class of models, sorted by title.

  Args:
    metric, mode: see `metric_to_compare`; None decides for each group separately.
    sort: 'best', 'name', 'step', 'age' or 'loss', or a field or metric; a '-' in front reverses the order.
    columns: the fields and metrics to show, each given as a path or as the end of a path; () shows the fields that
      differ. If an end fits several fields, each of them that differs gets a column.

  Raises:
    UserError: no run has the metric or a column; or `sort` is ambiguous.
  """
  if metric is not None:
    metric_to_compare(runs, metric, mode)
  order = sort.removeprefix('-')
  for name in (*columns, *([] if order in _ORDERS else [order])):
    _check_column(runs, name)
  if order not in _ORDERS:
    if len(several := _columns_of(runs, order)) > 1:
      raise UserError(f'{order}: several fields end with it; write {" or ".join(first_lines(several, _MOST_NAMED))}')
    sort = sort.replace(order, several[0])
  columns = list(dict.fromkeys(column for name in columns for column in _columns_of(runs, name)))
  alike = defaultdict[str, list[RunState]](list)
  for run in _complete_names(runs):
    alike[_title(run)].append(run)
  alone = [found[0] for found in alike.values() if len(found) == 1]
  groups = []
  for title, found in sorted(alike.items()):
    if len(found) > 1 or len(alone) < 2:
      groups.append(_make_group(title, found, *_metric_of(runs, found, metric, mode), sort, columns))
  if len(alone) > 1:
    recorded = [{*run.fields} for run in alone if run.fields]
    shared = set.intersection(*recorded) if recorded else set()
    comparable = [r._replace(fields={p: v for p, v in r.fields.items() if p in shared}) for r in alone]
    title = 'other runs, one of each experiment' if groups else 'runs of different experiments'
    order = 'name' if sort == 'best' and metric is None else sort  # The losses of these runs are not comparable.
    group = _make_group(title, comparable, *_metric_of(runs, alone, metric, mode), order, columns)
    values = [
      {'experiment': run.experiment or _title(run)} | {n: own.get(n) or _value(run, n) for n in group.columns}
      for run, own in zip(group.runs, group.values)
    ]
    names = sorted(group.columns, key=lambda name: name != 'learning_rate')  # The learning rate comes first.
    groups.append(group._replace(columns=['experiment', *names], values=values))
  return groups


def _complete_names(runs: Sequence[RunState]) -> Iterator[RunState]:
  """Yields the runs, with full names of their experiments.

  If a run has recorded only the file of its experiment, the name is taken from runs of the same file, if it is clear.
  """
  for run in runs:
    whole = {other.experiment for other in runs if other.experiment.rpartition('.')[0] == run.experiment}
    yield run._replace(experiment=min(whole)) if run.experiment and len(whole) == 1 else run


def _title(run: RunState) -> str:
  model = run.fields.get('task.model', '').rpartition('.')[2]
  name = run.experiment or run.fields.get('task.name', '').strip('\'"')
  return (f'{name} ({model})' if name and model else name or model) or 'runs without a record'


def _metric_of(
  runs: Sequence[RunState], group: Sequence[RunState], metric: str | None, mode: str | None
) -> tuple[str, str]:
  """Returns the metric and mode of a group; if it lacks the requested metric, the metric and mode for all runs."""
  try:
    return metric_to_compare(group, metric, mode)
  except UserError:
    return metric_to_compare(runs, metric, mode)


def _make_group(
  title: str, runs: Sequence[RunState], metric: str, mode: str, sort: str, columns: Sequence[str]
) -> RunGroup:
  ordered = _sort_runs(runs, metric, mode, sort)
  names, values = differing_fields(ordered)
  if columns and 'all' not in columns:
    names = list(columns)
    values = [{name: own.get(name, '') or _value(run, name) for name in names} for run, own in zip(ordered, values)]
  return RunGroup(title, ordered, metric, mode, names, values)


# ---------------------------------------------------------------- order


def _sort_runs(runs: Sequence[RunState], metric: str, mode: str, sort: str) -> list[RunState]:
  """Returns the runs in the order that `sort` names; runs without a value, or whose value is NaN, are always last."""
  name, is_reversed = sort.removeprefix('-'), sort.startswith('-')

  def score(run: RunState) -> Any:
    if name == 'best':
      best = run.best(metric, mode)
      return None if best is None else best[0] if mode == 'min' else -best[0]
    if name in _ORDERS:
      value = _ORDERS[name](run)
      return None if isinstance(value, float) and math.isnan(value) else value
    return _natural(value) if (value := _value(run, name)) and value.lower() != 'nan' else None

  if name not in _ORDERS and len({_value(run, name) for run in runs}) == 1:
    return _sort_runs(runs, metric, mode, 'best')  # The field gives no order: its value is the same in all runs.
  by_name = sorted(runs, key=_ORDERS['name'])
  with_value = [(value, run) for run in by_name if (value := score(run)) is not None]
  ordered = [run for _, run in sorted(with_value, key=lambda pair: pair[0], reverse=is_reversed)]
  return [*ordered, *(run for run in by_name if score(run) is None)]


def value_shared_by_all(runs: Sequence[RunState], sort: str) -> str | None:
  """Returns the value of the field to sort by, if it is the same in all runs and so gives no order; otherwise None."""
  name = sort.removeprefix('-')
  if name in _ORDERS or len(runs) < 2 or not all(run.fields and _paths(run, name) for run in runs):
    return None
  values = {_value(run, name) for run in runs if name not in run.metrics}
  return values.pop() if len(values) == 1 else None


def _natural(text: str) -> list[tuple[int, float, str]]:
  """Returns a sort key in which numbers in a text count as numbers: 'a2' comes before 'a10', and 1e-3 before 0.01."""
  with contextlib.suppress(ValueError):
    return [(0, float(text), '')]
  parts = re.split(r'(\d+(?:\.\d+)?(?:e[+-]?\d+)?)', text)
  return [(0, float(part), '') if i % 2 else (1, 0.0, part) for i, part in enumerate(parts) if part]


_ORDERS: dict[str, Callable[[RunState], Any]] = {
  'best': lambda run: None,  # `_sort_runs` uses the group's metric.
  'name': lambda run: _natural(str(run.directory)),
  'step': lambda run: run.step,
  'age': lambda run: -run.written,
  'loss': lambda run: run.last_loss,
}


# ---------------------------------------------------------------- columns


def _check_column(runs: Sequence[RunState], name: str) -> None:
  if name == 'all' or any(name in run.metrics or _paths(run, name) for run in runs):
    return
  if (several := max((_metrics(run, name) for run in runs), key=len, default=[])) and len(several) > 1:
    raise UserError(f'{name}: several metrics end with it; write {" or ".join(several)}')
  if not several:
    fields = dict.fromkeys(p.rpartition('.')[2] for run in runs for p in run.fields)
    close = did_you_mean(name, [*fields, *_add_ends(_metrics_of_all(runs))])
    raise UserError(f'{name}: no run has a field or a metric of this name.{close}{_list_differences(runs)}')


def _list_differences(runs: Sequence[RunState]) -> str:
  """Returns sentences for the end of a message, which name the fields that differ between runs, and all metrics."""
  lists = {'Fields that differ': differing_fields(runs)[0], 'Metrics': _metrics_of_all(runs)}
  return ''.join(f' {what}: {", ".join(first_lines(names, _MOST_NAMED))}.' for what, names in lists.items() if names)


_MOST_NAMED = 8
_UNSET = ('None', 'REQUIRED', "''")  # Values of fields that are not set.


def _metrics_of_all(runs: Sequence[RunState]) -> list[str]:
  """Returns the names of the metrics of all runs, with evaluation metrics first."""
  return sorted({name for run in runs for name in run.metrics}, key=lambda name: (not name.startswith('eval/'), name))


def _add_ends(metrics: Sequence[str]) -> list[str]:
  return [*metrics, *(name.rpartition('/')[2] for name in metrics)]


def _metrics(run: RunState, name: str) -> list[str]:
  """Returns the run's metric `name`; without such a metric, the metrics that end with `/name`.

  If some of these are evaluation metrics, only they are returned.
  """
  found = [name] if name in run.metrics else [metric for metric in run.metrics if metric.endswith(f'/{name}')]
  return sorted([metric for metric in found if metric.startswith('eval/')] or found)


def _paths(run: RunState, name: str) -> list[str]:
  """Returns the paths of the fields that end with a name, in which indices and `_tpl` may be omitted."""

  def plain(path: str) -> str:
    path = re.sub(r'_tpl(?=\.|$)', '', path)
    return path if re.search(r'\[\d', name) else re.sub(r'\[(\d+|\*)\]', '', path)

  return [path for path in run.fields if f'.{plain(path)}'.endswith(f'.{plain(name)}')]


def _columns_of(runs: Sequence[RunState], name: str) -> list[str]:
  """Returns the columns for a name.

  A name may match several fields. If their values differ within some run, each field that any run sets gets a column.
  Otherwise the only column is the name itself.
  """
  if name == 'loss':  # Each table has a column of this name: the training loss.
    whole = {tuple(_metrics(run, name)) for run in runs if _metrics(run, name)}
    return list(*whole) if len(whole) == 1 else [name]
  if all(len(_different_values(run, name)) < 2 for run in runs):
    return [name]
  paths = sorted(dict.fromkeys(path for run in runs for path in _paths(run, name)), key=_importance)
  merged = _merged_entries(paths, [run.fields for run in runs if run.fields])
  names = short_names(set(merged.values()))
  are_set = [path for path in paths if any(run.fields.get(path, 'None') not in _UNSET for run in runs)]
  return list(dict.fromkeys(names[merged[path]] for path in are_set)) or [name]


def _different_values(run: RunState, name: str) -> list[str]:
  """Returns the distinct values of the fields that a name matches; [] for a metric."""
  found = dict.fromkeys(run.fields[path] for path in _paths(run, name) if name not in run.metrics)
  return [value for value in found if value != 'REQUIRED' or len(found) == 1]


def _value(run: RunState, name: str) -> str:
  """Returns the value of a field, or the last value of a metric; if several fields match, their distinct values."""
  if name in run.metrics or not _paths(run, name):
    return '/'.join(format_number(float(run.metrics.curve(metric).values[-1])) for metric in _metrics(run, name))
  return '/'.join(_different_values(run, name))


def values_over_time(group: RunGroup, index: int) -> list[str]:
  """Returns the value of each column for a run of a group; '1.0 -> 3.0' for a field that changed between launches."""
  run, own = group.runs[index], group.values[index]
  values = []
  for name in group.columns:
    changed = next((run.changed[path] for path in _paths(run, name) if path in run.changed), '')
    values.append(changed if changed and own.get(name) else own.get(name, ''))
  return values


# ---------------------------------------------------------------- metrics


def metric_to_compare(runs: Sequence[RunState], metric: str | None, mode: str | None) -> tuple[str, str]:
  """Returns the full name of the metric for comparing runs, and 'min' or 'max'.

  If the input of the metric differs between runs, the name is a pattern, such as `eval/*/accuracy`.

  Args:
    metric: a full name, such as 'eval/validation/loss', or the end of one. None uses the `best_metric` on which the
      configs agree, or the metric of `early_stopping`, or else the loss. If several inputs have this metric, the input
      that most runs have is used.
    mode: 'min' if lower is better, otherwise 'max'. None means 'max' in two cases: the configs agree on this metric,
      and all have the mode 'max'; or `metric` is given, and its name implies 'max'. Otherwise None means 'min'.

  Raises:
    UserError: no run has the metric, or several inputs of one run have it.
  """
  recorded, modes = ({values[i] for values in map(_deciding_metric, runs)} for i in range(2))
  agreed = next(iter(recorded)) if len(recorded) == 1 else 'None'
  if mode is None:
    is_own = metric in (None, agreed) and agreed != 'None'
    is_max = (is_own and modes == {'max'}) or (metric is not None and mode_of_metric(metric) == 'max')
    mode = 'max' if is_max else 'min'
  wanted = metric or (agreed if agreed != 'None' else 'loss')
  known = _metrics_of_all(runs)
  if wanted in known:
    return wanted, mode
  found = [name for name in known if name.startswith('eval/') and name.endswith(f'/{wanted}')]
  if metric is not None and len(found) > 1:
    if any(sum(name in run.metrics for name in found) > 1 for run in runs):
      raise UserError(f'--metric={metric}: several inputs have it; write {" or ".join(found)}')
    return f'eval/*/{metric}', mode
  if metric is not None and not found:
    close, has = did_you_mean(metric, _add_ends(known)), ', '.join(first_lines(known, _MOST_NAMED)) or 'no metrics'
    raise UserError(f'--metric={metric}: no run has it.{close} They have {has}')
  return max(found, key=lambda name: sum(name in run.metrics for run in runs), default=wanted), mode


def _deciding_metric(run: RunState) -> tuple[str, str]:
  """Returns the name of the metric that decides which checkpoint of a run is best, and its mode.

  The name is 'None' if the run has no such metric.
  """

  def field(name: str, default: str) -> str:
    return run.fields.get(f'task.train.{name}', default).strip('\'"')

  metric, mode = field('best_metric', 'None'), field('best_metric_mode', '')
  if metric == 'None' and field('early_stopping.patience', 'None') != 'None':
    stopping = field('early_stopping.metric', 'None')
    return stopping, mode_of_metric(stopping, mode, field('early_stopping.mode', '')) or 'min'
  return metric, mode_of_metric(metric, mode) or 'min'


def best_run(runs: Sequence[RunState], metric: str, mode: str) -> RunState | None:
  """Returns the run with the best value of a metric; None if no run has the metric."""
  sign = 1 if mode == 'min' else -1
  scored = [(sign * best[0], i) for i, run in enumerate(runs) if (best := run.best(metric, mode)) is not None]
  return runs[min(scored)[1]] if scored else None


# ---------------------------------------------------------------- how configs differ


def differing_fields(runs: Sequence[RunState]) -> tuple[list[str], Sequence[Mapping[str, str]]]:
  """Returns the shortest unambiguous names of the fields in which the recorded configs differ, and each run's values.

  The most important fields come first. If the class of a config, such as the model, differs between runs, its fields
  are compared only among runs with the same class, and the other runs have no values for them. The same holds for a
  config that some runs lack, such as the rule of a quantized run.
  """
  recorded = [run.fields for run in runs if run.fields]
  paths = dict.fromkeys(path for fields in recorded for path in fields)
  classes_of = [{p: fields[p] for p in _class_paths(fields) if p in fields} for fields in recorded]
  classes = [p for p in paths if p != 'task' and len({own.get(p) for own in classes_of}) > 1]
  differing: dict[str, None] = {}
  by_run: list[set[str]] = [set() for _ in runs]
  for path in sorted(paths, key=_importance):
    above = [c for c in classes if path.startswith((f'{c}.', f'{c}['))]
    alike = defaultdict[tuple[str | None, ...], list[int]](list)
    for i, run in enumerate(runs):
      if run.fields:
        alike[tuple(run.fields.get(c) for c in above)].append(i)
    for group in alike.values():
      if len({runs[i].fields.get(path) for i in group}) > 1:
        differing[path] = None
        for i in group:
          by_run[i].add(path)
  merged = _merged_entries(list(differing), recorded)
  names = short_names(set(merged.values()))
  values = [
    {names[merged[path]]: run.fields[path] for path in differing if path in run.fields and path in own}
    for run, own in zip(runs, by_run)
  ]
  return list(dict.fromkeys(names[merged[path]] for path in differing)), values


def _class_paths(fields: Mapping[str, str]) -> set[str]:
  """Returns the paths of configs. The value at such a path is a class, to which the fields below the path belong."""
  return {path[:end] for path in fields for end, character in enumerate(path) if character == '.'}


def _importance(path: str) -> tuple[int, int]:
  """Returns a sort key: fields that change results come first, from the root down; sharding fields come last."""
  if path.endswith('.learning_rate'):
    return 0, 0
  if path == 'seed':
    return 0, 99
  if re.search(r'split|mesh|axis_rules|strategy|partitioning', path):
    return 2, 0
  if path == 'task.model':
    return 0, 0
  if path == 'task' or re.search(r'\.name$|interval_steps$|^task\.(evaluate|decode)|decoder_tpl|max_to_keep', path):
    return 1, 0
  return 0, 1 if path.endswith(('_tpl', '.optimizer')) else path.count('.')


def _merged_entries(paths: Sequence[str], recorded: Sequence[Mapping[str, str]]) -> dict[str, str]:
  """Returns the name to show for each path: `datasets[*].path` if each run has the same value in all its datasets."""
  groups = defaultdict[str, list[str]](list)
  for path in paths:
    groups[re.sub(r'\[\d+\]', '[*]', path)].append(path)
  shown: dict[str, str] = {}
  for pattern, members in groups.items():
    are_equal = all(len({fields.get(path) for path in members}) == 1 for fields in recorded)
    shown |= {path: pattern if are_equal and len(members) > 1 else path for path in members}
  return shown


def short_names(paths: Collection[str]) -> dict[str, str]:
  """Returns for each path its shortest ending, in whole names, that no other path has."""
  parts = {path: path.split('.') for path in paths}
  endings = {path: ['.'.join(names[i:]) for i in reversed(range(len(names)))] for path, names in parts.items()}
  counts = Counter(ending for found in endings.values() for ending in found)
  return {path: next((e for e in found if counts[e] == 1), path) for path, found in endings.items()}
