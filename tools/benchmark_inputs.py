"""Compares the throughput of each input with a bare loop that makes the same arrays from the same files.

    python tools/benchmark_inputs.py --megabytes=64 --seconds=2

    input   examples/s and MB/s of the arrays of its batches     bare   the same for the loop    ratio   input / bare

    python tools/benchmark_inputs.py --step_ms=1,5,25

prints the share of the time that a train loop waits for input, for steps of these durations in milliseconds. This is
the figure `waiting for input` of a run: a thread reads batches ahead and puts them on the device, while a step runs
that needs no host processor.

The bare loops read rows of arrays in memory by index, windows of a text by NumPy, records by TensorFlow or ArrayRecord,
and tables by PyArrow. They have no state, no hosts, no epochs and no error messages. Both run in this process. Files
are in the page cache, so this measures the work of the processor, not the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from praxis_lite import inputs
from praxis_lite.common.config import Config
from praxis_lite.experiments.lm import StdlibLm
from praxis_lite.inputs.rows import Rows

BATCH = 128
SEQ_LEN = 256
DIMS = 256  # Floats of a row of arrays, records and tables.
_WARM_UP_STEPS = 20


class Contest(NamedTuple):
  """An input, and the bare loop to compare it with. Both yield batches without end."""

  name: str
  config: Config
  bare: Callable[[], Iterator[Rows]]


def contests(root: Path, megabytes: int) -> list[Contest]:
  """Writes the files and returns the contests."""
  count = max(megabytes * 2**20 // (4 * DIMS), 4 * BATCH)
  rng = np.random.default_rng(0)
  rows = {'x': rng.normal(size=(count, DIMS)).astype(np.float32), 'label': np.arange(count, dtype=np.int32)}
  features: dict[str, object] = {
    'x': Config(inputs.Feature, shape=(DIMS,)),
    'label': Config(inputs.Feature, dtype='int32'),
  }
  text = root / 'text.txt'
  text.write_bytes(rng.integers(32, 127, megabytes * 2**20, np.uint8).tobytes())
  endless: dict[str, object] = {'batch_size': BATCH, 'is_training': True}
  on_text = {'path': str(text), 'seq_len': SEQ_LEN, **endless}
  chars = Config(inputs.CharTokenizer, path=str(text))
  return [
    Contest('ArrayInput', Config(inputs.ArrayInput, arrays=rows, **endless), lambda: _bare_arrays(rows)),
    Contest('TextInput concat', Config(inputs.TextInput, **on_text), lambda: _bare_windows(text)),
    Contest('TextInput windows', Config(inputs.TextInput, packing='windows', **on_text), lambda: _bare_windows(text)),
    Contest(
      'TextInput characters',
      Config(inputs.TextInput, packing='windows', tokenizer_tpl=chars, **on_text),
      lambda: _bare_windows(text),
    ),
    *_file_contests(root, rows, features, endless),
  ]


def _file_contests(
  root: Path, rows: Rows, features: dict[str, object], endless: dict[str, object]
) -> Iterator[Contest]:
  records, tables = root / 'rows.tfrecord', root / 'rows.parquet'
  inputs.write_tfrecords(str(records), rows)
  tf_records = Config(inputs.TFRecordInput, file_pattern=str(records), features=features, **endless)
  yield Contest('TFRecordInput', tf_records, lambda: _bare_tfrecords(records))
  with contextlib.suppress(ImportError):
    import pyarrow as pa
    from pyarrow import parquet

    column = pa.FixedSizeListArray.from_arrays(pa.array(rows['x'].ravel()), DIMS)
    table = pa.table({'x': column, 'label': rows['label']})
    parquet.write_table(table, tables, row_group_size=4096)
    yield Contest(
      'TableInput Parquet',
      Config(inputs.TableInput, path=str(tables), features=features, **endless),
      lambda: _bare_parquet(tables),
    )
    arrow = root / 'rows.arrow'
    with pa.OSFile(str(arrow), 'wb') as sink, pa.ipc.new_file(sink, table.schema) as writer:
      writer.write_table(table, max_chunksize=4096)
    yield Contest(
      'TableInput Arrow',
      Config(inputs.TableInput, path=str(arrow), features=features, **endless),
      lambda: _bare_arrow(arrow),
    )
  with contextlib.suppress(ImportError):
    import grain  # noqa: F401

    path = root / 'rows.array_record'
    inputs.write_array_records(str(path), rows)
    config = Config(inputs.ArrayRecordInput, path=str(path), features=features, **endless)
    yield Contest('ArrayRecordInput', config, lambda: _bare_array_records(path))


# -------------------------------------------------------------------- the loops


def _bare_arrays(rows: Rows) -> Iterator[Rows]:
  rng = np.random.default_rng(0)
  while True:
    order = rng.permutation(len(rows['label']))
    for i in range(0, len(order) - BATCH + 1, BATCH):
      yield {k: x[order[i : i + BATCH]] for k, x in rows.items()}


def _bare_windows(path: Path) -> Iterator[Rows]:
  tokens, rng = np.fromfile(path, np.uint8), np.random.default_rng(0)
  while True:
    starts = rng.integers(0, len(tokens) - SEQ_LEN, BATCH)
    yield {
      'ids': np.stack([tokens[i : i + SEQ_LEN].astype(np.int32) for i in starts]),
      'labels': np.stack([tokens[i + 1 : i + 1 + SEQ_LEN].astype(np.int32) for i in starts]),
    }


def _bare_tfrecords(path: Path) -> Iterator[Rows]:
  tf = inputs.tensorflow.import_tensorflow()
  stored = {'x': tf.io.FixedLenFeature((DIMS,), tf.float32), 'label': tf.io.FixedLenFeature((), tf.int64)}
  dataset = tf.data.TFRecordDataset(str(path)).repeat().shuffle(10_000).batch(BATCH)
  return dataset.map(lambda x: tf.io.parse_example(x, stored)).prefetch(1).as_numpy_iterator()


def _bare_parquet(path: Path) -> Iterator[Rows]:
  from pyarrow import parquet

  while True:
    yield from _batches_of_table(parquet.ParquetFile(path, memory_map=True).iter_batches(4096, use_threads=False))


def _bare_arrow(path: Path) -> Iterator[Rows]:
  import pyarrow as pa

  reader = pa.ipc.open_file(pa.memory_map(str(path)))
  while True:
    yield from _batches_of_table(reader.get_batch(i) for i in range(reader.num_record_batches))


def _batches_of_table(groups: Iterator) -> Iterator[Rows]:
  rng = np.random.default_rng(0)
  for group in groups:
    x, label = group.column('x').flatten().to_numpy().reshape(-1, DIMS), group.column('label').to_numpy()
    order = rng.permutation(len(label))
    for i in range(0, len(order), BATCH):
      yield {'x': x[order[i : i + BATCH]], 'label': label[order[i : i + BATCH]]}


def _bare_array_records(path: Path) -> Iterator[Rows]:
  from array_record.python import array_record_module

  from praxis_lite.inputs.tf_example import features_of_example

  reader = array_record_module.ArrayRecordReader(str(path), 'readahead_buffer_size:0')
  rng, size = np.random.default_rng(0), reader.num_records()
  while True:
    order = rng.permutation(size)
    for i in range(0, size - BATCH + 1, BATCH):
      examples = [features_of_example(r, '') for r in reader.read(order[i : i + BATCH].tolist())]
      yield {k: np.stack([e[k] for e in examples]) for k in ('x', 'label')}


# -------------------------------------------------------------------- measuring


def waiting(config: Config, step_seconds: float, num_steps: int) -> float:
  """Returns the share of time that a loop with steps of this duration waits for batches, after some warm-up steps."""
  waited, start = 0.0, 0.0
  with inputs.PrefetchIterator(config.instantiate(), jax.device_put) as batches:
    for step in range(-_WARM_UP_STEPS, num_steps):
      asked = time.perf_counter()
      if step == 0:
        waited, start = 0.0, asked
      batches.wait()
      waited += time.perf_counter() - asked
      next(batches)
      time.sleep(step_seconds)
    return waited / (time.perf_counter() - start)


def print_waiting(configs: dict[str, Config], steps_ms: list[float], seconds: float) -> None:
  """Prints, for each input, the share of the time that a train loop waits for it."""
  print(f'{"":22}' + ''.join(f'{f"{ms:g} ms":>10}' for ms in steps_ms))
  for name, config in configs.items():
    shares = [waiting(config, ms / 1e3, max(int(1e3 * seconds / ms), 10)) for ms in steps_ms]
    print(f'{name:22}' + ''.join(f'{share:10.1%}' for share in shares), flush=True)


class InputRate(NamedTuple):
  """Examples per second, and bytes of arrays per second."""

  examples: float
  num_bytes: float


def measure_rate(batches: Iterator[Rows], seconds: float) -> InputRate:
  """Reads batches for some seconds. The first batch, which opens the files, is not counted."""
  next(batches)
  examples, num_bytes, start = 0, 0, time.perf_counter()
  for batch in batches:
    leaves = jax.tree.leaves(batch)
    examples += len(leaves[0])
    num_bytes += sum(x.nbytes for x in leaves)
    passed = time.perf_counter() - start
    if passed > seconds:
      break
  return InputRate(examples / passed, num_bytes / passed)


def best_of(make: Callable[[], Iterator[Rows]], seconds: float, times: int) -> InputRate:
  """Returns the best of several measurements, because other programs can only make measurements worse."""
  results = []
  for _ in range(times):
    batches = make()
    results.append(measure_rate(batches, seconds))
    if isinstance(batches, inputs.BaseInput):
      batches.close()
  return max(results)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--megabytes', type=int, default=64, help='size of the files of each input')
  parser.add_argument('--seconds', type=float, default=2.0, help='how long each is read')
  parser.add_argument('--times', type=int, default=2, help='how often; the best counts')
  parser.add_argument('--only', default='', help='only inputs whose names contain this')
  parser.add_argument('--step_ms', default='', help='durations of steps; prints shares of waiting, and no throughput')
  arguments = parser.parse_args()
  if arguments.step_ms:
    with tempfile.TemporaryDirectory() as root:
      configs = {'lm.StdlibLm': StdlibLm().datasets()[0]}
      configs |= {contest.name: contest.config for contest in contests(Path(root), arguments.megabytes)}
      configs = {name: config for name, config in configs.items() if arguments.only in name}
      print_waiting(configs, [float(ms) for ms in arguments.step_ms.split(',')], arguments.seconds)
    return
  print(f'{"":22}{"input":>12}{"":10}{"bare loop":>14}{"":10}{"ratio":>8}')
  print(f'{"":22}{"examples/s":>12}{"MB/s":>10}{"examples/s":>14}{"MB/s":>10}')
  with tempfile.TemporaryDirectory() as root:
    for contest in contests(Path(root), arguments.megabytes):
      if arguments.only not in contest.name:
        continue
      ours = best_of(contest.config.instantiate, arguments.seconds, arguments.times)
      bare = best_of(contest.bare, arguments.seconds, arguments.times)
      numbers = (
        f'{ours.examples:12,.0f}{ours.num_bytes / 1e6:10,.0f}{bare.examples:14,.0f}{bare.num_bytes / 1e6:10,.0f}'
      )
      print(f'{contest.name:22}{numbers}{ours.examples / bare.examples:8.2f}', flush=True)


if __name__ == '__main__':
  main()
