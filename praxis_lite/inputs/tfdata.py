"""Inputs that TensorFlow reads: any `tf.data.Dataset`, and TFRecord files. TensorFlow is imported at the first read.

TensorFlow runs on a few CPU threads and never sees an accelerator. A position is a number of examples, so a restore
reads the earlier examples of the epoch again, without parsing them. Each host reads all examples and parses only its
own. A dataset must yield the same examples in the same order each time.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError, DataError, check_choice
from praxis_lite.inputs.bad_records import BadRecord, RecordsInput
from praxis_lite.inputs.files import Paths, find_files
from praxis_lite.inputs.random_access import permutation
from praxis_lite.inputs.rows import Feature, Rows, Struct, build_features, canonical_rows, fit_dtype, resolve_source
from praxis_lite.inputs.streamed import RowGroups, StreamedInput
from praxis_lite.inputs.tensorflow import import_tensorflow, tf
from praxis_lite.inputs.tf_example import serialized_examples
from praxis_lite.inputs.tfrecord_files import (
  CANNOT_PARSE,
  bad_records_of,
  ends_with_a_record,
  read_records,
  tensorflow_reason,
  whole_records,
)

_TRIED_AT_ONCE = 64  # Number of records to parse together in a test of whether they can be parsed.


class BaseTFInput(StreamedInput):
  """An input that TensorFlow reads. Subclasses define `elements`; and if elements are not yet examples, also `parse`.

  Attributes:
    shuffle_buffer_size: number of examples in the buffer from which `shuffle` draws, by (seed, epoch).
    num_threads: CPU threads that TensorFlow uses for this dataset.
  """

  shuffle_buffer_size: int = 10_000
  num_threads: int = 2

  def elements(self, epoch: int) -> tf.data.Dataset:
    """Returns the dataset of one epoch, in the stored order."""
    raise NotImplementedError

  def parse(self, elements: tf.Tensor) -> Mapping[str, tf.Tensor]:
    """Returns the examples of [n] elements, as tensors [n, ...]; n may be 0. TensorFlow traces this function."""
    return elements

  def parse_in_epoch(self, elements: tf.Tensor, epoch: int) -> Mapping[str, tf.Tensor]:
    """Returns the result of `parse`; subclasses override it if examples differ from epoch to epoch."""
    return self.parse(elements)

  def pipeline(self, epoch: int, position: int, count: int, start: int, stop: int) -> RowGroups:
    groups = iter(self._groups(epoch, position, count, start, stop))
    while True:
      try:
        n, examples = next(groups, (0, None))
      except tf.errors.OpError as e:
        if not self.leaves_out_cause(e):
          raise DataError(self.explain(e)) from None
        groups = iter(self._groups(epoch, position, count, start, stop))
        continue
      available = int(n)
      position += available
      rows = None
      if available > start:
        try:
          rows = self.to_rows(examples)
        except DataError as e:
          raise DataError(self.explain(e)) from None
      yield available, rows
      if available < count:
        return

  def _groups(self, epoch: int, position: int, count: int, start: int, stop: int) -> tf.data.Dataset:
    """Returns a dataset with a pair for each group of `count` elements: its size, and its examples [start, stop)."""
    dataset = self.elements(epoch)
    if self.num_epochs is not None and dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
      raise DataError(
        f'{self.label}: the dataset repeats forever, so num_epochs = {self.num_epochs} would never end; remove its '
        'repeat(), or add take(n)'
      )
    if self.shuffle:
      seed = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])
      dataset = dataset.shuffle(self.shuffle_buffer_size, seed=seed, reshuffle_each_iteration=False)

    def take_part(elements: object) -> tuple[object, object]:
      n = tf.shape(tf.nest.flatten(elements)[0])[0]
      return n, self.parse_in_epoch(tf.nest.map_structure(lambda x: x[start:stop], elements), epoch)

    dataset = (
      dataset.skip(position).batch(count).map(take_part, num_parallel_calls=self.num_threads, deterministic=True)
    )
    options = tf.data.Options()
    options.deterministic = True
    # Dropping an iterator waits for the autotuning thread, which may sleep for minutes, and the garbage collector may
    # drop one at any time. The number of threads is set here, so there is nothing to tune.
    options.autotune.enabled = False
    options.threading.private_threadpool_size = self.num_threads
    options.threading.max_intra_op_parallelism = 1
    return dataset.prefetch(1).with_options(options)

  def to_rows(self, examples: object) -> Rows:
    """Converts the output of `parse` to rows; raises DataError if a number does not fit its dtype."""
    return canonical_rows(tf.nest.map_structure(lambda x: x.numpy(), examples), self.label)

  def leaves_out_cause(self, error: Exception) -> bool:
    """Leaves out the elements that cause a TensorFlow error; returns False if that is not possible."""
    return False

  def explain(self, error: Exception) -> str:
    """Returns a one-line message for a TensorFlow error, or for a number that does not fit its dtype."""
    if isinstance(error, DataError):
      return str(error)
    return f'{self.label}: TensorFlow cannot read the data: {tensorflow_reason(error)}'


class TFDataInput(BaseTFInput):
  """Examples of a `tf.data.Dataset`.

  Attributes:
    dataset_fn: a function without arguments, or the `Config` of one, that returns a dataset of single examples: dicts,
      possibly nested, of dense numeric tensors of static shape. It is called once per epoch and must return the same
      examples in the same order each time.

  Raises (when the data is first needed):
    DataError: elements are not such dicts, there are none, or TensorFlow fails to read them.
  """

  dataset_fn: Callable[[], object] | Config = REQUIRED

  def elements(self, epoch: int) -> tf.data.Dataset:
    dataset = resolve_source(self.dataset_fn)
    if not isinstance(dataset, tf.data.Dataset):
      raise DataError(f'{self.label}.dataset_fn: expected it to return a tf.data.Dataset, got {type(dataset).__name__}')
    return dataset

  def example_struct(self) -> Struct:
    return self._struct

  @functools.cached_property
  def _struct(self) -> Struct:
    return struct_of(self.elements(0).element_spec, f'{self.label}.dataset_fn')


def struct_of(spec: object, where: str) -> Struct:
  """Converts TensorFlow's `element_spec` to shapes and dtypes.

  Raises DataError, with a message that begins with `where`, if the spec is not a dict of dense numeric
  tensors of static shape.
  """
  if not isinstance(spec, dict):
    raise DataError(f'{where}: expected elements that are dicts, got {spec}')

  def convert(path: jax.tree_util.KeyPath, s: object) -> jax.ShapeDtypeStruct:
    name = jax.tree_util.keystr(path)
    if not isinstance(s, tf.TensorSpec) or s.dtype == tf.string:
      raise DataError(f'{where}: {name} is {s}; expected a dense tensor of numbers')
    if not s.shape.is_fully_defined():
      raise DataError(f'{where}: {name} has shape {s.shape}; pad it, or use set_shape, so that every size is known')
    return jax.ShapeDtypeStruct(tuple(s.shape), jax.dtypes.canonicalize_dtype(s.dtype.as_numpy_dtype))

  return jax.tree_util.tree_map_with_path(convert, spec, is_leaf=lambda s: isinstance(s, tf.TypeSpec))


class TFRecordInput(RecordsInput, BaseTFInput):
  """Examples in TFRecord files.

  Attributes:
    file_pattern: a file, directory, glob pattern, list of those, or a function (or `Config` of one) that returns them.
    features: arrays of a `tf.train.Example` by name, as `Feature` configs; integers and booleans are stored as int64
      lists, floats as float lists, flattened. Other features of the records are ignored.
    parse_fn: replaces `features`: a TensorFlow function that takes a serialized record (a scalar string tensor) and
      returns the dict of an example's tensors.
    compression: '' (none), 'GZIP' or 'ZLIB'.

  With `shuffle`, each epoch reads the files in a new order, and records are shuffled in a buffer.

  Raises (when the data is first needed):
    DataError: no file is found, a file is not a TFRecord file or is truncated, or a record lacks a feature.
  """

  file_pattern: Paths | Callable[[], Paths] | Config = REQUIRED
  features: dict[str, Config | Feature] | None = None
  parse_fn: Callable[..., object] | None = None
  compression: str = ''

  def __post_init__(self) -> None:
    super().__post_init__()
    if (self.features is None) == (self.parse_fn is None):
      raise ConfigError(f'{self.label}: set one of features and parse_fn')
    if self.features is not None:
      self._features = build_features(self.features, f'{self.label}.features')
    check_choice(f'{self.label}.compression', self.compression, ('', 'GZIP', 'ZLIB'))
    self._damaged: dict[str, set[int]] = {}
    self._whole: set[str] = set()
    self._ended: set[str] = set()

  @functools.cached_property
  def _files(self) -> list[str]:
    files = find_files(self.file_pattern, f'{self.label}.file_pattern')
    if not any(map(os.path.getsize, files)):
      raise DataError(f'{self.label}.file_pattern: {", ".join(files[:3])} {"is" if len(files) == 1 else "are"} empty')
    return files

  def data_files(self) -> list[str]:
    return self._files

  def elements(self, epoch: int) -> tf.data.Dataset:
    files = self._files
    if self.shuffle:
      files = [files[i] for i in permutation(len(files), self.seed, epoch)]
    parts = []
    for by_tensorflow, group in itertools.groupby(files, lambda f: self.is_tfrecord(f) and f not in self._damaged):
      if by_tensorflow:
        names = tf.data.Dataset.from_tensor_slices(list(group)).map(self._checked_end)
        parts.append(names.flat_map(lambda file: tf.data.TFRecordDataset(file, compression_type=self.compression)))
      else:
        parts += [whole_records(functools.partial(self.read_file, f), self._damaged.get(f)) for f in group]
    dataset = functools.reduce(lambda a, b: a.concatenate(b), parts)
    # Each host parses all records, even those before a position, so that all hosts leave out the same records.
    return dataset.batch(_TRIED_AT_ONCE).map(self._parseable).unbatch() if self.skips else dataset

  def is_tfrecord(self, file: str) -> bool:
    """Whether TensorFlow can read a file as TFRecord. If not, `read_file` reads the file."""
    return True

  def read_file(self, file: str) -> Iterable[bytes | BadRecord]:
    """Yields each record of a file, or a `BadRecord` in its place."""
    return read_records(file, self.compression)

  def _checked_end(self, file: tf.Tensor) -> tf.Tensor:
    """Returns `file` after checking that the file ends with a complete record, which TensorFlow does not check."""

    def check(file: bytes) -> None:
      name = os.fsdecode(file)
      if name not in self._ended:
        if not ends_with_a_record(name, self.compression):
          raise DataError(f'{name} is cut off')
        self._ended.add(name)

    return _after(check, file)

  def _parseable(self, records: tf.Tensor) -> tf.Tensor:
    """Returns `records` after checking that all of them can be parsed."""
    return _after(lambda each: self.try_records(list(each)), records)

  def parse(self, elements: tf.Tensor) -> Mapping[str, tf.Tensor]:
    if self.features is None:
      return tf.map_fn(self.parse_fn, elements, fn_output_signature=self._parsed_spec)
    kinds = {k: tf.int64 if np.dtype(f.dtype).kind in 'biu' else tf.float32 for k, f in self._features.items()}
    stored = {k: tf.io.FixedLenFeature(tuple(f.shape), kinds[k]) for k, f in self._features.items()}
    return tf.io.parse_example(elements, stored)

  def to_rows(self, examples: object) -> Rows:
    if self.features is None:
      return super().to_rows(examples)
    where, stored = f'{self.label}.features', cast(Mapping[str, Any], examples)
    arrays = {k: fit_dtype(stored[k].numpy(), f.dtype, f'{where}[{k!r}]') for k, f in self._features.items()}
    return canonical_rows(arrays, where)

  def try_records(self, records: list[bytes]) -> None:
    """Raises an error of TensorFlow, or DataError, if one of these records cannot be parsed."""
    self.to_rows(self.parse(tf.constant(records)))

  def example_struct(self) -> Struct:
    if self.features is None:
      return struct_of(self._parsed_spec, f'{self.label}.parse_fn')
    return {k: f.struct() for k, f in self._features.items()}

  @functools.cached_property
  def _parsed_spec(self) -> Mapping[str, tf.TypeSpec]:
    return tf.data.Dataset.from_tensor_slices(['']).map(self.parse_fn).element_spec

  def leaves_out_cause(self, error: Exception) -> bool:
    found = self._next_damaged() if self.skips else None
    if found is None:
      return False
    file, bad = found
    self._damaged[file] = set(bad)
    for record in bad.values():
      self.leave_out(record, 'file_pattern')
    return True

  def explain(self, error: Exception) -> str:
    found = self._next_damaged()
    if found is None:
      return super().explain(error)
    bad = next(iter(found[1].values()))
    if bad.reason.startswith(CANNOT_PARSE):
      return f'{self.label}: a record {bad.reason} ({bad.place} of {bad.file})'
    is_not = f'{bad.file} is not a whole TFRecord file: ' if self.is_tfrecord(bad.file) else ''
    return f'{self.label}.file_pattern: {is_not}{bad}'

  def _next_damaged(self) -> tuple[str, dict[int, BadRecord]] | None:
    """Returns the first damaged file that is not in `_damaged` yet, and its unreadable records, or None."""
    for file in self._files:
      if file not in self._whole and file not in self._damaged:
        errors = (tf.errors.OpError, ValueError)
        bad = bad_records_of(file, self.read_file(file), self.try_records, errors)
        if bad:
          return file, bad
        self._whole.add(file)  # Each file is checked only once.
    return None


def write_tfrecords(path: str, rows: Mapping[str, np.ndarray | Sequence[Any]], compression: str = '') -> None:
  """Writes `tf.train.Example`s for TFRecordInput; columns are arrays [examples, ...] or lists of bytes or texts.

  Raises DataError if a column has other values.
  """
  import_tensorflow('write another format')
  with tf.io.TFRecordWriter(path, options=compression) as writer:
    for record in serialized_examples(rows):
      writer.write(record)


def _after(check: Callable[[Any], None], x: tf.Tensor) -> tf.Tensor:
  """Returns `x`, after calling `check` with the NumPy value of `x`; `check` may raise an error."""
  with tf.control_dependencies([tf.numpy_function(check, [x], [])]):
    return tf.identity(x)
