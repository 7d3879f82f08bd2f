"""A thread for reads that may hang, because storage is unreachable or a source has stopped yielding.

A caller waits for such a read up to a time limit, and then gets an error. The process can exit while a read hangs.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from praxis_lite.common.errors import HungInputError

# Seconds: the time limit of a read, and the time after which a line on stderr says that a read takes long.
READ_TIMEOUT_S, _LONG = 3600.0, 30.0
_AT_EXIT = 5.0  # Seconds that the exit of the process waits for reads in progress.

T = TypeVar('T')
_Call = tuple['Future[Any]', Callable[..., Any], tuple[Any, ...]]


class PatientThread:
  """A thread that runs submitted calls one after the other. It ends when this object is garbage-collected."""

  def __init__(self, name: str):
    self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
    self._last: Future[Any] | None = None
    # A daemon, so that a hanging call does not keep the process alive.
    self._thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
    self._thread.start()
    _threads.add(self._thread)
    weakref.finalize(self, _finish, self._calls)

  def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
    """Queues a call, and returns the future of its result."""
    future: Future[T] = Future()
    self._last = future
    self._calls.put((future, call, arguments))
    return future

  @property
  def is_idle(self) -> bool:
    """Whether all calls have ended."""
    return self._last is None or self._last.done()

  def end(self, seconds: float) -> bool:
    """Drops all calls except the one in progress; returns whether that call ended within the time limit."""
    _finish(self._calls)
    self._thread.join(seconds)
    return not self._thread.is_alive()

  @property
  def where(self) -> str:
    """The code that the thread runs now, as 'file:line function'; '' if unknown."""
    frame = sys._current_frames().get(self._thread.ident or 0)
    return '' if frame is None else f'{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}'


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
  while (entry := calls.get()) is not None:
    future, call, arguments = entry
    if future.set_running_or_notify_cancel():
      try:
        future.set_result(call(*arguments))
      except BaseException as error:
        future.set_exception(error)
    del entry, future, call, arguments  # So that these objects can be freed while the thread waits.


def _finish(calls: queue.SimpleQueue[_Call | None]) -> None:
  while not calls.empty():
    entry = calls.get_nowait()
    if entry is not None:
      entry[0].cancel()
  calls.put(None)


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
  """Waits up to `_AT_EXIT` for reads to end.

  Python kills daemon threads at exit, and the process may abort if such a thread is in a C library then.
  """
  end = time.monotonic() + _AT_EXIT
  for thread in list(_threads):
    thread.join(max(0.0, end - time.monotonic()))


def result_in_time(future: Future[T], thread: PatientThread, label: str, *, since: float, timeout_s: float) -> T:
  """Returns the result of a read that `thread` runs, or raises its error; `label` is the name of the input in errors.

  The wait ends `timeout_s` seconds after `since`, the time of `time.monotonic` at which it began.

  Raises:
    HungInputError: the read did not end in time; the message names the line of code where it hangs.
  """
  if not wait([future], min(_LONG, max(0.0, since + timeout_s - time.monotonic()))).done:
    left = since + timeout_s - time.monotonic()
    if left > 0:
      text = f'{label}: waiting for a batch for {time.monotonic() - since:.0f} s; giving up in {left:.0f} s\n'
      os.write(2, text.encode(errors='replace'))
    if not wait([future], max(0.0, left)).done:
      where = f' at {thread.where}' if thread.where else ''
      raise HungInputError(f'{label}: no batch for {timeout_s:g} s: its reader hangs{where}')
  return future.result()


def call_in_time(call: Callable[[], T], label: str, *, timeout_s: float = READ_TIMEOUT_S) -> T:
  """Runs `call` in a separate thread and returns its result; raises the same errors as `result_in_time`."""
  thread = PatientThread(f'read-{label}')
  future = thread.submit(call)
  try:
    return result_in_time(future, thread, label, since=time.monotonic(), timeout_s=timeout_s)
  finally:
    thread.end(0.0)
