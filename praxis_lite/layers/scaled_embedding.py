"""ScaledEmbeddingSoftmax: a table shared by embeddings and softmax, where embeddings are scaled by a given number."""

from __future__ import annotations

import jax

from praxis_lite.layers.embeddings import embed
from praxis_lite.layers.softmax import SharedEmbeddingSoftmax


class ScaledEmbeddingSoftmax(SharedEmbeddingSoftmax):
  """A `SharedEmbeddingSoftmax` with embeddings scale * w[ids]; RecurrentGemma's scale is sqrt(D) rounded to 16 bits.

  Attributes:
    embedding_scale: factor of the embeddings; `scale_sqrt_depth` is not used.
  """

  embedding_scale: float = 1.0

  def emb_lookup(self, ids: jax.Array) -> jax.Array:
    """Returns vectors [..., `input_dims`] for integer ids [...]; NaN for an id outside [0, `num_classes`)."""
    return embed(self, ids, 'emb', self.lookup_style, self.embedding_scale)
