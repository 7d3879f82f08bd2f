"""Batcher: continues prompts that come and go, in the rows of one batch.

    batcher = model.batcher(rows=8, max_length=1024)
    request = batcher.submit('to be', max_tokens=20)
    for finished in batcher:
      print(finished.text)

A request waits for a free row. Its prompt is read in chunks, between steps that add a few tokens to each row whose
prompt has been read. When a request ends, the next one takes its row. Requests of any length, with any settings, run
without a new compilation.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from praxis_lite.common.config.values import fit
from praxis_lite.common.devices import memory_of
from praxis_lite.common.errors import ConfigError, UserError, prefix_errors
from praxis_lite.common.figures import format_bytes, number_of
from praxis_lite.common.keywords import check_keywords, name_unknown_keywords
from praxis_lite.inputs import BaseTokenizer
from praxis_lite.models import EncoderDecoderModel, LanguageModel
from praxis_lite.models.decoding import Bucket, Sampler, chunk_of
from praxis_lite.models.decoding.row_loop import NewTokens
from praxis_lite.models.decoding.sampling import MOST_TEMPERATURE, NO_TOP_P
from praxis_lite.runs.continuations import GrowingText
from praxis_lite.runs.prefix_store import PrefixStore
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.prompts import (
  OF_OTHER_DECODERS,
  Sampling,
  check_ids,
  encode_prompt,
  prompt_batch,
  require_tokenizer,
  stop_ids,
)
from praxis_lite.runs.records.run_config import check_count, check_seed
from praxis_lite.runs.row_programs import RowPrograms, empty_settings
from praxis_lite.runs.row_slots import LEAST_SHARED, RowSlots

Stream = Callable[[Any], object]
_MOST_BY_DEFAULT = 1024  # The default limit of tokens in a row.


class Request:
  """A prompt and its continuation.

  Attributes:
    prompt: the tokens of the prompt.
    ids: the tokens after it so far.
    text: the text of these tokens; '' if the prompt was given as tokens.
    is_done: whether it has ended, or was cancelled.
    is_cancelled: whether `Batcher.cancel` ended it.
    is_stopped: whether it ended at a stop token or a stop text.
    shared: how many tokens at the start of the prompt were not read, but copied from the caches of another request.
    log_probs: log-probability of each token of `ids`, in nats, under the model at temperature 1.
    top: for each token of `ids`, the `top_log_probs` most probable tokens at its position, as pairs (token,
      log-probability) in descending order.
  """

  def __init__(
    self,
    prompt: list[int],
    text: GrowingText | None,
    stops: Sequence[int],
    max_tokens: int,
    temperature: float,
    top_p: float,
    key_data: np.ndarray,
    stream: Stream | None,
    gives_text: bool,
  ):
    self.prompt, self.ids = prompt, list[int]()
    self.is_done = self.is_cancelled = self.is_stopped = False
    self.shared = 0
    self.log_probs, self.top = list[float](), list[list[tuple[int, float]]]()
    self._text, self._stops, self._stream, self._gives_text = text, stops, stream, gives_text
    self._max_tokens, self._temperature, self._top_p, self._key_data = max_tokens, temperature, top_p, key_data
    self._row = self._adapter = -1
    self._num_given = 0  # How many tokens of the prompt were read or copied.

  @property
  def text(self) -> str:
    return self._text.text if self._gives_text and self._text is not None else ''

  @property
  def result(self) -> str | list[int]:
    """The continuation, as `TrainedModel.decode` returns it: a text, or tokens if the prompt is tokens."""
    return self.text if self._gives_text else self.ids

  def _add(self, row: NewTokens) -> Callable[[], object]:
    """Adds new tokens, up to one that ends the continuation; returns a function that passes them to the stream."""
    start, new = len(self.ids), row.ids[: row.counts].tolist()
    self.ids += new
    ends = [i + 1 for i, token in enumerate(new) if token in self._stops]
    until = self._text.count_until_stop(self.ids, start + 1) if self._text is not None else None
    end = min((*(start + i for i in ends[:1]), *(() if until is None else (until,))), default=None)
    self.ids = self.ids[:end]
    count = len(self.ids) - start
    self.log_probs += row.log_probs[:count].tolist()
    tops = zip(row.top_ids[:count].tolist(), row.top_log_probs[:count].tolist())
    self.top += [list(zip(*top)) for top in tops]
    self.is_stopped = end is not None
    self.is_done = self.is_stopped or len(self.ids) >= self._max_tokens
    if self._gives_text and self._text is not None:
      piece: Any = self._text.add(self.ids, is_all=self.is_done)
    else:
      piece = self.ids[start:]
    stream = self._stream
    return lambda: stream(piece) if stream is not None and piece else None

  def __repr__(self) -> str:
    state = 'cancelled' if self.is_cancelled else 'done' if self.is_done else 'waiting' if self._row < 0 else 'running'
    return (
      f'<request of {number_of(len(self.prompt), "token")}, {state}, {len(self.ids)} of up to '
      f'{number_of(self._max_tokens, "token")}>'
    )


@dataclasses.dataclass
class BatcherStatistics:
  """What a batcher has done.

  Attributes:
    prompt_tokens: tokens of prompts that were read.
    shared_tokens: tokens of prompts that were not read, but copied from another request or from a kept prefix.
    new_tokens: tokens of continuations.
    passes: calls that added tokens to the rows.
  """

  prompt_tokens: int = 0
  shared_tokens: int = 0
  new_tokens: int = 0
  passes: int = 0


class Batcher:
  """Continues prompts that come and go. `TrainedModel.batcher` makes it, and describes the arguments.

  Attributes:
    statistics: counts of what it has done so far.
    max_length: the largest number of tokens in a prompt and its continuation together, not counting the last token;
      for an encoder-decoder, in a source.
    sampler: the default settings of requests.
    prompts_are_sources: whether prompts are sources of an encoder-decoder, such as texts to translate.
    adapter_names: names of the adapters that requests choose from.
  """

  def __init__(
    self,
    tasks: TaskOnMesh,
    stored_variables: Any,
    global_step: jax.Array,
    key: jax.Array,
    tokenizer: Callable[[], BaseTokenizer | None],
    *,
    rows: int,
    max_length: int | None,
    tokens_per_step: int,
    chunk: int | None,
    chunks_per_step: int,
    reuse_prefixes: bool,
    kept_prefixes: int,
    top_log_probs: int = 0,
  ):
    for name, value in {'kept_prefixes': kept_prefixes, 'top_log_probs': top_log_probs}.items():
      check_count(f'batcher: {name}', value, least=0)
    for name, value in {'rows': rows, 'tokens_per_step': tokens_per_step, 'chunks_per_step': chunks_per_step}.items():
      check_count(f'batcher: {name}', value)
    for name, number in {'max_length': max_length, 'chunk': chunk}.items():
      check_count(f'batcher: {name}', number, kind=int | None)
    self.sampler, self._num_ids, max_length = _check_model(tasks, max_length)
    self.prompts_are_sources = tasks.jax_task.model.prompts_are_sources
    self.adapter_names: tuple[str, ...] = getattr(tasks.jax_task.model, 'adapter_names', ())
    without_reuse = '' if reuse_prefixes else 'it needs reuse_prefixes=True'
    if self.adapter_names:  # Caches of the same prefix differ between adapters.
      without_reuse = 'with several adapters, set it to 0'
    if self.prompts_are_sources:
      chunk, without_reuse = max_length, 'sources are read as a whole, so set it to 0'
    if kept_prefixes and without_reuse:
      raise ConfigError(f'batcher: kept_prefixes = {kept_prefixes}; {without_reuse}')
    chunk = min(chunk_of(Bucket.choose(max_length, 1, None).slots) if chunk is None else chunk, max_length)
    self._programs = RowPrograms(
      tasks,
      stored_variables,
      global_step,
      num_rows=rows,
      num_slots=max_length,
      chunk=max(chunk, 2),  # A chunk has several tokens, like any prompt.
      num_tokens=tokens_per_step,
      num_kept=kept_prefixes,
      num_top=top_log_probs if self._num_ids is None else min(top_log_probs, self._num_ids),
    )
    _check_memory(self._programs, tasks, rows, kept_prefixes)
    self.statistics = BatcherStatistics()
    self._key_data, self._find_tokenizer = self._programs.draw_key(key), tokenizer
    self.max_length, self._chunks_per_step = max_length, chunks_per_step
    self._slots = RowSlots(rows, reuses_prefixes=not without_reuse)
    self._waiting = deque[Request]()
    self._running: dict[int, Request] = {}  # The request in each busy row, by the number of the row.
    self._reading: Request | None = None  # The running request whose prompt is being read.
    self._ended: list[Request] = []  # Ended requests that no step has returned yet.
    self._settings = empty_settings(rows, self._key_data)
    self._state = self._programs.start()
    self._prefixes = PrefixStore(kept_prefixes, LEAST_SHARED)
    self._store = self._programs.start_store() if kept_prefixes else None

  # ---------------------------------------------------------------- requests

  @functools.partial(name_unknown_keywords, elsewhere='batcher', of_elsewhere=inspect.signature(Sampler).parameters)
  def submit(
    self,
    prompt: str | Sequence[int],
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    stop_tokens: Sequence[int] = (),
    adapter: str | None = None,
    stream: Stream | None = None,
  ) -> Request:
    """Adds a request, which `step` works on.

    Args:
      prompt: a text, or tokens.
      max_tokens: the largest number of tokens after the prompt; None keeps that of the config.
      temperature, top_p: see `Sampler`; None keeps those of the config.
      seed: seed of the sample; `TrainedModel.decode` returns the same sample for this prompt and seed. None uses the
        seed of the model.
      stop: texts that also end the continuation, see `TrainedModel.decode`.
      stop_tokens: tokens that also end it.
      adapter: the name of one of several adapters of the model; None uses none of them. See `combine_adapters`.
      stream: called with each new piece of text, or with new tokens if the prompt is tokens. See `step` for its errors.

    Raises:
      UserError: the prompt is empty, has an id outside of the vocabulary, or leaves no room for `max_tokens`; or
        another argument is not valid.
    """
    decoder = self.sampler
    max_tokens = decoder.max_decode_steps if max_tokens is None else max_tokens
    temperature = decoder.temperature if temperature is None else temperature
    top_p = decoder.top_p if top_p is None else top_p
    check_count('submit: max_tokens', max_tokens)
    for name, value, kind in (('temperature', temperature, float), ('top_p', top_p, float | None)):
      with prefix_errors(f'submit: {name}'):
        fit(value, kind, None)
    if seed is not None:
      check_seed(seed)
    if adapter is not None and adapter not in self.adapter_names:
      known = f'; expected one of {", ".join(map(repr, self.adapter_names))}' if self.adapter_names else ''
      raise ConfigError(f'submit: adapter = {adapter!r}: the model has no such adapter{known}')
    if stream is not None and not callable(stream):
      raise ConfigError(f'submit: stream = {stream!r}; expected a function that is called with each piece')
    if not 0 <= temperature <= MOST_TEMPERATURE:
      raise ConfigError(f'submit: temperature = {temperature}; expected from 0 to {MOST_TEMPERATURE:g}')
    if top_p is not None and not 0 < top_p <= 1:
      raise ConfigError(f'submit: top_p = {top_p}; expected more than 0 and at most 1')
    is_text = isinstance(prompt, str)
    tokenizer = self._tokenizer() if is_text or stop else None
    ids = encode_prompt(self._tokenizer(), prompt) if isinstance(prompt, str) else prompt
    with prefix_errors('submit'):
      batch = prompt_batch([ids])
      check_ids(batch, self._num_ids)
      single_stops = stop_ids(tokenizer, stop)
    tokens = batch['ids'][0, : batch['prompt_lengths'][0]].tolist()
    room = self.room(len(tokens))
    if max_tokens > room and self.prompts_are_sources:
      raise ConfigError(
        f'submit: a source of {number_of(len(tokens), "token")} with max_tokens = {max_tokens}: both are at most '
        f'max_length = {self.max_length}'
      )
    if max_tokens > room:
      fits = f'up to {room} fit' if room > 0 else f'the prompt has more than {number_of(self.max_length, "token")}'
      raise ConfigError(
        f'submit: a prompt of {number_of(len(tokens), "token")} with max_tokens = {max_tokens} needs more than the '
        f'max_length = {self.max_length} of the batcher; {fits}'
      )
    text = GrowingText(tokenizer, [] if self.prompts_are_sources else tokens, stop) if tokenizer is not None else None
    stops = (*decoder.stop_ids, *single_stops, *stop_tokens)
    key_data = self._key_data if seed is None else self._programs.draw_key_of_seed(seed)
    mass = NO_TOP_P if top_p is None else float(top_p)
    request = Request(tokens, text, stops, max_tokens, float(temperature), mass, key_data, stream, is_text)
    if adapter is not None:
      request._adapter = self.adapter_names.index(adapter)
    self._waiting.append(request)
    return request

  def cancel(self, request: Request) -> None:
    """Ends a request, which keeps the tokens that it has; does nothing if the request has ended already."""
    if not isinstance(request, Request):
      raise UserError(f'cancel: expected a request, as submit returns it, got {type(request).__name__}')
    if request.is_done:
      return
    if request in self._waiting:
      self._waiting.remove(request)
    elif self._running.get(request._row) is request:
      self._release(request)
    else:
      raise UserError('cancel: this request belongs to another batcher')
    request.is_done = request.is_cancelled = True

  def room(self, prompt_length: int) -> int:
    """Returns how many tokens can follow a prompt of this length; 0 or less if the prompt itself is too long."""
    if self.prompts_are_sources:
      return self.max_length if prompt_length <= self.max_length else 0
    return self.max_length - prompt_length + 1  # The last token needs no cache slot.

  @property
  def num_rows(self) -> int:
    """The number of rows: how many requests can run at once."""
    return len(self._settings.limits)

  @property
  def num_waiting(self) -> int:
    """How many requests wait for a row."""
    return len(self._waiting)

  @property
  def num_running(self) -> int:
    """How many requests are running: each has a row."""
    return len(self._running)

  # ---------------------------------------------------------------- work

  def step(self) -> list[Request]:
    """Reads some chunks of prompts, and adds a few tokens to each row; returns the requests that have ended.

    If the stream of a request raises an error, the request is cancelled, and `step` raises the error. Other requests
    are not affected: later steps continue them, and return the requests that ended in this step.
    """
    self._read_prompts()
    self._extend()
    ended, self._ended = self._ended, []
    return ended

  def __iter__(self) -> Iterator[Request]:
    """Yields requests as they end, until all have ended. More may be submitted meanwhile."""
    while self._waiting or self._running or self._ended:
      yield from self.step()

  def run(self, requests: Sequence[Request] | None = None) -> None:
    """Works until these requests have ended; None waits for all.

    Raises:
      UserError: a request belongs to another batcher.
    """
    while self._waiting or self._running if requests is None else any(not request.is_done for request in requests):
      if not (self._waiting or self._running):
        raise UserError('run: all requests of this batcher have ended, so an unfinished one belongs to another batcher')
      self.step()

  def _read_prompts(self) -> None:
    """Reads up to `chunks_per_step` chunks of prompts.

    A request gets a row after the prompts of all earlier requests have been read, so it can copy a prefix from any of
    them.
    """
    for _ in range(self._chunks_per_step):
      if self._reading is None:
        if not (self._waiting and self._slots.has_free):
          return
        self._reading = self._admit(self._waiting.popleft())
      self._read_chunk(self._reading)

  def _admit(self, request: Request) -> Request:
    """Gives a free row to a request."""
    plan, kept = self._slots.plan(request.prompt), None
    if self._store is not None:
      kept = self._prefixes.find(request.prompt, plan.shared)
      ids = self._slots.ids_of(plan.row)
      # Whether the prompt continues all tokens of the row. Then no caches are overwritten, and none need to be kept.
      is_extended = plan.source == plan.row and plan.shared == len(ids)
      to = None if is_extended else self._prefixes.keep(ids, but=None if kept is None else kept[0])
      if to is not None:
        self._store = self._programs.keep(self._state, self._store, plan.row, to)
    place = self._slots.take(request.prompt, 0 if kept is None else kept[1], plan)
    if kept is not None and self._store is not None:
      self._state = self._programs.fetch(self._state, self._store, kept[0], place.row)
    elif place.source is not None and place.source != place.row:
      self._state = self._programs.copy(self._state, place.source, place.row)
    request._row, request._num_given, request.shared = place.row, place.shared, place.shared
    self._running[place.row] = request
    self.statistics.shared_tokens += place.shared
    settings, row = self._settings, place.row
    before = 1 if self.prompts_are_sources else len(request.prompt)  # A target begins with one start token.
    settings.lengths[row] = settings.prompt_lengths[row] = before
    settings.temperatures[row], settings.top_ps[row] = request._temperature, request._top_p
    settings.keys[row] = request._key_data
    return request

  def _read_chunk(self, request: Request) -> None:
    """Reads the next chunk of a prompt; after the last chunk, steps add tokens to its row."""
    start, length = request._num_given, len(request.prompt)
    ids = request.prompt[start : start + self._programs.chunk]
    self._state = self._programs.read(self._state, request._row, ids, start, length, request._adapter)
    read = ids[: length - 1 - start]  # The next `_extend` reads the last token of a prompt.
    self._slots.note_read(request._row, read)
    self.statistics.prompt_tokens += len(read)
    request._num_given += len(ids)
    if request._num_given == length:
      self._settings.limits[request._row] = request._max_tokens
      self._reading = None

  def _extend(self) -> None:
    """Adds tokens to the rows whose prompts have been read."""
    settings, streams = self._settings, []
    if not settings.limits.any():
      return
    self._state, new = self._programs.extend(self._state, settings)
    self.statistics.passes += 1
    for row, request in list(self._running.items()):
      if not new.counts[row]:
        continue
      last = (request.prompt + request.ids)[-1:]
      before = len(request.ids)
      streams.append((request, request._add(jax.tree.map(lambda x, row=row: x[row], new))))
      added = request.ids[before:]
      self.statistics.new_tokens += len(added)
      self._slots.note_read(row, (last + added)[: len(added)])  # The next step reads the last token.
      settings.lengths[row] += len(added)
      if request.is_done:
        self._release(request)
        self._ended.append(request)
    errors = [error for request, tell in streams if (error := self._tell(request, tell)) is not None]
    if errors:
      raise errors[0]

  def _tell(self, request: Request, tell: Callable[[], object]) -> Exception | None:
    """Calls the stream of a request, which may submit and cancel requests.

    If the stream raises an error, cancels the request and returns the error; otherwise returns None.
    """
    try:
      tell()
    except Exception as error:
      error.add_note(f'the stream of {request!r} raised this; the request was cancelled')
      self.cancel(request)
      return error
    return None

  def _release(self, request: Request) -> None:
    self._settings.limits[request._row] = 0
    if self._reading is request:
      self._reading = None
    del self._running[request._row]
    self._slots.release(request._row)

  def _tokenizer(self) -> BaseTokenizer:
    return require_tokenizer(self._find_tokenizer(), 'submit: ', 'pass a list of tokens')


def check_setting(name: str, of_decode: Collection[str]) -> None:
  """Raises ConfigError unless a name is a setting that a batcher has for all of its requests."""
  of_sampler = [field for field in Sampling.__annotations__ if field not in OF_OTHER_DECODERS]
  if name in of_sampler:
    return
  if name in inspect.signature(Batcher.submit).parameters:
    raise ConfigError(f'batcher: {name} is a setting of a request; give it to submit')
  if name in of_decode:
    raise ConfigError(f'batcher: {name}: a batcher does not support it; use TrainedModel.decode')
  own = [field for field, x in inspect.signature(Batcher).parameters.items() if x.kind is x.KEYWORD_ONLY]
  check_keywords('batcher', [name], [*own, *of_sampler])


def _check_model(tasks: TaskOnMesh, max_length: int | None) -> tuple[Sampler, int | None, int]:
  """Returns the sampler, the size of the vocabulary (None if it is unknown), and the most tokens that one row can hold.

  Raises:
    ConfigError: a batcher cannot decode this model, or `max_length` is more than the model sees at once.
  """
  model = tasks.jax_task.model
  sources = model.prompts_are_sources and type(model).decode is EncoderDecoderModel.decode
  if not isinstance(model, LanguageModel) or not (sources or type(model).decode is LanguageModel.decode):
    raise ConfigError(
      f'batcher: needs a LanguageModel or an EncoderDecoderModel; this model is a {type(model).__name__}'
    )
  if model.model_type == 'prefix':
    raise ConfigError("batcher: model_type 'prefix' reads a whole prompt at once, and a batcher reads it in chunks")
  if not isinstance(model.decoder, Sampler):
    kind = type(model.decoder).__name__
    raise ConfigError(f'batcher: draws tokens as a Sampler does; task.model.decoder_tpl is a {kind}')
  mosts = [model.context, model.most_prompt_tokens() if sources else None]
  most = min((most for most in mosts if most is not None), default=None)
  length = min(_MOST_BY_DEFAULT, _MOST_BY_DEFAULT if most is None else most) if max_length is None else max_length
  if most is not None and length > most:
    raise ConfigError(f'batcher: max_length = {length}: the model sees only {number_of(most, "token")} at once')
  return model.decoder, model.num_ids, length


def _check_memory(programs: RowPrograms, tasks: TaskOnMesh, rows: int, kept: int) -> None:
  needed, there = programs.state_bytes, memory_of(tasks.mesh.devices.flat)
  if needed > there:
    also = f' and kept_prefixes = {kept}' if kept else ''
    raise ConfigError(
      f'batcher: the caches of rows = {rows}{also} need {format_bytes(needed)}, and there are {format_bytes(there)} of '
      'memory; take fewer rows, or a smaller max_length'
    )
