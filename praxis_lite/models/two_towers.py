"""TwoTowerModel: embeds images and texts into one space (CLIP, Radford et al., 2021; SigLIP, Zhai et al., 2023).

    image embedding = normalize(image_projection(image tower(image)))      SigLIP has no projection here
    text embedding  = normalize(text_projection(pooled states of the text tower(ids)))

B batch, T length, D dims of a tower, E dims of embeddings.

A batch holds `image`, [B, height, width, C]; `ids`, [B, T] int32, a text in each row; and `weights`, [B] float32.
`segment_ids`, [B, T] int32, is 0 at padding; without it, all are tokens. Predictions only need images or texts.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import SplitMapping
from praxis_lite.layers.contrastive import ContrastiveLoss, ContrastiveOutput
from praxis_lite.layers.encoder import TransformerEncoder
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.normalizations import to_units
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.vision_transformer import VisionTransformer
from praxis_lite.models.base import BaseModel
from praxis_lite.models.labels import IdLimit
from praxis_lite.models.masked_text_model import check_tokens, encode_batch, type_limits
from praxis_lite.models.text_classifier import mean_over_tokens

TEXT_POOLINGS = ('first', 'last', 'mean', 'end', 'largest')


class TwoTowerModel(BaseModel[ContrastiveOutput]):
  """A model that learns which images and texts match, from pairs of an image and a text.

  Attributes:
    embedding_dims: E.
    image_tpl: config of the child `image`.
    text_tpl: config of the child `text`.
    text_pooling: the features of a text. 'first' and 'last' take the state of this token, and 'mean' the mean over all
      tokens. 'end' takes the state of the first token `end_id`, as in CLIP, or of the first token if no token is
      `end_id`. 'largest' takes the state of the token with the largest id, as in old checkpoints of CLIP.
    end_id: the id that ends a text, for `text_pooling='end'`.
    projection_tpl: template of the children `image_projection` and `text_projection`.
    has_image_projection: whether there is an `image_projection`; without it, features of images must have E dims.
    loss_tpl: template of the child `loss`.
  """

  has_work_besides_ids: ClassVar[bool] = True

  embedding_dims: int = REQUIRED
  image_tpl: Config = template(VisionTransformer)
  text_tpl: Config = template(TransformerEncoder)
  text_pooling: str = 'mean'
  end_id: int | None = None
  projection_tpl: Config = template(Linear)
  has_image_projection: bool = True
  loss_tpl: Config = template(ContrastiveLoss)
  activation_split_dims_mapping: Config = template(SplitMapping)

  image: VisionTransformer = child()
  text: TransformerEncoder = child()
  image_projection: Linear = child()
  text_projection: Linear = child()
  loss: ContrastiveLoss = child()

  def setup(self) -> None:
    check_choice(f'{self.path_name}.text_pooling', self.text_pooling, TEXT_POOLINGS)
    if self.text_pooling == 'end' and (type(self.end_id) is not int or not 0 <= self.end_id < self.text_tpl.vocab_size):
      raise ConfigError(
        f"{self.path_name}.end_id: {self.end_id!r}; text_pooling='end' needs the id that ends a text, below "
        f'vocab_size = {self.text_tpl.vocab_size}'
      )
    dims = {
      'image': self.create_child('image', self.image_tpl).output_dims,
      'text': self.create_child('text', self.text_tpl).model_dims,
    }
    if not self.has_image_projection and dims.pop('image') != self.embedding_dims:
      raise ConfigError(
        f'{self.path_name}.has_image_projection: False needs features of images that are embedding_dims = '
        f'{self.embedding_dims} wide; those of image_tpl are {self.image.output_dims} wide'
      )
    for name, size in dims.items():
      projection = self.projection_tpl.clone(input_dims=size, output_dims=self.embedding_dims)
      self.create_child(f'{name}_projection', projection)
    self.create_child('loss', self.loss_tpl)

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if an id is not in the vocabulary, or images or texts are missing."""
    for name in ('image', 'ids'):
      if name not in batch:
        raise ConfigError(f'{data.label}: a batch of pairs has image and ids; this one has {", ".join(sorted(batch))}')
    check_tokens(self.text, data, batch, 'task.model.text')

  def embed_images(self, batch: NestedDict) -> jax.Array:
    """Returns the embeddings of images, [B, E] float32, of norm 1."""
    x_BD = self.image(batch['image'])
    return to_units(self.image_projection(x_BD) if self.has_image_projection else x_BD)

  def embed_texts(self, batch: NestedDict) -> jax.Array:
    """Returns the embeddings of texts, [B, E] float32, of norm 1."""
    states_BTD = encode_batch(self.text, batch, packed=False)
    segments_BT = batch.get('segment_ids')
    if self.text_pooling == 'mean':
      x_BD = mean_over_tokens(to_sum_dtype(states_BTD), segments_BT)
    elif segments_BT is None and self.text_pooling in ('first', 'last'):
      x_BD = states_BTD[:, 0 if self.text_pooling == 'first' else -1]
    else:
      at_B = self._chosen_token(batch['ids'], segments_BT)
      x_BD = jnp.take_along_axis(states_BTD, at_B[:, None, None], axis=1)[:, 0]
    return to_units(self.text_projection(x_BD))

  def _chosen_token(self, ids_BT: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
    """Returns the index of the token whose state represents the text, [B]; never padding if the row has a token."""
    places_T = jnp.arange(ids_BT.shape[1], dtype=jnp.int32)
    is_end_BT = jnp.where(ids_BT == self.end_id, 1, 0)
    ranks = {'first': -places_T, 'last': places_T, 'end': is_end_BT, 'largest': ids_BT}
    rank_BT = jnp.broadcast_to(ranks[self.text_pooling], ids_BT.shape)
    if segments_BT is not None:
      rank_BT = jnp.where(segments_BT != 0, rank_BT, -len(places_T))
    return jnp.argmax(rank_BT, axis=1)  # The first one of equal ranks.

  def compute_predictions(self, batch: NestedDict) -> ContrastiveOutput:
    """Returns the loss of each pair, [B], and whether its text is the best match of its image, [B]."""
    return self.loss(self.embed_images(batch), self.embed_texts(batch), batch['weights'])

  def compute_loss(self, predictions: ContrastiveOutput, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns the metrics `loss` and `accuracy`, and each pair's `loss`.

    `accuracy` is the fraction of images for which no other text fits better than their own.
    """
    metrics = {
      'loss': weighted_mean(predictions.loss, batch['weights']),
      'accuracy': weighted_mean(predictions.correct, batch['weights']),
    }
    return metrics, {'loss': predictions.loss}

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns `image_embedding`, [B, E], if the batch has images, and `text_embedding`, [B, E], if it has texts."""
    out = {}
    if 'image' in batch:
      out['image_embedding'] = self.embed_images(batch)
    if 'ids' in batch:
      out['text_embedding'] = self.embed_texts(batch)
    if not out:
      raise ConfigError(f'task.model: the batch has neither image nor ids, only {", ".join(sorted(batch))}')
    return out

  def id_limits(self) -> dict[str, IdLimit]:
    return type_limits(self.text)

  @property
  def num_ids(self) -> int | None:
    return self.text.vocab_size
