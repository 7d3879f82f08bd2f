"""A thread for reads that may hang, because storage is unreachable or a source has stopped yielding.

A caller that waits for such a read gets an error after a time limit, and the process can exit although the read hangs.
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

# The time limit of a read, and the time after which a line says that something waits for it; in seconds.
READ_TIMEOUT_S, _LONG = 3600.0, 30.0
# How long the exit of a process waits for a read in progress, in seconds.
_AT_EXIT = 5.0

T = TypeVar('T')
_Call = tuple['Future[Any]', Callable[..., Any], tuple[Any, ...]]


class PatientThread:
  """A thread that calls functions one after the other. It ends when this object is garbage-collected."""

  def __init__(self, name: str):
    self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
    self._last: Future[Any] | None = None
    # A daemon: a call that hangs in it must not keep the process alive.
    self._thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
    self._thread.start()
    _threads.add(self._thread)
    weakref.finalize(self, _finish, self._calls)

  def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
    """Calls a function, after those submitted before it."""
    future: Future[T] = Future()
    self._last = future
    self._calls.put((future, call, arguments))
    return future

  @property
  def is_idle(self) -> bool:
    """Whether all calls have ended."""
    return self._last is None or self._last.done()

  def end(self, seconds: float) -> bool:
    """Drops all calls except the one in progress; returns whether that one has ended in time."""
    _finish(self._calls)
    self._thread.join(seconds)
    return not self._thread.is_alive()

  @property
  def where(self) -> str:
    """Where the thread is now, as file:line function; '' if that is unknown."""
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
    del entry, future, call, arguments  # So that the thread keeps nothing alive while it waits for the next call.


def _finish(calls: queue.SimpleQueue[_Call | None]) -> None:
  while not calls.empty():
    entry = calls.get_nowait()
    if entry is not None:
      entry[0].cancel()
  calls.put(None)


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
  """Waits for reads to end, because Python kills daemon threads, which may abort the process inside a library."""
  end = time.monotonic() + _AT_EXIT
  for thread in list(_threads):
    thread.join(max(0.0, end - time.monotonic()))


def result_in_time(future: Future[T], thread: PatientThread, label: str, *, since: float, timeout_s: float) -> T:
  """Returns the result of a read, or raises its error.

  Args:
    future: of the read, in `thread`.
    label: of the input, for messages.
    since: when the wait began, by `time.monotonic`.
    timeout_s: seconds from `since`.

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
  """Returns the result of a read in a thread of its own; raises like `result_in_time`."""
  thread = PatientThread(f'read-{label}')
  future = thread.submit(call)
  try:
    return result_in_time(future, thread, label, since=time.monotonic(), timeout_s=timeout_s)
  finally:
    thread.end(0.0)
