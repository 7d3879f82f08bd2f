"""Continues prompts, which are texts or tokens, with a model on a mesh. Prompts of similar lengths share programs."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from praxis_lite.common.config import Config
from praxis_lite.common.config.values import describe_value
from praxis_lite.common.errors import ConfigError, DataError, UserError, check_range
from praxis_lite.common.figures import number_of
from praxis_lite.common.processes import is_primary_process
from praxis_lite.inputs import BaseTokenizer
from praxis_lite.inputs.rows import Rows
from praxis_lite.models.adapters import names_of_adapters
from praxis_lite.models.base import PromptLimits
from praxis_lite.models.decoding import Bucket
from praxis_lite.runs.constraints import TextConstraint, make_constraint
from praxis_lite.runs.continuations import GrowingText, continue_prompts, continued_text
from praxis_lite.runs.decoding_memory import check_memory
from praxis_lite.runs.draft_statistics import DraftStatistics
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.prompts import (
  Sampling,
  beginnings,
  check_ids,
  encode_prompt,
  fit_to_bucket,
  is_beam_search,
  numbers_of_adapters,
  prompt_batch,
  require_tokenizer,
  rows_of_call,
  stop_ids,
  task_with_sampler,
)

_Prompts = Sequence[str] | Sequence[Sequence[int]]


class _DecodeCall(NamedTuple):
  """The program and the settings that decode a group of prompts.

  Attributes:
    bucket: the sizes of the program; None if the model has a `decode` without buckets.
    sources: whether prompts are sources of an encoder-decoder. The tokens of a prompt after its source are then the
      beginning of the target, so a further call can continue the target.
    most: the largest number of tokens in a prompt; padding beyond it is cut off. None without a limit.
  """

  tasks: TaskOnMesh
  bucket: Bucket | None
  max_tokens: int
  stop_ids: tuple[int, ...]
  sources: bool = False
  most: int | None = None

  @property
  def takes_segments(self) -> bool:
    return self.bucket is not None or self.sources

  def to_batch(
    self,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    num_drawn: int,
    row: int,
    lengths: Sequence[int] | None = None,
    adapters: np.ndarray | None = None,
  ) -> Rows:
    """Returns a batch for the program.

    Args:
      prompts: tokens; in further calls, they end with the tokens that earlier calls added.
      max_tokens, num_drawn, row: see `fit_to_bucket`, which calls the last one `first_row`.
      lengths: for each prompt, how many tokens at its start are its source, while the others begin the answer; None
        if prompts are only sources.
      adapters: the number of the adapter of each prompt of the call, see `numbers_of_adapters`.
    """
    if lengths is not None and self.sources:
      texts = [list(prompt[length:]) for prompt, length in zip(prompts, lengths)]
      prompts = [prompt[:length] for prompt, length in zip(prompts, lengths)]
    batch = prompt_batch(prompts)
    if adapters is not None:
      batch['adapters'] = adapters[row : row + len(prompts)]
    if self.most is not None:
      batch['ids'] = batch['ids'][:, : self.most]
    if self.bucket is not None:
      return fit_to_bucket(batch, self.bucket, max_tokens, num_drawn, row)
    if not self.sources:
      return batch
    batch |= rows_of_call(max_tokens, num_drawn, row)
    return batch if lengths is None else batch | beginnings(texts, self.max_tokens)


class PromptDecoder:
  """Continues prompts with any settings of the sampler of a model.

  Args:
    task, tasks: the config of the model's task, and the task on its mesh.
    tokenizer: returns the tokenizer of the model, or None; called only if it is needed.
    run: (task, batch of prompts, key) -> what the model decodes, arrays by name.
  """

  def __init__(
    self,
    task: Config,
    tasks: TaskOnMesh,
    tokenizer: Callable[[], BaseTokenizer | None],
    run: Callable[[TaskOnMesh, Rows, jax.Array], Mapping[str, Any]],
  ):
    self._task, self._tasks, self._find_tokenizer, self._run = task, tasks, tokenizer, run
    self._tasks_by_sampler: dict[str, TaskOnMesh] = {}
    self._checked: set[tuple[int, Bucket]] = set()  # (rows, bucket) that are known to fit into memory.
    self._has_noted = False
    self._constraints: dict[str, TextConstraint | None] = {}

  def decode(
    self,
    prompts: _Prompts,
    settings: Sampling,
    key: jax.Array,
    *,
    stop: Sequence[str],
    stream: Callable[[int, Any], object] | None,
    batch_size: int | None,
    statistics: DraftStatistics | None = None,
    adapters: str | Sequence[str | None] | None = None,
  ) -> list[str] | list[list[int]]:
    """Returns the text, or the tokens, that follow each prompt; `TrainedModel.decode` describes the arguments."""
    if isinstance(prompts, str):
      raise UserError(f'decode: expected a list of prompts, got one text; pass [{prompts!r}]')
    if not hasattr(prompts, '__len__'):
      raise UserError(f'decode: expected a list of prompts, got {describe_value(prompts)}')
    if batch_size is not None and batch_size < 1:
      raise ConfigError(f'decode: batch_size = {batch_size}; expected at least 1, or None for all prompts at once')
    texts_at = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str)]
    are_texts = len(texts_at) == len(prompts)
    if texts_at and not are_texts:
      other = next(i for i in range(len(prompts)) if i not in texts_at)
      both = f'prompts[{texts_at[0]}] is a text, and prompts[{other}] is not'
      raise DataError(f'decode: {both}; pass only texts, or only lists of tokens')
    tokens = [encode_prompt(self._tokenizer(), p) if isinstance(p, str) else p for p in prompts]
    single_stops = self._single_stops(stop)
    numbers = numbers_of_adapters(adapters, names_of_adapters(self._tasks.jax_task.model), len(prompts), 'decode')
    in_segments = stream is not None or len(single_stops) < len(stop)
    if is_beam_search(self._task) or settings.get('beam_size') is not None:
      if in_segments:
        what = 'stream: the continuations are known' if stream is not None else f'stop={list(stop)!r}: texts are known'
        raise ConfigError(f'decode: {what} only when a beam search ends; it stops only at texts of one token')
      return self._search(tokens, settings, single_stops, key, batch_size, are_texts, numbers)
    rows: list[list[int]] = []
    texts = None
    if stop or are_texts:
      are_sources = self._tasks.jax_task.model.prompts_are_sources
      texts = [GrowingText(self._tokenizer(), [] if are_sources else prompt, stop) for prompt in tokens]

    def take_tokens(row: int, ids: list[int], num_new: int, is_all: bool) -> None:
      new = texts[row].add(ids, is_all=is_all) if are_texts and texts else ids[len(ids) - num_new :]
      if stream is not None and new:
        stream(row, new)

    for first, group in _groups(tokens, batch_size):
      call = self._plan(group, settings, single_stops, in_segments)
      lengths = [len(prompt) for prompt in group] if in_segments else None
      rows += continue_prompts(
        group,
        functools.partial(self._decode_tokens, call, key, first, statistics, lengths, numbers),
        texts and texts[first : first + len(group)],
        max_tokens=call.max_tokens,
        stop_ids=call.stop_ids,
        in_segments=in_segments and call.takes_segments,
        on_tokens=lambda row, *new, first=first: take_tokens(first + row, *new),
      )
    return [text.text for text in texts] if are_texts and texts else rows

  def _search(
    self,
    prompts: Sequence[Sequence[int]],
    settings: Sampling,
    stops: Sequence[int],
    key: jax.Array,
    batch_size: int | None,
    are_texts: bool,
    adapters: np.ndarray | None,
  ) -> list[str] | list[list[int]]:
    """Returns the best texts, or lists of tokens, that beam search finds: `num_best` in a row for each prompt."""
    found: list[tuple[Sequence[int], list[int]]] = []
    for first, group in _groups(prompts, batch_size):
      call = self._plan(group, settings, stops, False)
      batch = call.to_batch(group, [call.max_tokens] * len(group), 0, first, adapters=adapters)
      decoded = self._run(call.tasks, batch, key)
      for prompt, ids_NM, lengths_N in zip(group, decoded['beam_ids'], decoded['beam_lengths']):
        found += [(prompt, ids[:length].tolist()) for ids, length in zip(ids_NM, lengths_N)]
    if not are_texts:
      return [ids for _, ids in found]
    are_sources = self._tasks.jax_task.model.prompts_are_sources
    return [continued_text(self._tokenizer(), [] if are_sources else prompt, ids) for prompt, ids in found]

  def find_constraint(
    self, regex: str | None, json_schema: str | os.PathLike[str] | Mapping[str, Any] | None
  ) -> TextConstraint | None:
    """Returns the constraint of these settings, see `make_constraint`; None if both are None.

    Equal settings get the same object.
    """
    if regex is None and json_schema is None:
      return None
    name = repr((regex, json_schema))
    if name not in self._constraints:
      self._constraints[name] = make_constraint(self._find_tokenizer(), regex, json_schema, 'decode: ')
    return self._constraints[name]

  def first_batch(
    self, prompts: Sequence[Sequence[int]], stop: Sequence[str], in_segments: bool, batch_size: int | None
  ) -> tuple[TaskOnMesh, Rows]:
    """Returns the task and the batch of the first call that `decode` would make for these prompts."""
    single_stops = self._single_stops(stop)
    _, group = next(_groups(prompts, batch_size))
    in_segments = in_segments or len(single_stops) < len(stop)
    call = self._plan(group, {}, single_stops, in_segments)
    lengths = [len(prompt) for prompt in group] if in_segments else None
    return call.tasks, call.to_batch(group, [call.max_tokens] * len(group), 0, 0, lengths)

  def check(self, prompts: Sequence[str], max_tokens: int) -> None:
    """Raises UserError if `decode` could not continue one of these texts."""
    for prompt in prompts:
      batch = prompt_batch([encode_prompt(self._tokenizer(), prompt)])
      check_ids(batch, self._tasks.jax_task.model.num_ids)
      self._check_length(int(batch['prompt_lengths'][0]), self._tasks, max_tokens)

  def set_sampler(self, settings: Sampling, stops: Sequence[int] = (), max_context: int | None = None) -> TaskOnMesh:
    """Returns the task with other settings of the sampler, which are part of the compiled program."""
    given = {name: x for name, x in settings.items() if x is not None}
    if not (given or stops or max_context):
      return self._tasks
    if (name := repr((given, stops, max_context))) not in self._tasks_by_sampler:
      task = task_with_sampler(self._task, stops, max_context, **settings).instantiate()
      self._tasks_by_sampler[name] = TaskOnMesh(task, self._tasks.mesh, self._tasks.layout, edits=self._tasks.edits)
    return self._tasks_by_sampler[name]

  # ---------------------------------------------------------------- how

  def _plan(
    self, prompts: Sequence[Sequence[int]], settings: Sampling, stops: Sequence[int], in_segments: bool
  ) -> _DecodeCall:
    length = int(prompt_batch(prompts)['prompt_lengths'].max())
    # The number and the size of decode states depend on these settings.
    kinds: Any = {name: settings.get(name) for name in ('beam_size', 'lookup', 'draft_tokens')}
    limits, max_tokens = self._check_length(length, self.set_sampler(kinds), settings.get('max_tokens'))
    if limits is None:
      tasks = self.set_sampler(settings, stops)
      model: Any = tasks.jax_task.model
      if not model.prompts_are_sources:
        return _DecodeCall(tasks, None, max_tokens, (), most=model.most_prompt_tokens())
      most, decoder = model.most_prompt_tokens(), model.decoder
      max_tokens = decoder.max_decode_steps
      if decoder.goes_back:
        model.check_fits(1, max_tokens)
      if in_segments:  # The program reads a start token, and at most all tokens of the text but the last.
        tasks = self.set_sampler(settings, stops, min(max_tokens, decoder.max_context or max_tokens))
      return _DecodeCall(tasks, None, max_tokens, decoder.stop_ids, sources=True, most=most)
    self._note_short_context(limits.context, length + max_tokens - 1)

    def bucket_of(count: int) -> Bucket:
      # Segments after the first also read tokens that follow the prompt.
      return Bucket.choose(*((length + count, 1) if in_segments else (length, count)), limits.context)

    bucket = bucket_of(max_tokens)
    if (len(prompts), bucket) not in self._checked:
      check_memory(limits, self._tasks.mesh, len(prompts), max_tokens, bucket_of)
      self._checked.add((len(prompts), bucket))
    tasks = self.set_sampler({**settings, 'max_tokens': bucket.width}, stops, bucket.slots)
    as_set = tasks.jax_task.model.prompt_limits()
    assert as_set is not None
    return _DecodeCall(tasks, bucket, max_tokens, as_set.stop_ids)

  def _check_length(self, length: int, tasks: TaskOnMesh, max_tokens: int | None) -> tuple[PromptLimits | None, int]:
    """Returns a pair: the limits of prompts, or None if the model has none; and how many tokens may follow a prompt.

    Raises:
      ConfigError: a prompt of `length` tokens is too long.
    """
    if (limits := tasks.jax_task.model.prompt_limits()) is None:
      most = self._tasks.jax_task.model.most_prompt_tokens()
      if most is not None and length > most:
        raise ConfigError(f'a prompt has {number_of(length, "token")}, and the model reads at most {most}; shorten it')
      return None, max_tokens or 1
    max_tokens = limits.max_tokens if max_tokens is None else max_tokens
    check_range('max_tokens', max_tokens, least=1)
    limits.check_fits(length, max_tokens)
    return limits, max_tokens

  def _decode_tokens(
    self,
    call: _DecodeCall,
    key: jax.Array,
    first_row: int,
    statistics: DraftStatistics | None,
    lengths: Sequence[int] | None,
    adapters: np.ndarray | None,
    read: list[list[int]],
    max_tokens: list[int],
    drawn: int,
  ) -> list[list[int]]:
    """Returns the next tokens of each row, see `continuations.Decode`; for `lengths`, see `_DecodeCall.to_batch`."""
    decoded = self._run(call.tasks, call.to_batch(read, max_tokens, drawn, first_row, lengths, adapters), key)
    if statistics is not None:
      statistics.add(decoded)
    return [row[:length].tolist() for row, length in zip(decoded['ids'], decoded['lengths'])]

  def _note_short_context(self, seen: int | None, most: int) -> None:
    """Prints a note, once, if a prompt and its continuation may have more tokens than the model sees.

    `most` is the largest number of tokens that they may have, and `seen` the number that the model sees.
    """
    if seen is not None and most > seen and not self._has_noted and is_primary_process():
      self._has_noted = True
      print(f'note: the model sees only the last {seen} of up to {most} tokens', file=sys.stderr)

  def _single_stops(self, stop: Sequence[str]) -> list[int]:
    return stop_ids(self._find_tokenizer() if stop else None, stop)

  def _tokenizer(self) -> BaseTokenizer:
    return require_tokenizer(self._find_tokenizer(), 'decode: ', 'pass lists of tokens')


def _groups(prompts: Sequence[Sequence[int]], batch_size: int | None) -> Iterator[tuple[int, Sequence[Sequence[int]]]]:
  """Yields (number of the first prompt, prompts) for each batch; without a batch size, one batch has all prompts."""
  size = batch_size or max(len(prompts), 1)
  for first in range(0, max(len(prompts), 1), size):
    yield first, prompts[first : first + size]
