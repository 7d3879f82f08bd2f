"""ImageMixing: mixup (Zhang et al., 2018) and CutMix (Yun et al., 2019) of the images of a batch.

    mixup    x = share x_i + (1 - share) x_j                          share ~ Beta(alpha, alpha)
    CutMix   x = x_j in a box of 1 - share of the area, else x_i      the box may end at the border
    loss       = share loss(label_i) + (1 - share) loss(label_j)      j = i - 1; for row 0, the last real row

B batch, h and w height and width of an image, C channels.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.base import Layer
from praxis_lite.layers.precision import to_sum_dtype


class MixedImages(NamedTuple):
  """Images, each mixed with a part of the one before it in the batch.

  Attributes:
    image: [B, h, w, C], at least float32.
    share: [B] in the same dtype, the share of the row's own image; 1 for a row that is not mixed.
  """

  image: jax.Array
  share: jax.Array


class ImageMixing(Layer):
  """Mixes each image of a batch with the one before it, by mixup or CutMix, drawn for each row; in training only.

  Attributes:
    mixup_alpha: both parameters of the Beta distribution of the share in mixup; 0 disables mixup.
    cutmix_alpha: both parameters of the Beta distribution of the share in CutMix; 0 disables CutMix.
    activation_split_dims_mapping: `out`, [B, h, w, C].
  """

  noise_fields: ClassVar[tuple[str, ...]] = ('mixup_alpha', 'cutmix_alpha')

  mixup_alpha: float = 0.0
  cutmix_alpha: float = 0.0

  def setup(self) -> None:
    self._check_range('mixup_alpha', 'cutmix_alpha', least=0)

  def __call__(self, image_BhwC: jax.Array, weights_B: jax.Array) -> MixedImages:
    """Returns the mixed images and their shares.

    Args:
      image_BhwC: floating-point images.
      weights_B: weights of the images; a row is not mixed with one of weight 0, such as padding.
    """
    if not jnp.issubdtype(image_BhwC.dtype, jnp.floating):
      raise ConfigError(f'{self.path_name}: images to mix are floating-point numbers, and these are {image_BhwC.dtype}')
    image_BhwC = to_sum_dtype(image_BhwC)
    B, dtype = image_BhwC.shape[0], image_BhwC.dtype
    if self.do_eval or not (self.mixup_alpha or self.cutmix_alpha):
      return MixedImages(self.shard(image_BhwC), jnp.ones((B,), dtype))
    of_kind, of_share, of_box = jax.random.split(self.next_prng_key(), 3)
    is_cut_B = jax.random.bernoulli(of_kind, 0.5, (B,)) if self.mixup_alpha else jnp.ones((B,), bool)
    if not self.cutmix_alpha:
      is_cut_B = jnp.zeros((B,), bool)
    alpha_B = jnp.where(is_cut_B, self.cutmix_alpha or 1.0, self.mixup_alpha or 1.0)
    share_B = jax.random.beta(of_share, alpha_B.astype(dtype), alpha_B.astype(dtype), (B,), dtype)
    in_box_Bhw = _boxes(of_box, share_B, *image_BhwC.shape[1:3])
    cut_B = 1 - jnp.mean(in_box_Bhw, axis=(1, 2), dtype=dtype)
    share_B = jnp.where(is_cut_B, cut_B, share_B)
    share_B = jnp.where(other_rows(weights_B, weights_B) == 0, 1.0, share_B)
    own_Bhw = jnp.where(is_cut_B[:, None, None], 1.0 - in_box_Bhw, share_B[:, None, None])
    own_Bhw = jnp.where(share_B[:, None, None] == 1, 1.0, own_Bhw)[..., None]
    other_BhwC = other_rows(image_BhwC, weights_B)
    return MixedImages(self.shard(own_Bhw * image_BhwC + (1 - own_Bhw) * other_BhwC), share_B)


def other_rows(x_B: jax.Array, weights_B: jax.Array) -> jax.Array:
  """Returns for each row of x, [B, ...], the row that it is mixed with: the one before it.

  The first row is mixed with the last row of nonzero weight, so that filler rows at the end of a batch change nothing.
  """
  at_B = jnp.arange(len(x_B)).reshape(-1, *[1] * (x_B.ndim - 1))
  last = jnp.max(jnp.where(weights_B != 0, jnp.arange(len(x_B)), 0))
  # A sum moves one row between devices, whereas an index might gather all rows.
  last_1 = jnp.sum(jnp.where(at_B == last, x_B, 0), axis=0, keepdims=True).astype(x_B.dtype)
  return jnp.where(at_B == 0, last_1, jnp.roll(x_B, 1, axis=0))


def _boxes(key: jax.Array, share_B: jax.Array, height: int, width: int) -> jax.Array:
  """Returns bool [B, h, w], True in a box of each image, at a random center.

  The area of the box is 1 - share of the area of the image. Where it reaches beyond the image, it is cropped.
  """
  middles_B2 = jax.random.uniform(key, (*share_B.shape, 2))  # A row's numbers do not depend on later rows.
  half_B = jnp.sqrt(1 - share_B) / 2

  def inside(middle_B: jax.Array, size: int) -> jax.Array:
    middle_B1, half_B1 = (middle_B * size)[:, None], (half_B * size)[:, None]
    return jnp.abs(jnp.arange(size) + 0.5 - middle_B1) < half_B1

  return inside(middles_B2[:, 0], height)[:, :, None] & inside(middles_B2[:, 1], width)[:, None, :]
