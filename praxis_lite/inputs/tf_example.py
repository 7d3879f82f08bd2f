"""Reads and writes `tf.train.Example` records without TensorFlow, whose import takes seconds and much memory.

Example   1: features        Features  1: map from a name to a Feature
Feature   one of   1: BytesList   2: FloatList   3: Int64List        each with   1: its values
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.common.figures import number_of
from praxis_lite.inputs.rows import fit_dtype

# Float lists are declared as raw bytes, so that NumPy reads all values at once.
_DECLARATION = """
name: "praxis_lite/example.proto" package: "praxis_lite" syntax: "proto3"
message_type { name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".praxis_lite.Features" } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE
          type_name: ".praxis_lite.Features.FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".praxis_lite.Feature" } } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".praxis_lite.Bytes"
          oneof_index: 0 }
  field { name: "float_list" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".praxis_lite.Bytes"
          oneof_index: 0 }
  field { name: "int64_list" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".praxis_lite.Integers"
          oneof_index: 0 } }
message_type { name: "Bytes" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "Integers" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
"""


@functools.cache
def _example_class() -> Any:
  try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
  except ImportError:
    raise ConfigError('protobuf is not installed; pip install praxis_lite[grain]') from None
  pool = descriptor_pool.DescriptorPool()
  pool.Add(text_format.Parse(_DECLARATION, descriptor_pb2.FileDescriptorProto()))
  return message_factory.GetMessageClass(pool.FindMessageTypeByName('praxis_lite.Example'))


def features_of_example(record: bytes, where: str) -> dict[str, np.ndarray]:
  """Returns the values of each feature of a serialized example, [n] float32, int64 or object (bytes).

  Raises DataError, with a message that begins with `where`, if the record is not an example.
  """
  message = _example_class()
  try:
    example = message.FromString(record)
  except Exception as e:  # google.protobuf raises DecodeError.
    raise DataError(f'{where}: a record of {number_of(len(record), "byte")} is not a tf.train.Example: {e}') from None
  return {name: _values(feature, f'{where}: {name}') for name, feature in example.features.feature.items()}


def _values(feature: Any, where: str) -> np.ndarray:
  kind = feature.WhichOneof('kind')
  if kind == 'float_list':
    data = b''.join(feature.float_list.value)
    if len(data) % 4:
      raise DataError(f'{where}: {len(data)} bytes are not a list of float32')
    return np.frombuffer(data, '<f4')
  if kind == 'int64_list':
    return np.array(feature.int64_list.value, np.int64)
  return np.array(list(feature.bytes_list.value), object)


def serialized_examples(rows: Mapping[str, np.ndarray | Sequence[Any]]) -> Iterator[bytes]:
  """Yields a serialized record for each example; columns are arrays [examples, ...], or lists of bytes or texts.

  Raises DataError if a column has other values than numbers, bytes and texts.
  """
  for values in zip(*(_column(name, column) for name, column in rows.items()), strict=True):
    yield serialized_example(dict(zip(rows, values)))


def _column(name: str, values: np.ndarray | Sequence[Any]) -> np.ndarray | Sequence[bytes]:
  """Returns a column as an array; texts or bytes as a list of bytes, because NumPy would cut off zeros at the end."""
  if len(values) and all(isinstance(value, str | bytes) for value in values):
    return [value.encode() if isinstance(value, str) else value for value in values]
  try:
    column = np.asarray(values)
  except ValueError:  # Examples of different shapes.
    column = np.asarray(None)
  if column.dtype.kind in 'OUSc':
    raise DataError(f'{name}: expected numbers of one shape for all examples, bytes, or texts')
  return column


def serialized_example(example: Mapping[str, np.ndarray | bytes]) -> bytes:
  """Serializes an example: integers and booleans as int64 lists, floats as float lists, bytes as byte lists.

  Arrays are flattened.
  """
  message = _example_class()()
  for name, x in example.items():
    feature = message.features.feature[name]
    if isinstance(x, bytes):
      feature.bytes_list.value.append(x)
    elif x.dtype.kind in 'biu':
      feature.int64_list.value.extend(fit_dtype(x.ravel(), np.int64, name).tolist())
    else:
      feature.float_list.value.append(fit_dtype(x.ravel(), '<f4', name).tobytes())
  return message.SerializeToString(deterministic=True)
