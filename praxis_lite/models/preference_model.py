"""PreferenceModel: a language model that learns from pairs of a preferred and a rejected answer.

    scores      log-probability of each answer, under the model and under a frozen reference
    loss        computed from these scores, see `preference_losses.py`

`referenced_model.py` says what the reference is, and `pairs_of_answers.py` what a batch holds.

B batch, T length, S pairs of a row, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config, build_at, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.inputs.base import BaseInput
from praxis_lite.models.pairs_of_answers import (
  CHOSEN,
  MISMATCHED,
  REJECTED,
  check_pairs,
  has_pairs,
  rows_of_both,
  split_both,
  sum_by_pair,
)
from praxis_lite.models.preference_losses import AnswerScores, Dpo, PairScores, PreferenceLoss
from praxis_lite.models.referenced_model import ReferencedModel


class PreferenceModel(ReferencedModel):
  """A language model that trains on pairs of answers; it decodes and is exported like any `LanguageModel`.

  Attributes: the same as for `ReferencedModel`, and
    loss_tpl: config of the loss: `Dpo`, `Ipo`, `Kto`, `Orpo` or `SimPo`.
  """

  loss_tpl: Config = template(Dpo)

  _learns_from = 'pairs of answers'

  def setup(self) -> None:
    super().setup()
    loss = build_at(f'{self.path_name}.loss_tpl', self.loss_tpl)
    if not isinstance(loss, PreferenceLoss):
      raise ConfigError(f'{self.path_name}.loss_tpl: expected the config of a loss, such as Config(Dpo), got {loss!r}')
    self.pair_loss: PreferenceLoss = loss
    self._create_reference()

  @property
  def needs_reference(self) -> bool:
    return self.pair_loss.needs_reference

  @property
  def _other_smoothing(self) -> str:
    return f', and label_smoothing of {self.path_name}.loss_tpl if the labels of pairs may be wrong'

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if a batch holds no pairs of answers, or an id, label or position is out of range."""
    if 'prompt_lengths' in batch:
      return super().check_input(data, batch)
    if getattr(data, 'has_single', False) and not self.pair_loss.takes_single:
      raise ConfigError(
        f'{data.label}: some of its examples have one answer and a label, which task.model.loss_tpl = '
        f'{type(self.pair_loss).__name__} cannot learn from; set loss_tpl=praxis_lite.models.Kto'
      )
    check_pairs(
      data,
      batch,
      vocab_size=self.lm.vocab_size,
      field='task.model.vocab_size',
      packed=self.packed,
      limits=self.position_limits(),
      sides=(CHOSEN, REJECTED, MISMATCHED) if self.pair_loss.needs_mismatched else (CHOSEN, REJECTED),
    )

  def compute_predictions(self, batch: NestedDict) -> PairScores:  # type: ignore[override]
    """Returns the scores of both answers of each pair, [B], or [B, S] if rows are packed."""
    rows, *pairs_of_row = batch['weights'].shape
    shape, both = (2 * rows, *pairs_of_row), rows_of_both(batch)
    segments_BT = both['segment_ids']
    log_probs = sum_by_pair(self.log_probs_of_labels(both), segments_BT, shape)
    tokens, reference = sum_by_pair(both['weights'], segments_BT, shape), jnp.zeros(shape, jnp.float32)
    if self.needs_reference:
      reference = self._frozen_sums(both, shape, of_reference=True)
    chosen, rejected = (AnswerScores(*scores) for scores in zip(*map(split_both, (log_probs, reference, tokens))))
    divergence = self._divergence(batch) if self.pair_loss.needs_mismatched else jnp.zeros((), jnp.float32)
    return PairScores(chosen, rejected, batch['weights'], divergence)

  def compute_loss(self, predictions: PairScores, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:  # type: ignore[override]
    """Returns metrics and per-example outputs.

    Metrics: `loss`; `reward_chosen` and `reward_rejected`, means of the rewards of the loss; `margin`, their mean
    difference; `accuracy`, the fraction of pairs whose chosen answer has the larger reward; `log_prob_chosen` and
    `log_prob_rejected`, nats per answer; with `Kto` also `divergence`. Per example: `loss`, the mean over a row.
    """
    pairs, loss = predictions, self.pair_loss
    values, weights = loss.terms(pairs)
    chosen, rejected = loss.rewards(pairs.chosen), loss.rewards(pairs.rejected)
    margin, of_both = chosen - rejected, pairs.weights_of_both
    metrics = {
      'loss': weighted_mean(values, weights),
      'reward_chosen': weighted_mean(chosen, pairs.weights_of_chosen),
      'reward_rejected': weighted_mean(rejected, pairs.weights_of_rejected),
      'margin': weighted_mean(margin, of_both),
      'accuracy': weighted_mean(margin > 0, of_both),
      'log_prob_chosen': weighted_mean(pairs.chosen.log_prob, pairs.weights_of_chosen),
      'log_prob_rejected': weighted_mean(pairs.rejected.log_prob, pairs.weights_of_rejected),
    }
    if loss.needs_mismatched:
      metrics['divergence'] = (pairs.divergence, jnp.sum(weights))
    of_rows, their_weights = (jnp.moveaxis(x, 1, 0).reshape(x.shape[1], -1) for x in (values, weights))
    return metrics, {'loss': weighted_mean(of_rows, their_weights, axis=1)[0]}

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns `reward_chosen` and `reward_rejected` for a batch of pairs; for a batch of texts, `logits`, [B, T, V]."""
    if not has_pairs(batch):
      return super().predict(batch)
    pairs = self.compute_predictions(batch)
    return {f'reward_{name}': self.pair_loss.rewards(getattr(pairs, name)) for name in (CHOSEN, REJECTED)}

  # ---------------------------------------------------------------- log-probabilities

  def _frozen_sums(self, rows: dict[str, jax.Array], shape: tuple[int, ...], of_reference: bool) -> jax.Array:
    """Returns log-probabilities of answers, computed without dropout; no gradient flows through them."""
    return sum_by_pair(self._frozen_log_probs(rows, of_reference), rows['segment_ids'], shape)

  def _divergence(self, batch: NestedDict) -> jax.Array:
    """Returns the mean log-ratio of model and reference, in nats, over all mismatched answers of the whole batch.

    A mismatched answer is an answer to another prompt.
    """
    rows, weights = batch[MISMATCHED], batch['weights']
    tokens = sum_by_pair(rows['weights'], rows['segment_ids'], weights.shape)
    ratio = self._frozen_sums(rows, weights.shape, False) - self._frozen_sums(rows, weights.shape, True)
    counted = jnp.where(tokens > 0, weights, 0)
    sum_over_rows = self.surroundings.sum_over_rows
    total = sum_over_rows(jnp.sum(counted))
    return sum_over_rows(jnp.sum(jnp.where(counted > 0, ratio * counted, 0))) / jnp.where(total == 0, 1, total)
