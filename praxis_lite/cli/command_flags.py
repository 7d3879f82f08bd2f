"""CommandFlags: the flags of a command, and the flags that several commands share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from praxis_lite.common.errors import UserError


class CommandFlags(flags.FlagValues):
  """The flags of a command. Each flag has a text that says what it does, and an example value."""

  def __call__(self, argv: Sequence[str], known_only: bool = False) -> list[str]:
    """Parses a command line, where flags may have dashes in place of underscores; returns the positional arguments."""
    return super().__call__([argv[0], *self._replace_dashes(argv[1:])], known_only)

  def _replace_dashes(self, arguments: Sequence[str]) -> Iterator[str]:
    spellings: dict[str, str] = {}
    for i, argument in enumerate(arguments):
      if argument == '--':
        yield from arguments[i:]
        return
      name, equals, value = argument.partition('=')
      flag = name.lstrip('-').replace('-', '_')
      if flag not in self:
        flag = flag.replace('no_', 'no', 1) if flag.startswith('no_') else flag
      is_flag = name.startswith('-') and (flag in self or flag.removeprefix('no') in self)
      is_single = is_flag and flag in self and not isinstance(self[flag], flags.MultiFlag)
      if is_single and spellings.setdefault(flag, name) != name:
        raise UserError(f'{spellings[flag]} and {name} are the same flag; give it once')
      yield f'--{flag}{equals}{value}' if is_flag else argument

  def add_text(self, name: str, does: str, example: str, default: str | None = None) -> None:
    flags.DEFINE_string(name, default, _help(name, does, example), flag_values=self)

  def add_texts(self, name: str, does: str, example: str) -> None:
    """Adds a flag that may be repeated; its value is a list."""
    flags.DEFINE_multi_string(name, [], _help(name, f'{does} May be repeated.', example), flag_values=self)

  def add_list(self, name: str, does: str, example: str) -> None:
    """Adds a flag whose value is a list of texts, separated by commas."""
    flags.DEFINE_list(name, [], _help(name, does, example), flag_values=self)

  def add_switch(self, name: str, does: str, *, default: bool | None = False) -> None:
    text = f'{does} Example: --{"" if default is False else "no"}{name}'
    flags.DEFINE_boolean(name, default, text, flag_values=self)

  def add_choice(self, name: str, does: str, choices: Sequence[str], example: str, default: str | None = None) -> None:
    flags.DEFINE_enum(name, default, choices, _help(name, does, example), flag_values=self)

  def add_integer(
    self,
    name: str,
    does: str,
    example: int,
    default: int | None = None,
    *,
    least: int | None = None,
    most: int | None = None,
  ) -> None:
    text = _help(name, does, str(example))
    flags.DEFINE_integer(name, default, text, lower_bound=least, upper_bound=most, flag_values=self)

  def add_number(
    self, name: str, does: str, example: str, default: float | None = None, *, least: float | None = None
  ) -> None:
    parser, text = _NumberParser(least), _help(name, does, example)
    flags.DEFINE(parser, name, default, text, self, flags.ArgumentSerializer[float]())

  def add_parsed(self, name: str, does: str, example: str, parser: flags.ArgumentParser[Any]) -> None:
    """Adds a flag whose value `parser` parses."""
    flags.DEFINE(parser, name, None, _help(name, does, example), flag_values=self)

  def list_flags(self) -> list[flags.Flag]:
    """Returns the flags in the order in which they were added."""
    return [flag for name, flag in self._flags().items() if flag.name == name]


def _help(name: str, does: str, example: str) -> str:
  return f'{does} Example: --{name}{" " if "=" in example else "="}{example}'


def experiment_flags() -> CommandFlags:
  """Returns the flags of all commands that take an experiment or a run."""
  values = CommandFlags()
  classes = 'a registered name, my_package.my_module.MyExperiment, or path/to/file.py:MyExperiment'
  values.add_text('exp', f'Experiment: {classes}; or the directory of a run, for its config.', 'lm.StdlibLm')
  override = 'Override a field of the config, by the path that show prints.'
  values.add_texts('set', override, 'task.train.num_train_steps=100')
  values.add_text('job_log_dir', 'Directory of a run. Without --exp, its recorded config is used.', 'runs/1')
  values.add_texts('trust', 'Module or file whose code the recorded config may name.', 'my_layers.py')
  return values


def run_flags(*, seed: str = '', restores: bool = False) -> CommandFlags:
  """Returns the flags of all commands that run an experiment: `experiment_flags`, --devices, and the compilation cache.

  `seed`, the help text of --seed, adds this flag; `restores` adds --step, for a command that restores a checkpoint.
  """
  values = experiment_flags()
  add_devices(values)
  cache = 'Keep compiled programs in ~/.cache/praxis_lite.'
  values.add_switch('compilation_cache', cache, default=True)
  if seed:  # JAX uses 32 bits, so a larger seed would repeat the random numbers of a smaller one.
    values.add_integer('seed', seed, 1, 0, least=0, most=2**32 - 1)
  if restores:
    values.add_parsed('step', 'Step of the checkpoint, or best; by default the newest.', 'best', _StepParser())
  return values


def add_devices(values: CommandFlags, does: str = 'Simulate this many CPU devices.') -> None:
  values.add_integer('devices', does, 8, least=1)


def add_on_damage(values: CommandFlags) -> None:
  damage = 'If the newest checkpoint is damaged, use the one before it, or fail.'
  values.add_choice('on_damage', damage, ['previous', 'fail'], 'fail', 'previous')


def add_traceback(values: CommandFlags) -> None:
  values.add_switch('traceback', 'After a mistake, print where in the code it was found.')


def add_track(values: CommandFlags) -> None:
  track = 'Also send metrics to wandb, mlflow, aim, comet or prometheus, as task.train.loggers does.'
  values.add_texts('track', track, 'wandb')


def add_tap(values: CommandFlags, of: str, what: str = '') -> None:
  does = f'{what or "Add to the metrics"} statistics of {of} by path; see docs/inside.md.'
  values.add_texts('tap', does, 'lm.transformer.*.attention:rms,max')


def add_tracked(loggers: Sequence[object], names: Sequence[str]) -> tuple[object, ...]:
  """Returns the loggers of a config and those that --track adds to them; raises UserError if a name has a comma."""
  for name in names:
    if ',' in name:
      each = ' '.join(f'--track={part.strip()}' for part in name.split(','))
      raise UserError(f'--track={name}: repeat the flag for each logger: {each}')
  return (*loggers, *(name for name in dict.fromkeys(names) if name not in loggers))


def add_metric(values: CommandFlags) -> None:
  """Adds the flags for the metric that compares runs."""
  metric = 'Metric to compare runs by; by default best_metric of their configs, or the loss of the evaluation.'
  values.add_text('metric', metric, 'eval/validation/accuracy')
  mode = 'Whether lower (min) or higher (max) is better; by default as the configs say, or the name of the metric.'
  values.add_choice('mode', mode, ['min', 'max'], 'max')


class _NumberParser(flags.FloatParser):
  """Parses a number; refuses `nan` and `inf`, with which no command can compute."""

  def convert(self, argument: float | int | str) -> float:
    value = super().convert(argument)
    if not math.isfinite(value):
      raise ValueError('expected a finite number')
    return value


class _StepParser(flags.ArgumentParser[int | str]):
  """Parses the number of a step, or 'best'."""

  def parse(self, argument: int | str) -> int | str:
    if str(argument) == 'best' or str(argument).isdecimal():
      return 'best' if argument == 'best' else int(argument)
    raise ValueError('expected a step such as 500, or best; without --step, the newest is used')

  def flag_type(self) -> str:
    return 'step'
