"""The bi-tempered logistic loss: a bounded cross entropy for a softmax with heavy tails (Amid et al., 2019).

    log_t(x) = (x^(1 - t) - 1) / (1 - t)            log_1 = log
    exp_t(x) = max(1 + (1 - t) x, 0)^(1 / (1 - t))  exp_1 = exp

The tempered softmax is p_v = exp_t2(logits_v - z), where z makes the sum 1. With t1 < 1, the loss of an example is at
most about 1 / (1 - t1), which limits the harm of wrong labels far from the decision boundary. With t2 > 1,
probabilities fall more slowly, which limits the harm of wrong labels near the boundary. Cross entropy has t1 = t2 = 1.

D model dims, V classes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.base import Layer, SplitMapping
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.softmax import ClassLogits, SoftmaxOutput
from praxis_lite.sharding.weights import WeightHParams, WeightHParamsCollection, WeightInit

_NEWTON_STEPS = 12

Temperature = jax.Array | float


def tempered_log(x: jax.Array, t: Temperature) -> jax.Array:
  """Returns log_t(x) for any array x >= 0 and a scalar t."""
  power = jnp.asarray(1 - t, x.dtype)
  log = jnp.log(jnp.where(x > 0, x, 1))
  value = jnp.where(power == 0, log, jnp.expm1(power * log) / jnp.where(power == 0, 1, power))
  of_zero = jnp.where(power > 0, -1 / jnp.where(power > 0, power, 1), -jnp.inf)
  return jnp.where(x > 0, value, of_zero)


def tempered_exp(x: jax.Array, t: Temperature) -> jax.Array:
  """Returns exp_t(x) for any array x <= 0 and a scalar t."""
  power = jnp.asarray(1 - t, x.dtype)
  is_positive = power * x > -1
  log = jnp.log1p(jnp.where(is_positive, power * x, 0)) / jnp.where(power == 0, 1, power)
  return jnp.where(is_positive, jnp.exp(jnp.where(power == 0, x, log)), 0)


def tempered_softmax(logits: jax.Array, t: Temperature) -> jax.Array:
  """Returns probabilities [..., V] in float32 for logits [..., V]; t is a scalar above 0.

  Newton's method finds z as the root of log_t(sum_v exp_t(logits_v - z)). As a function of z, this is convex, and
  linear if all logits are equal. So a few steps suffice, and none overshoots. Only the last step is differentiated,
  which gives z the gradient of the root.
  """
  logits = to_sum_dtype(logits)
  logits -= jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))

  def newton(z: jax.Array, logits: jax.Array) -> jax.Array:
    p = tempered_exp(logits - z, t)
    total = jnp.sum(p, axis=-1, keepdims=True)
    slope = total ** (-t) * jnp.sum(_power(p, t), axis=-1, keepdims=True)
    return z + tempered_log(total, t) / jax.lax.stop_gradient(slope)

  constant = jax.lax.stop_gradient(logits)
  z = jax.lax.fori_loop(0, _NEWTON_STEPS, lambda _, z: newton(z, constant), jnp.zeros_like(constant[..., :1]))
  return tempered_exp(logits - newton(jax.lax.stop_gradient(z), logits), t)


def bi_tempered_loss(
  logits: jax.Array, labels: jax.Array, t1: Temperature, t2: Temperature, label_smoothing: float = 0.0
) -> jax.Array:
  """Returns the loss of each example, float32 [...], in nats if both temperatures are 1.

      sum_v target_v (log_t1(target_v) - log_t1(p_v)) - (target_v^(2 - t1) - p_v^(2 - t1)) / (2 - t1)

  Args:
    logits: [..., V] of any float dtype.
    labels: [...] integers in [0, V), where any other number gives NaN; or targets [..., V], floats that sum to 1.
    t1: temperature of the logarithm, less than 2.
    t2: temperature of the softmax, more than 0.
    label_smoothing: e; the target is (1 - e) times the label, plus e / V for each class.
  """
  V = logits.shape[-1]
  if jnp.issubdtype(labels.dtype, jnp.integer):
    one_hot = jax.nn.one_hot(labels, V)
    labels = jnp.where(((labels >= 0) & (labels < V))[..., None], one_hot, jnp.nan)
  p = tempered_softmax(logits, t2)
  target = jax.lax.stop_gradient(((1 - label_smoothing) * labels + label_smoothing / V).astype(p.dtype))
  difference = tempered_log(jnp.where(target == 0, 1, target), t1) - tempered_log(jnp.where(target == 0, 1, p), t1)
  return jnp.sum(target * difference - (_power(target, 2 - t1) - _power(p, 2 - t1)) / (2 - t1), axis=-1)


def _power(x: jax.Array, exponent: Temperature) -> jax.Array:
  """Returns x^exponent for x >= 0 and an exponent above 0; its gradient is 0 where x is 0."""
  return jnp.where(x == 0, 0, jnp.where(x == 0, 1, x) ** exponent)


class BiTemperedLoss(Layer):
  """`bi_tempered_loss`, whose temperatures may change during training from 1 (cross entropy) to t1 and t2.

  Attributes:
    t1: temperature of the logarithm, at least 0 and less than 2; the loss is bounded if it is less than 1.
    t2: temperature of the softmax, above 0; tails are heavy if it is more than 1.
    label_smoothing: see `bi_tempered_loss`.
    start_step, end_step: temperatures are 1 before `start_step`, t1 and t2 from `end_step` on, and linear in between.
      If `end_step` is 0, they are always t1 and t2, as in evaluations. Steps are calls in training, counted in the
      variable `count`, so each microbatch counts as one.
  """

  t1: float = 1.0
  t2: float = 1.0
  label_smoothing: float = 0.0
  start_step: int = 0
  end_step: int = 0
  activation_split_dims_mapping: Config = template(SplitMapping)

  def setup(self) -> None:
    self._check_range('t1', least=0, below=2)
    self._check_range('t2', above=0)
    self._check_range('label_smoothing', least=0, below=1)
    self._check_range('start_step', least=0)
    if self.end_step and self.end_step <= self.start_step:
      raise ConfigError(
        f'{self.path_name}.end_step: expected more than start_step, {self.start_step}, or 0, got {self.end_step}'
      )
    if self.end_step:
      keep = frozenset({WeightHParamsCollection.KEEP_FLOAT32})
      count = WeightHParams((), init=WeightInit.Constant(0.0), dtype='float32', collections=keep)
      self.create_variable('count', count, trainable=False)

  def __call__(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns float32 losses [...]; see `bi_tempered_loss` for the arguments."""
    t1, t2 = self._temperatures()
    return bi_tempered_loss(logits, labels, t1, t2, self.label_smoothing)

  def _temperatures(self) -> tuple[Temperature, Temperature]:
    if not self.end_step or self.do_eval:
      return self.t1, self.t2
    count = jax.lax.stop_gradient(self.theta.count)
    self.update_var('count', count + 1)
    left = jnp.clip((self.end_step - count) / (self.end_step - self.start_step), 0, 1)
    return left + (1 - left) * self.t1, left + (1 - left) * self.t2


class BiTemperedSoftmax(ClassLogits):
  """logits = x w (+ b), and their bi-tempered loss: a `softmax_tpl` for models trained on noisy labels.

  Attributes: the same as for `ClassLogits`, and
    loss_tpl: template of the child `loss`.
  """

  loss_tpl: Config = template(BiTemperedLoss, t1=0.8, t2=1.2)

  loss: BiTemperedLoss = child()

  def setup(self) -> None:
    super().setup()
    self.create_child('loss', self.loss_tpl)

  def __call__(self, x: jax.Array, class_ids: jax.Array, class_weights: jax.Array | None = None) -> SoftmaxOutput:
    """Returns the losses in place of cross entropies, whether the label has the largest logit, and the logits.

    `x` is [..., D], and `class_ids` are labels [...] in [0, V). `class_weights` are not used; the caller weights the
    losses in their mean.
    """
    logits = self.get_logits(x)
    return SoftmaxOutput(self.loss(logits, class_ids), jnp.argmax(logits, axis=-1) == class_ids, logits)
