"""What commands share: their form, flags of several commands, and what those on an experiment do first.

Experiments, configs and JAX are imported inside functions, so that help is printed at once.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from absl import flags

from praxis_lite.errors import UserError

if TYPE_CHECKING:
  from praxis_lite.experiment import ExperimentConfig


class Command(NamedTuple):
  """One command.

  Attributes:
    name, example: as typed on the command line, and a valid command line.
    summary, description: a line for the list of commands, and a paragraph for its help.
    flags: absl flags, each with an example in its help.
    run: takes the parsed flags and returns the exit code.
  """

  name: str
  summary: str
  description: str
  example: str
  flags: flags.FlagValues
  run: Callable[[flags.FlagValues], int]


def experiment_flags() -> flags.FlagValues:
  """Returns the flags of all commands on an experiment."""
  values = flags.FlagValues()
  classes = 'a registered name, my_package.my_module.MyExperiment, or path/to/file.py:MyExperiment'
  flags.DEFINE_string('exp', None, f'Experiment: {classes}. Example: --exp=lm.StdlibLm', flag_values=values)
  override = 'Override a field of the config, by its path in the output of show; may be repeated.'
  example = 'Example: --set task.train.num_train_steps=100'
  flags.DEFINE_multi_string('set', [], f'{override} {example}', flag_values=values)
  simulate = 'Simulate this many CPU devices. Example: --devices=8'
  flags.DEFINE_integer('devices', None, simulate, lower_bound=1, flag_values=values)
  return values


def run_flags(*, seed: str = '', restores: bool = False) -> flags.FlagValues:
  """Returns the flags of all commands on a run: those on an experiment, its directory and the compilation cache.

  `seed` is the help of --seed; without it the command has no such flag. If it `restores` a checkpoint, it has --step.
  """
  values = experiment_flags()
  directory = 'Directory of checkpoints and logs. Example: --job_log_dir=runs/1'
  flags.DEFINE_string('job_log_dir', None, directory, flag_values=values)
  cache = 'Keep compiled programs in ~/.cache/praxis_lite. Example: --nocompilation_cache'
  flags.DEFINE_boolean('compilation_cache', True, cache, flag_values=values)
  if seed:  # JAX makes keys of 32 bits of it: larger seeds would repeat the draws of smaller ones.
    flags.DEFINE_integer('seed', 0, seed, lower_bound=0, upper_bound=2**32 - 1, flag_values=values)
  if restores:
    step = 'Step of the checkpoint, or best; by default the newest. Example: --step=best'
    flags.DEFINE(_StepParser(), 'step', None, step, flag_values=values)
  return values


class _StepParser(flags.ArgumentParser[int | str]):
  """Reads the number of a step, or best."""

  def parse(self, argument: int | str) -> int | str:
    if str(argument) == 'best' or str(argument).isdecimal():
      return 'best' if argument == 'best' else int(argument)
    raise ValueError('expected a step such as 500, or best')

  def flag_type(self) -> str:
    return 'step'


def configured_run(values: flags.FlagValues) -> tuple[ExperimentConfig, str]:
  """Returns the config of the run and its directory; sets up the devices of --devices and the compilation cache.

  Must be called before JAX looks for devices. Raises as `configured_experiment`, and if --job_log_dir is missing.
  """
  if not values.job_log_dir:
    raise UserError('--job_log_dir is missing: name a directory, as in --job_log_dir=runs/1')

  from praxis_lite.runtime.distributed import set_up_compilation_cache, simulate_cpu_devices

  if values.devices is not None:
    simulate_cpu_devices(values.devices)
  config = configured_experiment(values)
  set_up_compilation_cache(enabled=values.compilation_cache)
  return config, values.job_log_dir


def configured_experiment(values: flags.FlagValues) -> ExperimentConfig:
  """Returns the configs of --exp with every --set applied; raises UserError if one of them is missing or not valid."""
  from praxis_lite import registry
  from praxis_lite.config.overrides import apply_overrides
  from praxis_lite.experiment import configure

  if not values.exp:
    raise UserError('--exp is missing: name an experiment, as in --exp=lm.StdlibLm; `praxis-lite list` prints them')
  config = configure(registry.get(values.exp))
  apply_overrides(config.roots(), values.set)
  return config


def help_text(command: Command) -> str:
  """Returns the help of a command, for a terminal of 80 columns: what it does, an example, and its flags."""
  lines = [f'praxis-lite {command.name} [--flags]', '']
  lines += textwrap.wrap(command.description[0].upper() + command.description[1:], _WIDTH)
  lines += ['', 'Example:', *_wrapped_command(command.example), '', 'Flags:']
  flag_list = [flag for name, flag in command.flags._flags().items() if flag.name == name]
  heads = [f'--[no]{flag.name}' if isinstance(flag, flags.BooleanFlag) else f'--{flag.name}' for flag in flag_list]
  indent = max(map(len, heads)) + 4
  for head, flag in zip(heads, flag_list):
    text, _, example = ' '.join(str(flag.help).removesuffix(_MULTI_NOTE).split()).partition(' Example: ')
    if flag.default not in (None, [], '', False):
      text += f' Default: {"on" if flag.default is True else flag.default}.'
    rows = textwrap.wrap(text, _WIDTH - indent) + textwrap.wrap(f'Example: {example}', _WIDTH - indent)
    lines += [f'  {head if i == 0 else "":<{indent - 2}}{row}' for i, row in enumerate(rows)]
  return '\n'.join(lines) + '\n'


# absl appends this to the help of a flag that may be repeated.
_MULTI_NOTE = ';\n    repeat this option to specify a list of values'
_WIDTH = 80


def _wrapped_command(example: str) -> list[str]:
  """Returns the lines of a command in a shell, broken between flags with backslashes."""
  command, *arguments = example.split(' --')
  rows = [f'  {command}']
  for argument in arguments:
    if len(rows[-1]) + len(f' --{argument} \\') <= _WIDTH:
      rows[-1] += f' --{argument}'
    else:
      rows.append(f'    --{argument}')
  return [f'{row} \\' for row in rows[:-1]] + rows[-1:]
