"""Encoded images with a class, from files of records, as batches for a `ClassificationModel`.

    training      random crop, flip, RandAugment, which depend on (seed, epoch, content of the record)
    evaluation    resize the shorter side to `resize_to`, then crop the middle

So the images of an epoch do not depend on earlier reads, on the number of hosts, or on the size of batches. A
batch has `image`, [B, height, width, channels] float32; `label`, [B] int32; and `weights`, [B] float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from praxis_lite.common.config import REQUIRED
from praxis_lite.common.errors import ConfigError, DataError, check_range
from praxis_lite.inputs import image_ops
from praxis_lite.inputs.bad_records import BadRecord
from praxis_lite.inputs.rand_augment import rand_augment
from praxis_lite.inputs.record_files import is_tfrecord, read_examples
from praxis_lite.inputs.rows import Struct
from praxis_lite.inputs.tensorflow import tf
from praxis_lite.inputs.tfdata import TFRecordInput
from praxis_lite.inputs.tfrecord_files import tensorflow_reason


class ImageRecordInput(TFRecordInput):
  """JPEG, PNG, BMP or GIF images with a class, in TFRecord or ArrayRecord files of `tf.train.Example`s, or in Parquet.

  The names of ArrayRecord and Parquet files end in .array_record and .parquet; they need the extra `grain`. In Parquet,
  a feature is a column. When a run resumes, all kinds of files are read again from the beginning of the epoch.

  Attributes: those of `TFRecordInput` besides `features` and `parse_fn`, and
    image_size: (height, width) of the images in a batch.
    channels: 3, or 1 for gray images. Images with another number of channels are converted.
    image_feature: name of the feature with the encoded image.
    label_feature: name of the feature with the class; None if there is none.
    first_label: the stored number of the first class; it becomes class 0.
    resize_to: in evaluation, pixels of the shorter side before the middle is cropped; None means 8 / 7 of the shorter
      side of `image_size`, such as 256 for 224.
    augment: whether images are augmented; None means only in training.
    crop_area: smallest and largest share of the area of an image that a random crop covers.
    crop_aspect: smallest and largest ratio of the width of a random crop to its height.
    flip: whether half of the augmented images are mirrored.
    rand_augment: (number of operations, magnitude) for RandAugment, where 10 is the paper's largest magnitude; None
      turns it off.
    mean, std: pixels in [0, 1] become (pixel - mean) / std; one value for all channels, or one for each. By default,
      pixels become numbers in [-1, 1].

  Raises (when the data is first needed):
    DataError: see `TFRecordInput`. A record without an image counts as a bad record; see `on_bad_record`.
  """

  image_size: tuple[int, int] = REQUIRED
  channels: int = 3
  image_feature: str = 'image'
  label_feature: str | None = 'label'
  first_label: int = 0
  resize_to: int | None = None
  augment: bool | None = None
  crop_area: tuple[float, float] = (0.05, 1.0)
  crop_aspect: tuple[float, float] = (0.75, 4 / 3)
  flip: bool = True
  rand_augment: tuple[int, float] | None = None
  mean: tuple[float, ...] = (0.5,)
  std: tuple[float, ...] = (0.5,)

  def __post_init__(self) -> None:
    if self.features is not None or self.parse_fn is not None:
      raise ConfigError(f'{self.label}: leave out features and parse_fn; image_feature names the image of a record')
    self.parse_fn = self._parse_record
    super().__post_init__()
    self._check()
    if self.augment is None:
      self.augment = self.is_training

  def identity(self) -> dict[str, Any]:
    return {**super().identity(), 'augment_seed': self.seed if self.augment else None}

  def example_struct(self) -> Struct:
    image = {'image': jax.ShapeDtypeStruct((*self.image_size, self.channels), np.float32)}
    return image | ({} if self.label_feature is None else {'label': jax.ShapeDtypeStruct((), np.int32)})

  def is_tfrecord(self, file: str) -> bool:
    return is_tfrecord(file)

  def read_file(self, file: str) -> Iterable[bytes | BadRecord]:
    if is_tfrecord(file):
      return super().read_file(file)
    return read_examples(file, list(self._features_to_read()), f'{self.label}.file_pattern')

  def parse_in_epoch(self, elements: tf.Tensor, epoch: int) -> Mapping[str, tf.Tensor]:
    seed = int(np.random.SeedSequence([self.seed, epoch, 1]).generate_state(1)[0])
    spec = {name: tf.TensorSpec(s.shape, s.dtype) for name, s in self.example_struct().items()}
    parse = functools.partial(self._parse_record, seed=seed)
    return tf.map_fn(parse, elements, fn_output_signature=spec, parallel_iterations=self.num_threads)

  def try_records(self, records: list[bytes]) -> None:
    for record in records:
      self._try(self._parse(tf.constant(record)))

  def read_image(self, encoded: bytes) -> np.ndarray:
    """Returns the image in a file's content, prepared as for evaluation, [height, width, channels] float32.

    Raises DataError if the content is not an image.
    """
    try:
      image = image_ops.decode_image(tf.constant(encoded), self.channels)
    except tf.errors.OpError as error:
      raise DataError(f'is not a JPEG, PNG, BMP or GIF image: {tensorflow_reason(error)}') from None
    return image_ops.normalize(self._middle_of(image), self.mean, self.std).numpy()

  def _features_to_read(self) -> dict[str, tf.DType]:
    """Returns the types, by name, of the features to read from a record; each feature has one value."""
    label = {} if self.label_feature is None else {self.label_feature: tf.int64}
    return {self.image_feature: tf.string} | label

  def _parse(self, record: tf.Tensor) -> dict[str, tf.Tensor]:
    features = {name: tf.io.FixedLenFeature((), dtype) for name, dtype in self._features_to_read().items()}
    return dict(tf.io.parse_single_example(record, features))

  def _try(self, stored: Mapping[str, tf.Tensor]) -> None:
    """Raises an error of TensorFlow, or DataError, if features of a record cannot be used."""
    image_ops.decode_image(stored[self.image_feature], self.channels)

  def _values_beside(self, stored: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns the arrays of an example other than its image, by name: its label, if there is one."""
    if self.label_feature is None:
      return {}
    return {'label': tf.cast(stored[self.label_feature] - self.first_label, tf.int32)}

  def _parse_record(self, record: tf.Tensor, seed: int = 0) -> dict[str, tf.Tensor]:
    stored = self._parse(record)
    image = image_ops.decode_image(stored[self.image_feature], self.channels)
    # The random values depend on the content of a record, not on its position.
    of_record = tf.stack([tf.strings.to_hash_bucket_fast(record, 2**62), tf.cast(seed, tf.int64)])
    image = self._augment_image(image, of_record) if self.augment else self._middle_of(image)
    return {'image': image_ops.normalize(image, self.mean, self.std), **self._values_beside(stored)}

  def _augment_image(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    of_crop, of_flip, of_rest = tf.unstack(tf.random.experimental.stateless_split(seed, 3), num=3)
    image = image_ops.random_resized_crop(image, self.image_size, of_crop, self.crop_area, self.crop_aspect)
    if self.flip:
      image = image_ops.random_flip(image, of_flip)
    if self.rand_augment is not None:
      image = rand_augment(image, of_rest, *self.rand_augment)
    return image

  def _middle_of(self, image: tf.Tensor) -> tf.Tensor:
    shorter = min(self.image_size)
    pixels = round(shorter * 8 / 7) if self.resize_to is None else self.resize_to
    return image_ops.central_crop(image_ops.resize_shorter_side(image, pixels), self.image_size)

  def _check(self) -> None:
    sizes = self.image_size
    if not isinstance(sizes, tuple | list) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
      raise ConfigError(f'{self.label}.image_size: expected (height, width) in pixels, got {sizes!r}')
    if self.channels not in (1, 3):
      raise ConfigError(f'{self.label}.channels: expected 3, or 1 for gray images, got {self.channels!r}')
    if self.resize_to is not None:
      self.check_at_least(resize_to=min(sizes))
    for name, most in (('crop_area', 1.0), ('crop_aspect', None)):
      low, high = getattr(self, name)
      if not 0 < low <= high or (most is not None and high > most):
        bound = '' if most is None else f' up to {most:g}'
        raise ConfigError(f'{self.label}.{name}: expected a smallest and a largest value above 0{bound}')
    if self.rand_augment is not None:
      count, magnitude = self.rand_augment
      check_range(f'{self.label}.rand_augment[0]', count, least=1)
      check_range(f'{self.label}.rand_augment[1]', magnitude, least=0)
    for name in ('mean', 'std'):
      if len(getattr(self, name)) not in (1, self.channels):
        raise ConfigError(
          f'{self.label}.{name}: expected one value for all channels, or one for each of {self.channels}, got '
          f'{getattr(self, name)!r}'
        )
    if any(value <= 0 for value in self.std):
      raise ConfigError(f'{self.label}.std: expected values above 0, got {self.std!r}')
