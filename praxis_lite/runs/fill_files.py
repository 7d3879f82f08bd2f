"""Fills in the hidden tokens of texts with a masked language model. Shapes: T tokens in a row, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from praxis_lite.common.errors import ConfigError, DataError, prefix_errors
from praxis_lite.common.figures import number_of
from praxis_lite.inputs import MaskedTextInput
from praxis_lite.inputs.files import check_utf8, read_file
from praxis_lite.inputs.rows import Rows, canonical_rows
from praxis_lite.runs.file_readers import check_exists, datasets_by_use, is_of, make_reader
from praxis_lite.runs.trained import TrainedModel

MASK = '[MASK]'
_CHOICES = 5  # How many of the most probable tokens are listed for each mask.


def fills_texts(model: TrainedModel) -> bool:
  """Whether a dataset of the run hides tokens of texts, so that its model can fill them in."""
  return any(is_of(config, MaskedTextInput) for config in datasets_by_use(model))


def fill_file(model: TrainedModel, file: str, batch_size: int) -> Iterator[dict[str, Any]]:
  """Yields a dict with `text` and `tokens` for each line of a text file; blank lines are left out.

  `text` is the line with its masks filled in. `tokens` lists, for each mask in the line, the most probable tokens with
  their probabilities.

  Args:
    model: a model from `SavedRun.load`; a dataset of its run must be a `MaskedTextInput`, which has the tokenizer.
    file: the path of a text in which `[MASK]`, or the mask of the tokenizer, stands for each hidden token.

  Raises:
    UserError: the file cannot be read, no line has a mask, or a line is longer than the rows of the run.
  """
  check_exists(file)
  reader = make_reader(model, MaskedTextInput, 'path', file, 'texts')
  content = read_file(file, where := f'{reader.label}.path')
  check_utf8(content, file, where)
  with prefix_errors(file):
    lines = enumerate(content.decode().splitlines(), 1)
    rows = [_encode(reader, number, line) for number, line in lines if line.strip()]
    if not any((ids == reader.mask).any() for ids in rows):
      raise DataError(
        f'no line has a {MASK}, which stands for a token to fill in; --what=evaluate prints the loss of rows in which '
        'tokens are hidden at random'
      )
    for start in range(0, len(rows), batch_size):
      found = model.predict(_batch(reader, some := rows[start : start + batch_size]))
      if not isinstance(found, dict) or 'logits' not in found:
        raise ConfigError(f'a {type(model.layer).__name__} fills in no tokens')
      yield from (_fill(reader, ids, np.asarray(logits_TV)) for ids, logits_TV in zip(some, found['logits']))


def _encode(reader: MaskedTextInput, number: int, line: str) -> np.ndarray:
  """Returns the token ids of a line, with masks for hidden tokens, between the begin and the end token."""
  bos, eos, _ = reader.tokenizer.special_ids
  ids = list(map(int, reader.tokenizer.encode(line)))
  if reader.mask not in ids:  # The tokenizer does not know this text as its mask.
    ids = [i for part in line.split(MASK) for i in (*map(int, reader.tokenizer.encode(part)), reader.mask)][:-1]
  if len(ids) + 2 > reader.row_len:
    raise DataError(f'line {number} has {number_of(len(ids) + 2, "token")}, and rows of the run {reader.row_len}')
  return np.array([bos, *ids, eos], np.int32)


def _batch(reader: MaskedTextInput, rows: list[np.ndarray]) -> Rows:
  shape = len(rows), reader.row_len
  batch = {name: np.zeros(shape, np.int32) for name in ('ids', 'segment_ids', 'segment_pos')}
  for row, ids in enumerate(rows):
    batch['ids'][row, : len(ids)], batch['segment_ids'][row, : len(ids)] = ids, 1
    batch['segment_pos'][row, : len(ids)] = np.arange(len(ids))
  return canonical_rows(batch, 'text')


def _fill(reader: MaskedTextInput, ids: np.ndarray, logits_TV: np.ndarray) -> dict[str, Any]:
  """Returns a line with its masks filled in, from the logits of each position."""
  tokenizer, ids, choices = reader.tokenizer, ids.copy(), []
  logits_TV = logits_TV[: len(ids)].astype(np.float64)
  logits_TV[:, [*tokenizer.control_ids, reader.mask]] = -np.inf
  logits_TV[:, tokenizer.vocab_size :] = -np.inf
  for place in np.flatnonzero(ids == reader.mask):
    if np.isnan(logits_TV[place]).any():
      raise DataError('the model computes NaN for a hidden token; it has diverged, so choose an earlier step')
    p_V = np.exp(logits_TV[place] - logits_TV[place].max())
    p_V /= p_V.sum()
    best = np.argsort(-p_V, kind='stable')[:_CHOICES]
    choices.append([{'token': tokenizer.decode([i]), 'probability': float(p_V[i])} for i in best])
    ids[place] = best[0]
  return {'text': tokenizer.decode(ids[1:-1]), 'tokens': choices}
