"""Inputs that TensorFlow reads: any `tf.data.Dataset`, and, in `tfrecord`, TFRecords. It is imported when first read.

TensorFlow reads and decodes on a few CPU threads and never sees an accelerator. Position is kept as a count of
examples, which is exact, small and the same on all hosts. What it costs: to restore, the examples before the position
in the epoch are read (but not parsed) again; and each host reads all examples, and parses its own. Datasets must yield
the same examples in the same order each time; order and parallelism that depend on timing break that.
"""

from __future__ import annotations

import functools
import operator
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from praxis_lite.config import REQUIRED, Config
from praxis_lite.errors import ConfigError, DataError
from praxis_lite.inputs.base import BaseInput
from praxis_lite.inputs.rows import Rows, Struct, canonical_rows, concatenate_rows

# What `BaseInput.read` is asked for again and again: (epoch, next position, count, start, stop).
_Request = tuple[int, int, int, int, int]


@functools.cache
def import_tensorflow() -> Any:
  """Imports TensorFlow and hides accelerators from it, which it would otherwise take the memory of.

  Raises:
    ConfigError: TensorFlow is not installed.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')  # nothing here computes, and it announces itself at each start
  try:
    import tensorflow as tf
  except ImportError:
    raise ConfigError('TensorFlow is not installed; pip install tensorflow-cpu, or use another input') from None
  for kind in ('GPU', 'TPU'):
    try:
      tf.config.set_visible_devices([], kind)
    except RuntimeError:  # the program has used TensorFlow before; the devices it sees are its own choice
      break
  return tf


class BaseTFInput(BaseInput):
  """An input that TensorFlow reads. Subclasses give `elements`, and `parse` where elements are not yet examples.

  Attributes:
    shuffle_buffer_size: how many examples are shuffled among each other where `shuffle` is on, by (seed, epoch).
    num_threads: CPU threads that TensorFlow uses for this dataset.
  """

  shuffle_buffer_size: int = 10_000
  num_threads: int = 2

  def __post_init__(self) -> None:
    super().__post_init__()
    self._pipeline: tuple[_Request, Iterator[Any]] | None = None
    self._chunk: tuple[int, int, Rows | None, int] | None = None  # epoch, number, rows, how many

  # What subclasses give: elements as they are read, and examples made from a batch of them.

  def elements(self, epoch: int) -> Any:
    """Returns the dataset of one epoch, in the order it is stored."""
    raise NotImplementedError

  def parse(self, elements: Any) -> Any:
    """Returns the examples of [n] elements, as tensors of dim 0 = n. Traced by TensorFlow; n may be 0."""
    return elements

  def read(self, epoch: int, position: int, count: int, start: int, stop: int) -> tuple[Rows | None, int]:
    if self.num_hosts > 1 and (count, start, stop) == self._own_batch():
      return self._read_group(epoch, position, count, start, stop)
    # One host wants all of each batch, and mixtures ask for other numbers each time: both are served from whole chunks.
    parts: list[Rows] = []
    available = 0
    while available < count:
      chunk, size, first = self._chunk_at(epoch, position + available)
      n = min(size - first, count - available)
      if n <= 0:
        break
      low, high = max(start - available, 0), min(stop - available, n)
      if chunk is not None and low < high:
        parts.append(jax.tree.map(operator.itemgetter(slice(first + low, first + high)), chunk))
      available += n
    return concatenate_rows(parts), available

  def _own_batch(self) -> tuple[int, int, int]:
    start = self.host_index * self.host_batch_size
    return self.batch_size, start, start + self.host_batch_size

  def _chunk_at(self, epoch: int, position: int) -> tuple[Rows | None, int, int]:
    """Returns `batch_size` consecutive examples with that of `position` among them; their number; and where it is.

    The last chunk is kept, so reading on, by whatever numbers, goes through one pipeline once.
    """
    number, first = divmod(position, self.batch_size)
    if self._chunk is None or self._chunk[:2] != (epoch, number):
      rows, size = self._read_group(epoch, number * self.batch_size, self.batch_size, 0, self.batch_size)
      self._chunk = (epoch, number, rows, size)
    _, _, rows, size = self._chunk
    return rows, size, first

  def _read_group(self, epoch: int, position: int, count: int, start: int, stop: int) -> tuple[Rows | None, int]:
    """Reads the next group from the pipeline that stands there, or from a new one that skips to `position`."""
    request = (epoch, position, count, start, stop)
    if self._pipeline is not None and self._pipeline[0] == request:
      groups = self._pipeline[1]
    else:
      groups = iter(self._groups(*request))
    self._pipeline = None
    tf = import_tensorflow()
    try:
      n, examples = next(groups, (0, None))
    except tf.errors.OpError as e:
      raise DataError(self.explain(e)) from None
    available = int(n)
    if not available:
      return None, 0
    self._pipeline = ((epoch, position + available, count, start, stop), groups)
    rows = tf.nest.map_structure(lambda x: x.numpy(), examples)
    if available <= start:
      return None, available
    return canonical_rows(rows, self.label), available

  def _groups(self, epoch: int, position: int, count: int, start: int, stop: int) -> Any:
    """Returns the dataset of (number of elements in a group of `count`, examples [start, stop) of them)."""
    tf = import_tensorflow()
    dataset = self.elements(epoch)
    if self.num_epochs is not None and dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
      raise DataError(
        f'{self.label}: the dataset repeats for ever, so num_epochs = {self.num_epochs} would never be over; leave out '
        'its repeat(), or add take(n)'
      )
    if self.shuffle:
      seed = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])
      dataset = dataset.shuffle(self.shuffle_buffer_size, seed=seed, reshuffle_each_iteration=False)

    def own_part(elements: Any) -> Any:
      n = tf.shape(tf.nest.flatten(elements)[0])[0]
      return n, self.parse(tf.nest.map_structure(lambda x: x[start:stop], elements))

    dataset = dataset.skip(position).batch(count).map(own_part, num_parallel_calls=self.num_threads, deterministic=True)
    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = self.num_threads
    options.threading.max_intra_op_parallelism = 1
    return dataset.prefetch(1).with_options(options)

  def explain(self, error: Exception) -> str:
    """Returns one line on an error of TensorFlow's."""
    return f'{self.label}: TensorFlow cannot read the data: {first_line(error)}'


class TFDataInput(BaseTFInput):
  """Examples of a `tf.data.Dataset`.

  Attributes:
    dataset_fn: a function without arguments, or the `Config` of one, that returns a dataset of single examples: dicts,
      possibly nested, of dense numeric tensors of static shape. It is called for each epoch, and must not shuffle by
      time.

  Raises (when the data is first needed):
    DataError: elements are not such dicts, there are none, or TensorFlow fails to read them.
  """

  dataset_fn: Any = REQUIRED

  def elements(self, epoch: int) -> Any:
    """Returns the dataset of one epoch, in the order it is stored."""
    del epoch
    fn = self.dataset_fn
    dataset = fn.instantiate() if isinstance(fn, Config) else fn()
    if not isinstance(dataset, import_tensorflow().data.Dataset):
      raise DataError(f'{self.label}.dataset_fn: expected it to return a tf.data.Dataset, got {type(dataset).__name__}')
    return dataset

  def example_struct(self) -> Struct:
    return self._struct

  @functools.cached_property
  def _struct(self) -> Struct:
    return struct_of(self.elements(0).element_spec, f'{self.label}.dataset_fn')


def struct_of(spec: Any, where: str) -> Struct:
  """Returns the shapes and dtypes of an element spec of TensorFlow's.

  Raises:
    DataError: it is no dict of dense numeric tensors of static shape; the message begins with `where`.
  """
  tf = import_tensorflow()
  if not isinstance(spec, dict):
    raise DataError(f'{where}: expected elements that are dicts, got {spec}')

  def convert(path: Any, s: Any) -> jax.ShapeDtypeStruct:
    name = jax.tree_util.keystr(path)
    if not isinstance(s, tf.TensorSpec) or s.dtype == tf.string:
      raise DataError(f'{where}: {name} is {s}; expected a dense tensor of numbers')
    if not s.shape.is_fully_defined():
      raise DataError(f'{where}: {name} has shape {s.shape}; pad it, or use set_shape, so that every size is known')
    return jax.ShapeDtypeStruct(tuple(s.shape), jax.dtypes.canonicalize_dtype(s.dtype.as_numpy_dtype))

  return jax.tree_util.tree_map_with_path(convert, spec, is_leaf=lambda s: isinstance(s, tf.TypeSpec))


def first_line(error: Exception) -> str:
  """Returns the first line of an error of TensorFlow's, without the place in its graph."""
  # Messages begin with the place in the graph, in double braces, and may end with the operation.
  line = re.sub(r'^(\{\{.*?\}\} ?)+', '', str(getattr(error, 'message', error))).split('\n')[0]
  return re.sub(r' *\[Op:\w+\] name: *$', '', line)
