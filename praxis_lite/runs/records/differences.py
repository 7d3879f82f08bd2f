"""Describes in messages how a config and the code differ from the recorded ones of a run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from praxis_lite.checkpoints.contents import OtherModelError
from praxis_lite.common.config.text import diff_texts, to_text
from praxis_lite.common.errors import UserError, first_lines
from praxis_lite.runs.records.launch import Launch, source_trees
from praxis_lite.runs.records.record import RunRecord, read_record
from praxis_lite.training.experiment import ExperimentConfig


def how_config_differs(job_log_dir: str | os.PathLike[str], config: ExperimentConfig) -> list[str]:
  """Returns a list with a line about how a config differs from the recorded one; [] if it does not differ."""
  with contextlib.suppress(UserError):
    if changes := diff_texts(read_record(job_log_dir).text, to_text(config.roots()) + '\n', folded=True):
      return [f'the config differs from the recorded one: {"; ".join(first_lines(changes, most=4))}']
  return []


@contextlib.contextmanager
def changes_named(job_log_dir: str | os.PathLike[str], config: ExperimentConfig) -> Iterator[None]:
  """Adds to an OtherModelError what differs from the record: the config or, if it equals the recorded one, the code."""
  try:
    yield
  except OtherModelError as error:
    with contextlib.suppress(UserError):
      record = read_record(job_log_dir)
      section = 'task.train.learner' if error.only_learner else 'task.model'
      lines = _deciding(diff_texts(record.text, to_text(config.roots()), folded=True), section)
      remedy = _differing_config(lines) if lines else _differing_code(record)
      with contextlib.suppress(UserError):  # These lines differ even without --exp and --set.
        of_code = diff_texts(record.text, to_text(record.config.roots()), folded=True)
        remedy = _differing_classes(lines) if lines and set(lines) <= set(of_code) else remedy
      error.args = (f'{error.difference}. {remedy}',)
    raise


def _deciding(changes: Sequence[str], section: str) -> list[str]:
  """Returns the lines of a diff that are in `section` and may affect which arrays a model has.

  If there are none, returns all lines in `section`. In both cases, lines about decoders are left out.
  """
  lines = [line for line in changes if line.removeprefix('+ ').removeprefix('- ').startswith(section)]
  lines = [line for line in lines if '.decoder_tpl' not in line]  # A decoder has no variables.
  return [line for line in lines if not _DECIDES_NO_SHAPE.search(line)] or lines


_DECIDES_NO_SHAPE = re.compile(r'split_|axis|\.learning_rate|\.schedule|\.clip_|dropout|params_init|fprop_dtype')


def _differing_config(changes: Sequence[str]) -> str:
  return (
    f'What differs from the recorded config: {"; ".join(first_lines(changes, most=5))}. Start a new run in '
    'another --job_log_dir; or, to go on with this run, leave out --exp, and the --set of these fields, since the '
    'directory records its config.'
  )


def _differing_classes(changes: Sequence[str]) -> str:
  """Returns the message for a checkpoint whose arrays differ because fields or defaults of classes have changed."""
  return (
    f'The classes of the config have changed since it was recorded: {"; ".join(first_lines(changes, most=5))}. Give '
    'these fields the values with which the code does what it did then, by --set or in the config; or go back to that '
    'code, or start a new run in another --job_log_dir.'
  )


def _differing_code(record: RunRecord) -> str:
  """Returns the message for a checkpoint whose arrays differ although the config equals the recorded one."""
  remedy = (
    'Go back to that code, or start a new run in another --job_log_dir; task.train.init_from takes over the variables '
    'that fit.'
  )
  if changed := record.files_changed_since_training():
    return (
      f'The config is as recorded, but your own code has changed since the run was trained: {", ".join(changed)} '
      f'declares other variables than when the checkpoint was written. {remedy}'
    )
  launch = record.launches[-1] if record.launches else Launch()
  then, now = (
    ', '.join(map(_describe_source, sources)) or 'sources that are not known'
    for sources in (launch.sources, source_trees())
  )
  version = launch.versions.get('praxis_lite')
  return (
    'The config is as recorded, so the code has changed: its layers declare other variables than when the checkpoint '
    f'was written{f", by praxis_lite {version}," if version else ""} with {then}; here it is {now}. {remedy}'
  )


def _describe_source(source: Mapping[str, Any]) -> str:
  changed = '' if source.get('clean', True) else ' with uncommitted changes'
  return f'commit {str(source.get("commit"))[:10]} of {source.get("path")}{changed}'
