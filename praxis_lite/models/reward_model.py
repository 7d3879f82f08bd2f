"""RewardModel: a language model with a head that rates answers, learnt from pairs (Bradley and Terry, 1952).

    reward    head(state of the last token of the answer)
    loss      -log sigmoid(reward_chosen - reward_rejected) + center_weight (reward_chosen + reward_rejected)^2

B batch, T length, S pairs of a row, D model dims. `pairs_of_answers.py` says what a batch holds.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import SplitMapping
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.position_limit import PositionLimit
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.transformer_lm import TransformerLm
from praxis_lite.models.base import BaseModel
from praxis_lite.models.language_model import clear_padding
from praxis_lite.models.pairs_of_answers import (
  CHOSEN,
  REJECTED,
  check_pairs,
  has_pairs,
  last_of_pairs,
  rows_of_both,
  split_both,
  tokens_of_pairs,
)


class Rewards(NamedTuple):
  """Rewards of both answers, and weights of pairs, 0 if an answer is missing: [B], or [B, S] if rows are packed."""

  chosen: jax.Array
  rejected: jax.Array
  weights: jax.Array


class RewardModel(BaseModel[Rewards]):
  """A model that learns to assign rewards to answers, from pairs of answers.

  The network's softmax is not used, except for its table if it is also the embedding.

  Attributes:
    lm_tpl: config of the network, the child `lm`, with its sizes.
    head_tpl: config of the child `head`, from D to 1.
    packed: see `LanguageModel`.
    center_weight: factor of the squared sum of both rewards, which keeps them around 0 (Eisenstein et al., 2023); 0
      disables it.
  """

  lm_tpl: Config = template(TransformerLm)
  head_tpl: Config = template(Linear, use_bias=False)
  packed: bool = True
  center_weight: float = 0.0
  activation_split_dims_mapping: Config = template(SplitMapping)

  plain_children = ('head',)  # The head has random initial values and is trained, so it is not quantized by default.

  lm: TransformerLm = child()
  head: Linear = child()

  def setup(self) -> None:
    self._check_range('center_weight', least=0)
    lm = self.create_child('lm', self.lm_tpl)
    if not isinstance(lm, TransformerLm):
      raise ConfigError(f'{self.path_name}.lm_tpl: rewards need a TransformerLm, got {type(lm).__name__}')
    self.create_child('head', self.head_tpl.clone(input_dims=lm.model_dims, output_dims=1))

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if a batch holds no pairs of answers, or an id or a position is out of range."""
    if getattr(data, 'has_single', False):
      raise ConfigError(
        f'{data.label}: some of its examples have one answer and a label; rewards are learnt from pairs'
      )
    check_pairs(
      data,
      batch,
      vocab_size=self.lm.vocab_size,
      field='task.model.lm.vocab_size',
      packed=self.packed,
      limits=self.position_limits(),
      sides=(CHOSEN, REJECTED),
    )

  def compute_predictions(self, batch: NestedDict) -> Rewards:
    """Returns the rewards of both answers of each pair."""
    shape = batch['weights'].shape
    both = rows_of_both(batch)
    rewards = self._rewards(both, shape[1] if len(shape) > 1 else 1)
    has_answer = jnp.any(both['weights'] > 0, axis=1)
    if len(shape) > 1:
      of_pair = tokens_of_pairs(both['segment_ids'], shape[1])
      has_answer = jnp.any(of_pair & (both['weights'][:, :, None] > 0), axis=1)
    else:
      rewards = rewards[:, 0]
    chosen, rejected = split_both(rewards)
    counts = jnp.logical_and(*split_both(has_answer))
    return Rewards(chosen, rejected, jnp.where(counts, batch['weights'], 0))

  def compute_loss(self, predictions: Rewards, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns metrics and per-example outputs.

    Metrics: `loss`, nats per pair; `reward_chosen` and `reward_rejected`; `margin`, their mean difference; `accuracy`,
    the fraction of pairs whose chosen answer has the larger reward. Per example: `loss`, the mean over a row.
    """
    chosen, rejected, weights = predictions
    margin = chosen - rejected
    losses = -jax.nn.log_sigmoid(margin)
    if self.center_weight:
      losses += self.center_weight * jnp.square(chosen + rejected)
    values = {'loss': losses, 'reward_chosen': chosen, 'reward_rejected': rejected, 'margin': margin}
    metrics = {name: weighted_mean(x, weights) for name, x in {**values, 'accuracy': margin > 0}.items()}
    rows = len(weights)
    return metrics, {'loss': weighted_mean(losses.reshape(rows, -1), weights.reshape(rows, -1), axis=1)[0]}

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns `reward_chosen` and `reward_rejected` of a batch of pairs, or `reward`, [B], of single answers.

    Args:
      batch: a batch of pairs; or `ids`, [B, T] int32, a prompt and its answer in each row, and `segment_ids`, [B, T]
        int32, nonzero for tokens and 0 for padding at the end; without `segment_ids`, all T are tokens.

    Raises:
      ConfigError: there are `weights` [B, T] but no `segment_ids`. Weights of labels do not say which ids are tokens.
    """
    if has_pairs(batch):
      rewards = self.compute_predictions(batch)
      return {'reward_chosen': rewards.chosen, 'reward_rejected': rewards.rejected}
    segments_BT, weights = batch.get('segment_ids'), batch.get('weights')
    if segments_BT is None:
      if weights is not None and weights.ndim > 1:
        raise ConfigError(
          'batch: weights [B, T] belong to labels, and do not say which ids are tokens; give segment_ids, [B, T] '
          'int32: 1 for the tokens of the prompt and the answer, 0 for padding at the end'
        )
      segments_BT = jnp.ones_like(batch['ids'])
    rows = {'ids': batch['ids'], 'segment_ids': jnp.minimum(segments_BT, 1)}
    return {'reward': self._rewards(rows, 1)[:, 0]}

  def position_limits(self) -> dict[str, PositionLimit]:
    limit = self.lm.position_limit
    return {'segment_pos': limit} if self.packed and limit is not None else {}

  @property
  def num_ids(self) -> int | None:
    return self.lm.vocab_size

  def _rewards(self, rows: NestedDict, num_pairs: int) -> jax.Array:
    """Returns the rewards of the segments of rows, [B, S] float32, S being `num_pairs`."""
    visible = {name: rows.get(name) for name in ('segment_ids', 'segment_pos')} if self.packed else {}
    is_token_BT = (rows['segment_ids'] > 0).astype(jnp.float32)
    x_BTD = self.lm.encode(clear_padding(rows['ids'], is_token_BT), is_token_BT, **visible)
    at_BS = last_of_pairs(rows['segment_ids'], num_pairs)
    x_BSD = jnp.take_along_axis(x_BTD, at_BS[:, :, None], axis=1)
    return to_sum_dtype(self.head(x_BSD))[..., 0]
