"""Image operations in TensorFlow: decode, crop, resize, flip, normalize. Random values come from a seed, int64 [2].

Images are uint8 [height, width, channels] until they are normalized.
"""

from __future__ import annotations

from typing import Any

from praxis_lite.inputs.tensorflow import tf


def decode_image(encoded: tf.Tensor, channels: int) -> tf.Tensor:
  """Decodes `content`, a scalar string: a JPEG, PNG, BMP or GIF file; returns the image, of a GIF the first one."""
  image = tf.io.decode_image(encoded, channels=channels, expand_animations=False)
  image.set_shape((None, None, channels))
  return image


def resize(image: tf.Tensor, size: tuple[int, int] | tf.Tensor) -> tf.Tensor:
  """Returns the image resized to (height, width), by linear interpolation with antialiasing."""
  resized = tf.image.resize(image, size, method='bilinear', antialias=True)
  return tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8)


def resize_shorter_side(image: tf.Tensor, pixels: int) -> tf.Tensor:
  """Returns the image with a shorter side of this many pixels, and the same aspect ratio."""
  sides = tf.cast(tf.shape(image)[:2], tf.float32)
  return resize(image, tf.cast(tf.round(sides * pixels / tf.reduce_min(sides)), tf.int32))


def central_crop(image: tf.Tensor, size: tuple[int, int]) -> tf.Tensor:
  """Returns the middle of an image, (height, width) = `size`; an image with a smaller side is resized to `size`."""
  height, width = size
  is_large = tf.reduce_all(tf.shape(image)[:2] >= [height, width])

  def crop() -> Any:
    top, left = (tf.shape(image)[0] - height) // 2, (tf.shape(image)[1] - width) // 2
    return image[top : top + height, left : left + width]

  return tf.ensure_shape(tf.cond(is_large, crop, lambda: resize(image, size)), (*size, image.shape[-1]))


def random_resized_crop(
  image: tf.Tensor, size: tuple[int, int], seed: tf.Tensor, area: tuple[float, float], aspect: tuple[float, float]
) -> tf.Tensor:
  """Returns a random part of an image, resized to (height, width) (Szegedy et al., 2015).

  `area` is the smallest and largest share of the image's area, and `aspect` the smallest and largest ratio of width to
  height. If ten draws do not fit, the whole image is used.
  """
  begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
    tf.shape(image),
    tf.zeros((0, 0, 4), tf.float32),
    seed,
    min_object_covered=0.0,
    aspect_ratio_range=aspect,
    area_range=area,
    max_attempts=10,
    use_image_if_no_bounding_boxes=True,
  )
  return tf.ensure_shape(resize(tf.slice(image, begin, extent), size), (*size, image.shape[-1]))


def random_flip(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """Returns the image, mirrored left to right with a probability of one half."""
  return tf.cond(tf.random.stateless_uniform((), seed) < 0.5, lambda: image[:, ::-1], lambda: image)


def normalize(image: tf.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> tf.Tensor:
  """Returns (image / 255 - mean) / std, float32; mean and std have one value for all channels, or one for each."""
  return (tf.cast(image, tf.float32) / 255.0 - tf.constant(mean, tf.float32)) / tf.constant(std, tf.float32)
