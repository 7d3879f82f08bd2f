"""SequenceClassifier: an encoder, and a softmax over the classes of whole texts or pairs of texts.

    first     logits = softmax(pooler(encoder(ids)[first token]))
    mean      logits = softmax(pooler(mean of encoder(ids) over tokens))

B batch, T length, D model dims, V classes.

A batch holds `ids`, [B, T] int32, one text or pair in each row; `label`, [B] int32; and `weights`, [B] float32.
`segment_ids`, [B, T] int32, is 0 at padding; without it, all are tokens. `token_type_ids`, [B, T] int32, are optional.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.errors import check_choice
from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import SplitMapping
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.encoder import HeadTransform, TransformerEncoder
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.models.classifier import Classifier
from praxis_lite.models.labels import IdLimit
from praxis_lite.models.masked_text_model import check_tokens, encode_batch, type_limits

POOLINGS = ('first', 'mean')


class SequenceClassifier(Classifier):
  """A classifier of texts, or of pairs of texts. Token types say which text of a pair a token belongs to.

  Attributes: the same as for `Classifier`, and
    encoder_tpl: config of the child `encoder`.
    pooling: 'first' takes the state of the first token, as BERT does; 'mean' the mean over all tokens except padding.
    pooler_tpl: config of the child `pooler`, between that state and the softmax; None disables it.
    dropout_tpl: template of the child `dropout`, before the softmax.
  """

  encoder_tpl: Config = template(TransformerEncoder)
  pooling: str = 'first'
  pooler_tpl: Config | None = template(HeadTransform, activation='tanh', norm_tpl=None)
  dropout_tpl: Config = template(Dropout)
  activation_split_dims_mapping: Config = template(SplitMapping)

  encoder: TransformerEncoder = child()
  pooler: HeadTransform = child()
  dropout: Dropout = child()

  def setup(self) -> None:
    check_choice(f'{self.path_name}.pooling', self.pooling, POOLINGS)
    encoder = self.create_child('encoder', self.encoder_tpl)
    if self.pooler_tpl is not None:
      self.create_child('pooler', self.pooler_tpl.clone(dims=encoder.model_dims))
    self.create_child('dropout', self.dropout_tpl)
    self.create_softmax(encoder.model_dims)

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if a label, an id or a type is out of range."""
    super().check_input(data, batch)
    check_tokens(self.encoder, data, batch)

  def compute_features(self, batch: NestedDict) -> jax.Array:
    """Returns the inputs of the softmax, [B, D]."""
    self._leaf(batch, 'ids')
    states_BTD = encode_batch(self.encoder, batch, packed=False)
    x_BD = states_BTD[:, 0]
    if self.pooling == 'mean':
      x_BD = mean_over_tokens(to_sum_dtype(states_BTD), batch.get('segment_ids'))
    return self.dropout(x_BD if self.pooler_tpl is None else self.pooler(x_BD))

  def id_limits(self) -> dict[str, IdLimit]:
    return type_limits(self.encoder)

  @property
  def num_ids(self) -> int | None:
    return self.encoder.vocab_size


def mean_over_tokens(states_BTD: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
  """Returns the mean over the tokens that are not padding, [B, D]; 0 for a row of padding."""
  if segments_BT is None:
    return jnp.mean(states_BTD, axis=1)
  is_token_BT = (segments_BT != 0).astype(states_BTD.dtype)
  sum_BD = jnp.einsum('btd,bt->bd', states_BTD, is_token_BT)
  return sum_BD / jnp.maximum(jnp.sum(is_token_BT, axis=1), 1)[:, None]
