"""The common parts of commands: their definition, flags of several commands, and the config of an experiment.

Functions import experiments, configs and JAX themselves, so that help appears immediately.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from absl import flags

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
    run: takes the parsed flags and returns the exit code.
    bare: name of the flag that the first argument without a flag sets; '' if the command takes no such argument.
    bare_rest: name of the repeatable flag that further such arguments set.
  """

  name: str
  summary: str
  description: str
  example: str
  flags: flags.FlagValues
  run: Callable[[flags.FlagValues], int]
  bare: str = ''
  bare_rest: str = ''


def experiment_flags() -> flags.FlagValues:
  """Returns the flags of all commands that take an experiment or a run."""
  values = flags.FlagValues()
  classes = 'a registered name, my_package.my_module.MyExperiment, or path/to/file.py:MyExperiment'
  flags.DEFINE_string('exp', None, f'Experiment: {classes}. Example: --exp=lm.StdlibLm', flag_values=values)
  override = 'Override a field of the config, by its path in the output of show; may be repeated.'
  example = 'Example: --set task.train.num_train_steps=100'
  flags.DEFINE_multi_string('set', [], f'{override} {example}', flag_values=values)
  directory = 'Directory of a run; without --exp, the config that it records is used. Example: --job_log_dir=runs/1'
  flags.DEFINE_string('job_log_dir', None, directory, flag_values=values)
  trust = 'Module or file whose code the recorded config may name; may be repeated. Example: --trust=my_layers.py'
  flags.DEFINE_multi_string('trust', [], trust, flag_values=values)
  traced = 'After a mistake, print where in the code it was found. Example: --traceback'
  flags.DEFINE_boolean('traceback', False, traced, flag_values=values)
  simulate = 'Simulate this many CPU devices. Example: --devices=8'
  flags.DEFINE_integer('devices', None, simulate, lower_bound=1, flag_values=values)
  return values


def run_flags(*, seed: str = '', restores: bool = False) -> flags.FlagValues:
  """Returns the flags of all commands that run an experiment: `experiment_flags`, and the compilation cache.

  `seed` is the help of --seed; if it is empty, the command has no such flag. A command that `restores` a checkpoint has
  --step.
  """
  values = experiment_flags()
  cache = 'Keep compiled programs in ~/.cache/praxis_lite. Example: --nocompilation_cache'
  flags.DEFINE_boolean('compilation_cache', True, cache, flag_values=values)
  if seed:  # JAX uses 32 bits of it, so larger seeds would repeat the draws of smaller ones.
    flags.DEFINE_integer('seed', 0, seed, lower_bound=0, upper_bound=2**32 - 1, flag_values=values)
  if restores:
    step = 'Step of the checkpoint, or best; by default the newest. Example: --step=best'
    flags.DEFINE(_StepParser(), 'step', None, step, flag_values=values)
  return values


def damage_flag(values: flags.FlagValues) -> None:
  """Defines --on_damage."""
  damage = 'Where the newest checkpoint is damaged: use the one before, or fail. Example: --on_damage=fail'
  flags.DEFINE_enum('on_damage', 'previous', ['previous', 'fail'], damage, flag_values=values)


class _StepParser(flags.ArgumentParser[int | str]):
  """Parses the number of a step, or 'best'."""

  def parse(self, argument: int | str) -> int | str:
    if str(argument) == 'best' or str(argument).isdecimal():
      return 'best' if argument == 'best' else int(argument)
    raise ValueError('expected a step such as 500, or best')

  def flag_type(self) -> str:
    return 'step'


def configured_run(values: flags.FlagValues) -> tuple[ExperimentConfig, str]:
  """Returns the config of the run and its directory; sets up the devices of --devices and the compilation cache.

  Must be called before JAX looks for devices.

  Raises:
    UserError: --job_log_dir is missing, or `configured_experiment` raises it.
  """
  if not values.job_log_dir:
    raise UserError('--job_log_dir is missing: name a directory, as in --job_log_dir=runs/1')

  local_path(values.job_log_dir)  # Reports a wrong directory before any other mistake.

  from praxis_lite.common.devices import simulate_cpu_devices
  from praxis_lite.runs.compilation_cache import set_up_compilation_cache

  if values.devices is not None:
    simulate_cpu_devices(values.devices)
  config = configured_experiment(values)
  set_up_compilation_cache(enabled=values.compilation_cache)
  return config, values.job_log_dir


def configured_experiment(values: flags.FlagValues, overrides: Sequence[str] | None = None) -> ExperimentConfig:
  """Returns the configs of --exp, or of the record of the run in --job_log_dir, with overrides applied.

  Args:
    values: the parsed flags.
    overrides: overrides to use in place of the values of --set.

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
  """Returns the flags with which `configured_experiment` returns the same configs in another process."""
  trust = [f'--trust={module}' for module in values.trust]
  named = [f'--exp={values.exp}'] if values.exp else [f'--job_log_dir={values.job_log_dir}', *trust]
  return [*named, *(f'--set={override}' for override in (values.set if overrides is None else overrides))]


def _read_recorded(values: flags.FlagValues) -> ExperimentConfig:
  """Returns the configs that the run in --job_log_dir recorded; prints on stderr which parts are not in the record."""
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


def defined_flags(values: flags.FlagValues) -> list[flags.Flag]:
  """Returns the defined flags in order, without the duplicates of short names."""
  return [flag for name, flag in values._flags().items() if flag.name == name]


def help_text(command: Command) -> str:
  """Returns the help of a command, for a terminal of 80 columns: what it does, an example, and its flags."""
  bare = ''.join(f' {name.upper()}' for name in (command.bare, command.bare_rest) if name)
  lines = [f'praxis-lite {command.name}{bare} [--flags]', '']
  lines += textwrap.wrap(command.description[0].upper() + command.description[1:], _WIDTH)
  lines += ['', 'Example:', *_wrapped_command(command.example), '', 'Flags:']
  flag_list = defined_flags(command.flags)
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
