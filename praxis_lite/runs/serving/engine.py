"""Engine: one thread that drives a `Batcher`, for callers in other threads.

Callers put calls into a queue, which the engine's thread empties between two steps of the batcher. The thread reports
the progress of a request as events:

    Accepted, NewTokensEvent, NewTokensEvent, ..., EndEvent          or Refused, EndEvent
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from praxis_lite.common.errors import ConfigError, UserError, error_summary
from praxis_lite.common.figures import number_of
from praxis_lite.inputs import BaseTokenizer
from praxis_lite.runs.batcher import Batcher, BatcherStatistics, Request
from praxis_lite.runs.prompts import chat_prompt, encode_prompt
from praxis_lite.runs.records.run_config import check_count
from praxis_lite.runs.serving.requests import Asked

STOPPED, LENGTH, CANCELLED = 'stop', 'length', 'cancelled'  # The reasons why a continuation has ended.


class Accepted(NamedTuple):
  """The request was accepted, and waits for a row; `prompt` is its tokens."""

  prompt: list[int]


class Refused(NamedTuple):
  """The request was refused; `message` says why, and `does_not_fit` whether it is too long."""

  message: str
  does_not_fit: bool


class NewTokensEvent(NamedTuple):
  """New tokens of a request; for the fields see `Request`."""

  ids: list[int]
  log_probs: list[float]
  top: list[list[tuple[int, float]]]

  def __add__(self, other: object) -> NewTokensEvent:
    assert isinstance(other, NewTokensEvent)
    return NewTokensEvent(self.ids + other.ids, self.log_probs + other.log_probs, self.top + other.top)


NOTHING = NewTokensEvent([], [], [])


class EndEvent(NamedTuple):
  """The last event of a request; `reason` is STOPPED, LENGTH or CANCELLED, or says why the engine failed."""

  reason: str


Event = Accepted | Refused | NewTokensEvent | EndEvent


class BusyError(Exception):
  """There are already as many requests as the engine accepts."""


class EndedError(Exception):
  """The engine has failed, or is stopping."""


class TooLongError(ConfigError):
  """A prompt and its continuation are longer than a row."""


class Ticket:
  """A caller's handle for its request."""

  def __init__(self, asked: Asked, send: Callable[[Event], object]):
    self._asked, self._send = asked, send
    self._request: Request | None = None
    self._num_sent = 0


class Engine:
  """Drives a batcher.

  Args:
    batcher: the batcher, which nobody else may use.
    most_waiting: how many requests may wait for a row; further ones are refused at once.
    draws_seeds: whether a request without a seed gets a random one; otherwise it gets the seed of the model.

  Attributes:
    num_accepted, num_busy, num_refused, num_cancelled, num_ended: the number of requests by outcome.
    failure: the error that has ended the engine; None if it works.
  """

  def __init__(self, batcher: Batcher, tokenizer: BaseTokenizer | None, most_waiting: int, *, draws_seeds: bool = True):
    check_count('most_waiting', most_waiting, least=0)
    self.batcher, self._tokenizer, self._draws_seeds = batcher, tokenizer, draws_seeds
    self._most = batcher.num_rows + most_waiting
    self._calls = queue.SimpleQueue[Callable[[], object]]()
    self._lock = threading.Lock()
    self._tickets = set[Ticket]()  # The open requests.
    self._by_request: dict[Request, Ticket] = {}  # Only the thread uses this dict.
    self._is_stopping = False
    self.num_accepted = self.num_busy = self.num_refused = self.num_cancelled = self.num_ended = 0
    self.failure: BaseException | None = None
    self.on_failure: Callable[[], object] = lambda: None
    self._thread = threading.Thread(target=self._run, name='batcher', daemon=True)

  @property
  def num_open(self) -> int:
    """The number of requests that wait or run."""
    return len(self._tickets)

  def warm_up(self) -> None:
    """Compiles the programs that requests need; call it before `start`."""
    request = self.batcher.submit([0], max_tokens=1)
    self.batcher.run([request])
    self.batcher.statistics = BatcherStatistics()

  def start(self) -> None:
    self._thread.start()

  def stop(self, timeout_s: float) -> bool:
    """Ends all requests and the thread; returns whether the thread ended in time."""
    self._calls.put(self._stop)
    self._thread.join(timeout_s)
    return not self._thread.is_alive()

  def submit(self, asked: Asked, send: Callable[[Event], object]) -> Ticket:
    """Adds a request. The engine's thread calls `send` with each event; `send` must return at once and never raise.

    Raises:
      BusyError: there are already as many requests as the engine accepts.
      EndedError: the engine has failed, or is stopping.
    """
    ticket = Ticket(asked, send)
    with self._lock:
      if self._is_stopping:
        failure = self.failure
        raise EndedError('the server has ended' if failure is None else f'the engine failed: {type(failure).__name__}')
      if len(self._tickets) >= self._most:
        self.num_busy += 1
        raise BusyError(f'all {self._most} places are taken')
      self._tickets.add(ticket)
    self._calls.put(lambda: self._admit(ticket))
    return ticket

  def cancel(self, ticket: Ticket) -> None:
    """Ends a request soon; does nothing if it has ended."""
    self._calls.put(lambda: self._cancel(ticket))

  # ---------------------------------------------------------------- in the thread

  def _run(self) -> None:
    try:
      while not self._is_stopping:
        self._take_calls()
        if self.batcher.num_running or self.batcher.num_waiting:
          for request in self.batcher.step():
            self._end(self._by_request[request], STOPPED if request.is_stopped else LENGTH)
    except BaseException as error:
      self.failure = error
      self.on_failure()
    finally:
      with self._lock:
        self._is_stopping = True
        left = list(self._tickets)
      for ticket in left:
        self._end(ticket, CANCELLED if self.failure is None else f'the engine failed: {type(self.failure).__name__}')

  def _take_calls(self) -> None:
    """Runs the calls in the queue; if the batcher has no work, first waits for a call."""
    if not (self.batcher.num_running or self.batcher.num_waiting):
      self._calls.get()()
    try:
      while not self._is_stopping:
        self._calls.get_nowait()()
    except queue.Empty:
      pass

  def _stop(self) -> None:
    self._is_stopping = True

  def _admit(self, ticket: Ticket) -> None:
    try:
      request = ticket._request = self._submit(ticket)
    except Exception as error:  # A tokenizer or chat template may raise any error.
      message = str(error).removeprefix('submit: ')
      message = message if isinstance(error, UserError) else f'the prompt cannot be read: {error_summary(error)}'
      self.num_refused += 1
      ticket._send(Refused(message, isinstance(error, TooLongError)))
      self._end(ticket, CANCELLED)
      return
    self.num_accepted += 1
    self._by_request[request] = ticket
    ticket._send(Accepted(request.prompt))

  def _submit(self, ticket: Ticket) -> Request:
    asked, batcher = ticket._asked, self.batcher
    prompt = self._encode(asked)
    room = batcher.room(len(prompt))
    wanted = asked.max_tokens or 1
    if wanted > room:
      most = batcher.max_length + (not batcher.prompts_are_sources)
      sees = 'reads and writes' if batcher.prompts_are_sources else 'sees'
      raise TooLongError(
        f'this model {sees} at most {number_of(most, "token")}; the prompt has {len(prompt)}, and max_tokens = {wanted}'
      )
    return batcher.submit(
      prompt,
      max_tokens=min(batcher.sampler.max_decode_steps, room) if asked.max_tokens is None else asked.max_tokens,
      temperature=asked.temperature,
      top_p=asked.top_p,
      seed=secrets.randbits(32) if asked.seed is None and self._draws_seeds else asked.seed,
      stop=asked.stop,
      adapter=asked.adapter,
      stream=lambda ids: self._tell(ticket),
    )

  def _encode(self, asked: Asked) -> Sequence[int]:
    if not isinstance(asked.prompt, str) and not asked.is_chat:
      return asked.prompt
    if self._tokenizer is None:
      raise UserError('this model has no tokenizer; pass a list of tokens as prompt')
    if asked.is_chat:
      return chat_prompt(self._tokenizer, asked.prompt)
    return encode_prompt(self._tokenizer, asked.prompt)

  def _tell(self, ticket: Ticket) -> None:
    request = ticket._request
    assert request is not None
    new = slice(ticket._num_sent, None)
    ticket._num_sent = len(request.ids)
    ticket._send(NewTokensEvent(request.ids[new], request.log_probs[new], request.top[new]))

  def _cancel(self, ticket: Ticket) -> None:
    if ticket in self._tickets:
      if ticket._request is not None:
        self.batcher.cancel(ticket._request)
      self.num_cancelled += 1
      self._end(ticket, CANCELLED)

  def _end(self, ticket: Ticket, reason: str) -> None:
    with self._lock:
      self._tickets.discard(ticket)
    if ticket._request is not None:
      self._by_request.pop(ticket._request, None)
    self.num_ended += reason in (STOPPED, LENGTH)
    ticket._send(EndEvent(reason))
