"""What commands share: their definition, their help, and the config of the experiment that their flags name.

Experiments, configs and JAX are imported inside functions, so that help appears immediately.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from absl import flags

from praxis_lite.cli.command_flags import CommandFlags
from praxis_lite.common.errors import UserError
from praxis_lite.common.files import local_path
from praxis_lite.common.foreign_text import printable

if TYPE_CHECKING:
  from praxis_lite.training.experiment import ExperimentConfig


class Command(NamedTuple):
  """One command.

  Attributes:
    name, example: its name on the command line, and a valid command line.
    summary, description: a line for the list of commands, and a paragraph for its help.
    flags: absl flags, each with an example in its help.
    run: takes the parsed flags and returns the exit code. Slow imports, such as JAX, happen inside it.
    bare: name of the flag that the first positional argument sets; '' if the command takes none. If the flag is `exp`,
      an argument that is a directory sets `job_log_dir` instead.
    bare_rest: name of the repeatable flag that further positional arguments set.
    usage: the arguments, as the first line of the help shows them.
  """

  name: str
  summary: str
  description: str
  example: str
  flags: CommandFlags
  run: Callable[[flags.FlagValues], int]
  bare: str = ''
  bare_rest: str = ''
  usage: str = '[--flags]'


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


def configured_experiment(values: flags.FlagValues, overrides: Sequence[str] | None = None) -> ExperimentConfig:
  """Returns the configs of --exp, or of the record of the run in --job_log_dir, with overrides applied.

  It does not set up the devices of --devices; `configured_run` does. A command that uses no accelerator calls
  `leave_accelerators_alone` first, so that it can run while a training run holds the accelerators.

  Args:
    values: the parsed flags.
    overrides: replace the values of --set.

  Raises:
    UserError: the flags name no experiment and no recorded run, or a flag is not valid.
  """
  from praxis_lite.common.config.overrides import apply_overrides

  if values.exp:
    from praxis_lite.training import registry
    from praxis_lite.training.experiment import configure

    config = configure(registry.get(values.exp))
  else:
    config = _read_recorded(values)
  apply_overrides(config.roots(), values.set if overrides is None else overrides)
  return config


def experiment_arguments(values: flags.FlagValues, overrides: Sequence[str] | None = None) -> list[str]:
  """Returns the command-line flags that give another process the same `configured_experiment`."""
  trust = [f'--trust={module}' for module in values.trust]
  named = [f'--exp={values.exp}'] if values.exp else [f'--job_log_dir={values.job_log_dir}', *trust]
  return [*named, *(f'--set={override}' for override in (values.set if overrides is None else overrides))]


def _read_recorded(values: flags.FlagValues) -> ExperimentConfig:
  """Returns the configs that the run in --job_log_dir recorded; prints on stderr which parts the record lacks."""
  if not values.job_log_dir:
    raise UserError(
      '--exp is missing: name an experiment, as in --exp=lm.StdlibLm; `praxis-lite list` prints them. '
      'Or name the directory of a run, as in --job_log_dir=runs/1'
    )
  from praxis_lite.runs.records.record import has_record, read_record
  from praxis_lite.runs.records.runs import runs_near

  if not has_record(values.job_log_dir):
    raise UserError(
      f'--exp is missing: name an experiment, as in --exp=lm.StdlibLm; `praxis-lite list` prints them. '
      f'{values.job_log_dir} records none{runs_near(values.job_log_dir)}'
    )
  record = read_record(values.job_log_dir, trusted=values.trust)
  for path, reason in record.lost.items():
    lost = reason if reason.startswith(path) else f'{path}: {reason}'
    print(printable(f'not recorded: {lost}', one_line=True), file=sys.stderr)
  return record.config


def help_text(command: Command) -> str:
  """Returns the help of a command, for a terminal of 80 columns: what it does, an example, and its flags."""
  lines = [f'praxis-lite {command.name} {command.usage}', '']
  lines += textwrap.wrap(command.description[0].upper() + command.description[1:], _WIDTH)
  lines += ['', 'Example:', *_wrapped_command(command.example), '', 'Flags:']
  flag_list = command.flags.list_flags()
  heads = [f'--[no]{flag.name}' if isinstance(flag, flags.BooleanFlag) else f'--{flag.name}' for flag in flag_list]
  indent = max(map(len, heads)) + 4
  for head, flag in zip(heads, flag_list):
    text, _, example = ' '.join(str(flag.help).removesuffix(_MULTI_NOTE).split()).partition(' Example: ')
    if flag.default not in (None, [], '', False):
      text += f' Default: {"on" if flag.default is True else flag.default}.'
    rows = textwrap.wrap(text, _WIDTH - indent) + textwrap.wrap(f'Example: {example}', _WIDTH - indent)
    lines += [f'  {head if i == 0 else "":<{indent - 2}}{row}' for i, row in enumerate(rows)]
  return '\n'.join(lines) + '\n'


# absl appends this to the help of a repeatable flag.
_MULTI_NOTE = ';\n    repeat this option to specify a list of values'
_WIDTH = 80


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
