"""Contrastive losses of pairs, such as images and their texts, computed in chunks of the texts.

    softmax    loss_i = (xent of text i among texts, for image i, + xent of image i among images, for text i) / 2
    sigmoid    loss_i = sum_j -log sigmoid(z_ij logit_ij),  z_ij = 1 if i = j else -1
    logit_ij   = exp(log_scale) image_i . text_j (+ bias)

    for each chunk of C texts                            rows of images stay on their devices, texts are on all of them
      logits [B, C]                                      computed again in the backward pass
      of rows     running log-sum-exp, or running sum
      of columns  log-sum-exp over all rows: C numbers

So no device has logits of more than C texts, and only embeddings and C numbers at a time are sent between devices.

B batch, E dims of embeddings, C texts of a chunk.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.base import ActivationSplit, Layer
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.sharding.weights import SplitDimsMapping, WeightHParams, WeightInit

KINDS = ('softmax', 'sigmoid')
_FAR = -1e30  # The logit of padding.


class ContrastiveOutput(NamedTuple):
  """What a contrastive loss returns.

  Attributes:
    loss: [B] float32, in nats.
    correct: [B] bool: True if, for the image of the row, no text has a larger logit than the row's own text.
  """

  loss: jax.Array
  correct: jax.Array


class ContrastiveActivationSplit(ActivationSplit):
  """`out`: losses, [B]; `logits`: logits of a chunk of texts, [B, C]."""

  logits: SplitDimsMapping = None


class ContrastiveLoss(Layer):
  """The softmax loss of CLIP (Radford et al., 2021), or the sigmoid loss of SigLIP (Zhai et al., 2023).

  Its variables are the scalars `log_scale` and, with 'sigmoid', `bias`.

  Attributes:
    kind: 'softmax' or 'sigmoid'.
    chunk_size: C, the number of texts whose logits are computed at a time; None computes all at once.
    initial_scale: the initial factor of products of embeddings; None means 1 / 0.07 with 'softmax', and 10 with
      'sigmoid'.
    initial_bias: the initial bias of 'sigmoid'.
    activation_split_dims_mapping: `out`: losses, [B]; `logits`: logits of a chunk, [B, C].
  """

  kind: str = 'softmax'
  chunk_size: int | None = None
  initial_scale: float | None = None
  initial_bias: float = -10.0
  activation_split_dims_mapping: Config = template(ContrastiveActivationSplit)

  def setup(self) -> None:
    check_choice(f'{self.path_name}.kind', self.kind, KINDS)
    self._check_range('chunk_size', least=1)
    self._check_range('initial_scale', above=0)
    default = 1 / 0.07 if self.kind == 'softmax' else 10.0
    scale = default if self.initial_scale is None else self.initial_scale
    self.create_variable('log_scale', WeightHParams((), init=WeightInit.Constant(math.log(scale))))
    if self.kind == 'sigmoid':
      self.create_variable('bias', WeightHParams((), init=WeightInit.Constant(self.initial_bias)))

  def __call__(self, image_BE: jax.Array, text_BE: jax.Array, weights_B: jax.Array | None = None) -> ContrastiveOutput:
    """Returns the loss of each pair.

    Args:
      image_BE, text_BE: embeddings, usually of norm 1.
      weights_B: weights of the pairs. Pairs of weight 0, such as padding, are not negatives of other pairs, and their
        own losses are 0; other weights are not applied here. None means all are 1.

    Raises:
      ConfigError: a `shard_map` splits the rows, so that a device sees only its own ones.
    """
    if self.surroundings.manual_axes:
      raise ConfigError(
        f"{self.path_name}: a contrastive loss compares all rows of a batch, and partitioning='shard_map' gives a "
        "device only its own; set task.partitioning to 'auto'"
      )
    B = text_BE.shape[0]
    is_pair_B = jnp.ones((B,), bool) if weights_B is None else weights_B != 0
    image_BE, text_BE = to_sum_dtype(image_BE) * jnp.exp(to_sum_dtype(self.theta.log_scale)), to_sum_dtype(text_BE)
    bias = to_sum_dtype(self.theta.bias) if self.kind == 'sigmoid' else jnp.zeros((), image_BE.dtype)
    own_B = jnp.sum(image_BE * text_BE, axis=-1) + bias
    size = B if self.chunk_size is None else min(self.chunk_size, B)
    count = -(-B // size)
    missing = count * size - B
    chunks = (
      jnp.pad(self.shard(text_BE, (None, None)), ((0, missing), (0, 0))).reshape(count, size, -1),
      jnp.pad(is_pair_B, (0, missing)).reshape(count, size),
      jnp.arange(count * size).reshape(count, size),
    )
    most_B = jnp.full((B,), _FAR, image_BE.dtype)
    body = functools.partial(self._read_chunk, image_BE, is_pair_B, bias)
    (most_B, sum_B), columns = jax.lax.scan(
      jax.checkpoint(body, prevent_cse=False), (most_B, jnp.zeros_like(most_B)), chunks
    )
    if self.kind == 'softmax':
      of_texts_B = columns.reshape(-1)[:B]
      loss_B = (most_B + jnp.log(sum_B) + of_texts_B) / 2 - own_B
    else:
      loss_B = sum_B
    loss_B = jnp.where(is_pair_B, loss_B, 0)
    # Equal texts have nearly equal logits, and do not count as wrong.
    return ContrastiveOutput(self.shard(loss_B), own_B >= most_B - 1e-4)

  def _read_chunk(
    self,
    image_BE: jax.Array,
    is_pair_B: jax.Array,
    bias: jax.Array,
    carry: tuple[jax.Array, jax.Array],
    chunk: tuple[jax.Array, jax.Array, jax.Array],
  ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Returns the running maximum and sum of each row, and the log-sum-exp of each column of this chunk."""
    text_CE, is_pair_C, number_C = chunk
    most_B, sum_B = carry
    logits_BC = self.shard(jnp.einsum('be,ce->bc', image_BE, text_CE) + bias, 'logits')
    of_texts_BC = jnp.where(is_pair_C, logits_BC, _FAR)
    new_B = jax.lax.stop_gradient(jnp.maximum(most_B, jnp.max(of_texts_BC, axis=1)))
    if self.kind == 'sigmoid':
      is_own_BC = jnp.arange(image_BE.shape[0])[:, None] == number_C
      losses_BC = -jax.nn.log_sigmoid(jnp.where(is_own_BC, logits_BC, -logits_BC))
      sum_B += jnp.sum(jnp.where(is_pair_C, losses_BC, 0), axis=1)
      return (new_B, sum_B), jnp.zeros_like(text_CE[:, 0])
    sum_B = sum_B * jnp.exp(most_B - new_B) + jnp.sum(jnp.exp(of_texts_BC - new_B[:, None]), axis=1)
    of_images_BC = jnp.where(is_pair_B[:, None], logits_BC, _FAR)
    return (new_B, sum_B), jax.nn.logsumexp(of_images_BC, axis=0)
