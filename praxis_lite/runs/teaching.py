"""Computes a teacher's most probable next tokens after each token of texts, for distillation into another model.

Shapes: B batch, T length, V vocabulary, K tokens stored at each position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers.base.call import Surroundings
from praxis_lite.models import LanguageModel
from praxis_lite.models.adapters import names_of_adapters
from praxis_lite.runs.layer_values import map_over_mesh
from praxis_lite.runs.prompts import check_ids, numbers_of_adapters
from praxis_lite.runs.scoring import padded_length
from praxis_lite.runs.trained import TrainedModel


class Teacher:
  """Computes the most probable next tokens of texts.

  Args:
    top_k: K.
    batch_size: B; a smaller batch is padded.

  Raises:
    ConfigError: the model is not a causal language model, or its vocabulary has fewer than K tokens.
  """

  def __init__(self, model: TrainedModel, top_k: int, batch_size: int):
    layer = model.layer
    if not isinstance(layer, LanguageModel) or layer.prompts_are_sources or layer.model_type != 'causal':
      raise ConfigError(f'--what=teach needs a causal language model; this model is a {type(layer).__name__}')
    if not 1 <= top_k <= layer.lm.vocab_size:
      raise ConfigError(f'--top_k={top_k}: expected 1 to {layer.lm.vocab_size}, the size of the vocabulary')
    self._model, self._batch_size = model, batch_size
    limits = layer.score_limits()
    self._most = None if limits is None else limits.max_positions

    def run(variables: NestedDict, batch: NestedDict, surroundings: Surroundings) -> tuple[jax.Array, jax.Array]:
      settings: dict[str, Any] = {'do_eval': True, 'method': 'predict', 'surroundings': surroundings}
      logits_BTV = layer.apply(variables, batch, **settings)[0]['logits']
      best, ids = jax.lax.top_k(jax.nn.log_softmax(logits_BTV.astype(jnp.float32)), top_k)
      return ids, best

    self._run = map_over_mesh(model.tasks, run)

  def __call__(
    self, texts: Sequence[Sequence[int]], adapters: Sequence[str | None] | None = None
  ) -> list[dict[str, list]]:
    """Returns `ids`, `teacher_ids` and `teacher_log_probs` for each text's tokens; see `inputs/teacher_rows.py`."""
    numbers = numbers_of_adapters(adapters, names_of_adapters(self._model.layer), len(texts), 'teach')
    most = max(len(ids) for ids in texts)
    if self._most is not None and most > self._most:
      raise DataError(f'{most} tokens, and the model sees at most {self._most} at once; cut the text')
    T = padded_length([most], self._most)
    batch = {name: np.zeros((self._batch_size, T), np.int32) for name in ('ids', 'segment_ids')}
    batch['segment_pos'] = np.tile(np.arange(T, dtype=np.int32), (self._batch_size, 1))
    for row, ids in enumerate(texts):
      batch['ids'][row, : len(ids)], batch['segment_ids'][row, : len(ids)] = ids, 1
    batch['weights'] = batch['segment_ids'].astype(np.float32)
    if numbers is not None:
      batch['adapters'] = np.pad(numbers, (0, self._batch_size - len(texts)))
    check_ids(batch, self._model.layer.num_ids)
    best_ids, best = (np.asarray(x) for x in self._run(self._model.stored_variables, batch))
    return [
      {
        'ids': [int(i) for i in ids],
        'teacher_ids': best_ids[row, : len(ids) - 1].tolist(),
        'teacher_log_probs': best[row, : len(ids) - 1].astype(float).tolist(),
      }
      for row, ids in enumerate(texts)
    ]
