"""What `praxis-lite predict --what=...` computes for the rows of files.

predict, evaluate    arrays by name, as `TrainedModel.predict` and `evaluate_examples` take them; or, if a dataset of
                     the run reads texts or images, {"text": ...} and {"file": "a.png"}
score                {"context": ..., "continuation": ...}, or {"text": ...}, or {"ids": ...}
teach                {"text": ...}, or {"ids": ...}: its tokens, and for each position the most probable next tokens
generate             {"prompt": ...}, {"prompt_ids": ...} or {"messages": ...}; {"text": ...} is a prompt, too

If the model has several adapters, the value `adapter` of a row names the adapter that the row uses; a row without it
uses none.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np

from praxis_lite.common.errors import ConfigError, DataError, UserError, error_summary
from praxis_lite.inputs import BaseTokenizer
from praxis_lite.inputs.image_records import ImageRecordInput
from praxis_lite.inputs.labelled_text import LabelledTextInput
from praxis_lite.inputs.rows import Rows, canonical_rows
from praxis_lite.models.adapters import names_of_adapters
from praxis_lite.runs.class_names import add_class_names, find_class_names
from praxis_lite.runs.continuations import GrowingText
from praxis_lite.runs.data_shapes import fit_rows, shapes_in_data
from praxis_lite.runs.file_readers import datasets_by_use, is_of, make_reader
from praxis_lite.runs.predict_files import name_outputs, read_images
from praxis_lite.runs.programs import examples_of
from praxis_lite.runs.prompts import chat_prompt, encode_prompt, numbers_of_adapters, require_tokenizer
from praxis_lite.runs.teaching import Teacher
from praxis_lite.runs.trained import TrainedModel

KINDS = ('predict', 'evaluate', 'score', 'generate', 'teach')
_TAUGHT_TOKENS = 32
_ADAPTER = 'adapter'
RowValues = Mapping[str, Any]
# (values of rows, number of the first row) -> a result for each row.
Compute = Callable[[Sequence[RowValues], int], list[dict[str, Any]]]


class Generation(TypedDict, total=False):
  """Settings of 'generate', see `TrainedModel.decode`; None keeps the config's value."""

  max_tokens: int | None
  temperature: float | None
  top_k: int | None
  top_p: float | None
  stop: Sequence[str]
  seed: int


def make_compute(
  model: TrainedModel, what: str, batch_size: int, generation: Generation, keep: Collection[str] = ()
) -> Compute:
  """Returns a function that computes the results of rows; it raises UserError if a row or the model does not fit.

  Args:
    what: one of `KINDS`.
    generation: settings of 'generate'; 'teach' takes its `top_k`.
    keep: names of values that are not passed to the model, unless the examples of the run have arrays of these names.
  """
  if what == 'score':
    return lambda rows, first: _score(model, rows, batch_size)
  if what == 'generate':
    return _Generate(model, generation)
  if what == 'teach':
    teacher = Teacher(model, generation.get('top_k') or _TAUGHT_TOKENS, batch_size)
    return lambda rows, first: teacher([_tokens_of(model, row) for row in rows], _adapters_of(model, rows))
  return _Predict(model, what, keep)


def _tokens_of(model: TrainedModel, row: RowValues) -> list[int]:
  """Returns the tokens of a row: its `ids`, or its `text` as tokens between the begin and the end token."""
  if isinstance(ids := row.get('ids'), list):
    return _not_empty(_integers(ids, 'ids'), 'ids')
  if 'text' not in row:
    raise DataError('expected text, or ids')
  _check_text(row, 'text')
  tokenizer = require_tokenizer(model.tokenizer, '', 'give ids')
  begin, end, _ = tokenizer.special_ids
  return [begin, *tokenizer.encode(row['text']), end]


def _adapters_of(model: TrainedModel, rows: Sequence[RowValues]) -> list[str | None] | None:
  """Returns the name of the adapter of each row; None if the model does not have several."""
  return [row.get(_ADAPTER) for row in rows] if names_of_adapters(model.layer) else None


def _integers(value: Any, name: str) -> list[int]:
  if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
    raise DataError(f'{name!r} is {reprlib.repr(value)}; expected a list of integers')
  return value


class _Predict:
  """Computes the predictions for each row, or what evaluation reports for it."""

  def __init__(self, model: TrainedModel, what: str, keep: Collection[str]):
    self._model, self._keep = model, keep
    self._compute = model.predict if what == 'predict' else model.evaluate_examples
    self._classes = find_class_names(model)
    self._structs = shapes_in_data(model.batch_struct)

  def __call__(self, rows: Sequence[RowValues], first: int) -> list[dict[str, Any]]:
    if (adapters := _adapters_of(self._model, rows)) is not None:
      rows = [{name: value for name, value in row.items() if name != _ADAPTER} for row in rows]
    names = rows[0].keys()
    if other := next((row for row in rows if row.keys() != names), None):
      raise DataError(f'expected the names {", ".join(names)}, got {", ".join(other) or "none"}')
    batch = self._to_arrays(rows)
    numbers = numbers_of_adapters(adapters, names_of_adapters(self._model.layer), len(rows), 'predict')
    if numbers is not None:
      batch = {**batch, 'adapters': numbers}
    examples = examples_of(name_outputs(self._model, self._compute(batch)), np.ones(len(rows), np.float32))
    return list(add_class_names(examples, self._classes))

  def _to_arrays(self, rows: Sequence[RowValues]) -> Mapping[str, Any]:
    for name, read in (('text', self._texts_to_arrays), ('file', self._images_to_arrays)):
      if isinstance(rows[0].get(name), str):
        for row in rows:
          _check_text(row, name)
        return read(rows)
    try:
      names = [name for name in rows[0] if name in self._structs or name not in self._keep]
      batch = canonical_rows({name: np.stack([np.asarray(row[name]) for row in rows]) for name in names}, 'row')
    except ValueError as error:
      if isinstance(error, UserError):
        raise
      raise DataError(f'has lists of unequal lengths: {error}') from None
    return fit_rows(batch, self._structs)

  def _texts_to_arrays(self, rows: Sequence[RowValues]) -> Rows:
    """Returns the arrays that the run's first dataset of texts with classes makes from the texts of rows."""
    config = next((c for c in datasets_by_use(self._model) if is_of(c, LabelledTextInput)), None)
    if config is None:
      raise ConfigError('the datasets of the run read no single texts; give arrays by name, such as {"ids": ...}')
    *texts, label = config.fields
    some_class = config.classes[0] if config.classes else 0
    if lacking := next((name for row in rows for name in texts if name not in row), None):
      raise DataError(f'{lacking!r} is missing; the run reads {", ".join(texts)}')
    for row, name in itertools.product(rows, texts):
      _check_text(row, name)
    examples = [(*(row[name] for name in texts), row.get(label, some_class)) for row in rows]
    data = config.clone(path=None, examples=examples, is_training=False, shuffle=False).instantiate()
    return data.rows(np.arange(len(examples)))

  def _images_to_arrays(self, rows: Sequence[RowValues]) -> Rows:
    files = [row['file'] for row in rows]
    return read_images(make_reader(self._model, ImageRecordInput, 'file_pattern', files[0], 'images'), files)


def _check_text(row: RowValues, name: str) -> None:
  if not isinstance(value := row[name], str):
    raise DataError(f'{name!r} is {reprlib.repr(value)}; expected a text')


def _score(model: TrainedModel, rows: Sequence[RowValues], batch_size: int) -> list[dict[str, Any]]:
  pairs = [_pair(row) for row in rows]
  contexts: Any = [context for context, _ in pairs]
  continuations: Any = [continuation for _, continuation in pairs]
  scores = model.score(contexts, continuations, batch_size=batch_size, adapters=_adapters_of(model, rows))
  return [{'log_prob': s.log_prob, 'num_tokens': len(s.ids), 'is_greedy': s.is_greedy} for s in scores]


def _pair(row: RowValues) -> tuple[Any, Any]:
  if 'continuation' in row:
    continuation = row['continuation']
    return row.get('context', '' if isinstance(continuation, str) else []), continuation
  if isinstance(row.get('text'), str):
    return '', row['text']
  if isinstance(row.get('ids'), list):
    return [], row['ids']
  raise DataError('expected context and continuation, or text, or ids')


class _Prompt(NamedTuple):
  """The tokens of a prompt.

  If the continuation is decoded to text, `before` has the tokens that precede it in the text; otherwise it is None.
  """

  ids: list[int]
  before: list[int] | None


def _not_empty(ids: list[int], name: str) -> list[int]:
  if not ids:
    raise DataError(f'{name!r} is empty; a prompt needs at least one token')
  return ids


def _chat(tokenizer: BaseTokenizer, messages: Any) -> list[int]:
  if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
    raise DataError(f"'messages' is {reprlib.repr(messages)}; expected a list of objects with role and content")
  try:
    return chat_prompt(tokenizer, messages)
  except UserError:
    raise
  except Exception as error:  # A chat template may raise any error about unexpected messages.
    raise DataError(f"'messages' cannot be read by the chat template: {error_summary(error)}") from None


class _Generate:
  def __init__(self, model: TrainedModel, generation: Generation):
    self._model, self._seed, self._stop = model, generation.get('seed', 0), generation.get('stop', ())
    self._settings: Any = {name: value for name, value in generation.items() if name != 'seed'}

  def __call__(self, rows: Sequence[RowValues], first: int) -> list[dict[str, Any]]:
    prompts = [self._prompt(row) for row in rows]
    seed = (self._seed * 1_000_003 + first) % 2**32  # Each batch has its own random numbers.
    others: Any = {'seed': seed, 'adapters': _adapters_of(self._model, rows)}
    found: Any = self._model.decode([prompt.ids for prompt in prompts], **others, **self._settings)
    return [self._result(prompt, ids) for prompt, ids in zip(prompts, found)]

  def _result(self, prompt: _Prompt, ids: list[int]) -> dict[str, Any]:
    if prompt.before is None or self._model.tokenizer is None:
      return {'continuation_ids': ids}
    text = GrowingText(self._model.tokenizer, prompt.before, self._stop)
    return {'continuation': text.add(ids, is_all=True)}

  def _prompt(self, row: RowValues) -> _Prompt:
    name = next((name for name in ('prompt', 'prompt_ids', 'messages', 'text') if name in row), None)
    if name is None:
      raise DataError('expected prompt, prompt_ids, messages or text')
    value = row[name]
    if name == 'prompt_ids':
      return _Prompt(_not_empty(_integers(value, name), name), None)
    tokenizer = require_tokenizer(self._model.tokenizer, '', 'give prompt_ids')
    if name == 'messages':
      return _Prompt(_not_empty(_chat(tokenizer, value), name), [])  # An answer is decoded without its prompt.
    _check_text(row, name)
    ids = _not_empty(encode_prompt(tokenizer, value, name), name)
    return _Prompt(ids, [] if self._model.layer.prompts_are_sources else ids)
