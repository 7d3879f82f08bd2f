"""Sweeps: a grid of overrides, each point trained in its own run directory by its own process.

    folder/learning_rate=0.001,num_layers=2/     a run, with the output of its process in sweep.log
           learning_rate=0.003,num_layers=2/
           sweep.json                            which points are finished, and with which config

Finished points are not started again, unless their config has changed; unfinished ones resume where they stopped.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import re
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from praxis_lite.common.config.overrides import alternatives
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.files import parse_json, read_plain, replace_file
from praxis_lite.common.foreign_text import LEFT_OUT, is_secret, remove_secrets
from praxis_lite.runs.records.comparing import short_names

_FINISHED, _LOG = 'sweep.json', 'sweep.log'
_STOP_SECONDS = 600.0  # Seconds that processes have to save and end after a signal.
_ASK_SECONDS = 2.0  # Seconds between checks whether a running point is hopeless.
_MOST_NAME = 120  # The most characters in the name of a directory; file systems allow 255 bytes.


class Point(NamedTuple):
  """A point of a grid: the name of its run directory, and its overrides."""

  name: str
  overrides: tuple[str, ...]


def grid(overrides: Sequence[str]) -> list[Point]:
  """Returns all combinations of the values of overrides; see `overrides.alternatives`.

  Raises:
    ConfigError: no override has several values, a value is given twice, or two overrides with several values have the
      same path.
  """
  options = [alternatives(override) for override in overrides]
  paths = [choices[0].partition('=')[0] for choices in options]
  varied = [path for path, choices in zip(paths, options) if len(choices) > 1]
  if not varied:
    bracketed = ' without brackets' if any(choice.endswith((')', ']')) for (choice,) in options) else ''
    raise ConfigError(
      f'nothing is varied: give a --set several values, with commas between them{bracketed}, as in '
      '--set task.train.learner.learning_rate=1e-3,3e-3'
    )
  if twice := [path for path in varied if varied.count(path) > 1]:
    raise ConfigError(f'{twice[0]} is varied twice; write all of its values in one --set')
  for path, choices in zip(paths, options):
    for choice, count in collections.Counter(choices).items():
      if count > 1:
        entries = [other.partition('=')[2] for other in choices]
        raise ConfigError(
          f'{path}: the value {choice.partition("=")[2]} is given {count} times; if they are the entries of one value, '
          f'put them in parentheses: {path}=({",".join(entries)})'
        )
  names = short_names(varied)
  points = []
  for chosen in itertools.product(*options):
    values = dict(override.split('=', 1) for override in chosen)
    points.append(Point(directory_name({path: values[path] for path in varied}, names), chosen))
  return points


def directory_name(values: Mapping[str, str], names: Mapping[str, str]) -> str:
  """Returns the name of the directory of a point, such as 'lr=0.1,depth=2'; `names` has a short name for each path."""
  shown = {path: LEFT_OUT if is_secret(path) else remove_secrets(value) for path, value in values.items()}
  name, plain = (','.join(f'{names[path]}={value}' for path, value in each.items()) for each in (values, shown))
  plain = re.sub(r'[^\w.,=+-]+', '_', plain)[:_MOST_NAME]
  return plain if plain == name else f'{plain}-{zlib.crc32(name.encode()):08x}'


class FinishedPoints:
  """The finished points of a sweep, with a digest of the config of each, in `folder/sweep.json`.

  A part of a sweep, such as (3, 8), the third of eight, writes its points to `sweep.3-of-8.json`, and reads the files
  of all parts. For a point in several files, the file that was written last counts.
  """

  def __init__(self, folder: Path, part: tuple[int, int] | None = None):
    self._path = folder / (f'sweep.{part[0]}-of-{part[1]}.json' if part else _FINISHED)
    self._own: dict[str, str] = {}
    self._digests: dict[str, str] = {}
    files = []
    for path in {*folder.glob('sweep.*-of-*.json'), folder / _FINISHED}:
      with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        files.append((path.stat().st_mtime_ns, path.name, dict(parse_json(read_plain(path))['finished'])))
    for _, name, digests in sorted(files, key=lambda file: file[:2]):
      self._digests |= digests
      if name == self._path.name:
        self._own = digests

  def has(self, point: Point, config: str) -> bool:
    """Whether a point has finished with this config (the text of the config)."""
    return self._digests.get(point.name) == digest_of(config)

  def add(self, point: Point, config: str) -> None:
    self._digests[point.name] = digest_of(config)
    # Only the points of this part of the sweep: other parts write theirs to other files.
    self._own = {name: self._digests[name] for name in (*self._own, point.name)}
    replace_file(self._path, json.dumps({'finished': self._own}, indent=1) + '\n')


def digest_of(text: str) -> str:
  """Returns a short digest of a text, such as that of a config."""
  return f'{zlib.crc32(text.encode()):08x}'


def run_points(
  points: Iterable[Point],
  folder: Path,
  command: Callable[[Point], list[str]],
  *,
  parallel: int = 1,
  ended: Callable[[Point, int, float], None],
  is_hopeless: Callable[[Point], bool] | None = None,
) -> bool:
  """Runs a process for each point, `parallel` at a time.

  After SIGINT or SIGTERM no more processes are started, and the running ones get SIGTERM, so that they save. They are
  killed after a second signal, or ten minutes after the first one.

  Args:
    points: the points, in the order in which they run; the next one is taken when a process can start.
    command: returns the command line of a point; its output is appended to a file in the point's directory.
    ended: called when the process of a point has ended, with its exit code and the seconds that it took.
    is_hopeless: called every few seconds for each running point; if it returns True, the process gets SIGTERM.

  Returns:
    Whether a signal ended the sweep.
  """
  waiting, is_over, asked_at = iter(points), False, time.monotonic()
  terminated: set[Point] = set()
  running: dict[Point, tuple[subprocess.Popen[bytes], float]] = {}
  stopped_at: float | None = None
  with _passing_signals(running) as stop:
    while running or not (is_over or stop.is_set()):
      while not is_over and len(running) < parallel and not stop.is_set():
        point = next(waiting, None)
        if point is None:
          is_over = True
          break
        directory = folder / point.name
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / _LOG, 'ab') as log:
          # The process gets its own session, because a terminal sends Ctrl-C to all processes of its session.
          process = subprocess.Popen(
            command(point), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
          )
        running[point] = process, time.monotonic()
      time.sleep(0.05)
      if stop.is_set() and stopped_at is None:
        stopped_at = time.monotonic()
      if stopped_at is not None and time.monotonic() - stopped_at > _STOP_SECONDS:
        for process, _ in running.values():
          process.kill()
      if is_hopeless is not None and time.monotonic() - asked_at > _ASK_SECONDS:
        for point, (process, _) in running.items():
          if point not in terminated and is_hopeless(point):
            terminated.add(point)
            process.terminate()
        asked_at = time.monotonic()
      for point, (process, started) in list(running.items()):
        if (code := process.poll()) is not None:
          del running[point]
          ended(point, code, time.monotonic() - started)
    return stop.is_set()


@contextlib.contextmanager
def _passing_signals(running: Mapping[Point, tuple[subprocess.Popen[bytes], float]]) -> Iterator[threading.Event]:
  stop = threading.Event()

  def handle(number: int, frame: FrameType | None) -> None:
    for process, _ in list(running.values()):
      process.send_signal(signal.SIGKILL if stop.is_set() else signal.SIGTERM)
      process.send_signal(signal.SIGCONT)  # A suspended process handles SIGTERM only after SIGCONT.
    stop.set()

  before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield stop
  finally:
    for s, handler in before.items():
      signal.signal(s, handler)


def last_line(folder: Path, point: Point) -> str:
  """Returns the last line that the process of a point has written; '' if it has written none."""
  lines = (folder / point.name / _LOG).read_text(encoding='utf-8', errors='replace').strip().splitlines()
  return lines[-1] if lines else ''
