"""What a command is: its own set of absl flags, each with an example, and a function to run."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import NamedTuple

from absl import flags

# JAX makes a key of 32 bits of a seed: larger ones would draw what a smaller one draws.
MAX_SEED = 2**32 - 1


class Command(NamedTuple):
  """One command of the command line.

  Attributes:
    name: as it is typed.
    description: a paragraph for its help.
    example: a command line that works.
    flags: its flags.
    run: takes the parsed flags and returns the exit code.
  """

  name: str
  description: str
  example: str
  flags: flags.FlagValues
  run: Callable[[flags.FlagValues], int]


def experiment_flags() -> flags.FlagValues:
  """The flags that all commands on an experiment share."""
  values = flags.FlagValues()
  flags.DEFINE_string(
    'exp',
    None,
    'Experiment: a registered name, my_package.my_module.MyExperiment, or path/to/file.py:MyExperiment. '
    'Example: --exp=lm.StdlibLm',
    flag_values=values,
  )
  flags.DEFINE_multi_string(
    'set',
    [],
    'Override a field of the config, by its path in the output of show; may be repeated. '
    'Example: --set task.train.num_train_steps=100',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'devices', None, 'Simulate this many CPU devices. Example: --devices=8', lower_bound=1, flag_values=values
  )
  return values


def job_log_dir_flag(values: flags.FlagValues) -> None:
  """Adds --job_log_dir."""
  flags.DEFINE_string(
    'job_log_dir', None, 'Directory of checkpoints and logs. Example: --job_log_dir=runs/1', flag_values=values
  )


def compilation_cache_flag(values: flags.FlagValues) -> None:
  """Adds --compilation_cache."""
  flags.DEFINE_boolean(
    'compilation_cache',
    True,
    'Keep compiled programs in ~/.cache/praxis_lite. Example: --nocompilation_cache',
    flag_values=values,
  )


def checkpoint_flags(values: flags.FlagValues) -> None:
  """Adds the flags of commands that read a checkpoint."""
  job_log_dir_flag(values)
  compilation_cache_flag(values)
  flags.DEFINE_integer(
    'step', None, 'Which checkpoint; the newest by default. Example: --step=500', lower_bound=0, flag_values=values
  )


def help_text(command: Command) -> str:
  """The help of one command, for a terminal of 80 columns: what it does, an example, and its flags."""
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


# absl adds it to the help of a flag that may be repeated.
_MULTI_NOTE = ';\n    repeat this option to specify a list of values'
_WIDTH = 80


def _wrapped_command(example: str) -> list[str]:
  """A command line as one would type it into a shell, continued between flags by backslashes."""
  command, *arguments = example.split(' --')
  rows = [f'  {command}']
  for argument in arguments:
    if len(rows[-1]) + len(f' --{argument} \\') <= _WIDTH:
      rows[-1] += f' --{argument}'
    else:
      rows.append(f'    --{argument}')
  return [f'{row} \\' for row in rows[:-1]] + rows[-1:]
