"""OnPolicyModel: a language model that learns from a teacher on answers that it samples itself (Agarwal et al., 2024).

    answers      sampled by the model, as for a `PolicyModel`
    loss         mean over their tokens of KL(model || teacher) = sum_v q_v (log q_v - log p_v)

At each position, the divergence is summed over the whole vocabulary, not estimated from the sampled token. No gradient
flows through the sampling. Rewards are only reported.

B batch, T length, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.transformer_lm import TransformerLm
from praxis_lite.models.base import FrozenVariables
from praxis_lite.models.distilled_model import create_teacher, frozen_teacher, kl_divergence, teacher_logits
from praxis_lite.models.language_model import clear_padding
from praxis_lite.models.policy_model import PolicyModel


class TaughtTokens(NamedTuple):
  """The terms of the loss for each token, [B, T]."""

  divergence: jax.Array  # float32 KL(model || teacher), in nats.
  agrees: jax.Array  # bool, whether model and teacher have the same most probable token.


class OnPolicyModel(PolicyModel):
  """A language model that learns from a frozen teacher on its own answers; decoding and export leave the teacher out.

  Attributes: the same as for `PolicyModel`, whose `loss_tpl` is not used, and
    teacher_tpl: config of the child `teacher`, the network of the teacher, with its sizes.
  """

  teacher_tpl: Config = REQUIRED

  teacher: TransformerLm = child()

  def setup(self) -> None:
    super().setup()
    if self.policy_loss.needs_reference:
      raise ConfigError(f'{self.path_name}.loss_tpl: the loss is the divergence from the teacher; leave it as it is')
    create_teacher(self, self.teacher_tpl)

  @property
  def frozen_variables(self) -> FrozenVariables:
    return frozen_teacher(self)

  def compute_predictions(self, batch: NestedDict) -> TaughtTokens:  # type: ignore[override]
    """Returns the terms of the loss for each token."""
    is_token_BT = (batch['segment_ids'] > 0).astype(jnp.float32)
    ids_BT, visible = clear_padding(batch['ids'], is_token_BT), self._visible(batch)
    ours_BTV = to_sum_dtype(self.lm.logits(ids_BT, is_token_BT, **visible))
    theirs_BTV = teacher_logits(self.teacher, ids_BT, is_token_BT, visible)
    agrees_BT = jnp.argmax(ours_BTV, axis=-1) == jnp.argmax(theirs_BTV, axis=-1)
    return TaughtTokens(kl_divergence(jax.nn.log_softmax(ours_BTV), jax.nn.log_softmax(theirs_BTV)), agrees_BT)

  def compute_loss(self, predictions: TaughtTokens, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:  # type: ignore[override]
    """Returns metrics and per-example outputs.

    Metrics: `loss`, nats per token; `agreement`, the fraction of tokens where model and teacher have the same most
    probable token; and the metrics of answers of a `PolicyModel`, from `reward` to `finished`. Per example: `loss`, the
    mean over the tokens of a row, and `reward`.
    """
    weights_BT = batch['weights']
    metrics = {
      'loss': weighted_mean(predictions.divergence, weights_BT),
      'agreement': weighted_mean(predictions.agrees, weights_BT),
      **self._metrics_of_answers(batch),
    }
    loss_B, _ = weighted_mean(predictions.divergence, weights_BT, axis=1)
    return metrics, {'loss': loss_B, 'reward': batch['reward']}
