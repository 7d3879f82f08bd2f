"""PrefetchIterator: reads batches, and puts them on the devices, in a thread while the step before them runs.

    training thread     step k | step k + 1 | ...          get_state() is the state of the input after
    prefetch thread     read and put batches k + 1, ..., k + depth       batch k, the last one returned

So a checkpoint between two steps continues with the next batch, however far the thread has read ahead.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar, cast

from praxis_lite.errors import ConfigError
from praxis_lite.inputs.base import BaseInput
from praxis_lite.inputs.rows import Rows

T = TypeVar('T')


class _Worker(Generic[T]):
  """One run of the thread. It holds no reference to its iterator, so that an iterator without references stops it.

  Attributes:
    items: batches with the state after them, or at the end the exception that ended the stream.
    slots: one is taken before a batch is read, so that at most `depth` batches exist.
  """

  def __init__(self, source: BaseInput, put_fn: Callable[[Rows], T], depth: int):
    self.items: queue.SimpleQueue[tuple[T, dict[str, Any]] | BaseException] = queue.SimpleQueue()
    self.slots = threading.Semaphore(depth)
    self._stopping = threading.Event()
    self._thread = threading.Thread(
      target=self._run, args=(source, put_fn), name=f'prefetch-{source.label}', daemon=True
    )
    self._thread.start()

  def _run(self, source: BaseInput, put_fn: Callable[[Rows], T]) -> None:
    try:
      while True:
        self.slots.acquire()
        if self._stopping.is_set():
          return
        batch = source.get_next()
        state = source.get_state()
        self.items.put((put_fn(batch), state))
    except BaseException as e:  # raised again by get_next
      self.items.put(e)

  def stop(self, wait: bool) -> None:
    self._stopping.set()
    self.slots.release()
    if wait and self._thread is not threading.current_thread():
      self._thread.join()


class PrefetchIterator(Generic[T]):
  """Batches of an input, read up to `depth` ahead. The input must not be used otherwise while this is open.

  Use it as a context manager, or call `close`. Settings of JAX that are local to a thread, such as the ambient mesh, do
  not apply in `put_fn`; give it shardings that hold their mesh.
  """

  def __init__(self, source: BaseInput, put_fn: Callable[[Rows], T] | None = None, depth: int = 2):
    """Starts reading.

    Args:
      source: the input to read, from its current position.
      put_fn: applied to each batch in the thread, to put it on devices; None leaves batches as they are.
      depth: how many batches may be ready and not yet returned; at least 1.

    Raises:
      ConfigError: depth is less than 1.
    """
    if depth < 1:
      raise ConfigError(f'PrefetchIterator.depth: expected at least 1, got {depth}')
    self._source = source
    self._put_fn: Callable[[Rows], T] = put_fn or cast(Callable[[Rows], T], lambda batch: batch)
    self._depth = depth
    self._error: BaseException | None = None
    self._worker: _Worker[T] | None = None
    self._start()

  def get_next(self) -> T:
    """Returns the next batch, waiting until it is ready.

    Raises:
      StopIteration: the input is exhausted.
      Exception: what the input or `put_fn` raised, after all batches before it; raised again on each call.
    """
    if self._error is not None:
      raise self._error
    if self._worker is None:
      raise RuntimeError('the prefetch iterator is closed')
    item = self._worker.items.get()
    if isinstance(item, BaseException):
      self._error = item
      raise item
    self._worker.slots.release()
    batch, self._state = item
    return batch

  def get_state(self) -> dict[str, Any]:
    """Returns the state of the input as of the last batch that was returned."""
    return self._state

  def set_state(self, state: dict[str, Any]) -> None:
    """Drops what was read ahead and continues from `state`."""
    self.close()
    self._source.set_state(state)
    self._start()

  def reset(self) -> Self:
    """Drops what was read ahead and goes back to the start of the input."""
    self.close()
    self._source.reset()
    self._start()
    return self

  def close(self) -> None:
    """Stops the thread and drops what was read ahead. The input is then at the position of `get_state`."""
    if self._worker is not None:
      self._worker.stop(wait=True)
      self._worker = None
      self._source.set_state(self._state)

  def _start(self) -> None:
    self._error = None
    self._state = self._source.get_state()
    self._worker = _Worker(self._source, self._put_fn, self._depth)

  def __iter__(self) -> Iterator[T]:
    return self

  def __next__(self) -> T:
    return self.get_next()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()

  def __del__(self) -> None:
    worker = getattr(self, '_worker', None)
    if worker is not None:
      worker.stop(wait=False)
