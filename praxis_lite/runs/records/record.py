"""The record in a run directory: the config of the run, and how each process that wrote to it was started.

    job_log_dir/run.json      the config as JSON, and for each launch: command, time, seed, mesh, versions, source trees
                config.txt    the config as text, one field per line, for people and `diff`

Anyone may have written a record, so reading it runs none of its code: `common/config/trusted.py` lists what is allowed.
Values that JSON cannot hold, such as a lambda or a data set in memory, are left out; the rest can be read back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from praxis_lite.checkpoints.contents import OtherModelError
from praxis_lite.common.config import Config
from praxis_lite.common.config.json import decode, encode_readable
from praxis_lite.common.config.text import diff_texts, to_text
from praxis_lite.common.config.trusted import UntrustedError, is_of_others
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.common.files import parse_json, read_plain, replace_file, user_path
from praxis_lite.common.foreign_text import printable, remove_secrets_of_argument
from praxis_lite.runs.records.work_tree import read_work_tree
from praxis_lite.training import registry
from praxis_lite.training.experiment import ExperimentConfig

_FORMAT = 1
_RECORD, _TEXT = 'run.json', 'config.txt'
_PACKAGES = ('praxis_lite', 'jax', 'jaxlib', 'numpy', 'optax', 'orbax-checkpoint')
_OWN_PACKAGES = ('experiments', 'tasks')  # Packages of the user in the working directory; see `registry`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
  """One process that trained the run, or wrote its record.

  Attributes:
    started: seconds since 1970.
    command: the command line.
    seed: seed of the run.
    step: the step it began at.
    mesh: the size of each mesh axis, or None.
    devices: number and kind of the devices, such as '8 cpu'.
    versions: the versions of Python and of the relevant packages, by name.
    sources: the known source trees: `path`, and for a git work tree `commit` and `clean`.
    changes: how the config differed from that of the previous launch, one field per line.
  """

  started: float = 0.0
  command: str = ''
  seed: int = 0
  step: int = 0
  mesh: Mapping[str, int] | None = None
  devices: str = ''
  versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  sources: tuple[Mapping[str, Any], ...] = ()
  changes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RunRecord:
  """The record in a run directory.

  Attributes:
    directory: the run directory.
    launches: the processes that wrote to it, in order.
    text: the config as text, with the defaults of the code that wrote it.
    lost: the reason for each field of the config that was left out, by the field's path.
  """

  directory: Path
  launches: tuple[Launch, ...]
  text: str
  lost: Mapping[str, str]
  _encoded: Mapping[str, Any] = dataclasses.field(repr=False)
  _trusted: tuple[str, ...] = dataclasses.field(default=(), repr=False)

  @property
  def seed(self) -> int:
    """The seed of the run's last launch."""
    return self.launches[-1].seed if self.launches else 0

  @property
  def commands(self) -> list[str]:
    """The different command lines of the run, in order."""
    return list(dict.fromkeys(launch.command for launch in self.launches))

  @functools.cached_property
  def config(self) -> ExperimentConfig:
    """The configs of the run. Fields that were left out are REQUIRED: set them before they are used.

    Raises:
      UntrustedError: the config names a module that may not be imported; the message says how to allow it.
      ConfigError: the config names something that no longer exists.
    """
    try:
      roots = _decode(self._encoded, self._trusted)
    except UntrustedError as error:
      raise UntrustedError(f'{self.directory / _RECORD}: {error}. {self._remedy(error.module)}', error.module) from None
    except UserError as error:
      raise ConfigError(f'{self.directory / _RECORD}: {error}') from None
    task = roots.get('task')
    if not isinstance(task, Config):
      raise ConfigError(f'{self.directory / _RECORD}: {self.lost.get("task", "it has no config of a task")}')
    return ExperimentConfig(task, _configs(roots.get('datasets')), _configs(roots.get('decode_datasets')))

  def _remedy(self, module: str) -> str:
    trust = f'If you trust that code, name its module or file, as in --trust={module} or trusted=[{module!r}]; or name'
    if is_of_others(module):
      trust = (
        f'No config needs code of {module}, so the record may have been made to do harm: do not use it unless you know '
        'who wrote it. If it is your own run, name'
      )
    if module == '__main__':
      trust = 'It was defined in a script or a notebook, which cannot be imported: put it in a module, or name'
    first, *later = self.commands or ['']
    made_by = f' This run was made by: {first}' if first else ''
    made_by += f'; and resumed by: {"; ".join(first_lines(later, most=3))}' if later else ''
    return f'{trust} the experiment with --exp.{made_by}'


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
    job_log_dir: the run directory, which exists.
    config: configs of the run.
    seed, mesh, step: as in `Launch`.
    command: the command line; None uses that of this process.
    keeps_record: do not change an existing record, but report how the config differs from it.

  Raises:
    UserError: the files cannot be written.

  Returns:
    Lines to print: how the config and the seed differ from the recorded ones; empty if they do not.
  """
  directory, text = Path(job_log_dir), to_text(config.roots()) + '\n'
  launches: tuple[Launch, ...] = ()
  changes: list[str] = []
  told: list[str] = []
  with contextlib.suppress(UserError):  # A record that cannot be read is replaced.
    before = read_record(directory)
    launches, changes = before.launches, diff_texts(before.text, text)
    of_seed = [f'seed: {before.seed} -> {seed}'] if before.seed != seed else []
    told, changes = diff_texts(before.text, text, folded=True) + of_seed, changes + of_seed
    if keeps_record:
      return _lines_about(told, ', which is kept')
  launch = Launch(
    started=round(time.time(), 3),
    command=_command_line() if command is None else command,
    seed=seed,
    step=step,
    mesh=None if mesh is None else dict(mesh),
    devices=f'{jax.device_count()} {jax.devices()[0].device_kind}',
    versions={'python': platform.python_version(), **dict(_versions())},
    sources=tuple(_sources()),
    changes=tuple(changes),
  )
  lost: dict[str, str] = {}
  encoded = encode_readable(config.roots(), lost)
  record = {
    'format': _FORMAT,
    'launches': [dataclasses.asdict(entry) for entry in (*launches, launch)],
    'lost': lost,
    'config': encoded,
  }
  for name, content in ((_TEXT, text), (_RECORD, json.dumps(record, indent=1, allow_nan=False) + '\n')):
    try:
      replace_file(directory / name, content)
    except OSError as error:
      raise UserError(f'{directory / name} cannot be written: {error.strerror or error}') from error
  return _lines_about(told)


def _lines_about(changes: Sequence[str], kept: str = '') -> list[str]:
  differs = f'the config differs from the recorded one{kept}:'
  return [differs, *(f'  {line}' for line in first_lines(changes))] if changes else []


def first_lines(lines: Sequence[str], most: int = 20) -> list[str]:
  """Returns the first `most` lines; if there are more, also a line with the number of the others."""
  return [*lines[:most], f'and {len(lines) - most} more'] if len(lines) > most else list(lines)


def read_record(job_log_dir: str | os.PathLike[str], *, trusted: Collection[str] = ()) -> RunRecord:
  """Returns the record of a run directory. Its config is decoded when it is first used.

  Args:
    job_log_dir: the run directory.
    trusted: modules, packages or Python files whose code the config may name too.

  Raises:
    UserError: there is no record, or it cannot be read.
  """
  directory = user_path(job_log_dir)
  file = directory / _RECORD
  try:
    record = json.loads(read_plain(file))
    if record['format'] != _FORMAT:
      raise UserError(f'{file} has format {record["format"]!r}; this version of praxis_lite reads {_FORMAT}')
    launches = tuple(map(_launch, record['launches']))
    encoded, lost = dict(record['config']), {str(k): str(v) for k, v in record['lost'].items()}
  except FileNotFoundError:
    raise UserError(f'{directory} has no record of a run ({_RECORD}); name its experiment with --exp') from None
  except UserError:
    raise
  except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
    raise UserError(f'{file} cannot be read: {type(error).__name__}: {error}') from None
  text = ''
  with contextlib.suppress(OSError):
    text = printable(read_plain(directory / _TEXT).decode(errors='replace'))
  return RunRecord(directory, launches, text, lost, encoded, tuple(trusted))


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


@contextlib.contextmanager
def changes_named(job_log_dir: str | os.PathLike[str], config: ExperimentConfig) -> Iterator[None]:
  """Adds to an OtherModelError how the config or, if that is equal, the code differs from the recorded one."""
  try:
    yield
  except OtherModelError as error:
    with contextlib.suppress(UserError):
      record = read_record(job_log_dir)
      lines = diff_texts(record.text, to_text(config.roots()), folded=True)
      lines = _deciding(lines, 'task.train.learner' if error.only_learner else 'task.model')
      error.args = (f'{error.difference}. {_differing_config(lines) if lines else _differing_code(record)}',)
    raise


def _deciding(changes: Sequence[str], section: str) -> list[str]:
  """Returns the lines of a diff that are in `section` and may change which arrays a model has."""
  lines = [line for line in changes if line.removeprefix('+ ').removeprefix('- ').startswith(section)]
  lines = [line for line in lines if '.decoder_tpl' not in line]  # A decoder has no variables of its own.
  return [line for line in lines if not _DECIDES_NO_SHAPE.search(line)] or lines


_DECIDES_NO_SHAPE = re.compile(r'split_|axis|\.learning_rate|\.schedule|\.clip_|dropout|params_init|fprop_dtype')


def _differing_config(changes: Sequence[str]) -> str:
  return (
    f'What differs from the recorded config: {"; ".join(first_lines(changes, most=5))}. The directory records its '
    'config, so leave out --exp, and the --set of these fields; or start a new run in another --job_log_dir.'
  )


def _differing_code(record: RunRecord) -> str:
  """Returns the message for a checkpoint with other arrays although the config is as recorded."""
  launch = record.launches[-1] if record.launches else Launch()
  then, now = (
    ', '.join(map(_describe_source, sources)) or 'sources that are not known'
    for sources in (launch.sources, _sources())
  )
  version = launch.versions.get('praxis_lite')
  return (
    'The config is as recorded, so the code has changed: its layers declare other variables than when the checkpoint '
    f'was written{f", by praxis_lite {version}," if version else ""} with {then}; here it is {now}. Go back to that '
    'code, or start a new run in another --job_log_dir; task.train.init_from takes over the variables that fit.'
  )


def _describe_source(source: Mapping[str, Any]) -> str:
  changed = '' if source.get('clean', True) else ' with uncommitted changes'
  return f'commit {str(source.get("commit"))[:10]} of {source.get("path")}{changed}'


# -------------------------------------------------------------------- reading


def _decode(encoded: Mapping[str, Any], trusted: Collection[str]) -> dict[str, Any]:
  modules = [*_OWN_PACKAGES, *map(registry.load_module, trusted)]
  try:
    roots = decode(dict(encoded), modules)
  except UntrustedError:
    registry.load_all()  # The user's experiments import the modules they need.
    roots = decode(dict(encoded), modules)
  return roots if isinstance(roots, dict) else {}


def _configs(entries: object) -> list[Config]:
  """Returns the configs in a list, without those that were left out."""
  return [c for c in entries if isinstance(c, Config)] if isinstance(entries, list) else []


def _launch(encoded: Mapping[str, Any]) -> Launch:
  known = {f.name for f in dataclasses.fields(Launch)}
  launch = Launch(**{k: v for k, v in encoded.items() if k in known})
  return dataclasses.replace(
    launch,
    started=float(launch.started),
    command=printable(str(launch.command)),
    seed=int(launch.seed),
    step=int(launch.step),
    sources=tuple(launch.sources),
    changes=tuple(printable(str(line)) for line in launch.changes),
  )


# -------------------------------------------------------------------- writing


def _command_line() -> str:
  program = Path(sys.argv[0] or 'python')
  started = ['python', '-m', program.parent.name] if program.name == '__main__.py' else [program.name]
  return shlex.join([*started, *map(remove_secrets_of_argument, sys.argv[1:])])


def _versions() -> Iterator[tuple[str, str]]:
  for package in _PACKAGES:
    with contextlib.suppress(metadata.PackageNotFoundError):
      yield package, metadata.version(package)


def _sources() -> Iterator[dict[str, Any]]:
  """Yields the known source trees: the working directory, and that of praxis_lite if it is elsewhere."""
  seen = set()
  for folder in (os.getcwd(), str(Path(__file__).parents[2])):
    if (tree := read_work_tree(folder)) is not None and tree['path'] not in seen:
      seen.add(tree['path'])
      yield tree
