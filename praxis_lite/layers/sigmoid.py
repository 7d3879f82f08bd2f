"""SigmoidCrossEntropy: classes that are independent of each other, such as several labels for one image.

D model dims, V classes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.softmax import ClassLogits, SoftmaxOutput


class SigmoidCrossEntropy(ClassLogits):
  """logits = x w (+ b), and a loss that treats each class as a yes-or-no question of its own.

  The loss is the sum of the cross entropies of all classes, each between the class's sigmoid and its target:

      xent = sum_v log(1 + exp(logits_v)) - target_v logits_v

  As the `softmax_tpl` of a `ClassificationModel`, it trains on examples with one label each; the model still predicts
  probabilities by a softmax of the logits.

  Attributes: those of `ClassLogits`.
  """

  def __call__(
    self,
    x: jax.Array,
    class_ids: jax.Array | None = None,
    class_weights: jax.Array | None = None,
    class_probabilities: jax.Array | None = None,
  ) -> SoftmaxOutput:
    """Returns the cross entropy and the logits.

    In the result, `correct` is whether the most probable class is a right one: the label, or a class whose target is
    more than 1/2.

    Args:
      x: [..., D].
      class_ids: [...] integer labels in [0, V), if each has exactly one right class; other labels give NaN.
      class_weights: [..., V] weights of the classes in the sum; None means all are 1. Weights [...] of the examples
        have no effect here, and belong in the mean of the losses.
      class_probabilities: [..., V] targets from 0 to 1, instead of `class_ids`.

    Raises:
      ConfigError: neither or both of `class_ids` and `class_probabilities` are given, or a shape is wrong.
    """
    if (class_ids is None) == (class_probabilities is None):
      raise ConfigError(f'{self.path_name}: a call takes either class_ids or class_probabilities')
    logits = self.get_logits(x)
    if class_ids is not None:
      in_range = (class_ids >= 0) & (class_ids < self.num_classes)
      target = jax.nn.one_hot(class_ids, self.num_classes, dtype=logits.dtype)
      target = jnp.where(in_range[..., None], target, jnp.nan)
    elif class_probabilities is not None:
      target = to_sum_dtype(class_probabilities)
    if target.shape != logits.shape:
      raise ConfigError(f'{self.path_name}: the labels have shape {target.shape}, and the logits {logits.shape}')
    losses = jax.nn.softplus(logits) - jax.lax.stop_gradient(target) * logits
    if class_weights is not None and class_weights.ndim == logits.ndim:
      losses *= class_weights
    best = jnp.argmax(logits, axis=-1)
    is_right = jnp.take_along_axis(target, best[..., None], axis=-1)[..., 0] > 0.5
    return SoftmaxOutput(jnp.sum(losses, axis=-1), is_right, logits)
