"""TextEncoder: an encoder without a head, whose states are the features of a text (`BertModel` in transformers).

    states = encoder(ids),  pooled = pooler(states of the first token)

B batch, T length, D model dims.

A batch holds `ids`, [B, T] int32, one text or pair in each row. `segment_ids`, [B, T] int32, is 0 at padding; without
it, all are tokens. `token_type_ids`, [B, T] int32, are optional.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.encoder import HeadTransform, TransformerEncoder
from praxis_lite.models.base import BaseModel
from praxis_lite.models.labels import IdLimit
from praxis_lite.models.masked_text_model import check_tokens, encode_batch, type_limits


class TextEncoder(BaseModel[dict[str, jax.Array]]):
  """A model that computes features of texts. It has no loss, but other models can be initialized with its `encoder`.

  Attributes:
    encoder_tpl: config of the child `encoder`.
    pooler_tpl: config of the child `pooler`, which computes a vector for the text from the state of its first token;
      None disables it.
  """

  encoder_tpl: Config = template(TransformerEncoder)
  pooler_tpl: Config | None = template(HeadTransform, activation='tanh', norm_tpl=None)

  encoder: TransformerEncoder = child()
  pooler: HeadTransform = child()

  def setup(self) -> None:
    encoder = self.create_child('encoder', self.encoder_tpl)
    if self.pooler_tpl is not None:
      self.create_child('pooler', self.pooler_tpl.clone(dims=encoder.model_dims))

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if an id or a type is out of range."""
    check_tokens(self.encoder, data, batch)

  def compute_predictions(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns `states`, [B, T, D] float32, of each token, and with a pooler `pooled`, [B, D] float32.

    States of padding are arbitrary finite numbers.
    """
    states_BTD = encode_batch(self.encoder, batch, packed=False)
    features = {'states': states_BTD}
    if self.pooler_tpl is not None:
      features['pooled'] = self.pooler(states_BTD[:, 0])
    return {name: x.astype(np.promote_types(x.dtype, jnp.float32)) for name, x in features.items()}

  def compute_loss(self, predictions: dict[str, jax.Array], batch: NestedDict) -> tuple[NestedDict, NestedDict]:
    raise ConfigError(
      'task.model: a TextEncoder has no loss, so it neither trains nor evaluates; train a masked_language_model or a '
      'sequence_classifier that starts from its encoder, by task.train.init_from'
    )

  def id_limits(self) -> dict[str, IdLimit]:
    return type_limits(self.encoder)

  @property
  def num_ids(self) -> int | None:
    return self.encoder.vocab_size
