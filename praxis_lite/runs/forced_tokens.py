"""Forced tokens: the log-probabilities that the programs for decoding compute for known continuations.

    context        a b c
    continuation   d e f     log p(d | a b c), log p(e | a b c d), ...

A logit processor allows only the known token, so a sampler draws it. Decoding reports the log-probabilities of the
model itself, without the processor.

Shapes: B batch, L positions in a row, N known texts, V vocabulary, S positions in a source, T in a row of data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import Config
from praxis_lite.common.errors import UserError
from praxis_lite.inputs.rows import Rows
from praxis_lite.models.base import ScoreLimits
from praxis_lite.models.decoding import Sampler
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.prompts import prompt_batch
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.training.experiment import ExperimentConfig

LEAST_TOKENS = 4  # Texts with fewer tokens are not compared.


class KnownTexts(NamedTuple):
  """Contexts and their continuations, as tokens; for an encoder-decoder, the contexts are sources."""

  contexts: list[list[int]]
  continuations: list[list[int]]

  @property
  def num_tokens(self) -> int:
    """The number of tokens whose log-probabilities are computed: all tokens of the continuations."""
    return sum(map(len, self.continuations))


def texts_of_tokens(rows: Sequence[Sequence[int]], most_tokens: int) -> KnownTexts:
  """Returns the texts of at least `LEAST_TOKENS` tokens, cut to different lengths, the longest to `most_tokens`.

  The context of a text is about a third of it, and its continuation is the rest.

  Raises:
    UserError: no text is long enough.
  """
  texts: list[tuple[list[int], list[int]]] = []
  for tokens in (list(map(int, row)) for row in rows if len(row) >= LEAST_TOKENS):
    kept = tokens[: max(most_tokens - 3 * len(texts), LEAST_TOKENS)]
    start = max(len(kept) // 3 + len(texts) % 2, 1)
    texts.append((kept[:start], kept[start:]))
  if not texts:
    raise UserError(f'agree: there is no text of at least {LEAST_TOKENS} tokens to compare; name others by --prompts')
  return KnownTexts(*map(list, zip(*texts)))


def texts_of_batch(batch: Mapping[str, Any], limits: ScoreLimits, most_rows: int, most_tokens: int) -> KnownTexts:
  """Returns the first text of each row of a batch of training or evaluation data.

  Raises:
    UserError: no row has a text that can be compared.
  """
  batch = batch.get('chosen', batch)
  ids_BT, labels_BT = np.asarray(batch['ids']), np.asarray(batch['labels'])
  weights = np.asarray(batch.get('weights', np.ones(ids_BT.shape)))
  is_token_BT = (weights if weights.ndim > 1 else np.broadcast_to(weights[:, None], ids_BT.shape)) != 0
  if batch.get('segment_ids') is not None:
    segments_BT = np.asarray(batch['segment_ids'])
    is_token_BT = (segments_BT == segments_BT[:, :1]) & (segments_BT != 0)
  lengths = [int(np.flatnonzero(row)[-1]) + 1 if row.any() else 0 for row in is_token_BT]
  if limits.start_id is None:
    whole = [[*row[:n], *labels[n - 1 : n]] for row, labels, n in zip(ids_BT, labels_BT, lengths) if n]
    return texts_of_tokens(whole[:most_rows], _fitting(most_tokens, limits))
  texts = KnownTexts([], [])
  for source, labels, n in list(zip(_sources(batch, limits), labels_BT, lengths))[:most_rows]:
    if source and n:
      texts.contexts.append(source[:most_tokens])
      texts.continuations.append(labels[: min(n, _fitting(most_tokens, limits))].tolist())
  if not texts.contexts:
    raise UserError('agree: no row of the data has a source and a target to compare')
  return texts


def random_texts(limits: ScoreLimits, num_rows: int, most_tokens: int) -> KnownTexts:
  rows = np.random.default_rng(0).integers(0, limits.vocab_size, (num_rows, _fitting(most_tokens, limits)))
  return texts_of_tokens(rows.tolist(), _fitting(most_tokens, limits))


def _fitting(most_tokens: int, limits: ScoreLimits) -> int:
  return most_tokens if limits.max_positions is None else min(most_tokens, limits.max_positions)


def _sources(batch: Mapping[str, Any], limits: ScoreLimits) -> list[list[int]]:
  """Returns the tokens of the first source of each row, without the token that ends a source."""
  ids_BS = np.asarray(batch['source_ids'])
  is_token_BS = np.ones(ids_BS.shape, bool)
  if batch.get('source_segment_ids') is not None:
    segments_BS = np.asarray(batch['source_segment_ids'])
    first_B1 = np.take_along_axis(segments_BS, np.argmax(segments_BS != 0, axis=1)[:, None], axis=1)
    is_token_BS = (segments_BS == first_B1) & (segments_BS != 0)
  elif batch.get('source_lengths') is not None:
    is_token_BS = np.arange(ids_BS.shape[1]) < np.asarray(batch['source_lengths'])[:, None]
  rows = [ids[keep].tolist() for ids, keep in zip(ids_BS, is_token_BS)]
  end = limits.source_end_id
  return [row[:-1] if end is not None and row and row[-1] == end else row for row in rows]


# ---------------------------------------------------------------- decoding


def change_model(model: TrainedModel, change: Callable[[Config], object]) -> TrainedModel:
  """Returns a model with the same variables on the same mesh, after `change` has edited a copy of its task's config."""
  task = model.config.task.clone()
  change(task)
  config = ExperimentConfig(task, model.config.datasets, model.config.decode_datasets)
  return dataclasses.replace(
    model, config=config, tasks=TaskOnMesh(task.instantiate(), model.tasks.mesh, model.tasks.layout)
  )


def decode_texts(model: TrainedModel, texts: KnownTexts) -> list[np.ma.MaskedArray]:
  """Returns the log-probabilities of each continuation, [n], that `decode` reports; its batch also has a filler row.

  An entry is masked if `decode` drew another token than the known one.
  """
  limits = model.layer.score_limits()
  assert limits is not None
  begin = [[limits.start_id]] * len(texts.contexts) if limits.start_id is not None else texts.contexts
  whole = [[*context, *more] for context, more in zip(begin, texts.continuations)]
  most = max(map(len, texts.continuations))
  forced = _force_tokens(model, _force_row(_table(whole)), most)
  batch: Rows = dict(prompt_batch([*texts.contexts, texts.contexts[0]]))
  batch['prompt_lengths'][-1] = 0
  if limits.start_id is None:
    batch['max_tokens'] = np.array([*map(len, texts.continuations), 0], np.int32)
  decoded = forced.decode(batch)
  pairs = zip(decoded['ids'], decoded['log_probs'], texts.continuations)
  return [np.ma.array(log_probs[: len(known)], mask=ids[: len(known)] != known) for ids, log_probs, known in pairs]


def batch_texts(model: TrainedModel, texts: KnownTexts, chunk: int = 8) -> list[np.ma.MaskedArray]:
  """Returns the log-probabilities of each continuation, [n], that a batcher reports.

  An entry is masked if the batcher drew another token than the one that the continuation has there.

  The batcher reads `chunk` tokens of a context at once. It has only two rows, in order to test requests that
  wait for a row; with an encoder-decoder, each text has a row.
  """
  limits = model.layer.score_limits()
  assert limits is not None
  if limits.start_id is None:
    whole = [[*context, *more] for context, more in zip(*texts)]
    rows, longest = 2, max(map(len, whole))
    force = _force_text(_table(whole), np.array(list(map(len, whole))))
  else:
    # The rows contain only targets, and all targets begin alike, so tokens do not show which text a row has. The number
    # of the row shows it, because a new batcher gives its rows to requests in order.
    whole = [[limits.start_id, *more] for more in texts.continuations]
    rows, longest = len(whole), max(map(len, [*texts.contexts, *whole]))
    force = _force_row(_table(whole))
  forced = _force_tokens(model, force, longest)
  batcher = forced.batcher(rows=rows, max_length=longest, tokens_per_step=3, chunk=chunk)
  requests = [batcher.submit(context, max_tokens=len(more)) for context, more in zip(*texts)]
  batcher.run()
  found = []
  for request, known in zip(requests, texts.continuations):
    # If two texts have a common prefix, the batcher may have continued with the other text.
    equal = next((i for i, (id_, other) in enumerate(zip(request.ids, known)) if id_ != other), len(known))
    log_probs = np.ma.masked_all(len(known))
    log_probs[:equal] = request.log_probs[:equal]
    found.append(log_probs)
  return found


def _force_tokens(model: TrainedModel, processor: Callable[..., jax.Array], most: int) -> TrainedModel:
  def change(task: Config) -> None:
    # This also replaces a decoder with a limited context: by design it forgets the first tokens, so its results differ.
    task.model.decoder_tpl = Config(Sampler, temperature=0.0, max_decode_steps=most, logit_processors=(processor,))

  return change_model(model, change)


def _table(rows: Sequence[Sequence[int]]) -> np.ndarray:
  width = max(map(len, rows))
  return np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int32)


def _force_row(known_NL: np.ndarray) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
  """Returns a logit processor that allows, in row i of a batch, only the next token of text i."""

  def force_row(logits_BV: jax.Array, ids_BL: jax.Array, lengths_B: jax.Array) -> jax.Array:
    number_B = jnp.minimum(jnp.arange(len(lengths_B)), len(known_NL) - 1)
    return _only(logits_BV, jnp.asarray(known_NL), number_B, lengths_B)

  return force_row


def _force_text(known_NL: np.ndarray, lengths_N: np.ndarray) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
  """Returns a logit processor that finds the first text that begins like a row, and allows its next token."""

  def force_text(logits_BV: jax.Array, ids_BL: jax.Array, lengths_B: jax.Array) -> jax.Array:
    most = min(ids_BL.shape[1], known_NL.shape[1])
    is_later_BL = jnp.arange(most) >= lengths_B[:, None]
    is_equal_BNL = (ids_BL[:, None, :most] == known_NL[None, :, :most]) | is_later_BL[:, None]
    goes_on_BN = jnp.all(is_equal_BNL, axis=2) & (lengths_N > lengths_B[:, None])
    return _only(logits_BV, jnp.asarray(known_NL), jnp.argmax(goes_on_BN, axis=1), lengths_B)

  return force_text


def _only(logits_BV: jax.Array, known_NL: jax.Array, number_B: jax.Array, lengths_B: jax.Array) -> jax.Array:
  """Returns logits, [B, V]: in row b, 0 for token `lengths_B[b]` of text `number_B[b]`, and -inf for all others."""
  token_B = known_NL[number_B, jnp.minimum(lengths_B, known_NL.shape[1] - 1)]
  return jnp.where(jnp.arange(logits_BV.shape[1]) == token_B[:, None], 0.0, -jnp.inf)
