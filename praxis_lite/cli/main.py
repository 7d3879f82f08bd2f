"""Entry point of `praxis-lite`: finds the command, parses its flags, and reports a user's mistake in one line.

This module imports nothing heavier than absl's flags until a command runs, so that help appears immediately.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TextIO, cast

from absl import flags

from praxis_lite.cli import completion
from praxis_lite.cli.command import Command, help_text
from praxis_lite.cli.command_flags import add_traceback
from praxis_lite.common.errors import UserError, did_you_mean
from praxis_lite.common.files import file_error
from praxis_lite.common.foreign_text import PrintableStream, printable, remove_secrets
from praxis_lite.common.importing import user_code_error
from praxis_lite.common.interrupts import EXIT_CODE, end_on_interrupt
from praxis_lite.common.other_names import field_path
from praxis_lite.common.versions import package_version

# The modules of the commands, in the order in which `praxis-lite help` lists them.
_NAMES = """
  list_experiments show check plan verify coordinate_check tokenize_files train status replay agree launch sweep runs
  scaling evaluate predict decode serve export import_hf export_hf quantize checkpoints
"""
_MODULES = [importlib.import_module(f'praxis_lite.cli.{name}') for name in _NAMES.split()]
COMMANDS: dict[str, Command] = {module.COMMAND.name: module.COMMAND for module in _MODULES}
COMMANDS['completion'] = completion.make_command(COMMANDS)
for _command in COMMANDS.values():
  add_traceback(_command.flags)

# Names of commands in other tools and in the Python API, and the command that does the same here.
_ALSO_CALLED = {
  'explain': 'show --sharding',
  'chat': 'decode --chat',
  'generate': 'decode',
  'sample': 'decode',
  'fit': 'train',
}

# These commands lock the directory of a run and handle signals in ways that only Linux and macOS support.
_NOT_ON_WINDOWS = ('verify', 'train', 'replay', 'launch', 'eval', 'predict', 'decode')

_USAGE = """praxis-lite: declare how a JAX model is split; train it on any mesh of devices.

Usage: praxis-lite COMMAND [--flags]

Commands:
{commands}

praxis-lite COMMAND --help describes a command and its flags.

A mistake is reported in one line; --traceback shows where in the code it is.

Exit codes:
    0  success
    1  a problem: check, plan, verify, coordinate-check, agree, sweep, status,
       replay, checkpoints
    2  a mistake in the command, the config or the data
   75  a host was lost, or there was no time to save; the same command resumes
   76  a faulty device (train --check_determinism, --check_replicas)
  130  Ctrl-C; train has saved the run
  143  train saved the run after SIGTERM

Example:
  praxis-lite train --exp=lm.StdlibLmTiny --job_log_dir=runs/1
"""


def main(argv: Sequence[str]) -> int:
  """Runs one command and returns its exit code. For a user's mistake, prints one line on stderr and returns 2."""
  name, *arguments = argv or ['--help']
  if name == 'help' and arguments:
    name, *arguments = arguments[0], '--help'
  if name in ('--help', '-h', '-help', 'help', '--helpfull'):
    width = max(map(len, COMMANDS))
    print(_USAGE.format(commands='\n'.join(f'  {c.name:<{width}}  {c.summary}' for c in COMMANDS.values())), end='')
    return 0
  if name == '--version':
    print(f'praxis_lite {package_version()}')
    return 0
  is_traced = '--traceback' in arguments
  try:
    if name not in COMMANDS and name in _ALSO_CALLED:
      raise UserError(f"no command '{name}'; `praxis-lite {_ALSO_CALLED[name]}` does this")
    if name not in COMMANDS:
      meant = did_you_mean(name, [*COMMANDS, '--version', '--help'])
      raise UserError(f"no command '{name}'.{meant} Commands: {', '.join(COMMANDS)}.")
    command = COMMANDS[name]
    if any(a in ('--help', '-h', '-help', '--helpfull') for a in arguments):
      print(help_text(command), end='')
      return 0
    if sys.platform == 'win32' and name in _NOT_ON_WINDOWS:
      raise UserError(
        'on Windows, praxis-lite lists, shows and checks experiments; run it in WSL 2 to train, evaluate and decode'
      )
    values = copy.deepcopy(command.flags)  # A copy, because parsing changes flags, and main may be called again.
    rest = values([f'praxis-lite {name}', *arguments])[1:]
    if rest and (bare := _bare_flag(rest[0], command)) and not values[bare].present:
      values[bare].parse(rest.pop(0))
    if rest and command.bare_rest:
      values[command.bare_rest].parse(rest)
      rest = []
    if rest:
      raise UserError(f'unexpected argument {rest[0]!r}; {_meant_by(rest, values, command)}')
    with _filter_output(command):
      return command.run(values)
  except (UserError, flags.Error) as error:
    if is_traced:
      traceback.print_exc()
    code = error.exit_code if isinstance(error, UserError) else 2
    return _report_failure(name, _one_line(error, name), code)
  except KeyboardInterrupt:
    return EXIT_CODE
  except Exception as error:
    # JAX raises these types for every failure of a program. They are compared by name: JAX may not be imported.
    if type(error).__name__ not in ('JaxRuntimeError', 'XlaRuntimeError') or 'RESOURCE_EXHAUSTED' not in str(error):
      failure = user_code_error(error)
      if failure is None and isinstance(error, ModuleNotFoundError) and f'{error.name}'.startswith('praxis_lite.'):
        return _report_failure(name, f'{name} needs {error.name}, which is not installed')
      about_file = file_error(error) if failure is None and isinstance(error, OSError) else None
      if failure is None and about_file is None:
        raise
      if is_traced:
        traceback.print_exc()
      hint = '' if is_traced or about_file is not None else '; --traceback shows how it got there'
      return _report_failure(name, f'{about_file or failure}{hint}')
    what = str(error).strip().splitlines()[0].removeprefix('RESOURCE_EXHAUSTED: ').rstrip('.')
    remedy = 'it may fit with a smaller batch or model, shorter sequences, more microbatches, or more devices'
    return _report_failure(name, f'{what}; {remedy}')


def run() -> None:
  """Runs the console script and exits the process with its exit code."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  sys.path.insert(0, os.getcwd())
  # Imports and tracing make many long-lived objects. Collecting them takes a tenth of the time of a short command.
  gc.set_threshold(20_000, 20, 100)
  end_on_interrupt()
  try:
    code = main(sys.argv[1:])
    sys.stdout.flush()
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    code = 0  # The reader has closed the pipe, as in `show | head`.
    if sys.argv[1:2] == ['train']:
      stopped = 'the process that read its output has ended, so training stopped'
      code = _report_failure('train', f'{stopped}; the same command resumes from the last checkpoint')
  _leave_others(code)
  sys.exit(code)


def _leave_others(code: int) -> None:
  """Ends a failed process of a multi-process run at once. In a normal exit, JAX would wait for the other processes."""
  watchdog = sys.modules.get('praxis_lite.runs.cluster.watchdog')
  running = watchdog.the_watchdog() if watchdog is not None else None
  if running is not None and code in (1, UserError.exit_code):
    running.end(code)


# These commands run users' code, whose output is not filtered. They filter other text themselves where they print it.
_RUN_CODE_OF_USERS = ('train', 'eval', 'predict', 'decode', 'replay', 'launch')


@contextlib.contextmanager
def _filter_output(command: Command) -> Iterator[None]:
  """Filters control sequences from a command's output, because the records that it prints may be untrusted.

  The output of commands that run code of users is not filtered.
  """
  if command.name in _RUN_CODE_OF_USERS:
    yield
    return
  out, err = (cast(TextIO, PrintableStream(stream)) for stream in (sys.stdout, sys.stderr))
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    yield


def _report_failure(command: str, message: str, code: int = UserError.exit_code) -> int:
  message = printable(remove_secrets(message), one_line=True)
  print(f'praxis-lite {command}: error: {message}', file=sys.stderr)
  return code


def _bare_flag(argument: str, command: Command) -> str:
  """Returns the flag that a positional argument sets, such as 'exp' or 'job_log_dir'; '' if it sets none."""
  if command.bare != 'exp':
    return command.bare
  if os.path.isdir(argument):
    return 'job_log_dir'
  if '=' in argument:  # The user has probably forgotten --set.
    return ''
  return 'job_log_dir' if '/' in argument and '.py' not in argument else 'exp'


def _meant_by(rest: Sequence[str], values: flags.FlagValues, command: Command) -> str:
  """Returns the end of an error about unexpected positional arguments: which flags may be meant, and their spelling."""
  given = values['set'].value if 'set' in command.flags else []
  at = next((i for i, word in enumerate(rest) if word.startswith('=')), None)
  if given and at is None and given[-1].endswith('='):
    at = len(rest) - 1
  if not given or at is None:
    return _written_as_flags(rest, values, command)
  last = at + 2 if rest[at] == '=' else at + 1
  separate = [given[-1], *(word for word in rest[at:last] if not word.startswith('-'))]
  override = f'an override is one word, as in --set={"".join(separate)}, or in quotes: --set "{" ".join(separate)}"'
  return f'{_written_as_flags(rest[:at], values, command)}; {override}' if at else override


def _written_as_flags(words: Sequence[str], values: flags.FlagValues, command: Command) -> str:
  """Returns 'flags are written --name=value, as in ...'. The dots stand for the words, written as the flags meant."""
  free = [name for name in ('exp', 'job_log_dir') if name in command.flags and not values[name].present]
  written = []
  for word in words:
    flag = _flag_of(word, command, free)
    if flag in command.flags:
      written.append(f'--{flag}={shlex.quote(word)}')
    free = [name for name in free if name != flag]
  return f'flags are written --name=value{", as in " if written else ""}{" ".join(written)}'


def _flag_of(word: str, command: Command, free: Sequence[str]) -> str:
  """Returns the flag that an argument is probably meant for; '' if unknown. `free` are the flags not given yet."""
  if word.partition(':')[0].endswith('.py') or re.fullmatch(r'\w+(\.\w+)+', word):
    return 'exp'
  if re.match(r'[\w.\[\]*]+=', word):
    return 'set'
  if re.fullmatch(r'\d+|best', word) and 'step' in command.flags:
    return 'step'
  is_path = os.path.isdir(word) or re.fullmatch(r'[^\s/]+/\S+', word)
  return 'job_log_dir' if is_path and 'job_log_dir' in free else command.stray


def _one_line(error: Exception, command: str) -> str:
  text = ' '.join(str(error).split())
  # These messages of absl are replaced: Python's own messages, which absl passes on, and an incomplete one.
  text = re.sub(r"invalid literal for int\(\) with base 10: '.*'", 'expected an integer', text)
  text = re.sub(r"could not convert string to float: '.*'", 'expected a number', text)
  text = re.sub(r"\('Non-boolean argument to boolean flag', '.*'\)", 'expected true or false', text)
  if isinstance(error, flags.UnrecognizedFlagError):
    text = text.replace('mean: ', 'mean --').replace(' ?', '?')
    known = COMMANDS[command].flags
    if COMMANDS[command].bare_rest == 'train' and (of_train := _misplaced_flag(error.flagname.replace('-', '_'))):
      return of_train
    if close := did_you_mean(error.flagname, known):  # Knows names of other libraries, too.
      text = f'{text.partition(". Did you mean")[0].rstrip(".")}.' + close.replace(" '", ' --').replace("'?", '?')
    if error.flagname == 'job_log_dir' and COMMANDS[command].bare == 'dir':
      text += f'; name the directory without a flag, as in praxis-lite {command} runs'
    elif error.flagname == 'job_log_dir' and COMMANDS[command].bare_rest == 'dirs':
      text += f'; name directories without a flag, as in praxis-lite {command} list runs/1'
    fields = ', and --set path=value sets a field of the config' if 'set' in known else ''
    if fields and 'Did you mean' not in text and (path := field_path(error.flagname.replace('-', '_').lower())):
      text += f". Did you mean --set '{path}=...'?"
    text += f'; `praxis-lite {command} --help` lists the flags{fields}'
  return text


def _misplaced_flag(name: str) -> str:
  """Returns the message if a flag of `train` was given among the flags of `launch`; '' if `train` has no such flag."""
  if name == 'num_processes':
    return 'launch has no flag --num_processes, which it sets in each process; --processes=2 says how many to start'
  if name not in COMMANDS['train'].flags:
    return ''
  example = 'praxis-lite launch --processes=2 -- train --exp=lm.StdlibLm --job_log_dir=runs/1'
  return f'--{name} is a flag of train; flags of train go after --, as in {example}'


if __name__ == '__main__':
  run()
