"""Softmax layers: logits over classes, and their cross entropy.

Cross entropy is computed in float32 for integer labels; logits may be split over the vocabulary. Its gradient is
written out as softmax(logits) - target. Automatic differentiation would keep exp(logits) in addition to the logits, and
scatter the labels into a third array of that size. These arrays take most of the memory of a language model's head.
With a large vocabulary, `chunked_loss.py` avoids all of them, the logits too.

D model dims, V classes, such as a vocabulary.
"""

from __future__ import annotations

import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.common.config import REQUIRED, Config, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.common.weighted import weighted_mean
from praxis_lite.layers.base import ActivationSplit, Layer, WeightSplit
from praxis_lite.layers.base.call import SplitConstraint
from praxis_lite.layers.chunked_loss import ClassChunks, auto_chunk_size, chunked_cross_entropy, unmapped_mesh_axes
from praxis_lite.layers.embeddings import LOOKUP_STYLES, embed, embedding_weight, sqrt_depth
from praxis_lite.layers.linears import bias_weight
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.sharding.specs import Placement
from praxis_lite.sharding.weights import SplitDimsMapping, WeightHParams

Losses = tuple[jax.Array, jax.Array]  # Cross entropy, log normalizer.
_Residuals = tuple[jax.Array, jax.Array, jax.Array]  # Logits, labels, log normalizer.


def cross_entropy(logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0) -> Losses:
  """Returns (cross entropy, log normalizer) in nats, each float32 of the shape of `labels`.

      log normalizer z = log sum_v exp(logits_v)
      cross entropy    = z - sum_v target_v logits_v

  The target is 1 for the label. With smoothing e, the target is e / V for every class, plus 1 - e for the label
  (Szegedy et al., 2016). The log normalizer is returned for a z-loss, z^2, which keeps it near zero (Chowdhery et al.,
  2022).

  Args:
    logits: [..., V] of any float dtype.
    labels: [...] integers; the cross entropy of a label outside [0, V) is NaN.
    label_smoothing: e.
  """
  return _cross_entropy(to_sum_dtype(logits), labels, label_smoothing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(logits: jax.Array, labels: jax.Array, label_smoothing: float) -> Losses:
  return _forward(logits, labels, label_smoothing)[0]


def _forward(logits: jax.Array, labels: jax.Array, label_smoothing: float) -> tuple[Losses, _Residuals]:
  log_normalizer = jax.nn.logsumexp(logits, axis=-1)
  index = jnp.where(labels < 0, logits.shape[-1], labels)  # Without this, -1 would select the last class.
  target = jnp.take_along_axis(logits, index[..., None], axis=-1, mode='fill', fill_value=jnp.nan)[..., 0]
  if label_smoothing:
    target = (1 - label_smoothing) * target + label_smoothing * jnp.mean(logits, axis=-1)
  return (log_normalizer - target, log_normalizer), (logits, labels, log_normalizer)


def _backward(label_smoothing: float, residuals: _Residuals, cotangents: Losses) -> tuple[jax.Array, None]:
  logits, labels, log_normalizer = residuals
  of_xent, of_normalizer = (c[..., None] for c in cotangents)
  # Unlike a one-hot array, a comparison is computed in the loop that writes the gradient.
  is_label = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
  target = (1 - label_smoothing) * is_label + label_smoothing / logits.shape[-1]
  probabilities = jnp.exp(logits - log_normalizer[..., None])
  return probabilities * (of_xent + of_normalizer) - target * of_xent, None


_cross_entropy.defvjp(_forward, _backward)


class SoftmaxOutput(NamedTuple):
  """What a softmax layer returns.

  Attributes:
    xent: [...] float32 cross entropy of each label, in nats.
    correct: [...] bool, whether the label is the most probable class; the first one if several are equal.
    whole_logits: [..., V] float32; None if the cross entropy was computed in chunks, see `FullSoftmax.chunk_size`.
  """

  xent: jax.Array
  correct: jax.Array
  whole_logits: jax.Array | None

  @property
  def logits(self) -> jax.Array:
    """The logits [..., V]. Raises ConfigError if the cross entropy was computed in chunks."""
    if self.whole_logits is None:
      raise ConfigError(
        'there are no logits: the softmax layer computed the cross entropy in chunks of the classes. Use its `correct` '
        'for the accuracy, call its get_logits(x), or set its chunk_size=None'
      )
    return self.whole_logits


class ClassLogits(Layer):
  """Base of the layers with logits = x w (+ b), w [D, V].

  Attributes:
    input_dims: D.
    num_classes: V.
    use_bias: whether there is a bias.
    soft_cap: bounds logits smoothly, cap * tanh(logits / cap) (Gemma 2); None disables it.
    weight_split_dims_mapping: `wt`, [D, V], of `w`; the bias is split like dimension V.
    activation_split_dims_mapping: `out`: logits, [..., V].
  """

  input_dims: int = REQUIRED
  num_classes: int = REQUIRED
  use_bias: bool = False
  soft_cap: float | None = None
  weight_split_dims_mapping: Config = template(WeightSplit)

  def setup(self) -> None:
    if self.soft_cap is not None and self.soft_cap <= 0:
      raise ConfigError(f'{self.path_name}.soft_cap: expected more than 0, or None, got {self.soft_cap}')
    weight, bias_split = self._declare(self.weight_split_dims_mapping.wt)
    self.create_variable('w', weight)
    if self.use_bias:
      self.create_variable('b', bias_weight(self.num_classes, bias_split))

  def _declare(self, wt: SplitDimsMapping) -> tuple[WeightHParams, SplitDimsMapping]:
    """Returns the declaration of `w`, and the mapping of its dimension V."""
    weight = WeightHParams((self.input_dims, self.num_classes), tensor_split_dims_mapping=wt)
    return weight, None if wt is None else wt[-1:]

  def _features(self, x: jax.Array) -> jax.Array:
    """Returns the vectors that are multiplied by `w`, [..., D], computed from inputs, [..., D]."""
    return x.astype(self.fprop_dtype)

  def _project(self, x: jax.Array) -> jax.Array:
    return x @ self.theta.w

  def compute_xent(self, x: jax.Array, class_ids: jax.Array) -> jax.Array:
    """Returns the loss of each label, [...], for x [..., D] and labels [...], without adding auxiliary losses."""
    output: SoftmaxOutput = self(x, class_ids)
    return output.xent

  def get_logits(self, x: jax.Array) -> jax.Array:
    """Returns float32 logits [..., V] for x [..., D]."""
    # The product is in fprop_dtype: a float32 product would have float32 gradients, which matrix units compute slower.
    logits = self._project(self._features(x))
    if self.use_bias:
      logits += self.theta.b
    logits = to_sum_dtype(self.shard(logits))
    return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)


class FullSoftmax(ClassLogits):
  """logits = x w (+ b), w [D, V], and their cross entropy.

  Attributes: those of `ClassLogits`, and
    label_smoothing: see `cross_entropy`.
    z_loss_weight: factor of the auxiliary loss `z_loss`, the mean squared log normalizer.
    chunk_size: the number of classes in a chunk. Each device computes the cross entropy chunk by chunk, so that the
      logits of all classes are never in memory. None computes all classes at once, which takes less time. 'auto' uses
      about 16 chunks if the logits of all classes would take 256 MiB or more on each device. On a single GPU, it does
      so if they would take a twelfth of its memory or more.
    activation_split_dims_mapping: `out`: logits, [..., V]; it applies to the logits of a chunk too.
  """

  label_smoothing: float = 0.0
  z_loss_weight: float = 0.0
  chunk_size: int | str | None = 'auto'

  _classes_axis: ClassVar[int] = 1

  def setup(self) -> None:
    self._check_range('label_smoothing', least=0, below=1)
    size = self.chunk_size
    if size not in ('auto', None) and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
      raise ConfigError(
        f"{self.path_name}.chunk_size: expected a number of classes, at least 1, 'auto', or None, got {size!r}"
      )
    super().setup()

  def __call__(self, x: jax.Array, class_ids: jax.Array, class_weights: jax.Array | None = None) -> SoftmaxOutput:
    """Returns the cross entropy, and the logits unless it is computed in chunks.

    Args:
      x: [..., D].
      class_ids: [...] integer labels in [0, V).
      class_weights: [...] weights of the labels in the mean of the z-loss; None means all are 1.
    """
    output, log_normalizer = self._compute(x, class_ids)
    if self.z_loss_weight:
      xent = output.xent
      weights = jnp.ones_like(xent) if class_weights is None else class_weights
      real = self.real_rows(xent.shape[0]) if xent.ndim else None
      if real is not None:
        weights = jnp.where(real.reshape(-1, *(1,) * (xent.ndim - 1)), weights, 0)
      z_loss, _ = weighted_mean(jnp.square(log_normalizer), weights)
      self.add_aux_loss('z_loss', z_loss, weight=self.z_loss_weight)
    return output

  def compute_xent(self, x: jax.Array, class_ids: jax.Array) -> jax.Array:
    return self._compute(x, class_ids)[0].xent

  def _compute(self, x: jax.Array, class_ids: jax.Array) -> tuple[SoftmaxOutput, jax.Array]:
    """Returns the `SoftmaxOutput`, and the log normalizers, [...]; see `cross_entropy`."""
    chunks = self._chunks(class_ids)
    if chunks is None:
      logits = self.get_logits(x)
      xent, log_normalizer = cross_entropy(logits, class_ids, self.label_smoothing)
      return SoftmaxOutput(xent, jnp.argmax(logits, axis=-1) == class_ids, logits), log_normalizer
    b = self.theta.b if self.use_bias else None
    xent, log_normalizer, correct = chunked_cross_entropy(self._features(x), self.theta.w, b, class_ids, chunks)
    return SoftmaxOutput(xent, correct, None), log_normalizer

  def _chunks(self, class_ids: jax.Array) -> ClassChunks | None:
    """Returns how classes are cut into chunks for the cross entropy of these labels; None if they are not cut."""
    if self.chunk_size is None:
      return None
    if type(self).get_logits is not FullSoftmax.get_logits:  # Chunks do not support overridden logits.
      if self.chunk_size == 'auto':
        return None
      raise ConfigError(
        f'{self.path_name}.chunk_size: {type(self).__name__} has a get_logits of its own, so its logits cannot be '
        'computed in chunks; set it to None'
      )
    rank, wt = class_ids.ndim + 1, self.weight_split_dims_mapping.wt
    out, out_field = self.activation_split_dims_mapping.out, f'{self.path_name}.activation_split_dims_mapping.out'
    logits = self._resolve(out, out_field, rank=rank)
    weight = self._resolve(wt, f'{self.path_name}.weight_split_dims_mapping.wt', rank=2)
    entry = logits.spec[-1] if logits is not None else weight and weight.spec[self._classes_axis]
    axes, size = unmapped_mesh_axes(entry), auto_chunk_size(self.num_classes, class_ids.size, unmapped_mesh_axes(entry))
    if self.chunk_size != 'auto':
      size = int(self.chunk_size)
    if size is None:
      return None
    chunks = ClassChunks(
      num_classes=self.num_classes,
      chunk_size=size,
      axes=axes,
      dims_axes=tuple(
        axis for axis in unmapped_mesh_axes(weight and weight.spec[1 - self._classes_axis]) if axis not in axes
      ),
      rows=None if logits is None else tuple(logits.spec[:-1]),
      classes_first=self._classes_axis == 0,
      label_smoothing=self.label_smoothing,
      soft_cap=self.soft_cap,
    )
    if self.surroundings.listener is not None:
      # Logits of a chunk are [..., num_parts, size]; `out` splits the classes into the parts.
      why = () if logits is None else (*logits.why, 'the classes of a chunk are on one device')
      of_chunk = None if logits is None else Placement(PartitionSpec(*logits.spec, None), why)
      shape, manual = (*class_ids.shape, chunks.num_parts, chunks.size), self.surroundings.manual_axes
      self.surroundings.listener(SplitConstraint(out_field, of_chunk, shape, jnp.dtype(jnp.float32), manual))
    return chunks


class SharedEmbeddingActivationSplit(ActivationSplit):
  """`out`: logits, [..., V]; `emb`: embeddings, [..., D]."""

  emb: SplitDimsMapping = None


class SharedEmbeddingSoftmax(FullSoftmax):
  """One table w [V, D] for both ends of a model: embeddings w[ids] and logits x w^T (Press and Wolf, 2017).

  Attributes: the same as for `FullSoftmax`, and
    scale_sqrt_depth, lookup_style: see `Embedding`.
    weight_split_dims_mapping: `wt`, [V, D], in contrast to [D, V] in `FullSoftmax`.
  """

  scale_sqrt_depth: bool = False
  lookup_style: str = 'gather'
  activation_split_dims_mapping: Config = template(SharedEmbeddingActivationSplit)

  _classes_axis = 0

  def setup(self) -> None:
    check_choice(f'{self.path_name}.lookup_style', self.lookup_style, LOOKUP_STYLES)
    super().setup()

  def _declare(self, wt: SplitDimsMapping) -> tuple[WeightHParams, SplitDimsMapping]:
    return embedding_weight(self.num_classes, self.input_dims, wt), None if wt is None else wt[:1]

  def _features(self, x: jax.Array) -> jax.Array:
    growth = self.growth_of('input_dims')
    return super()._features(x if growth == 1 else x / growth)

  def growth_multipliers(self) -> dict[str, float]:
    growth = self.growth_of('input_dims')
    return {} if growth == 1 else {'logits': 1 / growth}

  def _project(self, x: jax.Array) -> jax.Array:
    return jnp.einsum('...d,vd->...v', x, self.theta.w)

  def emb_lookup(self, ids: jax.Array) -> jax.Array:
    """Returns vectors [..., D] for integer ids [...]; NaN for an id outside [0, V)."""
    return embed(self, ids, 'emb', self.lookup_style, sqrt_depth(self) if self.scale_sqrt_depth else None)
