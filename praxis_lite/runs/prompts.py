"""Prompts of language models: turns texts into tokens and batches, and applies settings of the sampler."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, Unpack

import numpy as np

from praxis_lite.common.config import REQUIRED, Config, field_names, target
from praxis_lite.common.errors import ConfigError, DataError, UserError, prefix_errors
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import user_path
from praxis_lite.inputs import BaseTokenizer, HfTokenizer
from praxis_lite.inputs.rows import Rows
from praxis_lite.models.decoding import BeamSearch, Bucket, Decoder, LogitProcessor, Sampler, SpeculativeSampler
from praxis_lite.models.decoding.decoder import continues_prompts
from praxis_lite.models.drafted_model import DraftedModel
from praxis_lite.runs.continuations import check_stops
from praxis_lite.runs.imported_files import HOW_TO_SET_TOKENIZER, tokenizer_in
from praxis_lite.runs.records.moved_files import FOLDER
from praxis_lite.training.experiment import ExperimentConfig

# Prompts are padded to a multiple of this, so that a `decode` without buckets is compiled for only a few lengths.
_LENGTH_MULTIPLE = 16


def tokenizer_of(config: ExperimentConfig, job_log_dir: str | os.PathLike[str] | None = None) -> BaseTokenizer | None:
  """Returns the tokenizer of the first dataset that has one, or else the tokenizer that the run keeps, or else None."""
  kept = None if job_log_dir is None else tokenizer_in(user_path(job_log_dir) / FOLDER)
  for i, dataset in enumerate(config.datasets):
    template = getattr(dataset, 'tokenizer_tpl', None)
    if isinstance(template, Config) and getattr(template, 'path', None) is REQUIRED:
      raise ConfigError(f'datasets[{i}].tokenizer_tpl.path: the run has no tokenizer; {HOW_TO_SET_TOKENIZER}')
    if isinstance(template, Config):  # Makes only the tokenizer, because the data may be missing.
      with prefix_errors(f'datasets[{i}].tokenizer_tpl'):
        return template.instantiate()
    try:
      tokenizer = getattr(dataset.instantiate(), 'tokenizer', None)
    except UserError:  # For example, a function may not have been recorded.
      if kept is None:
        raise
      continue
    if tokenizer is not None:
      return tokenizer
  return None if kept is None else kept.instantiate()


def require_tokenizer(tokenizer: BaseTokenizer | None, where: str, instead: str) -> BaseTokenizer:
  """Returns a tokenizer; raises UserError, which says what to give in place of texts, if there is none."""
  if tokenizer is None:
    raise UserError(
      f'{where}texts need a dataset with a tokenizer, but there is none; set tokenizer_tpl of a dataset, or {instead}'
    )
  return tokenizer


def encode_prompt(tokenizer: BaseTokenizer, prompt: str, name: str = 'prompt') -> list[int]:
  """Returns the tokens of `prompt`; raises UserError if it is not text. Messages call the prompt `name`."""
  return _encode(tokenizer.prompt_ids, prompt, name)


def chat_prompt(
  tokenizer: BaseTokenizer, message: str | Sequence[Mapping[str, str]], system: str | None = None
) -> list[int]:
  """Returns the tokens of a chat by the tokenizer's chat template; a chat model continues them with its answer.

  Args:
    tokenizer: a tokenizer with a chat template; otherwise raises UserError.
    message: the user's message; or the messages so far, each with a `role` and a `content`.
  """
  if not isinstance(tokenizer, HfTokenizer):
    raise UserError(f'a chat needs a tokenizer with a chat template, but this run has a {type(tokenizer).__name__}')
  before = [{'role': 'system', 'content': system}] if system else []
  messages = [{'role': 'user', 'content': message}] if isinstance(message, str) else message
  return tokenizer.chat_ids([*before, *messages])


def _encode(encode: Callable[[str], list[int]], prompt: str, name: str) -> list[int]:
  try:
    with prefix_errors(f'{name}={prompt!r}'):
      return encode(prompt)
  except UnicodeEncodeError as error:  # A shell passed bytes that are not text.
    raise DataError(f'{name}={prompt!r} is not UTF-8 text: character {error.start} is a stray byte') from None


def prompt_batch(prompts: Sequence[Sequence[int]]) -> Rows:
  """Returns `ids`, [B, P] int32, and `prompt_lengths`, [B]; raises UserError unless each prompt is a list of tokens."""
  if not len(prompts):
    raise ConfigError('there are no prompts; expected a list with at least one')
  for prompt in prompts:
    if isinstance(prompt, bytes):
      raise DataError(f'a prompt is bytes; expected a text, such as {prompt.decode(errors="replace")!r}, or tokens')
  tokens = [_tokens(prompt) for prompt in prompts]
  lengths = np.array([len(ids) for ids in tokens], np.int32)
  width = -(-int(lengths.max()) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
  return {'ids': np.stack([np.pad(ids, (0, width - len(ids))) for ids in tokens]), 'prompt_lengths': lengths}


def _tokens(prompt: Sequence[int]) -> np.ndarray:
  """Returns the tokens of a prompt, [n] int32; raises UserError if it is empty or not a list of tokens."""
  ids = np.asarray(prompt)
  if ids.shape == (0,):
    raise ConfigError('a prompt is empty; it needs at least one token')
  if ids.ndim != 1 or ids.dtype.kind not in 'iu' or (ids != ids.astype(np.int32)).any():
    expected = 'one text, or a list of tokens' if ids.dtype.kind == 'U' and ids.ndim else 'a list of tokens'
    raise DataError(f'a prompt is {reprlib.repr(prompt)}; expected {expected}, which are integers of 32 bits')
  return ids.astype(np.int32)


def fit_to_bucket(batch: Rows, bucket: Bucket, max_tokens: Sequence[int], num_drawn: int, first_row: int) -> Rows:
  """Returns a batch of prompts, padded to the width of a bucket, with further arguments of the bucket's program.

  Args:
    max_tokens: the largest number of tokens to add to each prompt.
    num_drawn: how many of the last tokens of each prompt were drawn by earlier calls.
    first_row: the number of the first row; the random numbers of each row depend on its number.
  """
  ids = np.pad(batch['ids'], ((0, 0), (0, bucket.width - batch['ids'].shape[1])))
  return batch | {'ids': ids} | rows_of_call(max_tokens, num_drawn, first_row)


def rows_of_call(max_tokens: Sequence[int], num_drawn: int, first_row: int) -> Rows:
  """Returns `max_tokens`, `num_drawn` and `row` for each row of a batch, [B] int32 each; see `fit_to_bucket`."""
  count = len(max_tokens)
  drawn, rows = np.full(count, num_drawn, np.int32), first_row + np.arange(count, dtype=np.int32)
  return {'max_tokens': np.array(max_tokens, np.int32), 'num_drawn': drawn, 'row': rows}


def beginnings(texts: Sequence[Sequence[int]], most: int) -> Rows:
  """Returns arrays `target_ids` [B, T] and `target_lengths` [B], int32: the texts that B sources have so far.

  T is `most`, the largest number of tokens, rounded up to a multiple of `_LENGTH_MULTIPLE`.
  """
  width = -(-most // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
  padded = np.array([[*text, *[0] * (width - len(text))] for text in texts], np.int32)
  return {'target_ids': padded, 'target_lengths': np.array([len(text) for text in texts], np.int32)}


def check_ids(rows: Rows, vocab_size: int | None) -> None:
  """Raises DataError if a batch has ids outside of a language model's vocabulary, which devices do not report.

  Args:
    rows: a batch of B rows and T tokens, with `ids` [B, T] and `weights`; if they are prompts, also `prompt_lengths`,
      [B], or [B, S] with S prompts packed in a row. Padding may have any negative id, and the padding of prompts any
      id.
    vocab_size: V; None if it is unknown, and nothing is checked.
  """
  if vocab_size is None or not isinstance(ids_BT := rows.get('ids'), np.ndarray) or ids_BT.ndim != 2:
    return
  is_bad_BT = (ids_BT < 0) | (ids_BT >= vocab_size)
  if (lengths_B := rows.get('prompt_lengths')) is not None:
    lengths_BS = lengths_B.reshape(len(lengths_B), -1)  # S = 1 without packing.
    prompt_length = ids_BT.shape[1] // lengths_BS.shape[1]
    is_bad_BT &= np.arange(ids_BT.shape[1]) % prompt_length < np.repeat(lengths_BS, prompt_length, axis=1)
  else:
    weights = rows['weights']
    weights_BT = weights if weights.ndim == 2 else weights[:, None]
    is_bad_BT &= (ids_BT >= 0) | (weights_BT != 0)
  if is_bad_BT.any():
    row, position = np.argwhere(is_bad_BT)[0]
    raise DataError(
      f'ids: {ids_BT[row, position]}, at position {position} of row {row}, is not in the vocabulary of the model, '
      f'whose ids are 0 to {vocab_size - 1}; check that they come from the tokenizer of the training data'
    )


def check_adapters(rows: Rows, names: Sequence[str]) -> None:
  """Raises DataError if a batch has the number of an adapter that the model does not have.

  On a device, such a number gives NaN instead of an error.

  Args:
    rows: a batch, which may have `adapters`, the number of each row's adapter.
    names: the names of the adapters; if empty, nothing is checked.
  """
  numbers = rows.get('adapters')
  if not names or not isinstance(numbers, np.ndarray):
    return
  if not np.issubdtype(numbers.dtype, np.integer):
    raise DataError(f'adapters: expected integers, the number of the adapter of each row, got {numbers.dtype}')
  is_bad = (numbers < -1) | (numbers >= len(names))
  if is_bad.any():
    known = ', '.join(f'{i} for {name!r}' for i, name in enumerate(names))
    raise DataError(f'adapters: {numbers[is_bad][0]} is no adapter of the model; expected {known}, or -1 for none')


def numbers_of_adapters(
  adapters: str | Sequence[str | None] | None, names: Sequence[str], count: int, what: str
) -> np.ndarray | None:
  """Returns the number of the adapter of each row, [B] int32, -1 for none; None if `adapters` is None.

  Args:
    adapters: the name of the adapter of each row, None for none; or one name for all rows.
    count: B.

  Raises:
    UserError: the model has no such adapter, or the list has another length.
  """
  if adapters is None:
    return None
  of_rows = [adapters] * count if isinstance(adapters, str) else list(adapters)
  if len(of_rows) != count:
    raise DataError(f'{what}: adapters has {number_of(len(of_rows), "entry")}, for {number_of(count, "row")}')
  for name in of_rows:
    if name is not None and name not in names:
      known = f'expected one of {", ".join(map(repr, names))}, or None' if names else 'it has none; see attach_adapters'
      raise DataError(f'{what}: adapters: the model has no adapter {name!r}; {known}')
  return np.array([-1 if name is None else names.index(name) for name in of_rows], np.int32)


class Sampling(TypedDict, total=False):
  """Settings for decoding with a language model, by the names of its decoder's fields; None keeps the config's value.

  Attributes:
    max_tokens, min_tokens: `max_decode_steps` and `min_decode_steps`.
    beam_size: also replaces a `Sampler` by a `BeamSearch`, which keeps the values of the fields that both have.
    lookup, draft_tokens: also replace a `Sampler` by a `SpeculativeSampler`.
    others: the decoder's fields of these names.
  """

  max_tokens: int | None
  min_tokens: int | None
  temperature: float | None
  top_k: int | None
  top_p: float | None
  min_p: float | None
  repetition_penalty: float | None
  no_repeat_ngram_size: int | None
  presence_penalty: float | None
  frequency_penalty: float | None
  typical_p: float | None
  top_n_sigma: float | None
  beam_size: int | None
  num_best: int | None
  length_penalty: float | None
  early_stopping: bool | None
  lookup: int | None
  draft_tokens: int | None
  logit_processors: tuple[LogitProcessor, ...] | None


_OF_SPECULATION = ('lookup', 'draft_tokens')
# Settings of other decoders, which a `Sampler` does not have.
OF_OTHER_DECODERS = (*_OF_SPECULATION, 'beam_size', 'num_best', 'length_penalty', 'early_stopping')
_FIELDS = {'max_tokens': 'max_decode_steps', 'min_tokens': 'min_decode_steps'}  # Settings that fields name differently.


def check_decodes(task: Config) -> None:
  """Raises ConfigError if the model of a task, such as an encoder, cannot continue a prompt."""
  if not continues_prompts(task.model):
    raise ConfigError(
      f'a prompt needs a language model; the model of this experiment is of class {target(task.model).__name__}, '
      'whose results for rows of data are computed by predict'
    )


def task_with_sampler(
  task: Config, stop_ids: Sequence[int] = (), max_context: int | None = None, **settings: Unpack[Sampling]
) -> Config:
  """Returns a copy of the config of a task, with other settings for decoding.

  Args:
    stop_ids: tokens that end a continuation, in addition to the `stop_ids` of the config.
    max_context: `max_context` of the `Sampler`; None keeps the value of the config.
    **settings: see `Sampling`.

  Raises:
    ConfigError: the model has no sampler, or settings of sampling, speculation and beam search are mixed.
  """
  check_decodes(task)
  task = task.clone()
  decoder = task.model.decoder_tpl
  speculates = [name for name in _OF_SPECULATION if settings.get(name) is not None]
  searches = settings.get('beam_size') is not None or is_beam_search(task)
  if speculates and searches:
    given = f'{speculates[0]} = {dict(settings)[speculates[0]]}'
    raise ConfigError(f'{given}: beam search takes no guesses; leave out one of them')
  if searches and not is_beam_search(task):
    decoder = task.model.decoder_tpl = to_decoder(BeamSearch, decoder, Decoder)
  elif speculates and not is_decoder(task, SpeculativeSampler):
    decoder = task.model.decoder_tpl = to_decoder(SpeculativeSampler, decoder, Sampler)
  if settings.get('lookup') is not None:
    decoder.own_heads = False  # `lookup` guesses from earlier tokens instead.
  fields = field_names(decoder)
  for name, value in {**settings, 'max_context': max_context}.items():
    if value is None:
      continue
    field = _FIELDS.get(name, name)
    if fields is not None and field not in fields:
      if is_beam_search(task):
        raise ConfigError(f'{name} = {value}: beam search draws no tokens, so it has no {name}; leave out one of them')
      raise ConfigError(f'{name} = {value}: this is a setting of beam search; give beam_size too, such as 4')
    setattr(decoder, field, value)
  decoder.stop_ids = (*decoder.stop_ids, *stop_ids)
  return task


def is_beam_search(task: Config) -> bool:
  """Whether the model of a task decodes by beam search."""
  return is_decoder(task, BeamSearch)


def is_decoder(task: Config, kind: type[Decoder]) -> bool:
  """Whether the decoder of a task's model is of this class."""
  decoder = getattr(task.model, 'decoder_tpl', None)
  cls = target(decoder) if isinstance(decoder, Config) else None
  return isinstance(cls, type) and issubclass(cls, kind)


def to_decoder(cls: type[Decoder], decoder: Config, common: type[Decoder]) -> Config:
  """Returns a config of `cls`: fields that `common` declares are taken from `decoder`, others have their defaults."""
  names = field_names(Config(common)) or ()
  return Config(cls, **{name: getattr(decoder, name) for name in names if hasattr(decoder, name)})


def drafted_task(task: Config, draft: Config) -> Config:
  """Returns the config of a task that decodes with the model of `task`, guessing with the model of `draft`.

  Args:
    task, draft: configs of the tasks of two language models. The result has the mesh and the rules of `task`.

  Raises:
    ConfigError: a model is not a language model, or decodes by beam search.
  """
  for name, config in (('the model', task), ('the draft model', draft)):
    if not continues_prompts(config.model):
      raise ConfigError(f'draft: speculative decoding needs language models, and {name} is not one')
  if is_beam_search(task):
    raise ConfigError('draft: beam search takes no guesses; leave out one of them')
  drafted, decoder = task.clone(), task.model.decoder_tpl
  is_speculative = is_decoder(task, SpeculativeSampler)
  decoder = decoder.clone() if is_speculative else to_decoder(SpeculativeSampler, decoder, Sampler)
  decoder.lookup, decoder.own_heads = None, False  # Turns off the other sources of guesses.
  models = {'model_tpl': task.model.clone(), 'draft_tpl': draft.model.clone()}
  drafted.model = Config(DraftedModel, **models, decoder_tpl=decoder)
  return drafted


def stop_ids(tokenizer: BaseTokenizer | None, stops: Sequence[str], name: str = 'stop') -> list[int]:
  """Returns the tokens of stop texts that are a single token; raises UserError for a stop text that cannot occur."""
  check_stops(stops, name)
  if tokenizer is None and stops:
    raise UserError(f'{name}={stops[0]!r} needs a dataset with a tokenizer, but there is none')
  return [ids[0] for stop in stops if tokenizer and len(ids := _encode(tokenizer.encode, stop, name)) == 1]
