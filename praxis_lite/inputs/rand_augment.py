"""RandAugment: several operations in sequence, each drawn from a list, all of one strength (Cubuk et al., 2020).

An operation changes an image, uint8 [height, width, channels], by an amount. If an operation has a direction, the
direction is drawn too. The list, with the amounts at a magnitude of 10, the largest in the paper, is:

    none, auto contrast, equalize, invert    no amount
    rotate                                   30 degrees
    posterize                                keeps 4 of 8 bits
    solarize                                 inverts pixels from 0 on; at magnitude 0, from 256 on
    solarize add                             adds 110 to pixels below 128
    color, contrast, brightness, sharpness   factor 1.9, or 0.1, which is the smallest
    shear x, shear y                         0.3
    translate x, translate y                 0.45 of the width or the height
    cutout                                   a square of 0.36 of the shorter side

Pixels from outside the image are gray, 128.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from praxis_lite.inputs.tensorflow import tf

_FILL = 128
_MOST = 10.0


class Draw(NamedTuple):
  """The strength and the random values of one operation."""

  strength: float  # Factor of the operation's amount.
  sign: tf.Tensor  # The direction, 1 or -1.
  place: tf.Tensor  # [2] in [0, 1), a row and a column as shares of the height and the width.


def rand_augment(image: tf.Tensor, seed: tf.Tensor, num_operations: int, magnitude: float) -> tf.Tensor:
  """Returns an image, uint8 [height, width, channels], after `num_operations` random operations; the seed is int64 [2].

  All have the strength `magnitude`: 10 gives the amounts at the top of this file, and larger values are stronger.
  """
  for number in range(num_operations):
    of_operation = tf.random.stateless_uniform((4,), seed + tf.constant([0, number + 1], seed.dtype))
    index = tf.minimum(tf.cast(of_operation[0] * len(OPERATIONS), tf.int32), len(OPERATIONS) - 1)
    sign = tf.where(of_operation[1] < 0.5, -1.0, 1.0)
    draw = Draw(magnitude / _MOST, sign, of_operation[2:])
    branches = [functools.partial(operation, image, draw) for operation in OPERATIONS]
    image = tf.ensure_shape(tf.switch_case(index, branches), image.shape)
  return image


def _identity(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  return image


def _auto_contrast(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  low, high = (tf.cast(f(image, axis=(0, 1)), tf.float32) for f in (tf.reduce_min, tf.reduce_max))
  scale = tf.where(high > low, 255.0 / tf.maximum(high - low, 1.0), 1.0)
  return _to_bytes((tf.cast(image, tf.float32) - tf.where(high > low, low, 0.0)) * scale)


def _equalize(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  """Equalizes the histogram of each channel: a value becomes its rank among the channel's pixels, scaled to 255."""

  def equalize_channel(channel: Any) -> Any:
    counts = tf.math.bincount(tf.cast(tf.reshape(channel, (-1,)), tf.int32), minlength=256, maxlength=256)
    below = tf.cumsum(counts)
    first = tf.reduce_min(tf.boolean_mask(below, counts > 0))
    rest = tf.maximum(below[-1] - first, 1)
    table = tf.cast(tf.maximum(below - first, 0) * 255 // rest, tf.uint8)
    return tf.cond(below[-1] > first, lambda: tf.gather(table, tf.cast(channel, tf.int32)), lambda: channel)

  return tf.stack([equalize_channel(channel) for channel in tf.unstack(image, axis=-1)], axis=-1)


def _invert(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  return 255 - image


def _rotate(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  angle = draw.sign * draw.strength * math.pi / 6
  sin, cos = tf.sin(angle), tf.cos(angle)
  y, x = _middle(image)
  return _transform(image, [cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y])


def _posterize(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  shift = min(int(4 * draw.strength), 7)
  return tf.bitwise.left_shift(tf.bitwise.right_shift(image, shift), shift)


def _solarize(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  threshold = 256 - round(256 * draw.strength)
  return tf.where(tf.cast(image, tf.int32) < threshold, image, 255 - image)


def _solarize_add(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  more = _to_bytes(tf.cast(image, tf.float32) + round(110 * draw.strength))
  return tf.where(image < 128, more, image)


def _color(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  if image.shape[-1] != 3:
    return image
  gray = tf.image.rgb_to_grayscale(image)
  return _blend(tf.cast(gray, tf.float32), image, draw)


def _contrast(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  gray = tf.image.rgb_to_grayscale(image) if image.shape[-1] == 3 else image
  return _blend(tf.reduce_mean(tf.cast(gray, tf.float32)), image, draw)


def _brightness(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  return _blend(0.0, image, draw)


def _sharpness(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  """Blends with a copy whose inner pixels are smoothed by the kernel [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13."""
  x, channels = tf.cast(image, tf.float32), image.shape[-1]
  kernel = tf.constant([[1, 1, 1], [1, 5, 1], [1, 1, 1]], tf.float32) / 13.0
  inner = tf.nn.depthwise_conv2d(x[None], tf.tile(kernel[:, :, None, None], (1, 1, channels, 1)), [1] * 4, 'VALID')[0]
  around = tf.pad(tf.ones_like(inner), ((1, 1), (1, 1), (0, 0)))
  return _blend(tf.where(around > 0, tf.pad(inner, ((1, 1), (1, 1), (0, 0))), x), image, draw)


def _shear_x(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  return _transform(image, [1.0, draw.sign * 0.3 * draw.strength, 0.0, 0.0, 1.0, 0.0])


def _shear_y(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  return _transform(image, [1.0, 0.0, 0.0, draw.sign * 0.3 * draw.strength, 1.0, 0.0])


def _translate_x(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  return _transform(image, [1.0, 0.0, draw.sign * 0.45 * draw.strength * 2 * _middle(image)[1], 0.0, 1.0, 0.0])


def _translate_y(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  return _transform(image, [1.0, 0.0, 0.0, 0.0, 1.0, draw.sign * 0.45 * draw.strength * 2 * _middle(image)[0]])


def _cutout(image: tf.Tensor, draw: Draw) -> tf.Tensor:
  """Makes a square gray; the middle of the square may be anywhere in the image."""
  shape = tf.shape(image)
  half = tf.cast(tf.cast(tf.minimum(shape[0], shape[1]), tf.float32) * min(0.36 * draw.strength, 1.0) / 2, tf.int32)
  middle = tf.cast(draw.place * tf.cast(shape[:2], tf.float32), tf.int32)
  rows, columns = (tf.abs(tf.range(shape[i]) - middle[i]) < half for i in (0, 1))
  return tf.where((rows[:, None] & columns[None, :])[..., None], tf.constant(_FILL, tf.uint8), image)


def _blend(base: tf.Tensor | float, image: tf.Tensor, draw: Draw) -> tf.Tensor:
  """Returns base + factor (image - base), where the factor follows from `draw`; a factor of 1 changes nothing."""
  factor = tf.maximum(1.0 + draw.sign * 0.9 * draw.strength, 0.1)
  return _to_bytes(base + factor * (tf.cast(image, tf.float32) - base))


def _to_bytes(image: tf.Tensor) -> tf.Tensor:
  return tf.cast(tf.clip_by_value(image, 0.0, 255.0), tf.uint8)


def _middle(image: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the (row, column) of the middle of an image, which may lie between two pixels."""
  height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.float32) - 1.0)
  return height / 2, width / 2


def _transform(image: tf.Tensor, rows: list[tf.Tensor | float]) -> tf.Tensor:
  """Returns an image whose pixel (x, y) is the pixel of `image` nearest to (a x + b y + c, d x + e y + f)."""
  matrix = tf.stack([tf.cast(value, tf.float32) for value in (*rows, 0.0, 0.0)])
  moved = tf.raw_ops.ImageProjectiveTransformV3(
    images=image[None],
    transforms=matrix[None],
    output_shape=tf.shape(image)[:2],
    fill_value=float(_FILL),
    interpolation='NEAREST',
    fill_mode='CONSTANT',
  )
  return moved[0]


OPERATIONS: tuple[Callable[..., tf.Tensor], ...] = (
  *(_identity, _auto_contrast, _equalize, _invert, _rotate, _posterize, _solarize, _solarize_add),
  *(_color, _contrast, _brightness, _sharpness, _shear_x, _shear_y, _translate_x, _translate_y, _cutout),
)
