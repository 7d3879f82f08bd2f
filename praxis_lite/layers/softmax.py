"""Softmax layers: logits over classes, and their cross entropy.

D model dims, V classes, such as a vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.config import REQUIRED, Config, template
from praxis_lite.errors import ConfigError
from praxis_lite.layer import ActivationSplit, Layer
from praxis_lite.layers.cross_entropy import cross_entropy
from praxis_lite.layers.embeddings import check_lookup_style, embedding_weight, lookup, split_rows
from praxis_lite.layers.linears import bias_weight
from praxis_lite.weights import SplitDimsMapping, WeightHParams


class SoftmaxOutput(NamedTuple):
  """What a softmax layer returns.

  Attributes:
    logits: [..., V] float32.
    xent: [...] float32 cross entropy of each label, in nats.
  """

  logits: jax.Array
  xent: jax.Array


class FullSoftmax(Layer):
  """logits = x w (+ b), w [D, V], and their cross entropy.

  Attributes:
    input_dims: D.
    num_classes: V.
    use_bias: whether there is a bias.
    soft_cap: bounds logits smoothly, cap * tanh(logits / cap) (Gemma 2); None does not.
    label_smoothing: see `cross_entropy`.
    z_loss_weight: factor of the auxiliary loss `z_loss`, the mean squared log normalizer.
    weight_split_dims_mapping: `wt`, [D, V], of `w`; the bias is split as its classes.
    activation_split_dims_mapping: `out`: logits, [..., V].
  """

  input_dims: int = REQUIRED
  num_classes: int = REQUIRED
  use_bias: bool = False
  soft_cap: float | None = None
  label_smoothing: float = 0.0
  z_loss_weight: float = 0.0

  def setup(self) -> None:
    if not 0 <= self.label_smoothing < 1:
      raise ConfigError(
        f'{self.path_name}.label_smoothing: expected at least 0 and less than 1, got {self.label_smoothing}'
      )
    if self.soft_cap is not None and self.soft_cap <= 0:
      raise ConfigError(f'{self.path_name}.soft_cap: expected more than 0, or None, got {self.soft_cap}')
    weight, bias_split = self._declare(self.weight_split_dims_mapping.wt)
    self.create_variable('w', weight)
    if self.use_bias:
      self.create_variable('b', bias_weight(self.num_classes, bias_split))

  def _declare(self, wt: SplitDimsMapping) -> tuple[WeightHParams, SplitDimsMapping]:
    """Returns the declaration of `w`, and how the classes are split."""
    weight = WeightHParams((self.input_dims, self.num_classes), tensor_split_dims_mapping=wt)
    return weight, None if wt is None else tuple(wt)[-1:]

  def _project(self, x: jax.Array) -> jax.Array:
    return x @ self.theta.w

  def get_logits(self, x: jax.Array) -> jax.Array:
    """Returns logits [..., V], float32, of x [..., D]."""
    # The product itself is in fprop_dtype: in float32, its gradients would be too, and miss the fast matrix units.
    logits = self._project(x.astype(self.fprop_dtype))
    if self.use_bias:
      logits += self.theta.b
    logits = self.shard(logits, self.activation_split_dims_mapping.out).astype(jnp.float32)
    return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)

  def __call__(self, x: jax.Array, class_ids: jax.Array, class_weights: jax.Array | None = None) -> SoftmaxOutput:
    """Returns logits and cross entropy.

    Args:
      x: [..., D].
      class_ids: [...] integer labels in [0, V).
      class_weights: [...] weights of the labels in the mean that the z-loss is; None is ones.
    """
    logits = self.get_logits(x)
    xent, log_normalizer = cross_entropy(logits, class_ids, self.label_smoothing)
    if self.z_loss_weight:
      weights = jnp.ones_like(xent) if class_weights is None else class_weights.astype(jnp.float32)
      total = jnp.sum(weights)
      z_loss = jnp.sum(jnp.where(weights > 0, jnp.square(log_normalizer) * weights, 0.0))
      self.add_aux_loss('z_loss', z_loss / jnp.where(total > 0, total, 1.0), weight=self.z_loss_weight)
    return SoftmaxOutput(logits, xent)


class SharedEmbeddingActivationSplit(ActivationSplit):
  """`out`: logits, [..., V]; `emb`: vectors, [..., D]."""

  emb: SplitDimsMapping = None


class SharedEmbeddingSoftmax(FullSoftmax):
  """One table w [V, D] for both ends of a model: vectors = w[ids], logits = x w^T (Press and Wolf, 2017).

  Attributes: those of `FullSoftmax`, and
    scale_sqrt_depth, lookup_style: see `Embedding`.
    weight_split_dims_mapping: `wt`, [V, D]: the other way around than in `FullSoftmax`.
  """

  scale_sqrt_depth: bool = False
  lookup_style: str = 'gather'
  activation_split_dims_mapping: Config = template(SharedEmbeddingActivationSplit)

  def setup(self) -> None:
    check_lookup_style(self.lookup_style, f'{self.path_name}.lookup_style')
    super().setup()

  def _declare(self, wt: SplitDimsMapping) -> tuple[WeightHParams, SplitDimsMapping]:
    return embedding_weight(self.num_classes, self.input_dims, wt), None if wt is None else tuple(wt)[:1]

  def _project(self, x: jax.Array) -> jax.Array:
    return jnp.einsum('...d,vd->...v', x, self.theta.w)

  def emb_lookup(self, ids: jax.Array) -> jax.Array:
    """Returns vectors [..., D] of integer ids [...]; NaN for ids that are not in [0, V)."""
    emb = self.activation_split_dims_mapping.emb
    y = lookup(split_rows(self, self.theta.w, emb), ids, self.lookup_style)
    if self.scale_sqrt_depth:
      y *= self.input_dims**0.5
    return self.shard(y, emb, 'activation_split_dims_mapping.emb')
