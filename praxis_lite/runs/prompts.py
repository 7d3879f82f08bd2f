"""Prompts for language models: texts to tokens, tokens to a batch, and the settings of the sampler."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence

import numpy as np

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError, UserError, prefix_errors
from praxis_lite.inputs import BaseTokenizer, HfTokenizer
from praxis_lite.inputs.rows import Rows
from praxis_lite.models.decoding import Bucket
from praxis_lite.training.experiment import ExperimentConfig

# Prompts are padded to a multiple of this, so that a `decode` without buckets is compiled for few lengths.
_LENGTH_MULTIPLE = 16


def tokenizer_of(config: ExperimentConfig) -> BaseTokenizer | None:
  """Returns the tokenizer of the first dataset that has one; None if there is none."""
  for i, dataset in enumerate(config.datasets):
    template = getattr(dataset, 'tokenizer_tpl', None)
    if isinstance(template, Config):  # Avoids reading data, which may be missing.
      with prefix_errors(f'datasets[{i}].tokenizer_tpl'):
        return template.instantiate()
    tokenizer = getattr(dataset.instantiate(), 'tokenizer', None)
    if tokenizer is not None:
      return tokenizer
  return None


def encode_prompt(tokenizer: BaseTokenizer, prompt: str, name: str = 'prompt') -> list[int]:
  """Returns the tokens of `prompt`; raises UserError if it is not text. Messages call the prompt `name`."""
  return _encode(tokenizer.prompt_ids, prompt, name)


def chat_prompt(tokenizer: BaseTokenizer, message: str, system: str | None = None) -> list[int]:
  """Returns the tokens of a user's message in the tokenizer's chat template, to which a chat model adds its answer.

  Args:
    tokenizer: one with a chat template; otherwise raises UserError.
    message: the user's message.
    system: the system message before it, if any.
  """
  if not isinstance(tokenizer, HfTokenizer):
    raise UserError(f'a chat needs a tokenizer with a chat template, but this run has a {type(tokenizer).__name__}')
  messages = [{'role': 'system', 'content': system}] if system else []
  return tokenizer.chat_ids([*messages, {'role': 'user', 'content': message}])


def continued_text(tokenizer: BaseTokenizer, prompt: Sequence[int], continuation: Sequence[int]) -> str:
  """Returns the text that follows a prompt.

  Decodes both together if possible, because some tokenizers drop the space at the beginning of what they decode.
  """
  before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *continuation])
  return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(continuation)


def _encode(encode: Callable[[str], list[int]], prompt: str, name: str) -> list[int]:
  try:
    with prefix_errors(f'{name}={prompt!r}'):
      return encode(prompt)
  except UnicodeEncodeError as error:  # A shell passed bytes that are not text.
    raise UserError(f'{name}={prompt!r} is not UTF-8 text: character {error.start} is a stray byte') from None


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
    raise DataError(f'a prompt is {reprlib.repr(prompt)}; expected a list of tokens, which are integers of 32 bits')
  return ids.astype(np.int32)


def fit_to_bucket(batch: Rows, bucket: Bucket, max_tokens: int) -> Rows:
  """Returns a batch of prompts, padded to a bucket's width, that asks for `max_tokens` tokens after each prompt."""
  count, width = batch['ids'].shape
  ids = np.pad(batch['ids'], ((0, 0), (0, bucket.width - width)))
  return batch | {'ids': ids, 'max_tokens': np.full(count, max_tokens, np.int32)}


def check_ids(rows: Rows, vocab_size: int | None) -> None:
  """Raises DataError if a batch has ids outside of a language model's vocabulary: devices report no such error.

  Args:
    rows: a batch with `ids` [B, T] and `weights`, and `prompt_lengths` [B] if they are prompts. Padding may be any
      negative id, and padding of prompts any id at all.
    vocab_size: V; None if it is unknown, and nothing is checked.
  """
  if vocab_size is None or not isinstance(ids_BT := rows.get('ids'), np.ndarray) or ids_BT.ndim != 2:
    return
  is_bad_BT = (ids_BT < 0) | (ids_BT >= vocab_size)
  if (lengths_B := rows.get('prompt_lengths')) is not None:
    is_bad_BT &= np.arange(ids_BT.shape[1]) < lengths_B[:, None]
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


def task_with_sampler(
  task: Config,
  tokenizer: BaseTokenizer | None,
  *,
  max_tokens: int | None = None,
  temperature: float | None = None,
  top_k: int | None = None,
  top_p: float | None = None,
  max_context: int | None = None,
  stop: Sequence[str] = (),
  flag: str = '',
) -> Config:
  """Returns a copy of the config of a task, with settings of the sampler of its model.

  Args:
    task: config of the task of a language model.
    tokenizer: encodes the stop texts.
    max_tokens: `max_decode_steps` of the `Sampler`; None keeps the value in the config.
    temperature, top_k, top_p, max_context: the fields of these names; None keeps the value in the config.
    stop: texts of one token each that end a continuation, in addition to the `stop_ids` of the config.
    flag: a prefix of argument names in messages, such as '--'.

  Raises:
    ConfigError: the model has no sampler.
    UserError: a stop text is not one token, or there is no tokenizer.
  """
  task = task.clone()
  try:
    decoder = task.model.decoder_tpl
  except AttributeError:
    raise ConfigError(f'{flag}prompt needs a language model; the model of this experiment has no decoder_tpl') from None
  settings = {'max_decode_steps': max_tokens, 'temperature': temperature, 'top_k': top_k, 'top_p': top_p}
  settings['max_context'] = max_context
  decoder.set(**{name: value for name, value in settings.items() if value is not None})
  for text in stop:
    if tokenizer is None:
      raise UserError(f'{flag}stop={text!r} needs a dataset with a tokenizer, but there is none')
    ids = _encode(tokenizer.encode, text, f'{flag}stop')
    if len(ids) != 1:
      raise UserError(f'{flag}stop={text!r} is {len(ids)} tokens; a stop text must be one token')
    decoder.stop_ids = (*decoder.stop_ids, *ids)
  return task
