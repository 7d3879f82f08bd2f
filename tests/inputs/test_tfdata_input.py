"""TFRecords and tf.data: what is written is read, TensorFlow stays off the accelerators, and errors name the file."""

import subprocess
import sys

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import ArrayInput, Feature, MixtureInput, TFDataInput, TFRecordInput, write_tfrecords

FEATURES = {'x': Config(Feature, shape=(2, 3)), 'y': Config(Feature, dtype='int32'), 'z': Config(Feature, dtype='bool')}


def _arrays(count=5):
  rng = np.random.default_rng(0)
  return {
    'x': rng.normal(size=(count, 2, 3)).astype(np.float32),
    'y': np.arange(count, dtype=np.int32) - 2,
    'z': np.arange(count) % 2 == 1,
  }


@pytest.mark.parametrize('compression', ['', 'GZIP'])
def test_records_are_read_as_written(tmp_path, compression):
  path = str(tmp_path / 'a.tfrecord')
  write_tfrecords(path, _arrays(), compression)
  source = TFRecordInput(file_pattern=path, features=FEATURES, compression=compression, batch_size=5)
  batch = source.get_next()
  for key, expected in _arrays().items():
    np.testing.assert_array_equal(batch[key], expected)
    assert batch[key].dtype == expected.dtype


def test_parse_fn_takes_any_record(tmp_path):
  import tensorflow as tf

  path = str(tmp_path / 'text.tfrecord')
  with tf.io.TFRecordWriter(path) as writer:
    for i in range(5):
      writer.write(f'{i},{i * i}'.encode())

  def parse(record):
    left, right = tf.unstack(tf.ensure_shape(tf.strings.split(record, ','), [2]))
    return {'n': tf.strings.to_number(left, tf.int32), 'square': tf.strings.to_number(right, tf.float32)}

  for num_hosts in (1, 2):
    hosts = [
      TFRecordInput(file_pattern=path, parse_fn=parse, batch_size=4, num_hosts=num_hosts, host_index=i)
      for i in range(num_hosts)
    ]
    assert hosts[0].batch_struct()['square'].shape == (4,)
    batches = [np.concatenate([h.get_next()['square'] for h in hosts]) for _ in range(2)]
    np.testing.assert_array_equal(batches, [[0, 1, 4, 9], [16, 0, 0, 0]])


def test_nested_elements_and_64_bit_numbers_work():
  import tensorflow as tf

  def dataset():
    return tf.data.Dataset.range(3).map(lambda i: {'a': {'b': i * 7}, 'c': tf.cast(i, tf.float64) / 2})

  batch = TFDataInput(dataset_fn=dataset, batch_size=3).get_next()
  assert batch['a']['b'].tolist() == [0, 7, 14]
  assert batch['c'].tolist() == [0, 0.5, 1]
  assert (batch['a']['b'].dtype, batch['c'].dtype) == (np.int32, np.float32)


def test_dataset_fn_may_be_a_config():
  def dataset(count):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices({'n': np.arange(count)})

  source = Config(TFDataInput, dataset_fn=Config(dataset, count=3), batch_size=3).instantiate()
  assert source.get_next()['n'].tolist() == [0, 1, 2]


def test_shuffling_goes_beyond_the_order_of_files(tmp_path):
  for i in range(4):
    write_tfrecords(str(tmp_path / f'{i}.tfrecord'), {'y': np.arange(8) + 8 * i})
  config = Config(TFRecordInput, file_pattern=str(tmp_path), features={'y': Config(Feature, dtype='int32')})
  ordered = config.instantiate(batch_size=32).get_next()['y']
  np.testing.assert_array_equal(ordered, np.arange(32))
  shuffled = config.instantiate(batch_size=32, is_training=True).get_next()['y']
  assert sorted(shuffled.tolist()) == list(range(32))
  within = shuffled[shuffled < 8]
  assert within.tolist() != sorted(within.tolist())
  # With a buffer of one, only the files change places.
  files = config.instantiate(batch_size=32, is_training=True, shuffle_buffer_size=1).get_next()['y'].reshape(4, 8)
  np.testing.assert_array_equal(files % 8, np.tile(np.arange(8), (4, 1)))
  assert (files[:, 0] // 8).tolist() != [0, 1, 2, 3]


def _expect(source, message):
  with pytest.raises(DataError, match=message) as error:
    source.get_next()
  assert '\n' not in str(error.value)


def test_missing_damaged_and_foreign_files_are_named(tmp_path):
  fields = {'name': 'images', 'features': FEATURES, 'batch_size': 2}
  _expect(TFRecordInput(file_pattern=str(tmp_path / '*.tfrecord'), **fields), r'images\.file_pattern: no file matches')
  for name in ('good', 'bad'):
    write_tfrecords(str(tmp_path / f'{name}.tfrecord'), _arrays())
  bad = tmp_path / 'bad.tfrecord'
  bad.write_bytes(bad.read_bytes()[:-3])
  source = TFRecordInput(file_pattern=str(tmp_path / '*.tfrecord'), **{**fields, 'batch_size': 50})
  _expect(source, r'images\.file_pattern: .*bad\.tfrecord is not a whole TFRecord file: [^\[]*$')
  (tmp_path / 'text.tfrecord').write_text('this is not a record file, whatever its name says')
  source = TFRecordInput(file_pattern=str(tmp_path / 'text.tfrecord'), **fields)
  _expect(source, r'images\.file_pattern: .*text\.tfrecord is not a whole TFRecord file')
  (tmp_path / 'empty.tfrecord').write_text('')
  _expect(
    TFRecordInput(file_pattern=str(tmp_path / 'empty.tfrecord'), **fields),
    r'images\.file_pattern: .*empty\.tfrecord is empty',
  )


def test_missing_features_are_named(tmp_path):
  path = str(tmp_path / 'a.tfrecord')
  write_tfrecords(path, {'x': _arrays()['x']})
  _expect(TFRecordInput(file_pattern=path, features=FEATURES, batch_size=2), 'a record cannot be parsed: .*Feature: y')


def _strings(tf):
  return tf.data.Dataset.from_tensor_slices({'text': ['a', 'b']})


def _ragged(tf):
  return tf.data.Dataset.from_tensor_slices({'ids': tf.ragged.constant([[1], [2, 3]])})


def _unknown(tf):
  return tf.data.Dataset.from_generator(
    lambda: iter([{'n': [1]}]), output_signature={'n': tf.TensorSpec([None], tf.int32)}
  )


def _tuples(tf):
  return tf.data.Dataset.from_tensor_slices(([1, 2], [3, 4]))


def _empty(tf):
  return tf.data.Dataset.range(0).map(lambda i: {'n': i})


@pytest.mark.parametrize(
  'make, message',
  [
    (_strings, r"dataset_fn: \['text'\] is .*; expected a dense tensor of numbers"),
    (_ragged, r"dataset_fn: \['ids'\] is Ragged"),
    (_unknown, r"dataset_fn: \['n'\] has shape \(None,\); pad it"),
    (_tuples, r'dataset_fn: expected elements that are dicts'),
    (_empty, r'there are no examples'),
    (lambda tf: 3, r'dataset_fn: expected it to return a tf.data.Dataset, got int'),
  ],
)
def test_elements_that_cannot_go_to_a_device_are_named(make, message):
  import tensorflow as tf

  _expect(TFDataInput(dataset_fn=lambda: make(tf), batch_size=2), message)


def test_errors_within_a_dataset_surface():
  import tensorflow as tf

  def dataset():
    return tf.data.Dataset.range(3).map(
      lambda i: {'n': tf.debugging.check_numerics(1 / tf.cast(i - 1, tf.float32), 'bad')}
    )

  _expect(TFDataInput(dataset_fn=dataset, batch_size=3), 'TensorFlow cannot read the data: .*bad')


def _counting(tf, count):
  return tf.data.Dataset.range(count).map(lambda i: {'n': tf.cast(i, tf.int32)})


@pytest.mark.parametrize('weights', [[1.0, 1.0], [50.0, 1.0]])
def test_a_mixture_reads_its_dataset_through_one_pipeline_whatever_numbers_it_asks_for(weights):
  import tensorflow as tf

  opened = []

  def dataset():
    opened.append(None)
    return _counting(tf, 10_000)

  mixture = MixtureInput(
    inputs=[Config(TFDataInput, dataset_fn=dataset), Config(ArrayInput, arrays={'n': np.full(3, -1, np.int32)})],
    weights=weights,
    batch_size=4,
    is_training=True,
    shuffle=False,
  )
  read = np.concatenate([mixture.get_next()['n'] for _ in range(200)])
  np.testing.assert_array_equal(read[read >= 0], np.arange((read >= 0).sum()))
  assert len(opened) == 2  # for the shapes, and to read it


def test_another_batch_size_goes_on_at_the_same_example():
  import tensorflow as tf

  fields = {'dataset_fn': lambda: _counting(tf, 10), 'num_epochs': 2, 'shuffle': False}
  first = TFDataInput(batch_size=3, **fields)
  first.get_next()
  second = TFDataInput(batch_size=4, **fields)
  second.set_state(first.get_state())
  read = [batch['n'][batch['weights'] > 0].tolist() for batch in second]
  assert read == [[3, 4, 5, 6], [7, 8, 9], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_dataset_that_never_ends_is_for_training_only():
  import tensorflow as tf

  def dataset():
    return _counting(tf, 3).repeat()

  _expect(TFDataInput(dataset_fn=dataset, batch_size=2), r'repeats forever, .*num_epochs = 1 .*; remove its repeat')
  training = TFDataInput(dataset_fn=dataset, batch_size=2, is_training=True, shuffle=False)
  assert [training.get_next()['n'].tolist() for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]


@pytest.mark.parametrize(
  'fields, message',
  [
    ({}, 'set one of features and parse_fn'),
    ({'features': FEATURES, 'parse_fn': len}, 'set one of features and parse_fn'),
    ({'features': FEATURES, 'compression': 'zip'}, "compression: expected '', 'GZIP' or 'ZLIB', got 'zip'"),
  ],
)
def test_bad_fields_are_named(fields, message):
  with pytest.raises(ConfigError, match=message):
    TFRecordInput(file_pattern='x', batch_size=2, **fields)


def test_inputs_are_imported_without_the_packages_they_may_not_need():
  heavy = ['tensorflow', 'sentencepiece', 'sklearn', 'orbax', 'optax']
  # pickle looks for the name of an object without a module, such as a ufunc of SciPy, in all modules.
  look = '[getattr(m, "expit", 0) for n, m in [*sys.modules.items()] if n.startswith("praxis_lite.inputs")]'
  modules = 'praxis_lite.inputs, praxis_lite.inputs.tfdata, praxis_lite.inputs.image_ops'
  program = f'import sys, {modules}; {look}; print([m for m in {heavy} if m in sys.modules])'
  out = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
  assert out.stdout.strip() == '[]'


def test_tensorflow_sees_no_accelerator():
  from praxis_lite.inputs.tensorflow import tf

  assert {d.device_type for d in tf.config.get_visible_devices()} == {'CPU'}
