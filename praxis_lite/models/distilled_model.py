"""DistilledModel: a language model that learns the probabilities of a larger one (Hinton et al., 2015).

    loss = (1 - weight) xent(labels) + weight T^2 KL(teacher || model)      both distributions at temperature T

The factor T^2 keeps the gradient of the divergence as large as at T = 1.

B batch, T length, V vocabulary; batches are as for `LanguageModel`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, leaves
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.softmax import SoftmaxOutput
from praxis_lite.layers.transformer_lm import TransformerLm
from praxis_lite.models.frozen import FrozenVariables
from praxis_lite.models.language_model import LanguageModel, clear_padding, weights_of_tokens


class DistilledTokens(NamedTuple):
  """What the loss reads of each token, [B, T].

  Attributes:
    xent: float32 cross entropy of the labels, in nats.
    divergence: float32 KL divergence from the teacher's distribution, in nats, both at the temperature.
    correct: bool, whether the label is the most probable token.
    agrees: bool, whether model and teacher have the same most probable token.
  """

  xent: jax.Array
  divergence: jax.Array
  correct: jax.Array
  agrees: jax.Array


class DistilledModel(LanguageModel):
  """A language model with a frozen teacher; it decodes, predicts and is exported without that.

  A step keeps the logits of both, [B, T, V], also if the softmax could work in chunks.

  Attributes: the same as for `LanguageModel`, and
    teacher_tpl: config of the network of the teacher, with its sizes, the child `teacher`.
    temperature: T; above 1, small probabilities count more.
    weight: the share of the divergence in the loss, from 0 to 1.
  """

  teacher_tpl: Config = REQUIRED
  temperature: float = 1.0
  weight: float = 0.5

  teacher: TransformerLm = child()

  def setup(self) -> None:
    super().setup()
    self._check_range('temperature', above=0)
    self._check_range('weight', least=0)
    if self.weight > 1:
      raise ConfigError(f'{self.path_name}.weight: expected a share from 0 to 1, got {self.weight}')
    if self.adapters:
      raise ConfigError(
        f'{self.path_name}.adapters: a model with a teacher trains its own weights; remove the adapters'
      )
    if self.model_type != 'causal':
      raise ConfigError(f"{self.path_name}.model_type: a model with a teacher is 'causal', not {self.model_type!r}")
    teacher = self.create_child('teacher', self.teacher_tpl)
    for name, network in (('lm_tpl', self.lm), ('teacher_tpl', teacher)):
      if not isinstance(network, TransformerLm):
        raise ConfigError(f'{self.path_name}.{name}: distillation needs a TransformerLm, got {type(network).__name__}')
    if teacher.vocab_size != self.lm.vocab_size:
      raise ConfigError(
        f'{self.path_name}.teacher_tpl.vocab_size: the teacher has {teacher.vocab_size} tokens, and the model '
        f'{self.lm.vocab_size}; both need the same tokenizer'
      )

  @property
  def frozen_variables(self) -> FrozenVariables:
    paths = frozenset(path for path in leaves(self.abstract_init()) if path[0] == 'teacher')
    return FrozenVariables(paths, 'bprop_variable_exclusion', r'teacher\..*', 'the teacher must keep its values')

  def compute_predictions(self, batch: NestedDict) -> DistilledTokens:  # type: ignore[override]
    """Returns what the loss reads of each token."""
    weights_BT = weights_of_tokens(batch)
    ids_BT, labels_BT = (clear_padding(batch[name], weights_BT) for name in ('ids', 'labels'))
    visible: dict[str, Any] = self._visible(batch)
    x_BTD = self.lm.encode(ids_BT, weights_BT, **visible)
    output: SoftmaxOutput = self.lm.softmax(x_BTD, labels_BT, weights_BT)
    logits_BTV = self.lm.softmax.get_logits(x_BTD) if output.whole_logits is None else output.whole_logits
    teacher_BTV, _ = self.teacher.apply(
      jax.lax.stop_gradient(self.teacher.variables), ids_BT, weights_BT, **visible, do_eval=True, method='logits'
    )
    teacher_BTV = jax.lax.stop_gradient(teacher_BTV)
    ours_BTV, theirs_BTV = (jax.nn.log_softmax(to_sum_dtype(x) / self.temperature) for x in (logits_BTV, teacher_BTV))
    divergence_BT = jnp.sum(jnp.exp(theirs_BTV) * (theirs_BTV - ours_BTV), axis=-1)
    agrees_BT = jnp.argmax(logits_BTV, axis=-1) == jnp.argmax(teacher_BTV, axis=-1)
    return DistilledTokens(output.xent, divergence_BT, output.correct, agrees_BT)

  def compute_loss(self, predictions: DistilledTokens, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:  # type: ignore[override]
    """Returns metrics and per-example outputs.

    Metrics: `loss`; `xent`, nats per token; `divergence`, nats per token; in evaluation `accuracy`, and `agreement`,
    how often model and teacher have the same most probable token. Per example: `loss` and `weights`.
    """
    weights_BT, found = weights_of_tokens(batch), predictions
    loss_BT = (1 - self.weight) * found.xent + self.weight * self.temperature**2 * found.divergence
    loss_B, weights_B = weighted_mean(loss_BT, weights_BT, axis=1)
    metrics = {'loss': weighted_mean(loss_B, weights_B)}
    shown = {'xent': found.xent, 'divergence': found.divergence}
    if self.do_eval:
      shown |= {'accuracy': found.correct, 'agreement': found.agrees}
    metrics |= {name: weighted_mean(x, weights_BT) for name, x in shown.items()}
    return metrics, {'loss': loss_B, 'weights': weights_B}
