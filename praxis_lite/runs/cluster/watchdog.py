"""The watchdog: each process of a run watches the others, and ends when one of them is lost.

A collective waits for all processes. So if one of them dies, is stopped or hangs, the others would wait forever. Here
each process writes beats to the key-value store of JAX's service: that it is alive, what it is doing, and how long ago
its main thread last made progress:

    beat     of each process, every interval     {"beat": 17, "doing": "step 12", "at": "...", "idle": 0.2, "state": ""}
    watch    in each process                     | no beats of a host for the timeout: that host is lost
                                                 | its connection is closed, and no beats since: that host is lost
                                                 | no progress of any host for the timeout: all hosts hang
                                                 | a host says that it has failed

`beats.py` decides which processes read whose beats; `connections.py` has the connections.

If a host is lost or all hang, the process prints which host it was and what that host was doing, writes the stacks of
its own threads, and ends with the exit code of `LostHostError`. Launchers then restart the job from its last
checkpoint. Tracing and compiling count as progress.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import math
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax

from praxis_lite.common.errors import LostHostError, UserError, first_line
from praxis_lite.common.jax_internals import unless_unknown
from praxis_lite.common.jax_internals.processes import BUILDING_FILES, Client, service_client
from praxis_lite.common.processes import last_progress, note_progress
from praxis_lite.runs.cluster.beats import Beats, beat_interval
from praxis_lite.runs.cluster.connections import Connections
from praxis_lite.runs.cluster.rendezvous import Meeting
from praxis_lite.runs.records.history import note_event
from praxis_lite.runs.trouble import GoBack

# Seconds without a sign of life after which a host counts as lost.
HANG_TIMEOUT_S = 300.0
# Folders of code that belongs neither to praxis_lite nor to the user.
_LIBRARIES = ('<frozen', *(sysconfig.get_path(name).replace(os.sep, '/') for name in ('stdlib', 'purelib', 'platlib')))
# Extra seconds to wait for the last beat at exit.
_PATIENCE_AT_EXIT = 2.0
# After this many beats, all groups of processes know that one of them has made progress.
_ROUNDS = 10
# A host whose connection is closed counts as lost after this many intervals without a beat. If as many of its beats
# arrive after the connection has ended, only the connection was lost. One beat is no proof, because it may have been
# sent before the end.
_BEATS_AFTER_CLOSE = 2
_HANG = 'no host has made progress'
# How many characters of an error are sent to other hosts.
_MOST_SHOWN = 300
# The key that JAX's preemption service writes to the store after any process received SIGTERM.
PREEMPTION_KEY = 'RECEIVED_PREEMPTION_NOTICE'
# An error with one of these words, from a collective or JAX's service, means that another process has ended.
_OF_A_PEER = ('gloo', 'nccl', 'connection', 'unavailable', 'deadline_exceeded', 'coordination', 'barrier', 'peer')


@dataclasses.dataclass
class _Host:
  """What this process knows of a host: its name, its last beat, and when this beat arrived, by this process's clock."""

  name: str
  heard: float
  arrivals: tuple[float, ...] = (-math.inf,) * _BEATS_AFTER_CLOSE  # When its last beats arrived.
  beat: int = 0
  doing: str = 'starting'
  at: str = ''
  idle: float = 0.0
  state: str = ''  # '', 'running', 'left', or why the host has failed.
  is_ending: bool = False  # Whether the host has reported its failure, and cleaned up.

  def has_failed(self) -> bool:
    return self.state not in ('', 'running', 'left')

  def __str__(self) -> str:
    return f'{self.name}, which was in {self.doing}{f" ({self.at})" if self.at else ""}'


class Watchdog:
  """Watches the processes of this run, in two threads, until the process ends.

  Messages call the hosts by `names`. This host has the index `index`. See `HANG_TIMEOUT_S` for `timeout_s`.
  """

  def __init__(self, client: Client, names: list[str], connections: Connections, index: int, timeout_s: float):
    now = time.monotonic()
    self._client, self._connections, self._index, self._timeout = client, connections, index, timeout_s
    self._interval = beat_interval(len(names), timeout_s)
    self._beats = Beats(client, index, len(names), self._interval)
    self._hosts = [_Host(f'host {i} ({name})' if name else f'host {i}', now) for i, name in enumerate(names)]
    self._watched = {i: self._hosts[i] for i in self._beats.watched}
    self._verdict = ''  # Why a process that this one does not watch has given up.
    self._contact = now
    self._main = threading.main_thread().ident
    self._building = now  # When the main thread was last seen tracing or compiling.
    self._state, self._is_ending, self._suspects = '', False, False
    self._ending = threading.Lock()
    self.directory: Path | None = None
    self._why_lost: Callable[[], UserError | None] = lambda: None
    self.preempted_since: float | None = None
    self._is_over = threading.Event()
    self._threads = [
      threading.Thread(target=run, name=f'watchdog-{run.__name__.strip("_")}', daemon=True)
      for run in (self._beat, self._watch)
    ]
    for thread in self._threads:
      thread.start()
    self._end_well_when_jax_aborts()
    atexit.register(self._leave)

  @contextlib.contextmanager
  def running(self, directory: Path, why_lost: Callable[[], UserError | None] = lambda: None) -> Iterator[None]:
    """Also watches progress while the block runs; reports an error in the block to the other hosts.

    If another host has caused the error, this waits until the watchdog names that host and ends the process. `why_lost`
    returns an error if the run's directory is no longer at its path, otherwise None. A run without its directory is not
    restarted, because it would start at step 0.
    """
    self.directory, self._state, self._why_lost = directory, 'running', why_lost
    note_progress('start-up')
    try:
      yield
    except GoBack:
      raise  # No failure: all processes go back to a checkpoint together, and continue.
    except BaseException as error:
      if _is_of_a_peer(error):
        self._suspects = True
        _write(f'{self._hosts[self._index].name}: {first_line(error)[:_MOST_SHOWN]}\n')
        time.sleep(12 * self._interval)  # If a host is lost, `_watch` ends the process in this time.
        self.give_up(f'all hosts are alive, but could not communicate: {first_line(error)[:_MOST_SHOWN]}')
      self._state = f'{type(error).__name__}: {first_line(error)[:_MOST_SHOWN]}'
      raise
    self._state = 'left'

  def end(self, code: int) -> None:
    """Ends this process after a failure, because JAX would wait for the others. Returns only if all have left."""
    if self._state in ('', 'running'):
      self._state = f'exit code {code}'
    self._is_ending = True
    start = time.monotonic()
    others = [host for i, host in self._watched.items() if i != self._index]
    while any(self._is_awaited(host, start) for host in others):
      time.sleep(self._interval / 4)
    if any(host.state != 'left' for host in others):
      sys.stdout.flush()
      sys.stderr.flush()
      time.sleep((4 if self._index == 0 else 2) * self._interval)  # The others read the reason from host 0.
      os._exit(code)

  def _is_awaited(self, host: _Host, since: float) -> bool:
    """Whether this process, which is ending, still waits for the process of `host`.

    This process waits until the other knows that it is ending. Host 0 also waits until the other has cleaned up: host 0
    runs JAX's service, and JAX aborts the other processes when the service ends.
    """
    now = time.monotonic()
    if host.state in ('', 'running'):
      return now - since < 10 * self._interval
    is_alive = host.state != 'left' and not host.is_ending and now - host.heard < 10 * self._interval
    return self._index == 0 and is_alive and now - since < 60 * self._interval

  # ---- beat

  def _beat(self) -> None:
    number, is_last = 0, False
    while not is_last:
      is_last = self._is_over.is_set()
      number += 1
      at, (doing, since) = self._look_at_main_thread(), last_progress()
      idle = round(time.monotonic() - max(since, self._building), 1)
      beat = {'beat': number, 'doing': doing, 'at': at, 'idle': idle, 'state': self._state, 'ending': self._is_ending}
      with contextlib.suppress(Exception):  # If the service does not answer, `_watch` will notice.
        self._hear(self._beats.exchange(beat, idle if self._state == 'running' else 0.0))
        for closed in list(self._connections.closed):  # A copy, because `_watch` changes it meanwhile.
          if closed not in self._watched:
            self._hear(self._beats.beat_of(closed))
        self._verdict = self._verdict or self._beats.verdict()
        self._contact = time.monotonic()
        if self.preempted_since is None:
          self._client.key_value_try_get(PREEMPTION_KEY)  # This raises an error if there is no such key.
          self.preempted_since = time.monotonic()
      self._is_over.wait(self._interval)

  def _hear(self, beats: Mapping[int, Mapping[str, Any]]) -> None:
    for index, said in beats.items():
      host = self._hosts[index]
      if said['beat'] != host.beat:
        host.heard = time.monotonic()
        host.arrivals = (*host.arrivals[1:], host.heard)
        host.beat, host.doing, host.at = said['beat'], said['doing'], said['at']
        host.idle, host.state, host.is_ending = said['idle'], said['state'], said['ending']

  def _look_at_main_thread(self) -> str:
    """Returns where the main thread is, as file:line function. Building a program counts as progress."""
    frame, where = sys._current_frames().get(self._main or 0), ''
    while frame is not None:
      file = frame.f_code.co_filename.replace(os.sep, '/')
      if not where and ('praxis_lite/' in file or not file.startswith(_LIBRARIES)):
        where = f'{file.rpartition("praxis_lite/")[2]}:{frame.f_lineno} {frame.f_code.co_name}'
      if file.endswith(BUILDING_FILES):
        self._building = time.monotonic()
      frame = frame.f_back
    return where

  # ---- watch

  def _watch(self) -> None:
    last = time.monotonic()
    while not self._is_over.is_set():
      self._connections.listen(self._interval / 4)
      now = time.monotonic()
      if now - last > self._timeout / 2:  # This process was stopped, or the machine slept: all beats are old.
        self._contact = now
        for host in self._hosts:
          host.heard = now
      last = now
      self._verdict = self._verdict or self._connections.verdict
      if self._state in ('', 'running') and (reason := self._trouble(now) or self._lost_connection(now)):
        is_told = self._verdict or any(host.has_failed() for host in self._watched.values())
        self.give_up(reason, needs_stacks=not is_told or reason.startswith(_HANG))

  def _trouble(self, now: float) -> str:
    """Returns what is wrong with another host or with all hosts; '' if nothing is."""
    patience = min(self._timeout, 8 * self._interval) if self._suspects else self._timeout
    silent = f'has shown no sign of life for {patience:.0f} s'
    if now - self._contact > patience:
      return f'{self._hosts[0]}, {silent}'
    if self._verdict:
      return self._verdict
    for i, host in self._watched.items():
      if i != self._index and host.has_failed():
        return f'{host}, has ended: {host.state}'
      if i != self._index and host.state != 'left' and now - host.heard > patience:
        return f'{host}, {silent}'
    watched = self._watched.values()
    is_idle = all(host.state == 'running' and host.idle > self._timeout for host in watched)
    if is_idle and (
      len(watched) == len(self._hosts) or self._beats.idle_anywhere > self._timeout + _ROUNDS * self._interval
    ):
      last = '; '.join(f'{host} for {host.idle:.0f} s' for host in watched)
      return f'{_HANG} for {self._timeout:.0f} s: {last}'
    return ''

  def _lost_connection(self, now: float) -> str:
    """Returns which host has been silent since its connection was closed; '' if none has."""
    patience = _BEATS_AFTER_CLOSE * self._interval
    for i, at in list(self._connections.closed.items()):
      host = self._hosts[i]
      if host.state == 'left' or host.arrivals[0] > at:
        del self._connections.closed[i]
      elif now - max(at, host.heard) > patience:
        return f'{host}, has shown no sign of life for {patience:g} s, and its connection is closed'
    return ''

  def give_up(self, reason: str, *, needs_stacks: bool = True) -> NoReturn:
    """Prints the reason, tells the other hosts, writes the stacks of all threads, and ends the process.

    The exit code makes launchers restart the job, unless the run's directory was lost. If another host has reported why
    it ended, stacks are of no use, and `needs_stacks` is False.
    """
    if not self._ending.acquire(blocking=False):
      time.sleep(20 * self._interval)  # Another thread is already ending the process.
      os._exit(LostHostError.exit_code)
    code = LostHostError.exit_code
    self._state, self._is_ending = f'it gave up, because {reason}', True
    self._beats.tell(reason)
    is_told = self._connections.tell(reason)
    mine = self._hosts[self._index].name
    _write(f'{mine}, in {last_progress()[0]}: {reason}\n')
    if lost := self._why_lost():
      code = lost.exit_code
      _write(f'error: {lost}; it continues there from its last checkpoint\n')
    else:
      if self.directory is not None and self._index == (1 if reason.startswith(self._hosts[0].name) else 0):
        note_event(self.directory, 'lost', text=reason)  # One of the remaining processes records the loss for all.
      where = dump_stacks(self.directory, self._index) if needs_stacks else ''
      _write(f'{mine}: {where}exit code {code}: if the job is started again, it continues from its last checkpoint\n')
    self._wait_until_told(is_told)
    os._exit(code)

  def _wait_until_told(self, is_sent: bool) -> None:
    """Waits until the others have probably read why this process gives up.

    If host 0 ended first, JAX would abort the others. Once host 0 has ended, waiting is useless, because the store from
    which the others read has ended too. `is_sent` says whether the connections have sent the reason.
    """
    end = time.monotonic() + (4 if self._index == 0 else 2) * self._interval
    while time.monotonic() < end:
      if (is_sent and (self._index != 0 or not self._connections)) or 0 in self._connections.closed:
        return
      self._connections.listen(self._interval / 4)

  # ---- the end of the process

  def _end_well_when_jax_aborts(self) -> None:
    """Prints the reason when JAX's C++ client aborts this process, which it does when host 0 ends.

    This catches SIGABRT, because Python cannot set a callback of that client.
    """

    def handle_abort(number: int) -> None:
      # This runs in a thread of C++, in which Python's own signal handlers are not called.
      if not self._ending.locked():
        self.give_up(f"{self._hosts[0]}, has ended, or JAX's service there has failed")

    self._abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle_abort)  # Keeps the callback from being freed.
    ctypes.CDLL(None).signal(int(signal.SIGABRT), self._abort_handler)

  def _leave(self) -> None:
    """Called when Python exits, before JAX waits for all processes.

    Tells the other processes that this one leaves, and ends the watchdog's threads.
    """
    if self._state not in ('', 'running', 'left'):
      self.end(1)
    self._state = 'left'
    self._connections.leave()
    # Python kills daemon threads at exit. If one of them is inside JAX's client at that moment, the process aborts.
    self._is_over.set()
    for thread in self._threads:
      thread.join(2 * self._interval + _PATIENCE_AT_EXIT)


_watchdogs: list[Watchdog] = []  # At most one watchdog.


def watch_hosts(met: Meeting, index: int, timeout_s: float) -> None:
  """Starts the watchdog of this process; `met` is what `meet` returned."""
  client = unless_unknown('hosts are not watched: a run waits for a lost one', service_client, None)
  if client is not None:
    _watchdogs.append(Watchdog(client, met.names, Connections(met.connections), index, timeout_s))


def the_watchdog() -> Watchdog | None:
  """Returns the watchdog of this process; None if there are no other processes."""
  return _watchdogs[0] if _watchdogs else None


def dump_stacks(directory: Path | None, index: int) -> str:
  """Writes the stacks of all threads to the run's directory, or if that fails to stderr.

  Returns a text that names the file; '' for stderr.
  """
  if directory is not None:
    path = directory / 'stacks' / f'host_{index}.txt'
    with contextlib.suppress(OSError):
      path.parent.mkdir(exist_ok=True)  # Without parents: the run's directory may have been moved.
      # Without O_NONBLOCK, opening a named pipe would wait for a reader.
      with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666), 'w') as file:
        faulthandler.dump_traceback(file)
      return f'stacks in {path}; '
  faulthandler.dump_traceback(2)
  return ''


def _is_of_a_peer(error: BaseException | None) -> bool:
  """Whether an error or its cause shows that another process has ended."""
  while error is not None:
    # JAX raises a ValueError for the status UNKNOWN, which Gloo sometimes returns.
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError) or (
      type(error) is ValueError and str(error).startswith('UNKNOWN: ')
    )
    if is_of_jax and any(word in str(error).lower() for word in _OF_A_PEER):
      return True
    error = error.__cause__ or error.__context__
  return False


def _write(text: str) -> None:
  os.write(2, text.encode())
