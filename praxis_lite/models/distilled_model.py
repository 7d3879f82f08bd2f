"""DistilledModel: a language model that learns the probabilities of a larger one (Hinton et al., 2015).

    loss = (1 - weight) xent(labels) + weight T^2 KL(teacher || model)      both distributions at temperature T

The factor T^2 keeps the gradient of the divergence as large as at T = 1.

The model may also learn without a teacher, from batches that contain the probabilities p_k which the teacher gave to
its K most probable tokens. All other tokens then count as one. With the probabilities q of the model:

    KL = sum_k p_k (log p_k - log q_k) + p_rest (log p_rest - log q_rest),  p_rest = 1 - sum_k p_k

This is at most the divergence over all tokens, and 0 only if model and teacher agree on the K tokens.

B batch, T length, V vocabulary, K stored tokens; batches are as for `LanguageModel`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, child
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, leaves
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.softmax import SoftmaxOutput
from praxis_lite.layers.transformer_lm import TransformerLm
from praxis_lite.models.base import FrozenVariables
from praxis_lite.models.language_model import LanguageModel, clear_padding, weights_of_tokens

_NO_REST = 1e-6  # Smaller remaining probabilities are rounding errors.


def kl_divergence(p_BTV: jax.Array, q_BTV: jax.Array) -> jax.Array:
  """Returns KL(p || q), [B, T], in nats, for log-probabilities of all tokens."""
  return jnp.sum(jnp.exp(p_BTV) * (p_BTV - q_BTV), axis=-1)


def stored_divergence(q_BTV: jax.Array, ids_BTK: jax.Array, p_BTK: jax.Array) -> jax.Array:
  """Returns KL(p || q), [B, T], in nats, from log-probabilities. p has K different tokens; all others count as one."""
  own_BTK = jnp.take_along_axis(q_BTV, ids_BTK, axis=-1)
  rest_BT = 1 - jnp.sum(jnp.exp(p_BTK), axis=-1)
  others_BTV = jnp.put_along_axis(q_BTV, ids_BTK, -jnp.inf, axis=-1, inplace=False)
  has_rest_BT = (rest_BT > _NO_REST) & (ids_BTK.shape[-1] < q_BTV.shape[-1])
  others_BTV = jnp.where(has_rest_BT[..., None], others_BTV, 0)  # The gradient of -inf would be NaN.
  of_rest_BT = rest_BT * (jnp.log(jnp.where(has_rest_BT, rest_BT, 1)) - jax.nn.logsumexp(others_BTV, axis=-1))
  return jnp.sum(jnp.exp(p_BTK) * (p_BTK - own_BTK), axis=-1) + jnp.where(has_rest_BT, of_rest_BT, 0)


def create_teacher(model: LanguageModel, teacher_tpl: Config) -> None:
  """Builds the child `teacher` in `setup` of a model; raises ConfigError if the model cannot learn from it."""
  where = model.path_name
  if model.adapters:
    raise ConfigError(f'{where}.adapters: a model with a teacher trains its own weights; remove the adapters')
  teacher = model.create_child('teacher', teacher_tpl)
  for name, network in (('lm_tpl', model.lm), ('teacher_tpl', teacher)):
    if not isinstance(network, TransformerLm):
      raise ConfigError(f'{where}.{name}: distillation needs a TransformerLm, got {type(network).__name__}')
  if teacher.vocab_size != model.lm.vocab_size:
    raise ConfigError(
      f'{where}.teacher_tpl.vocab_size: the teacher has {teacher.vocab_size} tokens, and the model '
      f'{model.lm.vocab_size}; both need the same tokenizer'
    )


def frozen_teacher(model: LanguageModel) -> FrozenVariables:
  """Returns the `FrozenVariables` of the teacher."""
  paths = frozenset(path for path in leaves(model.abstract_init()) if path[0] == 'teacher')
  return FrozenVariables(paths, 'bprop_variable_exclusion', r'teacher\..*', 'the teacher must keep its values')


def teacher_logits(teacher: TransformerLm, ids_BT: jax.Array, weights_BT: jax.Array, visible: Any) -> jax.Array:
  """Returns the teacher's logits, [B, T, V], without gradients; `visible` are keyword arguments for attention masks."""
  variables = jax.lax.stop_gradient(teacher.variables)
  logits_BTV, _ = teacher.apply(variables, ids_BT, weights_BT, **visible, do_eval=True, method='logits')
  return to_sum_dtype(jax.lax.stop_gradient(logits_BTV))


class DistilledTokens(NamedTuple):
  """The terms of the loss for each token, [B, T]."""

  xent: jax.Array  # float32 cross entropy of the labels, in nats.
  divergence: jax.Array  # float32 KL(teacher || model), in nats, with both distributions at temperature T.
  correct: jax.Array  # bool, whether the label is the most probable token.
  agrees: jax.Array  # bool, whether model and teacher have the same most probable token.


class DistilledModel(LanguageModel):
  """A language model that learns from a frozen teacher or its stored probabilities; both are left out when it decodes.

  The teacher is not exported either. A step keeps the logits of model and teacher, [B, T, V], even if the softmax layer
  can work in chunks.

  Attributes: the same as for `LanguageModel`, and
    teacher_tpl: config of the child `teacher`, the network of the teacher, with its sizes. None if batches have, for
      each label, `teacher_ids`, [B, T, K] int32, the most probable first, and `teacher_log_probs`, [B, T, K] float32.
    temperature: T; above 1, small probabilities count more.
    weight: the weight of the divergence in the loss, from 0 to 1.
  """

  teacher_tpl: Config | None = REQUIRED
  temperature: float = 1.0
  weight: float = 0.5

  teacher: TransformerLm = child()

  def setup(self) -> None:
    super().setup()
    self._check_range('temperature', above=0)
    self._check_range('weight', least=0)
    if self.weight > 1:
      raise ConfigError(f'{self.path_name}.weight: expected a share from 0 to 1, got {self.weight}')
    if self.model_type != 'causal':
      raise ConfigError(f"{self.path_name}.model_type: a model with a teacher is 'causal', not {self.model_type!r}")
    if self.teacher_tpl is not None:
      create_teacher(self, self.teacher_tpl)
    elif self.temperature != 1:
      raise ConfigError(
        f'{self.path_name}.temperature: {self.temperature}, and probabilities are stored at the temperature 1'
      )

  @property
  def frozen_variables(self) -> FrozenVariables | None:
    return None if self.teacher_tpl is None else frozen_teacher(self)

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if a batch does not fit the model, or lacks stored probabilities that it needs."""
    stored = [name for name in ('teacher_ids', 'teacher_log_probs') if name in batch]
    if self.teacher_tpl is None and 'labels' in batch and len(stored) < 2:
      raise ConfigError(
        f'{data.label}: its batches have no probabilities of a teacher, and task.model.teacher_tpl is None; read what '
        '`praxis-lite predict --what=teach` has written, by read_teacher_rows, or set teacher_tpl'
      )
    super().check_input(data, batch)
    if self.teacher_tpl is None and 'teacher_ids' in stored:
      ids = np.asarray(batch['teacher_ids'])
      if (most := int(ids.max(initial=0))) >= self.lm.vocab_size:
        raise ConfigError(
          f'{data.label}: its teacher_ids go up to {most}, but task.model.vocab_size is {self.lm.vocab_size}; a '
          'teacher has the tokens of the model that learns from it'
        )

  def compute_predictions(self, batch: NestedDict) -> DistilledTokens:  # type: ignore[override]
    """Returns the terms of the loss for each token."""
    weights_BT = weights_of_tokens(batch)
    ids_BT, labels_BT = (clear_padding(batch[name], weights_BT) for name in ('ids', 'labels'))
    visible: dict[str, Any] = self._visible(batch)
    x_BTD = self.lm.encode(ids_BT, weights_BT, **visible)
    output: SoftmaxOutput = self.lm.softmax(x_BTD, labels_BT, weights_BT)
    logits_BTV = self.lm.softmax.get_logits(x_BTD) if output.whole_logits is None else output.whole_logits
    ours_BTV = jax.nn.log_softmax(to_sum_dtype(logits_BTV) / self.temperature)
    if self.teacher_tpl is None:
      best_BT = batch['teacher_ids'][..., 0]
      divergence_BT = stored_divergence(ours_BTV, batch['teacher_ids'], batch['teacher_log_probs'])
    else:
      teacher_BTV = teacher_logits(self.teacher, ids_BT, weights_BT, visible)
      best_BT = jnp.argmax(teacher_BTV, axis=-1)
      divergence_BT = kl_divergence(jax.nn.log_softmax(teacher_BTV / self.temperature), ours_BTV)
    return DistilledTokens(output.xent, divergence_BT, output.correct, jnp.argmax(logits_BTV, axis=-1) == best_BT)

  def compute_loss(self, predictions: DistilledTokens, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:  # type: ignore[override]
    """Returns metrics and per-example outputs.

    Metrics: `loss`; `xent`, nats per token; `divergence`, nats per token; in evaluation `accuracy`, and `agreement`,
    the fraction of tokens where model and teacher have the same most probable token. Per example: `loss`, the mean over
    the tokens of a row, and `weights`, the sum of their weights.
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
