"""Numbers that a dtype does not hold are refused, or their record is left out, by every input: none becomes another."""

from __future__ import annotations

import jax
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from praxis_lite.common.config import Config
from praxis_lite.common.errors import DataError
from praxis_lite.inputs import (
  ArrayInput,
  ArrayRecordInput,
  Feature,
  MixtureInput,
  SyntheticInput,
  TableInput,
  TFDataInput,
  TFRecordInput,
  write_array_records,
  write_tfrecords,
)
from praxis_lite.inputs.packing import concat_documents, pack_documents
from praxis_lite.inputs.rows import canonical_rows, fit_dtype
from praxis_lite.inputs.synthetic import ConstantFeature, RandomFeature
from praxis_lite.inputs.tokenizers import ByteTokenizer, Tokens

# A dtype, numbers that it holds, and one that it does not.
CASES = [
  ('int32', [1, -(2**31), 2**31 - 1], 2**33),
  ('int8', [1, -128, 127], 300),
  ('uint8', [1, 0, 255], -1),
  ('uint16', [1, 0, 65535], 65536),
  ('uint32', [1, 0, 2**32 - 1], 2**32),
  ('int64', [1, -(2**31), 2**31 - 1], 2**31),  # 32 bits are left of it, as JAX does.
  ('bool', [1, 0, 1], 2),
  ('float16', [1.5, -65504.0, 65504.0], 1e6),
  ('bfloat16', [1.5, -1e30, 3.38e38], 3.4e38),
]
# What is stored as float64 where the format has it.
DOUBLES = [('float32', [1.5, -3e38, 1e-300], 1e39), ('float16', [1.5, 2.0, 3.0], -1e300)]


def written(tmp_path, kind, values):
  """The config of an input of `kind` with one number a record in the feature x, without its dtype."""
  array = np.array(values, np.float64 if isinstance(values[-1], float) else np.int64)
  if kind == 'tfrecord':
    write_tfrecords(str(tmp_path / 'a.tfrecord'), {'x': array, 'y': np.arange(len(array))})
    return Config(TFRecordInput, file_pattern=str(tmp_path))
  if kind == 'array_record':
    write_array_records(str(tmp_path / 'a.array_record'), {'x': array, 'y': np.arange(len(array))})
    return Config(ArrayRecordInput, path=str(tmp_path))
  parquet.write_table(pa.table({'x': array, 'y': np.arange(len(array))}), tmp_path / 'a.parquet', row_group_size=2)
  return Config(TableInput, path=str(tmp_path))


def with_dtype(config, dtype, **kwargs):
  features = {'x': Config(Feature, dtype=dtype), 'y': Config(Feature, dtype='int32')}
  return config.clone(features=features, batch_size=2, **kwargs)


def rows(data):
  """(y, x) of each example of weight one."""
  return [(int(y), x) for b in data for x, y, w in zip(b['x'], b['y'], b['weights']) if w]


@pytest.mark.parametrize('kind', ['tfrecord', 'array_record', 'table'])
@pytest.mark.parametrize(('dtype', 'good', 'bad'), CASES, ids=[c[0] for c in CASES])
def test_a_number_that_does_not_fit_is_refused_or_left_out(tmp_path, kind, dtype, good, bad):
  config = written(tmp_path, kind, [*good, bad])
  with pytest.raises(DataError, match=r"\['x'\]: values from .* to .* do not fit in \w+ \(.* to .*\)") as error:
    rows(with_dtype(config, dtype).instantiate())
  message = str(error.value)
  assert str(tmp_path / 'a.') in message and '\n' not in message
  assert ('record 3' if kind != 'table' else 'row 1 of group 1') in message and f'{np.float64(bad):.3g}'[:1] in message

  config = with_dtype(config, dtype, on_bad_record='skip')
  data = config.instantiate()
  expected = np.array(good).astype(jax.dtypes.canonicalize_dtype(np.dtype(dtype)))
  assert rows(data) == list(enumerate(expected)) and len(data.bad_records) == 1
  with pytest.raises(DataError, match='1 record cannot be read, and max_bad_records = 0'):
    rows(config.clone(max_bad_records=0).instantiate())


@pytest.mark.parametrize(('dtype', 'good', 'bad'), DOUBLES)
def test_doubles_that_would_become_infinite(tmp_path, dtype, good, bad):
  config = with_dtype(written(tmp_path, 'table', [*good, bad]), dtype)
  with pytest.raises(DataError, match=rf"\['x'\]: values from .* do not fit in {dtype} .*row 1 of group 1 of"):
    rows(config.instantiate())
  assert [x for _, x in rows(config.clone(on_bad_record='skip').instantiate())] == np.array(good).astype(dtype).tolist()


@pytest.mark.parametrize('kind', ['tfrecord', 'array_record', 'table'])
@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'float32'])
def test_what_is_not_finite_stays_so(tmp_path, kind, dtype):
  values = [np.nan, np.inf, -np.inf, 1e-30]
  got = [float(x) for _, x in rows(with_dtype(written(tmp_path, kind, values), dtype).instantiate())]
  assert np.isnan(got[0]) and got[1:3] == [np.inf, -np.inf] and np.isfinite(got[3])


@pytest.mark.parametrize('kind', ['tfrecord', 'array_record', 'table'])
def test_floats_do_not_become_integers(tmp_path, kind):
  with pytest.raises(DataError, match=r'(?i)expected.* int32|data types|int64'):
    rows(with_dtype(written(tmp_path, kind, [1.0, 2.5]), 'int32').instantiate())


@pytest.mark.slow
def test_records_that_are_left_out_are_so_after_a_restart_and_on_two_hosts(tmp_path):
  """Though a host parses only its own records, and a restart only those after its position."""
  values = np.arange(40)
  values[[3, 4, 17, 39]] = 1000
  config = with_dtype(written(tmp_path, 'tfrecord', values), 'int8', on_bad_record='skip').set(batch_size=4)
  expected = [(i, i) for i in range(39) if values[i] < 1000]
  assert rows(config.instantiate()) == expected
  for start in (1, 4, 5, 8):
    data = config.instantiate()
    data.set_state(data.get_state() | {'position': 4 * start})
    assert rows(data) == expected[4 * start :]
  hosts = [config.instantiate(num_hosts=2, host_index=i) for i in (0, 1)]
  first, second = map(rows, hosts)
  assert sorted(first + second) == expected and {len(host.bad_records) for host in hosts} == {4}


def test_arrays_and_functions_of_the_user(tmp_path):
  for values, message in (
    (np.array([1.0, 1e300]), r"\['x'\]: values from 1e\+300 to 1e\+300 do not fit in float32 \(-3.403e\+38 to"),
    (np.array([2**40]), r"\['x'\]: values from 1099511627776 .* do not fit in int32 .*jax_enable_x64 is off"),
    (np.array([2**63], np.uint64), r'do not fit in uint32 \(0 to 4294967295\)'),
    (np.array([1e300 + 1j]), 'do not fit in complex64'),
  ):
    for config in (
      Config(ArrayInput, arrays={'x': values}),
      Config(MixtureInput, inputs=[Config(ArrayInput, arrays={'x': values})]),
    ):
      with pytest.raises(DataError, match=message):
        config.clone(batch_size=1).instantiate().get_next()
  with pytest.raises(DataError, match=r"\['weights'\]: values from 1e\+300"):
    canonical_rows({'x': np.zeros(1), 'weights': np.array([1e300])}, 'rows')
  kept = canonical_rows({'x': np.array([np.nan, np.inf, 1e-300, 3e38])}, 'rows')['x']
  assert np.isnan(kept[0]) and kept[1] == np.inf and kept.dtype == np.float32

  def doubles():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices({'x': np.array([1.0, 1e300])})

  with pytest.raises(DataError, match=r"\['x'\]: values from 1e\+300"):
    Config(TFDataInput, dataset_fn=doubles, batch_size=2).instantiate().get_next()

  def parse(record):
    import tensorflow as tf

    x = tf.io.parse_single_example(record, {'y': tf.io.FixedLenFeature((), tf.int64)})['y']
    return {'x': x * 2**31}

  write_tfrecords(str(tmp_path / 'a'), {'y': np.arange(3)})
  by_function = Config(TFRecordInput, file_pattern=str(tmp_path / 'a'), parse_fn=parse, batch_size=1)
  with pytest.raises(DataError, match=r'values from 2147483648 .* do not fit in int32 .*record 1 of .*/a'):
    list(by_function.instantiate())


def test_numbers_that_are_made_and_written(tmp_path):
  for feature in (
    Config(RandomFeature, dtype='int8', low=200, high=300),
    Config(RandomFeature, dtype='float16', low=1e6, high=1e7),
    Config(RandomFeature, low=-1e308, high=1e308),
    Config(ConstantFeature, dtype='uint8', value=300),
    Config(ConstantFeature, dtype='uint8', value=-1),
    Config(ConstantFeature, dtype='int32', value=1.5),
  ):
    with pytest.raises(DataError, match=r'do not fit in|cannot be'):
      Config(SyntheticInput, features={'x': feature}, batch_size=2).instantiate().get_next()
  for array in (np.array([2**63], np.uint64), np.array([1e39])):
    for write in (write_tfrecords, write_array_records):
      with pytest.raises(DataError, match='do not fit in'):
        write(str(tmp_path / 'a'), {'x': array})


def test_ids_of_tokens_that_the_vocabulary_does_not_have():
  tokenizer = ByteTokenizer()
  for pack in (concat_documents, pack_documents):
    for ids in ([1, 2**33], [1, 256], [-1, 1]):
      with pytest.raises(DataError, match=r'the tokenizer gives ids from .* and its vocab_size is 256'):
        pack([Tokens(np.array(ids), None)], tokenizer, 4)


def test_fitted_of_nothing_and_of_what_fits():
  assert fit_dtype(np.zeros((0, 3), np.int64), 'int8', 'x').shape == (0, 3)
  assert fit_dtype(np.array(True), 'float32', 'x') == 1.0
  with pytest.raises(DataError, match='x: float32 values cannot become int32'):
    fit_dtype(np.ones(1, np.float32), 'int32', 'x')
