"""The record in a run directory: the config of the run, and how each process that wrote to it was started.

    job_log_dir/run.json      the config as JSON, and for each launch: command, time, seed, mesh, versions, source trees
                config.txt    the config as text, one field per line, for people and `diff`

The JSON has every value, including defaults, so editing a default later does not change what the run computes. Values
that JSON cannot represent, such as a lambda or a data set in memory, are left out; the rest can be read back. A record
is untrusted, so reading it runs no code that it names, except what `common/config/trusted.py` allows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.common.config import Config
from praxis_lite.common.config.json import OtherFields, decode, encode_readable
from praxis_lite.common.config.text import changed_fields, child_path, diff_texts, fields_of, to_text
from praxis_lite.common.config.trusted import UntrustedError, is_of_others
from praxis_lite.common.errors import ConfigError, UserError, first_lines
from praxis_lite.common.files import forbidden_by, parse_json, read_plain, replace_file, user_path
from praxis_lite.common.foreign_text import printable
from praxis_lite.common.moved import to_current_names
from praxis_lite.runs.records.consents import (
  consented_files,
  digest,
  files_changed_since_training,
  files_of_user,
  give_consent,
  module_that_changed,
  renew_consent,
)
from praxis_lite.runs.records.launch import Launch, read_launch, this_launch
from praxis_lite.runs.records.moved_files import find_moved_files
from praxis_lite.runs.records.other_defaults import OtherDefaults, compare_defaults, restore_defaults
from praxis_lite.training import registry
from praxis_lite.training.experiment import ExperimentConfig

_FORMAT = 1
_RECORD, _TEXT = 'run.json', 'config.txt'
_OWN_PACKAGES = ('experiments', 'tasks')  # Packages of the user in the working directory; see `training/registry.py`.


@dataclasses.dataclass(frozen=True)
class RunRecord:
  """The record in a run directory.

  Attributes:
    text: the config as text, with the defaults of the code that wrote it, but with today's names of modules that moved.
    lost: the reason for each field of the config that was left out, by the field's path.
  """

  directory: Path
  launches: tuple[Launch, ...]
  text: str
  lost: Mapping[str, str]
  _encoded: Mapping[str, Any] = dataclasses.field(repr=False)
  _digest: str = dataclasses.field(repr=False)  # The digest of run.json; see `consents.py`.
  _edited: frozenset[str] | None = dataclasses.field(default=None, repr=False)  # None for a record without defaults.
  _trusted: tuple[str, ...] = dataclasses.field(default=(), repr=False)

  @property
  def seed(self) -> int:
    """The seed of the run's last launch."""
    return self.launches[-1].seed if self.launches else 0

  @property
  def commands(self) -> list[str]:
    """The different command lines of the run, in order."""
    return list(dict.fromkeys(launch.command for launch in self.launches))

  @property
  def config(self) -> ExperimentConfig:
    """The configs of the run. Fields that were left out are REQUIRED; set them before they are used.

    Raises:
      UntrustedError: the config names a module that may not be imported; the message says how to allow it.
      ConfigError: the config names something that no longer exists.
    """
    return self._decoded[0]

  @property
  def other_defaults(self) -> OtherDefaults:
    """How the defaults of today's code differ from those of the run; raises like `config`."""
    return self._decoded[1]

  @functools.cached_property
  def _decoded(self) -> tuple[ExperimentConfig, OtherDefaults]:
    try:
      roots, other = self._read_roots()
    except UntrustedError as error:
      raise UntrustedError(self._refusal(error), error.module) from None
    except UserError as error:
      raise ConfigError(f'{self.directory / _RECORD}: {error}') from None
    task = roots.get('task')
    if not isinstance(task, Config):
      raise ConfigError(f'{self.directory / _RECORD}: {self.lost.get("task", "it has no config of a task")}')
    config = ExperimentConfig(task, _configs(roots.get('datasets')), _configs(roots.get('decode_datasets')))
    if self._edited is None:
      defaults = restore_defaults(config.roots(), self.text)
    else:
      defaults = compare_defaults(config.roots(), self._edited, self.text, other)
    find_moved_files(config, self.directory)
    return config, defaults

  def _read_roots(self) -> tuple[dict[str, Any], OtherFields]:
    modules = [*_OWN_PACKAGES, *map(registry.load_module, self._trusted)]
    try:
      roots, other = decode(dict(self._encoded), modules, self._edited)
    except UntrustedError:
      registry.load_all()  # Imports the user's experiments, and with them the modules that they need.
      if changed := module_that_changed(self._digest, json.dumps(self._encoded)):
        raise UntrustedError(f'{changed} is not one of the packages that a recorded config may name', changed) from None
      modules += map(registry.load_module, sorted(self.consented_files()))
      roots, other = decode(dict(self._encoded), modules, self._edited)
    return roots if isinstance(roots, dict) else {}, other

  def consented_files(self) -> set[str]:
    """Returns the unchanged files of this user that the run's config names; empty if another user trained the run."""
    return {file for file, is_same in consented_files(self._digest).items() if is_same}

  def files_changed_since_training(self) -> list[str]:
    """Returns the files of this user that the run's config names and that have changed since the run was trained."""
    return files_changed_since_training(self._digest)

  def renew_consent(self) -> None:
    """Records that this user trusts the run's changed files, by naming them again.

    Does nothing if another user trained the run.
    """
    renew_consent(self._digest)

  def unchanged_defaults(self, text: str) -> set[str]:
    """Returns the paths of recorded defaults whose values equal those in `text`, the config of another launch."""
    before, now = ({} if self._edited is None else fields_of(t) for t in (self.text, text))
    return {path for path, value in before.items() if path not in (self._edited or ()) and now.get(path) == value}

  def _refusal(self, error: UntrustedError) -> str:
    """Returns a message that says why the record is refused, and what to do. A changed file is the first reason."""
    module = error.module
    changed = sorted(file for file, is_same in consented_files(self._digest).items() if not is_same)
    code = next((file for file in changed if Path(file).stem == module), module)
    trust = (
      f'If you trust that code, name its module or file, as in --trust={code} or trusted=[{code!r}]; --exp names '
      "the experiment instead, and takes today's defaults in place of the recorded ones"
    )
    if is_of_others(module):
      trust = (
        f'No config needs code of {module}, so the record may have been made to do harm: do not use it unless you know '
        'who wrote it. If it is your own run, name the experiment with --exp'
      )
    if module == '__main__':
      trust = (
        'It was defined in a script or a notebook, which cannot be imported: put it in a module, or name the '
        'experiment with --exp'
      )
    first, *later = self.commands or ['']
    made_by = f' This run was made by: {first}' if first else ''
    made_by += f'; and resumed by: {"; ".join(first_lines(later, most=3))}' if later else ''
    has = 'has' if len(changed) == 1 else 'have'
    why = f'{" and ".join(changed)} {has} changed since you trained the run. ' if changed else ''
    if missing := [file for file in changed if not os.path.exists(file)]:
      why, name = '', os.path.basename(missing[0])
      trust = (
        f'You trained the run with {", ".join(missing)}, which is missing: put it back; or, if it has moved, name it, '
        f'as in --trust=FOLDER/{name}; or, if it has another name, as in --exp=FILE.py:MyExperiment, which takes '
        "today's defaults in place of the recorded ones"
      )
    return f'{why}{self.directory / _RECORD}: {error}. {trust}.{made_by}'


def write_record(
  job_log_dir: str | os.PathLike[str],
  config: ExperimentConfig,
  *,
  seed: int = 0,
  command: str | None = None,
  mesh: Mapping[str, int] | None = None,
  step: int = 0,
  keeps_record: bool = False,
) -> list[str]:
  """Records the config of a run, and adds this process to the recorded launches.

  Call it in only one process of a run. The files appear complete or not at all.

  Args:
    seed, mesh, step: see `Launch`.
    command: the command line; None uses the command line of this process.
    keeps_record: whether to leave an existing record unchanged, and only report how the config differs from it.

  Raises:
    UserError: the files cannot be written.

  Returns:
    Lines to print: how the config and the seed differ from the recorded ones, or that a damaged record was replaced;
    empty if neither is the case.
  """
  directory, roots = Path(job_log_dir), config.roots()
  text = to_text(roots) + '\n'
  launches: tuple[Launch, ...] = ()
  changes: list[str] = []
  trusted: set[str] = set()
  told: list[str] = []
  edited = set(changed_fields(roots))
  is_damaged = has_record(directory)
  with contextlib.suppress(UserError):  # A record that cannot be read is replaced.
    before = read_record(directory)
    is_damaged = False
    launches, changes = before.launches, diff_texts(before.text, text)
    of_seed = [f'seed: {before.seed} -> {seed}'] if before.seed != seed else []
    told, changes = diff_texts(before.text, text, folded=True) + of_seed, changes + of_seed
    edited -= before.unchanged_defaults(text)
    trusted |= before.consented_files()
    if keeps_record:
      return _lines_about(told, step, ', which is kept')
  launch = this_launch(seed=seed, command=command, mesh=mesh, step=step, changes=tuple(changes))
  lost: dict[str, str] = {}
  encoded = encode_readable(roots, lost)
  record = {
    'format': _FORMAT,
    'launches': [dataclasses.asdict(entry) for entry in (*launches, launch)],
    'lost': lost,
    'config': encoded,
    'edited': sorted(edited),
  }
  encoded_record = json.dumps(record, indent=1, allow_nan=False) + '\n'
  trusted |= files_of_user(encoded_record)
  for name, content in ((_TEXT, text), (_RECORD, encoded_record)):
    try:
      replace_file(directory / name, content)
    except OSError as error:
      raise UserError(f'{directory / name} cannot be written: {error.strerror or error}') from error
  give_consent(digest(encoded_record.encode()), trusted)
  lost_launches = f'{directory / _RECORD} could not be read and was written anew; its earlier launches are lost'
  return [lost_launches] if is_damaged else _lines_about(told, step)


def _lines_about(changes: Sequence[str], step: int, kept: str = '') -> list[str]:
  if not changes:
    return []
  lines = [f'the config differs from the recorded one{kept}:', *(f'  {line}' for line in first_lines(changes))]
  if step and any(re.match('task.train.init_from.path: .* -> (?!None$)', line) for line in changes):
    lines.append(
      f'task.train.init_from is not used: the run goes on after its own step {step}; to start from the other run, name '
      'a new --job_log_dir'
    )
  return lines


def read_record(job_log_dir: str | os.PathLike[str], *, trusted: Collection[str] = ()) -> RunRecord:
  """Returns the record of a run directory. Its config is decoded when it is first used.

  Args:
    trusted: further modules, packages or Python files whose code the config may name.

  Raises:
    UserError: there is no record, or it cannot be read.
  """
  directory = user_path(job_log_dir)
  file = directory / _RECORD
  try:
    content = read_plain(file)
    record = json.loads(content)
    if record['format'] != _FORMAT:
      raise UserError(f'{file} has format {record["format"]!r}; this version of praxis_lite reads {_FORMAT}')
    launches = tuple(map(read_launch, record['launches']))
    encoded, lost = dict(record['config']), {str(k): str(v) for k, v in record['lost'].items()}
    if '__main__' not in trusted:
      for name in ('datasets', 'decode_datasets'):
        if name in encoded:
          encoded[name] = _leave_out_functions_of_scripts(encoded[name], name, lost)
    edited = frozenset(map(str, record['edited'])) if 'edited' in record else None
  except FileNotFoundError:
    raise UserError(f'{directory} has no record of a run ({_RECORD}); name its experiment with --exp') from None
  except UserError:
    raise
  except PermissionError as error:
    raise UserError(f'{file} cannot be read: {error.strerror}; {forbidden_by(file)}') from None
  except OSError as error:
    raise UserError(f'{file} cannot be read: {error.strerror or error}; {remedy_for_damage(directory)}') from None
  except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
    is_json = not isinstance(error, ValueError)
    what = 'is not the record of a run' if is_json else f'is not JSON: {error}' if content.strip() else 'is empty'
    raise UserError(f'{file} {what}; {remedy_for_damage(directory)}') from None
  return RunRecord(directory, launches, read_text(directory), lost, encoded, digest(content), edited, tuple(trusted))


def read_text(directory: Path) -> str:
  """Returns the recorded config as text, with today's names of modules that moved; '' if it cannot be read."""
  with contextlib.suppress(OSError):
    return to_current_names(printable(read_plain(directory / _TEXT).decode(errors='replace')))
  return ''


def remedy_for_damage(directory: Path) -> str:
  """Returns advice, for messages, on what to do with a run whose record is damaged or missing."""
  text = directory / _TEXT
  seen = f'; {text} has its config as text' if text.is_file() else ''
  return f'name its experiment with --exp, and train then records it{seen}'


def first_launch(record: bytes) -> float | None:
  """Returns the start time of the first launch in a run.json, which identifies the run; None if it is unknown."""
  try:
    return float(parse_json(record)['launches'][0]['started'])
  except (ValueError, TypeError, KeyError, IndexError, OverflowError):
    return None


def has_record(job_log_dir: str | os.PathLike[str]) -> bool:
  """Whether a directory is the directory of a recorded run."""
  return (user_path(job_log_dir) / _RECORD).is_file()


def recorded_seed(job_log_dir: str | os.PathLike[str]) -> int:
  """Returns the seed of a run; 0, the default of new runs, if there is no readable record."""
  with contextlib.suppress(UserError):
    return read_record(job_log_dir).seed if has_record(job_log_dir) else 0
  return 0


def _configs(entries: object) -> list[Config]:
  """Returns the configs in a list from the record; [] if `entries` is not a list."""
  return [c for c in entries if isinstance(c, Config)] if isinstance(entries, list) else []


def _leave_out_functions_of_scripts(encoded: Any, path: str, lost: dict[str, str]) -> Any:
  """Returns the JSON of datasets, in which REQUIRED replaces functions of a script.

  These functions are needed only to read the data.

  Args:
    encoded: the JSON, which is untrusted.
    lost: receives the reason for each field that is left out, by its path.
  """
  if isinstance(encoded, list):
    return [_leave_out_functions_of_scripts(v, child_path(path, i), lost) for i, v in enumerate(encoded)]
  if not isinstance(encoded, dict):
    return encoded
  partial = encoded.get('$partial')
  called = partial[0] if isinstance(partial, list) and partial else encoded
  function = called.get('$ref') if isinstance(called, dict) else None
  if isinstance(function, str) and function.startswith('__main__:'):
    lost[path] = f'{function} of a script or a notebook, which cannot be imported: put it in a module'
    return {'$required': True}
  below = {k: path if k.startswith('$') else child_path(path, k) for k in encoded}
  return {k: _leave_out_functions_of_scripts(v, below[k], lost) for k, v in encoded.items()}
