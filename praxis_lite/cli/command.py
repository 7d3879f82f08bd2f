"""What commands share: how they are defined, their help, and the config of the experiment that their flags name.

Experiments, configs and JAX are imported inside functions, so that help appears immediately.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from absl import flags

from praxis_lite.cli.command_flags import CommandFlags
from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import local_path
from praxis_lite.common.foreign_text import printable

if TYPE_CHECKING:
  from praxis_lite.runs.records.record import RunRecord
  from praxis_lite.training.experiment import ExperimentConfig


class Command(NamedTuple):
  """One command."""

  name: str
  summary: str  # A line for the list of commands.
  description: str  # A paragraph for its help.
  example: str  # A valid command line.
  flags: CommandFlags  # Each with an example in its help.
  run: Callable[[flags.FlagValues], int]  # Returns the exit code. Slow imports, such as JAX, happen inside it.
  # The flag that the first positional argument sets. If it is `exp`, a directory sets `job_log_dir` instead.
  bare: str = ''
  bare_rest: str = ''  # The repeatable flag that further positional arguments set.
  stray: str = ''  # The flag that the error about an unexpected positional argument suggests.
  usage: str = ''  # The arguments, as the first line of the help shows them; '' if `bare` says what they are.


def configured_run(values: flags.FlagValues) -> tuple[ExperimentConfig, str]:
  """Returns the config of the run and its directory; sets up the devices of --devices and the compilation cache.

  Must be called before JAX looks for devices.

  Raises:
    UserError: --job_log_dir is missing, or `configured_experiment` fails.
  """
  if not values.job_log_dir:
    raise UserError('--job_log_dir is missing: name a directory, as in --job_log_dir=runs/1')

  local_path(values.job_log_dir)  # Reports an invalid directory before any other mistake.

  from praxis_lite.common.devices import simulate_cpu_devices
  from praxis_lite.runs.compilation_cache import set_up_compilation_cache

  if values.devices is not None:
    simulate_cpu_devices(values.devices)
  config = configured_experiment(values)
  set_up_compilation_cache(enabled=values.compilation_cache)
  return config, values.job_log_dir


def say_how_config_differs(values: flags.FlagValues, config: ExperimentConfig) -> None:
  """Prints on stderr how the config of --exp, which was used to restore a checkpoint, differs from the recorded one."""
  from praxis_lite.runs.records.differences import how_config_differs

  for line in how_config_differs(values.job_log_dir, config) if values.exp and values.job_log_dir else ():
    print(printable(line, one_line=True), file=sys.stderr)


def configured_experiment(values: flags.FlagValues, overrides: Sequence[str] | None = None) -> ExperimentConfig:
  """Returns the configs of --exp (an experiment or a recorded run) or else of the run in --job_log_dir, with overrides.

  It does not set up the devices of --devices; `configured_run` does. A command that uses no accelerator calls
  `leave_accelerators_alone` first, so that it can run while a training run holds the accelerators.

  Args:
    values: the parsed flags.
    overrides: the overrides to use in place of --set; None uses those of --set.

  Raises:
    UserError: the flags name no experiment and no recorded run, or a flag is not valid.
  """
  from praxis_lite.common.config.overrides import apply_overrides
  from praxis_lite.runs.records.record import has_record, read_record
  from praxis_lite.training.experiment import read_sizes

  if '' in values.trust:
    raise UserError('--trust is empty: name a module or file, as in --trust=my_layers.py')
  if values.exp and not has_record(values.exp):
    from praxis_lite.training import registry
    from praxis_lite.training.experiment import configure

    if re.fullmatch(r'[^:]*/[^:]*(?<!\.py)', values.exp):
      from praxis_lite.runs.records.runs import runs_near

      raise UserError(f'--exp: there is no experiment {values.exp!r}, and no run{runs_near(values.exp)}')
    config, record = configure(registry.get(values.exp)), None
  else:
    record = _read_recorded(values.exp or values.job_log_dir, values.trust, restores='step' in values)
    config = record.config
  apply_overrides(config.roots(), values.set if overrides is None else overrides)
  read_sizes(config.task)
  for line in () if record is None else record.other_defaults.describe(config.roots()):
    print(line, file=sys.stderr)
  if (record is None or values.trust) and values.job_log_dir:
    with contextlib.suppress(UserError):  # The directory may have no record.
      (record or read_record(values.job_log_dir)).renew_consent()
  return config


def configured_shapes(values: flags.FlagValues) -> ExperimentConfig:
  """Like `configured_experiment`, for a command that needs only shapes; keeps JAX from using accelerators.

  If a size of the mesh is -1, the mesh gets --devices devices. Without that flag, it gets as few as possible, and a
  note says so.

  Raises:
    UserError: `configured_experiment` fails, or the mesh needs more devices than --devices.
  """
  import jax

  from praxis_lite.common.devices import leave_accelerators_alone, simulate_cpu_devices
  from praxis_lite.common.jax_internals.devices import backends_have_started

  leave_accelerators_alone()
  config = configured_experiment(values)
  smallest, shape = check_devices(values, config), config.task.ici_mesh_shape or ()
  if -1 not in shape:
    return config
  if values.devices is not None:
    simulate_cpu_devices(values.devices)
  elif shape.count(-1) == 1 and smallest > 0:
    if not backends_have_started():
      simulate_cpu_devices(smallest)
    given, count = f'task.ici_mesh_shape = {shape}', jax.device_count()
    print(
      f'{given}: this is the mesh of {number_of(count, "device")}; --devices={4 * smallest} shows another',
      file=sys.stderr,
    )
  return config


def check_devices(values: flags.FlagValues, config: ExperimentConfig) -> int:
  """Returns the smallest number of devices for the mesh of a config; raises UserError if --devices is smaller.

  If a size of the mesh is -1, --devices is not checked, because it decides that size.
  """
  shape = config.task.ici_mesh_shape or ()
  smallest = abs(math.prod(shape)) * math.prod(config.task.dcn_mesh_shape or ())
  if -1 not in shape and values.devices is not None and values.devices < smallest:
    raise UserError(f'--devices={values.devices}: task.ici_mesh_shape = {shape} needs {number_of(smallest, "device")}')
  return smallest


def experiment_arguments(values: flags.FlagValues, overrides: Sequence[str] | None = None) -> list[str]:
  """Returns the flags with which another process gets the same `configured_experiment`."""
  trust = [f'--trust={module}' for module in values.trust]
  named = f'--exp={values.exp}' if values.exp else f'--job_log_dir={values.job_log_dir}'
  return [named, *trust, *(f'--set={override}' for override in (values.set if overrides is None else overrides))]


_NO_EXPERIMENT = '--exp is missing: name an experiment, as in --exp=lm.StdlibLm; `praxis-lite list` prints them. '


def _read_recorded(directory: str | None, trusted: Sequence[str], *, restores: bool) -> RunRecord:
  """Returns the record of the run in a directory; prints on stderr the fields that could not be recorded."""
  if not directory:
    raise UserError(f'{_NO_EXPERIMENT}Or name the directory of a run, as in --job_log_dir=runs/1')
  from praxis_lite.runs.records.record import has_record, read_record
  from praxis_lite.runs.records.runs import runs_near

  if not has_record(directory):
    if (near := runs_near(directory)) and (restores or os.path.isdir(directory)):
      raise UserError(f'{directory} records no run{near}')
    raise UserError(
      f'{_NO_EXPERIMENT}A new run may take the config of another run, as in --exp=runs/1. {directory} records '
      f'none{near}'
    )
  record = read_record(directory, trusted=trusted)
  for path, reason in record.lost.items():
    lost = reason if reason.startswith(path) else f'{path}: {reason}'
    print(printable(f'not recorded: {lost}', one_line=True), file=sys.stderr)
  return record


def listed_flags(command: Command) -> list[flags.Flag]:
  """Returns the flags that help and completion list: all but the one that receives the arguments after --."""
  return [f for f in command.flags.list_flags() if f.name != command.bare_rest or ' -- ' not in command.usage]


def help_text(command: Command) -> str:
  """Returns the help of a command, for a terminal of 80 columns: what it does, an example, and its flags."""
  usage = command.usage or f'{_ARGUMENTS.get(command.bare, "")}[--flags]'
  lines = [f'praxis-lite {command.name} {usage}', '']
  lines += textwrap.wrap(command.description[0].upper() + command.description[1:], _WIDTH)
  lines += ['', 'Example:', *_wrapped_command(command.example), '', 'Flags:']
  flag_list = listed_flags(command)
  heads = [f'--[no]{flag.name}' if isinstance(flag, flags.BooleanFlag) else f'--{flag.name}' for flag in flag_list]
  indent = max(map(len, heads)) + 4
  for head, flag in zip(heads, flag_list):
    text, _, example = ' '.join(str(flag.help).removesuffix(_MULTI_NOTE).split()).partition(' Example: ')
    if flag.default not in (None, [], '', False):
      text += f' Default: {"on" if flag.default is True else flag.default}.'
    rows = textwrap.wrap(text, _WIDTH - indent) + textwrap.wrap(f'Example: {example}', _WIDTH - indent)
    lines += [f'  {head if i == 0 else "":<{indent - 2}}{row}' for i, row in enumerate(rows)]
  return '\n'.join(lines) + '\n'


# absl appends this text to the help of a repeatable flag.
_MULTI_NOTE = ';\n    repeat this option to specify a list of values'
_WIDTH = 80
# How the help shows the argument that sets a flag.
_ARGUMENTS = {'exp': 'EXPERIMENT_OR_RUN ', 'job_log_dir': 'RUN ', 'dir': '[DIRECTORY] '}


def _wrapped_command(example: str) -> list[str]:
  """Returns a shell command as lines that end with backslashes between flags."""
  command, *arguments = example.split(' --')
  rows = [f'  {command}']
  for argument in arguments:
    if len(rows[-1]) + len(f' --{argument} \\') <= _WIDTH:
      rows[-1] += f' --{argument}'
    else:
      rows.append(f'    --{argument}')
  return [f'{row} \\' for row in rows[:-1]] + rows[-1:]
