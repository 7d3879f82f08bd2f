"""VqVae: an autoencoder of images whose latents are codes (van den Oord et al., 2017).

    codes = quantizer(encoder(image)),  reconstruction = decoder(quantizer.lookup(codes))

B batch, H height, W width, C channels, h, w height and width of the grid of latents, D dims of a latent, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import SplitMapping
from praxis_lite.layers.image_coders import ImageDecoder, ImageEncoder, check_image
from praxis_lite.layers.quantizers import Quantizer, VectorQuantizer
from praxis_lite.models.base import BaseModel


class VqVaeOutput(NamedTuple):
  """Reconstructions [B, H, W, C], codes [B, h, w, G] int32, and the perplexity of the codes of the batch, a scalar.

  The perplexity is None if the quantizer has too many codes to count them.
  """

  reconstruction: jax.Array
  codes: jax.Array
  perplexity: jax.Array | None


class VqVae(BaseModel[VqVaeOutput]):
  """A model that compresses images to codes; batches have images [B, H, W, C] and `weights` [B].

  Attributes:
    encoder_tpl: config of the child `encoder`; its `output_dims` follow from the quantizer.
    quantizer_tpl: config of the child `quantizer`; if it has a codebook, its `input_dims` must be set to D.
    decoder_tpl: config of the child `decoder`; its `input_dims` follow from the quantizer, and its `image_channels`
      from the encoder.
    input_name: the leaf of the batch with the images.
  """

  encoder_tpl: Config = template(ImageEncoder)
  quantizer_tpl: Config = template(VectorQuantizer)
  decoder_tpl: Config = template(ImageDecoder)
  input_name: str = 'image'
  activation_split_dims_mapping: Config = template(SplitMapping)

  encoder: ImageEncoder = child()
  quantizer: Quantizer = child()
  decoder: ImageDecoder = child()

  def setup(self) -> None:
    dims = self.create_child('quantizer', self.quantizer_tpl).latent_dims
    encoder = self.create_child('encoder', self.encoder_tpl.clone(output_dims=dims))
    decoder = self.decoder_tpl.clone(input_dims=dims, image_channels=encoder.image_channels)
    self.create_child('decoder', decoder)
    if len(self.decoder.channels) != len(encoder.channels):
      raise ConfigError(
        f'{self.path_name}.decoder_tpl.channels: {number_of(len(self.decoder.channels), "doubling")}, but the encoder '
        f'has {number_of(len(encoder.channels), "halving")}; both must be the same'
      )

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if there are no images, or the encoder does not take their shape."""
    if self.input_name not in batch:
      raise ConfigError(f'{data.label}: no {self.input_name!r}, which task.model.input_name names; has {list(batch)}')
    shape = np.shape(batch[self.input_name])
    check_image(f'{data.label}: {self.input_name!r}', shape, self.encoder.image_channels, len(self.encoder.channels))

  def compute_predictions(self, batch: NestedDict) -> VqVaeOutput:
    """Returns reconstructions, codes and their perplexity."""
    paddings = batch['weights'] == 0 if 'weights' in batch else None
    vectors, codes = self.quantizer(self.encoder(batch[self.input_name]), paddings)
    return VqVaeOutput(self.decoder(vectors), codes, self.quantizer.perplexity(codes, paddings))

  def compute_loss(self, predictions: VqVaeOutput, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns metrics and each example's `loss`.

    Metrics: `loss`, the mean squared error of the pixels' values; `perplexity` of the codes of a batch. In training,
    auxiliary losses of the quantizer are added.
    """
    errors = predictions.reconstruction.astype(jnp.float32) - batch[self.input_name]
    loss_B = jnp.mean(jnp.square(errors), axis=(1, 2, 3))
    loss = weighted_mean(loss_B, batch['weights'])
    metrics = {'loss': loss}
    if predictions.perplexity is not None:
      metrics['perplexity'] = (predictions.perplexity, loss[1])
    return metrics, {'loss': loss_B}

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns each image's `codes`, [B, h, w, G] int32, and `reconstruction`, [B, H, W, C]."""
    output = self.compute_predictions(batch)
    return {'codes': output.codes, 'reconstruction': output.reconstruction}

  def reconstruct(self, codes: jax.Array) -> jax.Array:
    """Returns the images [B, H, W, C] of codes [B, h, w, G]."""
    return self.decoder(self.quantizer.lookup(codes))
