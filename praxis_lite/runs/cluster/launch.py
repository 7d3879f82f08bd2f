"""Runs several processes on this machine as the hosts of one run, and restarts them when one is lost.

    attempt 0    host 0 ... host N-1    one ends: by a signal, or with the exit code of LostHostError
                                        the others have `grace_s` to end by themselves, and then get SIGKILL
    wait         1 s, 2 s, 4 s, ...     at most 60 s; SIGINT or SIGTERM ends it
    attempt 1    all hosts again, from the last checkpoint

A job whose run directory was moved or deleted is not restarted, because it would start at step 0.

With `spares`, a place that `blame.py` blames is replaced by a spare place. Without spares, or if all are in use, a
place that is lost first in two successive attempts counts as gone; with `min_processes`, the job goes on without it.
After the exit code of CorruptionError, the job is restarted only if a place was blamed and replaced, or if a device was
quarantined and the command has `--elastic`, which leaves the device out.

SIGINT and SIGTERM are passed on, followed by SIGCONT, because a stopped process does not handle signals. All hosts then
have `stop_s` to save and end; after a second signal, they have a few seconds.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from praxis_lite.common.errors import FAULTY_DEVICE_CODE, LostHostError, UserError
from praxis_lite.common.figures import number_of
from praxis_lite.common.foreign_text import printable
from praxis_lite.runs.cluster.blame import Blame, Evidence, corrupt_places, last_quarantined, recorded_evidence
from praxis_lite.runs.cluster.clusters import LAUNCHER
from praxis_lite.runs.cluster.warm_start import WarmProcess, WarmStarter
from praxis_lite.runs.records.history import EventKind, RunEvent, note_event, read_history
from praxis_lite.runs.records.seats import PLACE

_POLL = 0.05
_LONGEST_WAIT = 60.0
# Seconds that the other processes have to end, once one process has ended because it noticed a loss.
_AFTER_NOTICED = 20.0
# Seconds that processes have to end after a second signal.
_AFTER_SECOND_SIGNAL = 10.0
# Seconds to wait for a killed process to end. A process that is blocked on storage may never end.
_AFTER_KILL = 10.0
_AFTER_FAULT = (
  'a device is faulty, so the job is not started again: faulty_devices.jsonl in its directory names the suspects; '
  'start it without them, or with --elastic, which leaves out quarantined devices'
)
_STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)


class Ended(NamedTuple):
  """The end of an attempt: its exit code, and the first host that ended with this code."""

  code: int
  host: int


class _Limit(NamedTuple):
  """The time at which processes must have ended. Messages also say how long they had, and after which event."""

  at: float = math.inf  # By `time.monotonic`.
  seconds: float = 0.0
  after: str = ''  # The event; '' for a failure, which has its own message.

  @classmethod
  def begin(cls, seconds: float, after: str = '') -> _Limit:
    return cls(time.monotonic() + seconds, seconds, after)

  def __str__(self) -> str:
    return f'{self.seconds:g} s{f" of {self.after}" if self.after else ""}'


class _RunDirectory:
  """The directory of a run. It is identified once it has content, because an empty directory may be replaced."""

  def __init__(self, path: Path | None):
    self.path = path
    self._about: os.stat_result | None = None

  def look(self) -> None:
    """Identifies the directory, unless it is identified already."""
    if self.path is not None and self._about is None:
      with contextlib.suppress(OSError):
        about = os.stat(self.path)
        if os.listdir(self.path):
          self._about = about

  def where(self) -> Path | None:
    """Returns the path of the identified directory; None if it is lost, or not identified yet."""
    return None if self._about is None or self.is_lost() else self.path

  def is_lost(self) -> bool:
    """Whether the identified directory is no longer at its path; False if its storage cannot be reached."""
    if self.path is None or self._about is None:
      return False
    try:
      return os.stat(self.path).st_ino != self._about.st_ino  # The device number may change in a new mount.
    except (FileNotFoundError, NotADirectoryError):
      return True
    except OSError:
      return False


class Launcher:
  """Runs a command in several processes, which find each other through environment variables.

  Args:
    max_restarts: how often all processes are restarted after one of them was lost.
    min_processes: the smallest number of processes that may continue if hosts are lost; None requires all.
    spares: the number of spare places. A spare place replaces a place that is blamed. The first `processes` places have
      the numbers 0, 1, ..., and the numbers of the spare places follow. Each process finds the number of its place in
      the environment variable PRAXIS_LITE_PLACE.
    grace_s: seconds that the others have to end by themselves after one has ended.
    stop_s: seconds that all have to save and end after SIGINT or SIGTERM.
    backoff_s: seconds before the first restart; doubled for each further one.
    imports: on Linux, modules that one process imports for all processes of all attempts; see `warm_start.py`. The
      command must then be `[sys.executable, '-m', module, ...]`.
    write: called with each line of output, which begins with the name of its host.
  """

  def __init__(
    self,
    command: Sequence[str],
    processes: int,
    *,
    max_restarts: int = 3,
    min_processes: int | None = None,
    spares: int = 0,
    grace_s: float = 30.0,
    stop_s: float = 600.0,
    backoff_s: float = 1.0,
    directory: Path | None = None,
    imports: Sequence[str] = (),
    write: Callable[[str], object] = lambda line: print(line, end='', flush=True),
  ):
    self._command, self._processes, self._max_restarts = list(command), processes, max_restarts
    self._min_processes = processes if min_processes is None else min_processes
    self._places = list(range(processes))
    self._spares = list(range(processes, processes + spares))
    self._blame = Blame()
    self._grace, self._stop, self._backoff = grace_s, stop_s, backoff_s
    self._directory = _RunDirectory(directory)
    self._imports = imports
    self._warm: WarmStarter | None = None
    self._output = write
    self._lock = threading.Lock()
    self._running: list[subprocess.Popen[bytes] | WarmProcess] = []
    self._signals: list[int] = []

  def run(self) -> int:
    """Runs the job to its end; returns the exit code that `the_verdict` chooses for the last attempt.

    For a process that a signal has ended, the code is 128 plus the number of the signal, as in a shell. If the run's
    directory was lost, returns `UserError.exit_code`.
    """
    count, restarts, lost = self._processes, 0, -1  # `lost` is the last place that was lost; -1 for none.
    directory = self._directory.path
    with self._passing_signals(), self._warm_starter():
      while True:
        began = time.time()
        last = self._attempt(count)
        is_faulty = last.code == FAULTY_DEVICE_CODE
        if last.code == 0 or self._signals or not (is_restartable(last.code) or is_faulty):
          return last.code
        lost_before, lost = lost, self._lost_place(last)
        events = [event for event in read_history(directory) if event.time >= began] if directory else []
        self._add_evidence(lost, last.code, events)
        blamed = self._places_to_replace()
        if is_faulty and not blamed and not self._can_leave_out_device():
          self._say(_AFTER_FAULT)
          return last.code
        why = 'has found a faulty device, which is left out' if is_faulty else f'was lost ({exit_text(last.code)})'
        gone = f'host {last.host} of {count} {why}'
        if lost >= 0 and not any(event.kind == 'lost' for event in events):
          self._note('lost', gone, last.host)  # No remaining process has recorded the loss.
        if self._directory.is_lost():
          self._say(
            f'error: {gone}, and job_log_dir {directory} is not where it was: the job is not started again, '
            'because it would begin at step 0; to go on, train where its checkpoints are'
          )
          return UserError.exit_code
        if restarts == self._max_restarts:
          self._say(f'{gone}; {restarts} restarts are all that --max_restarts allows')
          return last.code
        replaced = self._replace_places(blamed)
        gone += ''.join(f'; {text}' for text in replaced.values())
        if lost >= 0 and lost == lost_before and not blamed and not self._spares and count > self._min_processes:
          count -= 1
          self._places.pop(last.host)
          gone += f' twice, so the job goes on with {number_of(count, "process")}'
        seconds = min(self._backoff * 2**restarts, _LONGEST_WAIT)
        restarts += 1
        self._say(f'{gone}; restart {restarts} of {self._max_restarts} in {seconds:g} s')
        if self._wait(seconds):
          return last.code
        for i, text in replaced.items():
          self._note('replaced', text, i)
        self._note('restarted', f'restart {restarts} of {self._max_restarts}, after host {last.host} {why}')

  def _lost_place(self, last: Ended) -> int:
    """Returns the place of the process that was lost first; -1 if nothing says which.

    Processes that notice a loss end with LostHostError. If all end with it, all were alive but could not communicate.
    """
    is_known = is_restartable(last.code) and last.code != LostHostError.exit_code
    return self._places[last.host] if is_known else -1

  def _add_evidence(self, lost: int, code: int, events: Sequence[RunEvent]) -> None:
    self._blame.add(*recorded_evidence(events, self._places))
    if code == FAULTY_DEVICE_CODE:
      self._blame.add(*corrupt_places(self._directory.path, self._places))
    if lost >= 0:
      self._blame.add(Evidence(lost, f'lost ({exit_text(code)})'))

  def _places_to_replace(self) -> list[int]:
    """Returns the indices of processes whose places are blamed, at most one for each spare."""
    return [i for i, place in enumerate(self._places) if self._blame.reasons(place)][: len(self._spares)]

  def _replace_places(self, blamed: Sequence[int]) -> dict[int, str]:
    """Gives spare places to processes; returns a description of each replacement, by the index of the process."""
    done = {}
    for i in blamed:
      place, self._places[i] = self._places[i], self._spares.pop(0)
      reasons = ', '.join(self._blame.reasons(place))
      text = f'place {self._places[i]} takes over from place {place}, which is blamed: {reasons}'
      done[i] = f'{text}; {number_of(len(self._spares), "spare")} left'
    return done

  def _note(self, kind: EventKind, text: str, process: int | None = None) -> None:
    """Adds a line to the history of the run, once its directory has content."""
    if directory := self._directory.where():
      note_event(directory, kind, text=text, about={} if process is None else {'process': process})

  def _can_leave_out_device(self) -> bool:
    """Whether the last corruption quarantined a device, and the command can train without it."""
    is_elastic = not {'--elastic', '--elastic=true'}.isdisjoint(self._command)
    return is_elastic and bool(last_quarantined(self._directory.path))

  def _attempt(self, count: int) -> Ended:
    address = f'localhost:{free_port()}'
    readers = []
    # `_watch` passes on a signal that arrives during this loop.
    for i in range(count):
      env = {'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': str(count), 'JAX_PROCESS_ID': str(i)}
      env |= {PLACE: str(self._places[i]), LAUNCHER: str(os.getpid()), 'PYTHONUNBUFFERED': '1'}
      process = self._start(env)
      assert process.stdout is not None
      self._running.append(process)
      readers.append(threading.Thread(target=self._copy, args=(process.stdout, f'host {i}'), daemon=True))
      readers[-1].start()
    try:
      return self._watch()
    finally:
      for i, process in enumerate(self._running):
        process.kill()
        try:
          process.wait(_AFTER_KILL)
        except subprocess.TimeoutExpired:
          self._say(f'host {i}, process {process.pid}, did not end within {_AFTER_KILL:g} s of SIGKILL; giving up')
      for reader in readers:
        reader.join(timeout=5)  # A child of a killed process may keep its output open.
      self._running = []

  @contextlib.contextmanager
  def _warm_starter(self) -> Iterator[None]:
    if self._imports and sys.platform == 'linux':
      _, _, module, *arguments = self._command
      self._warm = WarmStarter(module, arguments, self._imports)
    try:
      yield
    finally:
      if self._warm is not None:
        self._warm.close()

  def _start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | WarmProcess:
    """Starts a process in a new session, because a terminal sends Ctrl-C to all processes of its session."""
    if self._warm is not None:
      try:
        return self._warm.start(environment)
      except OSError as error:
        self._say(f'no process has the imports of all ({error}), so each imports by itself')
        self._warm.close()
        self._warm = None
    return subprocess.Popen(
      self._command,
      env={**os.environ, **environment},
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )

  def _watch(self) -> Ended:
    """Waits until all processes have ended, and returns how; kills those that are late after a failure or a signal."""
    ended: dict[int, int] = {}
    passed, limit, stop_limit = 0, _Limit(), _Limit()
    while len(ended) < len(self._running):
      time.sleep(_POLL)
      self._directory.look()
      if passed < len(self._signals):
        passed = len(self._signals)
        name = signal.Signals(self._signals[-1]).name
        seconds, after = (self._stop, name) if passed == 1 else (_AFTER_SECOND_SIGNAL, f'another {name}')
        stop_limit = _Limit.begin(seconds, after)
        for process in self._running:
          process.send_signal(self._signals[-1])
          process.send_signal(signal.SIGCONT)
      for i, process in enumerate(self._running):
        code = process.poll()
        if code is None or i in ended:
          continue
        ended[i] = 128 - code if code < 0 else code
        if self._signals and ended[i] in (0, *_STOPPED):
          # The signal ended this host, which is no failure. Other hosts may still be saving, so this begins no time
          # limit.
          continue
        if code == LostHostError.exit_code:
          limit = _Limit.begin(min(self._grace, _AFTER_NOTICED))
        elif code != 0 and limit.at == math.inf:
          limit = _Limit.begin(self._grace)
        if code < 0 and not self._signals:
          self._say(f'host {i} was ended by {exit_text(ended[i])}')
      over = next((each for each in (limit, stop_limit) if time.monotonic() > each.at), None)
      if over is not None and (late := [i for i in range(len(self._running)) if i not in ended]):
        self._say(f'host {", ".join(map(str, late))} did not end within {over}, and is killed')
        # A host that had to be killed comes first: it counts as lost, and the other hosts waited for it.
        return the_verdict(dict.fromkeys(reversed(late), 128 + signal.SIGKILL) | ended)
    return the_verdict(ended)

  def _copy(self, stream: IO[bytes], name: str) -> None:
    for line in stream:
      if b'Expected number of connected peer ranks' not in line:  # XLA's CPU collectives print this for each mesh.
        self._write(f'{name}: {printable(line.decode(errors="replace").rstrip(), one_line=True)}\n')

  def _say(self, text: str) -> None:
    self._write(f'launch: {text}\n')

  def _write(self, line: str) -> None:
    with self._lock:
      self._output(line)

  def _wait(self, seconds: float) -> bool:
    """Waits; returns True as soon as a signal arrives, otherwise False."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not self._signals:
      time.sleep(_POLL)
    return bool(self._signals)

  @contextlib.contextmanager
  def _passing_signals(self) -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
      self._signals.append(number)

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
      yield
    finally:
      for s, handler in before.items():
        signal.signal(s, handler)


def the_verdict(ended: dict[int, int]) -> Ended:
  """Returns the end of an attempt, given the exit codes of the hosts in the order in which they ended.

  A user's mistake takes precedence, because a restart would repeat it. A lost host takes precedence over the hosts that
  noticed its loss.
  """
  noticed = LostHostError.exit_code
  for kind in (
    lambda code: code != 0 and not is_restartable(code) and code not in _STOPPED,
    lambda code: is_restartable(code) and code != noticed,
    lambda code: code == noticed,
    lambda code: code != 0,
  ):
    for host, code in ended.items():
      if kind(code):
        return Ended(code, host)
  return Ended(0, -1)


def is_restartable(code: int) -> bool:
  """Whether a job is restarted after this exit code: LostHostError's, or that of a signal except SIGINT and SIGTERM."""
  return code == LostHostError.exit_code or (code > 128 and code not in _STOPPED)


def exit_text(code: int) -> str:
  """Returns an exit code as text: the name of the signal behind it, or 'exit code N'."""
  with contextlib.suppress(ValueError):
    return signal.Signals(code - 128).name
  return f'exit code {code}'


def free_port() -> int:
  """Returns a free port of this machine."""
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    return int(probe.getsockname()[1])


def launched_command(arguments: Sequence[str], *, devices: int | None, elastic: bool) -> list[str]:
  """Returns the command line of each process: this program, with the arguments after `launch --`.

  Raises UserError if the arguments do not begin with `train`, or contain a flag that `launch` sets itself.
  """
  if not arguments or arguments[0] != 'train':
    got = f', got {arguments[0]!r}' if arguments else ''
    raise UserError(
      f'name what to run after --, as in praxis-lite launch --processes=2 -- train --exp=lm.StdlibLm{got}'
    )
  own = ('--coordinator_address', '--num_processes', '--process_id')
  for argument in arguments:
    if argument.split('=')[0] in own:
      raise UserError(f'{argument}: leave it out, because launch sets it in each process')
    if devices is not None and argument.split('=')[0] == '--devices':
      raise UserError('--devices is given twice: launch --devices is for each process')
  simulated = [] if devices is None else [f'--devices={devices}']
  return [sys.executable, '-m', 'praxis_lite', *arguments, *simulated, *(['--elastic'] if elastic else [])]
