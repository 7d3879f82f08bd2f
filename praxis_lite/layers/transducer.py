"""Parts of a transducer: a network that reads labels, one that joins labels and encoder, and the loss (Graves, 2012).

    g_u      = recurrent(embedding(blank, labels before u))
    logits   = softmax(tanh(encoder_proj(x_t) + label_proj(g_u)))

The times of labels are not known. A path begins at frame 0 with no label. In each step it either writes the next label
and stays in its frame, or writes a blank and goes to the next frame; it ends with the blank of the last frame, after
all labels. The probability of labels is the sum over all of their paths:

    alpha[0, 0] = 1;  alpha[t, u] = alpha[t - 1, u] blank[t - 1, u] + alpha[t, u - 1] label[t, u - 1]
    p(labels)   = alpha[last frame, L] blank[last frame, L]

All entries with the same t + u are computed at once, so a scan has T + L steps.

B batch, T frames, L labels, U = L + 1: 0 to L labels are written, N = T + U - 1 diagonals, D dims, J joint dims, V
symbols, C frames of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base import ActivationSplit, Layer, WeightSplit
from praxis_lite.layers.block_arrays import join_blocks, to_blocks
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.linears import Linear, bias_weight
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.recurrent import Recurrent
from praxis_lite.sharding.weights import SplitDimsMapping, WeightHParams

_IMPOSSIBLE = -1e30  # A finite number, because differences of infinities are NaN.


class LabelNetwork(Layer):
  """Reads the labels that have been written so far (the prediction network).

  Attributes:
    vocab_size: V.
    model_dims: D.
    start_id: the symbol that is read before all labels, the blank.
    embedding_tpl: template of the child `embedding`.
    recurrent_tpl: template of the child `recurrent`.
    activation_split_dims_mapping: `out`, [B, U, D].
  """

  vocab_size: int = REQUIRED
  model_dims: int = REQUIRED
  start_id: int = 0
  embedding_tpl: Config = template(Embedding)
  recurrent_tpl: Config = template(Recurrent)

  embedding: Embedding = child()
  recurrent: Recurrent = child()

  def setup(self) -> None:
    self.create_child('embedding', self.embedding_tpl.clone(num_classes=self.vocab_size, input_dims=self.model_dims))
    self.create_child('recurrent', self.recurrent_tpl.clone(input_dims=self.model_dims))

  def __call__(self, labels_BL: jax.Array) -> jax.Array:
    """Returns the outputs g_u after u = 0, ..., L labels, [B, U, D], for int32 labels."""
    ids_BU = jnp.pad(labels_BL, ((0, 0), (1, 0)), constant_values=self.start_id)
    return self.shard(self.recurrent(self.embedding(ids_BU)))

  def init_decode_state(self, batch_size: int) -> None:
    """Allocates the state of `batch_size` rows in which no label has been read."""
    self.recurrent.init_decode_state(batch_size, 1)

  def extend_step(self, ids_B: jax.Array, pos_B: jax.Array) -> jax.Array:
    """Returns the outputs after one more symbol, [B, D]; the first symbol is `start_id`.

    Args:
      ids_B: int32, the symbol.
      pos_B: int32; rows with -1 read nothing, and their outputs are arbitrary.
    """
    return self.recurrent.extend_step(self.embedding(ids_B[:, None]), pos_B[:, None])[:, 0]


class JointSplit(ActivationSplit):
  """`out`: logits, [B, C, U, V]; `hidden`: what the softmax reads, [B, C, U, J]."""

  hidden: SplitDimsMapping = None


class PathLogProbs(NamedTuple):
  """The log probabilities of the blank and of the next label, in frame t after u labels: [B, T, U] float32 each."""

  blank: jax.Array
  label: jax.Array


class TransducerJoint(Layer):
  """The softmax of the outputs of encoder and label network together (the joint network).

  Attributes:
    encoder_dims, label_dims: dims of the two outputs.
    joint_dims: J.
    num_classes: V.
    activation: name of the activation before the softmax.
    chunk_size: C; the log probabilities of C frames are computed at a time, and again in the backward pass, so that
      logits [B, T, U, V] are never in memory. None computes all frames at once.
    proj_tpl: template of the children `encoder_proj` and `label_proj`.
    weight_split_dims_mapping: `wt`, [J, V], of `w`; the bias is split like V. If `proj_tpl` has no mapping, its output
      is split like J.
  """

  encoder_dims: int = REQUIRED
  label_dims: int = REQUIRED
  joint_dims: int = REQUIRED
  num_classes: int = REQUIRED
  activation: str = 'tanh'
  chunk_size: int | None = 16
  proj_tpl: Config = template(Linear)
  weight_split_dims_mapping: Config = template(WeightSplit)
  activation_split_dims_mapping: Config = template(JointSplit)

  encoder_proj: Linear = child()
  label_proj: Linear = child()

  def setup(self) -> None:
    self._check_range('chunk_size', least=1)
    get_activation(self.activation, f'{self.path_name}.activation')
    J, wt = self.joint_dims, self.weight_split_dims_mapping.wt
    proj = self.proj_tpl.clone(output_dims=J)
    self.create_child('encoder_proj', proj.clone(input_dims=self.encoder_dims, use_bias=True))
    self.create_child('label_proj', proj.clone(input_dims=self.label_dims))
    self.create_variable('w', WeightHParams((J, self.num_classes), tensor_split_dims_mapping=wt))
    self.create_variable('b', bias_weight(self.num_classes, None if wt is None else wt[-1:]))

  def __call__(self, x_BTD: jax.Array, g_BUD: jax.Array, labels_BL: jax.Array, blank_id: int) -> PathLogProbs:
    """Returns log probabilities of the blank, `blank_id`, and of the labels, which are int32.

    Args:
      x_BTD: outputs of the encoder.
      g_BUD: outputs of the label network after u labels.
    """
    T = x_BTD.shape[1]
    g_B1UJ = self.label_proj(g_BUD)[:, None]
    w, b = self.theta.w, self.theta.b
    next_B1U1 = jnp.pad(labels_BL, ((0, 0), (0, 1)), constant_values=blank_id)[:, None, :, None]

    def compute(x_BCJ: jax.Array) -> PathLogProbs:
      logits_BCUV = self._logits(x_BCJ[:, :, None], g_B1UJ, w, b)
      normalizer_BCU = jax.nn.logsumexp(logits_BCUV, axis=-1)
      label_BCU = jnp.take_along_axis(logits_BCUV, next_B1U1, axis=-1)[..., 0]
      return PathLogProbs(logits_BCUV[..., blank_id] - normalizer_BCU, label_BCU - normalizer_BCU)

    x_BTJ = self.encoder_proj(x_BTD)
    if self.chunk_size is None or self.chunk_size >= T:
      return compute(x_BTJ)
    scanned = jax.checkpoint(lambda _, x_BCJ: (None, compute(x_BCJ)), prevent_cse=False)
    _, found = jax.lax.scan(scanned, None, to_blocks(x_BTJ, self.chunk_size))
    return PathLogProbs(*(join_blocks(x, T) for x in found))

  def step_logits(self, x_BD: jax.Array, g_BD: jax.Array) -> jax.Array:
    """Returns float32 logits [B, V], for one frame and one output of the label network of each row."""
    hidden = self.encoder_proj(x_BD[:, None]), self.label_proj(g_BD[:, None])
    return self._logits(hidden[0][:, :, None], hidden[1][:, None], self.theta.w, self.theta.b)[:, 0, 0]

  def _logits(self, x_BC1J: jax.Array, g_B1UJ: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    hidden_BCUJ = self.shard(get_activation(self.activation)(x_BC1J + g_B1UJ), 'hidden')
    return self.shard(to_sum_dtype(hidden_BCUJ @ w) + to_sum_dtype(b))


def rnnt_loss(blank_BTU: jax.Array, label_BTU: jax.Array, frames_B: jax.Array, labels_B: jax.Array) -> jax.Array:
  """Returns -log p(labels), [B] float32, in nats; about 1e30 for rows without frames.

  Entries beyond the frames and labels of a row may have any finite values.

  Args:
    blank_BTU: log probability of the blank in frame t, after u labels.
    label_BTU: log probability of label u in frame t, after u labels; the last entry, u = L, is not used.
    frames_B: int32, the number of frames of each row.
    labels_B: int32, the number of labels of each row, at most L.
  """
  B, T, U = blank_BTU.shape
  at_U = jnp.arange(U)
  frame_NU = jnp.arange(T + U - 1)[:, None] - at_U
  exists_NU = (frame_NU >= 0) & (frame_NU < T)

  def to_diagonals(x_BTU: jax.Array) -> jax.Array:
    """Returns [N, B, U]: entry [n, b, u] is x[b, n - u, u], or `_IMPOSSIBLE` if there is no frame n - u."""
    index_BNU = jnp.broadcast_to(jnp.clip(frame_NU, 0, T - 1), (B, T + U - 1, U))
    found_BNU = jnp.take_along_axis(x_BTU.astype(jnp.float32), index_BNU, axis=1)
    return jnp.moveaxis(jnp.where(exists_NU, found_BNU, _IMPOSSIBLE), 1, 0)

  def step(alpha_BU: jax.Array, logs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    blank_BU, label_BU = logs
    after_blank_BU = alpha_BU + blank_BU
    after_label_BU = jnp.pad(alpha_BU + label_BU, ((0, 0), (1, 0)), constant_values=_IMPOSSIBLE)[:, :U]
    next_BU = jnp.logaddexp(after_blank_BU, after_label_BU)
    return jnp.maximum(next_BU, _IMPOSSIBLE), after_blank_BU

  start_BU = jnp.full((B, U), _IMPOSSIBLE).at[:, 0].set(0.0)
  _, ended_NBU = jax.lax.scan(step, start_BU, (to_diagonals(blank_BTU), to_diagonals(label_BTU)))
  last_B = jnp.maximum(frames_B - 1 + labels_B, 0)
  ended_BU = jnp.take_along_axis(ended_NBU, last_B[None, :, None], axis=0)[0]
  log_prob_B = jnp.take_along_axis(ended_BU, labels_B[:, None], axis=1)[:, 0]
  return jnp.where(frames_B > 0, -log_prob_B, -_IMPOSSIBLE)
