"""Progress: what decides, besides the train state, how a run goes on; it is part of checkpoints and emergency copies.

    evaluations    the metrics that decide about early stopping and the best checkpoint, at each step
    losses         the last losses; a new loss far above them is a jump
    troubles       the batches to skip, and how often the run has gone back
    lines          how many lines metrics.jsonl had
    data           which files the training input reads, to detect changes

So a run goes on in the same way if its `metrics.jsonl`, `losses.json` or `trouble.jsonl` was deleted or emptied. Curves
in these files are lost, and a line says so. Checkpoints of earlier versions contain no progress; for them, the files
decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from praxis_lite.common.figures import number_of
from praxis_lite.common.processes import is_primary_process, meet_others
from praxis_lite.inputs.manifest import DataManifest
from praxis_lite.runs.improvement import Watched
from praxis_lite.runs.records.metrics import EvalResult, SummaryWriter, read_results
from praxis_lite.runs.trouble import restore_rollbacks

ValuesByStep = dict[int, float]  # NaN for a value that was not a number.


class Progress(NamedTuple):
  """The facts that decide, besides the saved train state, how a run continues.

  Attributes:
    evaluations: the values of each watched metric by step, by the path of the metric.
    losses: (step, loss) of the last steps; None if unknown.
    troubles: records of each `Trouble` for which the run went back.
    lines: the number of lines in metrics.jsonl; None if unknown.
    data: the manifest of the training input; None if unknown, or if the input reads no files.
  """

  evaluations: dict[str, ValuesByStep]
  losses: Sequence[tuple[int, float]] | None
  troubles: Sequence[dict[str, Any]]
  lines: int | None
  data: DataManifest | None = None

  def record(self) -> dict[str, Any]:
    values = {path: [[step, _or_none(x)] for step, x in of.items()] for path, of in self.evaluations.items()}
    losses = None if self.losses is None else [[step, _or_none(loss)] for step, loss in self.losses]
    return {**self._asdict(), 'evaluations': values, 'losses': losses, 'troubles': list(self.troubles)}

  @classmethod
  def parse(cls, record: object) -> Progress:
    """Returns the progress in a checkpoint, whose content is untrusted; `NOTHING_KNOWN` if it contains none."""
    if not isinstance(record, dict):
      return NOTHING_KNOWN
    try:
      evaluations = {str(path): dict(map(_pair, of)) for path, of in record['evaluations'].items()}
      losses = None if record['losses'] is None else list(map(_pair, record['losses']))
      troubles = [dict(trouble) for trouble in record['troubles']]
      lines = None if record['lines'] is None else int(record['lines'])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
      return NOTHING_KNOWN
    return cls(evaluations, losses, troubles, lines, record.get('data'))


NOTHING_KNOWN = Progress({}, None, (), None)


def _or_none(value: float) -> float | None:
  return value if math.isfinite(value) else None


def _pair(entry: Sequence[Any]) -> tuple[int, float]:
  step, value = entry
  return int(step), math.nan if value is None else float(value)


def evaluations_in(results: Iterable[EvalResult], watched: Watched) -> dict[str, ValuesByStep]:
  """Returns the values of the watched metrics, by their paths."""
  found = list(results)
  return {metric.path: dict(metric.values(found)) for metric in watched if metric is not None}


def recover_results(
  saved: Progress, step: int, directory: Path, watched: Watched, writer: SummaryWriter
) -> tuple[list[EvalResult], list[str]]:
  """Returns the evaluations of a run that continues after `step`, and messages about what its files have lost.

  If `trouble.jsonl` has lost batches to skip, process 0 writes them to it again. All processes call this.
  """
  lines = []
  results, changed = merge_saved(read_results(directory, step), saved, watched, step)
  if is_primary_process():
    rollbacks = restore_rollbacks(directory, saved.troubles)
    missing = (saved.lines or 0) - writer.num_lines
    if changed or missing > 0:
      lost = number_of(missing, 'line') if missing > 0 else number_of(changed, 'evaluation')
      kept = '; early stopping and the best checkpoint go by the evaluations in the checkpoint' if changed else ''
      lines.append(f'{directory / "metrics.jsonl"} has lost {lost} that it had when the checkpoint was saved{kept}')
    if rollbacks:
      lost = number_of(rollbacks, 'line')
      lines.append(f'{directory / "trouble.jsonl"} had lost {lost}; the checkpoint knows which batches to skip')
  if saved.troubles:
    meet_others()  # The other processes read the file, so they must wait until it is written.
  return results, lines


def merge_saved(
  results: Sequence[EvalResult], saved: Progress, watched: Watched, step: int
) -> tuple[list[EvalResult], int]:
  """Returns the evaluations of a run that continues after `step`, and how many of them its files have lost or changed.

  For earlier steps the saved values replace those in the files. An evaluation of `step` that only the files have is
  kept, because it may have been made after the checkpoint was saved.
  """
  merged, changed = {(result.step, result.split): result for result in results}, 0
  for metric in {metric for metric in watched if metric is not None and metric.path in saved.evaluations}:
    values = saved.evaluations[metric.path]
    for key in [key for key in merged if key[1] == metric.split and key[0] < step and key[0] not in values]:
      del merged[key]
      changed += 1
    for at, value in values.items():
      before = merged.get((at, metric.split))
      known = math.nan if before is None else float(before.metrics.get(metric.name, math.nan))
      if at <= step and not (before is not None and (known == value or (math.isnan(known) and math.isnan(value)))):
        metrics = {} if before is None else before.metrics
        merged[at, metric.split] = EvalResult(at, metric.split, {**metrics, metric.name: value})
        changed += 1
  return sorted(merged.values(), key=lambda result: result.step), changed
