"""PrefetchIterator: a thread that reads batches and puts them on the devices while the previous step runs.

    training thread     step k | step k + 1 | ...          get_state() is the state of the input after
    prefetch thread     read and put batches k + 1, ..., k + depth       batch k, the last one returned

So a checkpoint between two steps resumes with the next batch, however far the thread has read ahead.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from typing import Any, Self, TypeVar, cast

from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs.base import BaseInput
from praxis_lite.inputs.patient_thread import READ_TIMEOUT_S, PatientThread, result_in_time
from praxis_lite.inputs.rows import Rows

_AT_CLOSE = 10.0  # Seconds that `close` waits for a read in progress.

T = TypeVar('T')


class PrefetchIterator(Iterator[T]):
  """The batches of an input, with up to `depth` batches read ahead. Nothing else may use the input until `close`.

  Use it as a context manager, or call `close`. JAX settings that are local to a thread, such as the ambient mesh, do
  not apply in `put_fn`, so it must use shardings that contain their mesh.

  Attributes:
    hangs: whether `close` gave up on a read that did not end. If so, the input must not be used any more.
  """

  def __init__(
    self,
    source: BaseInput,
    put_fn: Callable[[Rows], T] | None = None,
    depth: int = 2,
    left_out: Iterable[dict[str, Any]] = (),
    timeout_s: float = READ_TIMEOUT_S,
  ):
    """Starts reading `source` from its current position; raises ConfigError if `depth` is less than 1.

    Args:
      put_fn: applied to each batch in the thread, to put it on devices; None leaves batches as they are.
      depth: largest number of batches that are ready but not yet returned.
      left_out: states of the input; a batch that follows one of these states is skipped.
      timeout_s: seconds to wait for a batch.
    """
    if depth < 1:
      raise ConfigError(f'PrefetchIterator.depth: expected at least 1, got {depth}')
    self._source = source
    self._put_fn: Callable[[Rows], T] = put_fn or cast(Callable[[Rows], T], lambda batch: batch)
    self._depth = depth
    self._left_out = frozenset(map(_key, left_out))
    self._thread: PatientThread | None = None
    self.timeout_s = timeout_s
    self.hangs = False
    self._start()

  def _start(self) -> None:
    self._state = self._before = self._source.get_state()
    self._batches = _batches(self._source, self._put_fn, self._left_out)
    self._thread = thread = PatientThread(f'prefetch-{self._source.label}_0')
    self._since: float | None = None
    self._ahead = deque(thread.submit(next, self._batches) for _ in range(self._depth))

  def get_next(self) -> T:
    """Returns the next batch, waiting until it is ready.

    Raises:
      StopIteration: the input is exhausted.
      HungInputError: the batch did not come within `timeout_s` of the first wait for it.
      Exception: any error of the input or `put_fn`, after all batches before it. Each further call raises it again.
    """
    if self._thread is None:
      raise RuntimeError('the prefetch iterator is closed')
    self._since = self._since or time.monotonic()
    limit: dict[str, Any] = {'since': self._since, 'timeout_s': self.timeout_s}
    batch, self._before, self._state = result_in_time(self._ahead[0], self._thread, self._source.label, **limit)
    self._since = None
    self._ahead.popleft()
    self._ahead.append(self._thread.submit(next, self._batches))
    return batch

  def wait(self, seconds: float | None = None) -> bool:
    """Waits up to `seconds`, if set, for a batch, the end of the input or an error; returns whether any of these came.

    An overdue batch counts as an error, which `get_next` raises.
    """
    self._since = self._since or time.monotonic()
    left = self._since + self.timeout_s - time.monotonic()
    return bool(wait([self._ahead[0]], left if seconds is None else min(seconds, max(left, 0.0))).done) or left <= 0

  def get_state(self) -> dict[str, Any]:
    """Returns the state of the input after the last batch that `get_next` returned."""
    return self._state

  @property
  def state_before(self) -> dict[str, Any]:
    """The state of the input before the last batch that `get_next` returned."""
    return self._before

  def set_state(self, state: dict[str, Any]) -> None:
    """Drops what was read ahead, and continues from `state`."""
    self.close()
    self._source.set_state(state)
    self._start()

  def reset(self) -> Self:
    """Drops what was read ahead, and goes back to the start of the input."""
    self.close()
    self._source.reset()
    self._start()
    return self

  def close(self) -> None:
    """Stops the thread, drops what was read ahead, closes the input and leaves it at `get_state()`.

    A read that does not end in time is abandoned; see `hangs`.
    """
    if self._thread is not None:
      self.hangs = not self._thread.end(_AT_CLOSE)
      self._thread = None
      if not self.hangs:
        self._source.set_state(self._state)
        self._source.close()

  __next__ = get_next

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()


def _batches(
  source: BaseInput, put_fn: Callable[[Rows], T], left_out: frozenset[str]
) -> Iterator[tuple[T, dict[str, Any], dict[str, Any]]]:
  """Yields each batch with the states of the input before and after it; skips it if the first one is in `left_out`."""
  # No reference to the prefetch iterator here: the thread must end when the iterator is garbage-collected.
  before = source.get_state()
  for batch in source:
    after = source.get_state()
    if _key(before) not in left_out:
      yield put_fn(batch), before, after
    before = after


def _key(state: dict[str, Any]) -> str:
  return json.dumps(state, sort_keys=True)
