r"""AdversarialModel: a generator of images, and a discriminator that it learns from (GAN; Goodfellow et al., 2014).

    generator_loss       mean over images of -log s(D(G(z)))                        s(x) = 1 / (1 + exp(-x))
    discriminator_loss   mean over images of -log s(D(x)) - log(1 - s(D(G(z))))

Each part is trained by its own loss, so the rules of a `MultiLearner` name them:

    LearnerRule(name='generator', regex=r'generator\..*', loss='generator_loss', learner=...)
    LearnerRule(name='discriminator', regex=r'discriminator\..*', loss='discriminator_loss', learner=...)

B batch, H height, W width, C channels, h, w height and width of the grid of latents, Z dims of a latent.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import SplitMapping
from praxis_lite.layers.image_coders import ImageDecoder, ImageEncoder, check_image
from praxis_lite.models.base import BaseModel


class AdversarialOutput(NamedTuple):
  """Generated images [B, H, W, C], and the discriminator's logits for these images, [B], and for real images, [B]."""

  generated: jax.Array
  of_generated: jax.Array
  of_real: jax.Array


class AdversarialModel(BaseModel[AdversarialOutput]):
  """A model that learns to generate images like those of its batches, [B, H, W, C]; `weights` are [B].

  Attributes:
    generator_tpl: config of the child `generator`, from latents [B, h, w, Z] to images.
    discriminator_tpl: config of the child `discriminator`, from images to logits [B, ...], averaged for each image.
    latent_dims: Z.
    image_size: H and W.
    input_name: the leaf of the batch with the images.

  Raises:
    ConfigError: H or W is not a multiple of 2^n, where n is the number of upsampling stages of the generator.
  """

  generator_tpl: Config = template(ImageDecoder)
  discriminator_tpl: Config = template(ImageEncoder)
  latent_dims: int = REQUIRED
  image_size: tuple[int, int] = REQUIRED
  input_name: str = 'image'
  activation_split_dims_mapping: Config = template(SplitMapping)

  generator: ImageDecoder = child()
  discriminator: ImageEncoder = child()

  def setup(self) -> None:
    self.create_child('discriminator', self.discriminator_tpl.clone(output_dims=1))
    channels = self.discriminator.image_channels
    generator = self.create_child(
      'generator', self.generator_tpl.clone(input_dims=self.latent_dims, image_channels=channels)
    )
    doublings = len(generator.channels)
    check_image(f'{self.path_name}.image_size', (1, *self.image_size, channels), channels, doublings)
    self._grid = tuple(size // 2**doublings for size in self.image_size)

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if a batch has no images, or their shape is not the shape of the generated images."""
    if self.input_name not in batch:
      raise ConfigError(f'{data.label}: no {self.input_name!r}, which task.model.input_name names; has {list(batch)}')
    shape, expected = np.shape(batch[self.input_name])[1:], (*self.image_size, self.discriminator.image_channels)
    if shape != expected:
      raise ConfigError(
        f'{data.label}: {self.input_name!r} has images {list(shape)}, but those of task.model are {list(expected)}'
      )

  def compute_predictions(self, batch: NestedDict) -> AdversarialOutput:
    """Returns generated images and all logits; the latent of each generated image does not depend on the other rows."""
    real = batch[self.input_name]
    generated = self.generate(len(real))
    return AdversarialOutput(generated, self._logits(generated), self._logits(real))

  def generate(self, rows: int, seed_B: jax.Array | None = None) -> jax.Array:
    """Returns images [rows, H, W, C] of random latents. Equal seeds give equal images; None means 0, 1, 2, ..."""
    key = self.next_prng_key()
    shape = (*self._grid, self.latent_dims)
    seeds = jnp.arange(rows) if seed_B is None else seed_B
    z_BHWZ = jax.vmap(lambda seed: jax.random.normal(jax.random.fold_in(key, seed), shape))(seeds)
    return self.generator(z_BHWZ)

  def compute_loss(self, predictions: AdversarialOutput, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns metrics and each row's `loss`.

    Metrics: `generator_loss`, `discriminator_loss`, their sum `loss`, and `accuracy` of the discriminator.
    """
    fake, real = predictions.of_generated, predictions.of_real
    generator, discriminator = jax.nn.softplus(-fake), jax.nn.softplus(-real) + jax.nn.softplus(fake)
    right = ((real > 0).astype(jnp.float32) + (fake < 0)) / 2
    rows = {'generator_loss': generator, 'discriminator_loss': discriminator, 'accuracy': right}
    rows['loss'] = generator + discriminator
    return {name: weighted_mean(x, batch['weights']) for name, x in rows.items()}, {'loss': rows['loss']}

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns `image`, [B, H, W, C], a generated image for each row.

    Args:
      batch: `seed`, [B] int32: different seeds give different images. Without it, the seeds are 0, 1, 2, ..., and B is
        the number of real images in the batch.
    """
    if not {'seed', self.input_name} & set(batch):
      raise DataError(f'{self.path_name}: to make images, a batch has seed, got {list(batch)}')
    seed_B = batch.get('seed')
    return {'image': self.generate(len(batch[self.input_name] if seed_B is None else seed_B), seed_B)}

  def _logits(self, x_BHWC: jax.Array) -> jax.Array:
    logits = self.discriminator(x_BHWC).astype(jnp.float32)
    return jnp.mean(logits.reshape(len(logits), -1), axis=1)
