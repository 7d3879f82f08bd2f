"""MaskedAutoencoder: a vision transformer that learns to predict hidden patches of images (He et al., 2022).

B batch, h and w height and width of an image, C channels, T patches, P numbers in a patch, D dims of the encoder.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import SplitMapping
from praxis_lite.layers.masked_patches import (
  PatchDecoder,
  choose_patches,
  normalize_patches,
  pixels_of_patches,
  take_tokens,
)
from praxis_lite.layers.vision_transformer import VisionTransformer
from praxis_lite.models.base import BaseModel
from praxis_lite.models.labels import check_images
from praxis_lite.models.vision_configs import VisionSizes, vision_transformer
from praxis_lite.sharding.weights import WeightInit


class PatchPredictions(NamedTuple):
  """Predictions and targets of all patches, [B, T, P] float32, and which patches were hidden, [B, T] bool."""

  output: jax.Array
  target: jax.Array
  is_hidden: jax.Array


class MaskedAutoencoder(BaseModel[PatchPredictions]):
  """A model that hides most patches of each image, encodes the others, and predicts the hidden ones.

  Each row hides other patches, chosen at random. Batches have images [B, h, w, C] and `weights` [B]. The variables of
  `network` have the same paths as in a `ClassificationModel`, which can therefore be initialized with them.

  Attributes:
    network_tpl: config of the child `network`, the encoder, which only sees the patches that are not hidden.
    patch_decoder_tpl: config of the child `patch_decoder`; the model sets its sizes of images and patches.
    mask_ratio: fraction of the patches that are hidden, above 0 and below 1.
    normalizes_targets: whether the targets of each patch are normalized.
    input_name: the leaf of the batch with the images.
  """

  network_tpl: Config = template(VisionTransformer)
  patch_decoder_tpl: Config = template(PatchDecoder)
  mask_ratio: float = 0.75
  normalizes_targets: bool = True
  input_name: str = 'image'
  activation_split_dims_mapping: Config = template(SplitMapping)

  network: VisionTransformer = child()
  patch_decoder: PatchDecoder = child()

  def setup(self) -> None:
    self.create_child('network', self.network_tpl)
    network = self.network
    self._num_patches = network.grid[0] * network.grid[1]
    self._check_range('mask_ratio', above=0, below=1)
    # The small number makes up for rounding: 100 * (1 - 0.9) is a little less than 10.
    self._num_seen = int(self._num_patches * (1 - self.mask_ratio) + 1e-6)
    if not 0 < self._num_seen < self._num_patches:
      raise ConfigError(
        f'{self.path_name}.mask_ratio: {self.mask_ratio} of {self._num_patches} patches hides none or all of them; '
        'expected a share that leaves some'
      )
    decoder = self.patch_decoder_tpl.clone(input_dims=network.model_dims, grid=network.grid)
    height, width = network.patch_size
    decoder.set(patch_dims=height * width * network.channels, has_class_token=network.class_token)
    self.create_child('patch_decoder', decoder)

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if images are missing or do not have the network's size."""
    check_images(data, batch, self.input_name, (*self.network.image_size, self.network.channels))

  def compute_predictions(self, batch: NestedDict) -> PatchPredictions:
    """Returns predictions and targets of all patches; each row draws which patches to hide."""
    image = batch[self.input_name]
    key = self.next_prng_key()
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(image.shape[0]))
    return self.predict_hidden(image, jax.vmap(lambda key: jax.random.uniform(key, (self._num_patches,)))(keys))

  def predict_hidden(self, image_BhwC: jax.Array, noise_BT: jax.Array) -> PatchPredictions:
    """Returns predictions and targets of all patches; the patches with the largest numbers in `noise_BT` are hidden."""
    seen = choose_patches(noise_BT, self._num_seen)
    tokens_BTD = self.network.embed(image_BhwC)
    others = int(self.network.class_token)
    tokens_BKD = take_tokens(tokens_BTD[:, others:], seen.numbers)
    states = self.network.encode_tokens(jnp.concatenate([tokens_BTD[:, :others], tokens_BKD], axis=1))
    output_BTP = self.patch_decoder(states, seen.places).astype(jnp.float32)
    target_BTP = pixels_of_patches(image_BhwC.astype(jnp.float32), self.network.patch_size)
    if self.normalizes_targets:
      target_BTP = normalize_patches(target_BTP)
    return PatchPredictions(output_BTP, target_BTP, seen.is_hidden)

  def compute_loss(self, predictions: PatchPredictions, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns the metric `loss`, the mean squared error over hidden patches, and the `loss` of each example."""
    errors_BT = jnp.mean(jnp.square(predictions.output - predictions.target), axis=-1)
    loss_B = jnp.sum(errors_BT * predictions.is_hidden, axis=1) / (self._num_patches - self._num_seen)
    return {'loss': weighted_mean(loss_B, batch['weights'])}, {'loss': loss_B}

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns `features`, [B, D], and `states` of all tokens, [B, T, D]; nothing is hidden."""
    states_BTD = self.network.encode(batch[self.input_name])
    return {'features': self.network.pool(states_BTD), 'states': states_BTD}


def masked_autoencoder(
  *,
  decoder_dims: int = 512,
  decoder_layers: int = 8,
  decoder_heads: int = 16,
  mask_ratio: float = 0.75,
  normalizes_targets: bool = True,
  fprop_dtype: DTypeLike | None = None,
  **sizes: Unpack[VisionSizes],
) -> Config[MaskedAutoencoder]:
  """Returns the config of a masked autoencoder with a vision transformer; the decoder's defaults are the paper's.

  Args:
    decoder_dims, decoder_layers, decoder_heads: `model_dims`, `num_layers` and `num_heads` of the `PatchDecoder`.
    mask_ratio, normalizes_targets: see `MaskedAutoencoder`.
    fprop_dtype: dtype of the computation, such as jnp.bfloat16; None means the dtype of the weights, float32.
    **sizes: arguments of `vision_transformer`. Here, `positions` is 'sinusoidal' and `class_token` is True by default;
      the decoder has the same kind of positions.
  """
  encoder: VisionSizes = {'positions': 'sinusoidal', 'class_token': True, **sizes}
  network = vision_transformer(**encoder)
  decoder = Config(PatchDecoder, model_dims=decoder_dims, num_layers=decoder_layers, num_heads=decoder_heads)
  decoder.transformer_tpl = network.transformer_tpl.clone()
  decoder.final_norm_tpl = network.final_norm_tpl.clone()
  decoder.position_tpl = network.position_tpl.clone()
  network.params_init = decoder.params_init = WeightInit.Xavier()
  model = Config(MaskedAutoencoder, network_tpl=network, patch_decoder_tpl=decoder, mask_ratio=mask_ratio)
  return model.set(normalizes_targets=normalizes_targets, fprop_dtype=fprop_dtype)
