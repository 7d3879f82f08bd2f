"""Gives bad input to every parser of external data, which may only raise a UserError, and must not hang or run code.

  python tools/fuzz_parsers.py --seed=1 --cases=200000

Each case depends only on the seed and its number; `--only=NUMBER` repeats one and shows its input. Inputs may name an
importable module `fuzz_canary`. The tool checks that nothing imports it, starts a process, opens a connection, or
changes a file outside of the folder of the case. The exit code is 1 if a case went wrong.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import numpy as np

from praxis_lite.common.errors import UserError
from tools.fuzz.parsers import PARSERS

_SECONDS = 20  # A case takes milliseconds; this leaves room for a busy machine.
_FORBIDDEN = ('os.system', 'os.exec', 'os.posix_spawn', 'os.spawn', 'os.fork', 'subprocess.Popen', 'socket.connect')
_CHANGES = ('os.remove', 'os.rename', 'os.rmdir', 'os.mkdir', 'os.chmod', 'os.truncate', 'shutil.rmtree', 'os.link')


class Wrong(NamedTuple):
  """A case that went wrong: its number, the parser, the input, and the reason."""

  number: int
  parser: str
  case: Any
  why: str


class _HangError(BaseException):
  """A case took too long. It does not derive from `Exception`, so that no parser can catch it by accident."""


class Guard:
  """Records forbidden actions of a case. A process can have only one guard, because audit hooks cannot be removed."""

  def __init__(self) -> None:
    self.done: list[str] = []
    self._folder = ''
    self._is_on = False
    sys.addaudithook(self._hook)
    canary = types.ModuleType('fuzz_canary')
    canary.run = lambda *args, **keywords: self.done.append('fuzz_canary:run was called')  # type: ignore[attr-defined]
    self._canary = canary
    sys.meta_path.insert(0, self)

  def find_spec(self, name: str, path: object = None, target: object = None) -> None:
    """Called by `import`, as a finder of modules: notes an attempt to import the canary."""
    if self._is_on and name.partition('.')[0] == 'fuzz_canary':
      self.done.append(f'{name} was imported')

  def watch(self, folder: Path | None) -> None:
    """Starts watching; with None, stops."""
    self._is_on, self._folder = folder is not None, os.fspath(folder or '')
    if folder is not None:
      self.done = []

  def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
    if not self._is_on:
      return
    if event in _FORBIDDEN:
      self.done.append(f'{event} {arguments[:2]!r:.80}')
    elif (
      event == 'open' and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    ) or event in _CHANGES:
      self._check_inside(event, arguments[0])

  def _check_inside(self, event: str, path: Any) -> None:
    if isinstance(path, int) or path == os.devnull or '__pycache__' in os.fsdecode(path):
      return
    path = os.path.realpath(os.fsdecode(path))
    if not path.startswith(self._folder):
      self.done.append(f'{event} {path}')


def fuzz(
  seed: int, numbers: Iterable[int], guard: Guard, only: str | None = None
) -> Iterator[tuple[str, Wrong | None]]:
  """Runs cases. For each, yields the name of its parser, and what went wrong or None."""
  names = [name for name in PARSERS if only is None or name == only]
  weights = np.array([PARSERS[name].weight for name in names], float)
  signal.signal(signal.SIGALRM, _hang)
  with tempfile.TemporaryDirectory(prefix='fuzz-', dir='/dev/shm' if os.path.isdir('/dev/shm') else None) as folder:
    for number in numbers:
      rng = np.random.default_rng([seed, number])
      name = names[int(rng.choice(len(names), p=weights / weights.sum()))]
      case = PARSERS[name].draw(rng)
      why = run_case(name, case, Path(os.path.realpath(folder)), guard)
      yield name, Wrong(number, name, case, why) if why else None


def run_case(name: str, case: Any, folder: Path, guard: Guard) -> str:
  """Returns what went wrong; '' if nothing did."""
  where = folder / name.replace(' ', '-')
  where.mkdir(exist_ok=True)
  guard.watch(where)
  signal.alarm(_SECONDS)
  why = ''
  try:
    PARSERS[name].read(case, where)
  except UserError as error:
    if not str(error).strip():
      why = 'an error without a message'
  except _HangError:
    why = f'more than {_SECONDS} s'
  except BaseException as error:
    why = f'{type(error).__name__}: {error!s:.200} at {_place(error)}'
  finally:
    signal.alarm(0)
    guard.watch(None)
  return why or '; '.join(guard.done)


def _place(error: BaseException) -> str:
  """Returns the last line of this project in an error's traceback."""
  place, trace = '', error.__traceback__
  while trace is not None:
    file = trace.tb_frame.f_code.co_filename
    if 'praxis_lite' in file or not place:
      place = f'{Path(file).name}:{trace.tb_lineno}'
    trace = trace.tb_next
  return place


def _hang(number: int, frame: object) -> None:
  raise _HangError


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--cases', type=int, default=200_000, help='how many')
  parser.add_argument('--first', type=int, default=0, help='the number of the first')
  parser.add_argument('--only', type=int, help='the case of this number alone')
  parser.add_argument('--parser', choices=PARSERS, help='this parser alone')
  values = parser.parse_args(argv)
  numbers = range(values.first, values.first + values.cases) if values.only is None else [values.only]
  start, count, kinds = time.process_time(), collections.Counter[str](), collections.Counter[str]()
  for name, wrong in fuzz(values.seed, numbers, Guard(), values.parser):
    count[name] += 1
    if wrong is not None:
      kind = f'{name}: {wrong.why}'
      kinds[kind.rpartition(' at ')[2] if ' at ' in kind else kind] += 1
      if kinds[kind.rpartition(' at ')[2] if ' at ' in kind else kind] == 1:
        print(f'case {wrong.number}, {name}: {wrong.why}\n  {wrong.case!r:.300}', flush=True)
  width = max(map(len, count))
  print('\n'.join(f'{name:<{width}}  {number:8,} cases' for name, number in count.most_common()))
  seconds = time.process_time() - start
  print(f'seed {values.seed}: {count.total():,} cases in {seconds:.0f} s of CPU; {kinds.total()} went wrong')
  for kind, number in kinds.most_common():
    print(f'{number:6} x {kind}')
  return bool(kinds)


if __name__ == '__main__':
  sys.exit(main())
