"""What a command is: its own set of absl flags, each with an example, and a function to run."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import NamedTuple

from absl import flags


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
    'Override a field of the config; may be repeated. Example: --set task.train.num_train_steps=100',
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
  """The help of one command: what it does, an example, and its flags."""
  lines = [f'praxis-lite {command.name}: {command.description}', '', 'Example:', f'  {command.example}', '', 'Flags:']
  for name in sorted(command.flags):
    flag = command.flags[name]
    if flag.name != name:
      continue
    default = '' if flag.default in (None, [], False) else f' (default: {flag.default})'
    head = f'  --[no]{name}' if isinstance(flag, flags.BooleanFlag) else f'  --{name}'
    text = ' '.join(str(flag.help).split()) + default
    lines += [head, textwrap.fill(text, 96, initial_indent='      ', subsequent_indent='      ')]
  return '\n'.join(lines) + '\n'
