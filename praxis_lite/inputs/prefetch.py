"""PrefetchIterator: reads batches, and puts them on the devices, in a thread while the step before them runs.

    training thread     step k | step k + 1 | ...          get_state() is what the input's state was
    prefetch thread     read and put batches k + 1, ..., k + depth       after batch k, the last one handed out

So a checkpoint taken between two steps continues with the batch that comes next, however far the thread is ahead.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar

from praxis_lite.errors import ConfigError
from praxis_lite.inputs.base import BaseInput
from praxis_lite.inputs.rows import Rows

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class _Item:
  """What the thread hands over: a batch and the state after it, or the exception that ended the stream."""

  batch: Any = None
  state: dict[str, Any] = dataclasses.field(default_factory=dict)
  error: BaseException | None = None


class _Worker:
  """One run of the thread. It knows nothing of the iterator that owns it, so an iterator nobody holds can stop it."""

  def __init__(self, source: BaseInput, put_fn: Callable[[Rows], Any], depth: int):
    self.items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    self.slots = threading.Semaphore(depth)
    self._stopping = threading.Event()
    self._thread = threading.Thread(
      target=self._run, args=(source, put_fn), name=f'prefetch-{source.label}', daemon=True
    )
    self._thread.start()

  def _run(self, source: BaseInput, put_fn: Callable[[Rows], Any]) -> None:
    try:
      while True:
        # A slot is taken before reading, so that no more than `depth` batches exist.
        self.slots.acquire()
        if self._stopping.is_set():
          return
        batch = source.get_next()
        state = source.get_state()
        self.items.put(_Item(put_fn(batch), state))
    except BaseException as e:  # raised again where the batch is asked for
      self.items.put(_Item(error=e))

  def stop(self, wait: bool) -> None:
    self._stopping.set()
    self.slots.release()
    if wait and self._thread is not threading.current_thread():
      self._thread.join()


class PrefetchIterator(Generic[T]):
  """Batches of an input, `depth` of them ahead. The input must not be used otherwise while this is open.

  Use it as a context manager, or call `close`. Settings of JAX that are local to a thread, such as a mesh that was
  set, do not hold in `put_fn`; give it shardings that name their mesh.
  """

  def __init__(self, source: BaseInput, put_fn: Callable[[Rows], T] | None = None, depth: int = 2):
    """Starts reading.

    Args:
      source: the input to read from, from where it stands.
      put_fn: applied to each batch in the thread, to put it on devices; None leaves batches as they are.
      depth: how many batches may be ready and not yet asked for; at least 1.

    Raises:
      ConfigError: depth is less than 1.
    """
    if depth < 1:
      raise ConfigError(f'PrefetchIterator.depth: expected at least 1, got {depth}')
    self._source = source
    self._put_fn: Callable[[Rows], Any] = put_fn or (lambda batch: batch)
    self._depth = depth
    self._error: BaseException | None = None
    self._worker: _Worker | None = None
    self._state = source.get_state()
    self._start()

  def get_next(self) -> T:
    """Returns the next batch, waiting for it if it is not ready.

    Raises:
      StopIteration: the input is over.
      Exception: what the input or `put_fn` raised, after all batches before it; raised again on each call.
    """
    if self._error is not None:
      raise self._error
    if self._worker is None:
      raise RuntimeError('the prefetch iterator is closed')
    item = self._worker.items.get()
    if item.error is not None:
      self._error = item.error
      raise item.error
    self._worker.slots.release()
    self._state = item.state
    return item.batch

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
    """Stops the thread and drops what was read ahead. The input then stands where `get_state` says."""
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
