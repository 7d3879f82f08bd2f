"""TFRecordInput: files of serialized `tf.train.Example`s, or of any records that a function can parse."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from praxis_lite.config import REQUIRED
from praxis_lite.errors import ConfigError
from praxis_lite.inputs.features import Feature, build_features
from praxis_lite.inputs.random_access import permutation
from praxis_lite.inputs.rows import Struct
from praxis_lite.inputs.text_files import find_files
from praxis_lite.inputs.tfdata import BaseTFInput, first_line, import_tensorflow, struct_of


class TFRecordInput(BaseTFInput):
  """Examples in TFRecord files.

  Attributes:
    file_pattern: a file, directory, glob pattern, list of those, or a function (or `Config` of one) that returns them.
    features: arrays of a `tf.train.Example` by name, as `Feature` configs; integers and booleans are stored as int64
      lists, floats as float lists, flattened. Records may have more features.
    parse_fn: instead of `features`, a TensorFlow function of one serialized record (a scalar string tensor) that
      returns the dict of an example's tensors.
    compression: '' (none), 'GZIP' or 'ZLIB'.

  With `shuffle`, the files are read in another order each epoch, and records are shuffled in a buffer.

  Raises (when the data is first needed):
    DataError: no file is found, a file is not a TFRecord file or cut off, or a record lacks a feature.
  """

  file_pattern: Any = REQUIRED
  features: dict[str, Any] | None = None
  parse_fn: Any = None
  compression: str = ''

  def __post_init__(self) -> None:
    super().__post_init__()
    if (self.features is None) == (self.parse_fn is None):
      raise ConfigError(f'{self.label}: set one of features and parse_fn')
    if self.compression not in ('', 'GZIP', 'ZLIB'):
      raise ConfigError(f"{self.label}.compression: expected '', 'GZIP' or 'ZLIB', got {self.compression!r}")
    if self.features is not None:
      self._features = build_features(self.features, f'{self.label}.features')

  @functools.cached_property
  def _files(self) -> list[str]:
    return find_files(self.file_pattern, f'{self.label}.file_pattern')

  def elements(self, epoch: int) -> Any:
    files = self._files
    if self.shuffle:
      files = [files[i] for i in permutation(len(files), self.seed, epoch)]
    return import_tensorflow().data.TFRecordDataset(files, compression_type=self.compression)

  def parse(self, elements: Any) -> Any:
    tf = import_tensorflow()
    if self.features is None:
      return tf.map_fn(self.parse_fn, elements, fn_output_signature=self._parsed_spec)
    parsed = tf.io.parse_example(elements, {k: _stored_spec(f) for k, f in self._features.items()})
    return {k: tf.cast(parsed[k], f.dtype) for k, f in self._features.items()}

  def example_struct(self) -> Struct:
    if self.features is None:
      return struct_of(self._parsed_spec, f'{self.label}.parse_fn')
    return {k: f.struct() for k, f in self._features.items()}

  @functools.cached_property
  def _parsed_spec(self) -> Any:
    return import_tensorflow().data.Dataset.from_tensor_slices(['']).map(self.parse_fn).element_spec

  def explain(self, error: Exception) -> str:
    tf = import_tensorflow()
    for file in self._files:
      try:
        for _ in tf.data.TFRecordDataset(file, compression_type=self.compression):
          pass
      except tf.errors.OpError as e:
        return f'{self.label}.file_pattern: {file} is not a whole TFRecord file: {first_line(e)}'
    return f'{self.label}: a record cannot be parsed: {first_line(error)}'


def write_tfrecords(path: str, rows: dict[str, Any], compression: str = '') -> None:
  """Writes arrays with examples in dim 0 as `tf.train.Example` records, as `TFRecordInput.features` describes them."""
  tf = import_tensorflow()
  arrays = {k: np.asarray(v) for k, v in rows.items()}
  with tf.io.TFRecordWriter(path, options=compression) as writer:
    for i in range(len(next(iter(arrays.values())))):
      features = {k: _stored_feature(x[i]) for k, x in arrays.items()}
      example = tf.train.Example(features=tf.train.Features(feature=features))
      writer.write(example.SerializeToString())


def _stored_spec(feature: Feature) -> Any:
  tf = import_tensorflow()
  return tf.io.FixedLenFeature(tuple(feature.shape), tf.int64 if _is_integral(np.dtype(feature.dtype)) else tf.float32)


def _stored_feature(x: np.ndarray) -> Any:
  tf = import_tensorflow()
  if _is_integral(x.dtype):
    return tf.train.Feature(int64_list=tf.train.Int64List(value=x.ravel().astype(np.int64)))
  return tf.train.Feature(float_list=tf.train.FloatList(value=x.ravel().astype(np.float32)))


def _is_integral(dtype: np.dtype) -> bool:
  return dtype.kind in 'biu'
