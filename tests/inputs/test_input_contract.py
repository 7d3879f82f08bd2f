"""Every input keeps the contract: deterministic, resumable, split over hosts, each example once in evaluation."""

import collections
import json

import jax
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from praxis_lite import inputs
from praxis_lite.common.config import Config, target
from praxis_lite.inputs.grain_input import write_array_record_file
from praxis_lite.inputs.tokenized import token_records, tokenizer_settings

BATCH = 4
# Real rows of an epoch of each case. None is a multiple of the batch.
NUM_EXAMPLES = 11


def _arrays(start=0, count=NUM_EXAMPLES):
  index = np.arange(start, start + count)
  return {'image': index[:, None] + np.array([0.25, 0.5]), 'label': index + 1, 'nested': {'index': index * 10}}


def _dataset():
  import tensorflow as tf

  return tf.data.Dataset.from_tensor_slices(_arrays())


def _png(label):
  import tensorflow as tf

  pixels = np.random.default_rng(label).integers(0, 256, (7, 9, 3)).astype(np.uint8)
  return tf.io.encode_png(pixels).numpy()


@pytest.fixture(scope='session')
def paths(tmp_path_factory):
  root = tmp_path_factory.mktemp('data')
  # 11 rows of 8 labels, the last row not full.
  text = ''.join(f'line {i:03d}\n' for i in range(9))
  (root / 'a.txt').write_text(text[:50])
  (root / 'b.txt').write_text(text[50:])
  (root / 'rows').write_text(''.join(f'row {i:03d} ' for i in range(10)))
  (root / 'text').write_text(''.join(f'row {i:03d} ' for i in range(11))[:-3])  # The last row has text too.
  flat = {'image': _arrays()['image'], 'label': _arrays()['label']}
  with open(root / 'speech.tsv', 'w') as table:
    for i in range(NUM_EXAMPLES):
      inputs.write_wav(root / f'{i}.wav', np.full(i + 1, 0.1 * (i - 5)), 16_000)
      table.write(f'{i}.wav\t{i}\n')
  for i in range(3):
    part = slice(4 * i, 4 * i + 4)
    rows = {k: x[part] for k, x in flat.items()}
    inputs.write_tfrecords(str(root / f'{i}.tfrecord'), rows)
    inputs.write_array_records(str(root / f'{i}.array_record'), rows)
    texts = [f'row {k}'.encode() for k in rows['label']]
    pictures = {'image': [_png(label) for label in rows['label']], 'label': rows['label'], 'text': texts}
    inputs.write_tfrecords(str(root / f'{i}.images'), pictures)
    columns = {'image': list(rows['image']), 'label': rows['label'], 'id': [f'row {k}' for k in rows['label']]}
    parquet.write_table(pa.table(columns), root / f'{i}.parquet', row_group_size=3)
  _write_tokens(root / 'tokens', (text[:50], text[50:]))
  return root


def _write_tokens(folder, documents):
  settings = {'seq_len': 8, **tokenizer_settings(inputs.ByteTokenizer())}
  folder.mkdir()
  (folder / 'plan.json').write_text(json.dumps({'settings': settings, 'shards': [0]}))
  tokens = inputs.ByteTokenizer().encode_documents([text.encode() for text in documents])
  records = token_records(tokens, inputs.ByteTokenizer(), 8, 'concat')
  write_array_record_file(str(folder / 'part-00000.array_record'), records)


def _case(name, root):
  features = {'x': Config(inputs.RandomFeature, shape=(3,)), 'y': Config(inputs.RandomFeature, dtype='int32', high=9)}
  record = {
    'image': Config(inputs.Feature, shape=(2,)),
    'label': Config(inputs.Feature, dtype='int32'),
  }
  sources = [
    Config(inputs.ArrayInput, arrays=_arrays(0, 7)),
    Config(inputs.ArrayInput, arrays=_arrays(7, 4), seed=5),
  ]
  return {
    'ArrayInput': lambda: Config(inputs.ArrayInput, arrays=_arrays()),
    'GrowingBatches': lambda: Config(
      inputs.GrowingBatches, input=Config(inputs.ArrayInput, arrays=_arrays()), factors=(1,)
    ),
    'TextInput': lambda: Config(inputs.TextInput, path=str(root / '*.txt'), seq_len=8),
    'TokenizedInput': lambda: Config(inputs.TokenizedInput, path=str(root / 'tokens')),
    'SpanCorruptionInput': lambda: Config(inputs.SpanCorruptionInput, path=str(root / 'rows'), seq_len=8),
    'LabelledTextInput': lambda: Config(
      inputs.LabelledTextInput, examples=[(f'text {i}', i) for i in range(NUM_EXAMPLES)], seq_len=10
    ),
    'MaskedTextInput': lambda: Config(inputs.MaskedTextInput, path=str(root / 'text'), seq_len=8),
    'SourceTargetInput': lambda: Config(
      inputs.SourceTargetInput, pairs=[(f's {i}', f't {i}') for i in range(NUM_EXAMPLES)], source_len=6, target_len=6
    ),
    'ChatInput': lambda: Config(
      inputs.ChatInput, examples=[{'prompt': f'p {i}', 'completion': f'c {i}'} for i in range(NUM_EXAMPLES)], seq_len=12
    ),
    'PreferenceInput': lambda: Config(
      inputs.PreferenceInput,
      examples=[{'prompt': f'p {i}', 'chosen': f'c {i}', 'rejected': f'r {i}'} for i in range(NUM_EXAMPLES)],
      seq_len=12,
    ),
    'TFDataInput': lambda: Config(inputs.TFDataInput, dataset_fn=_dataset),
    'ImageRecordInput': lambda: Config(inputs.ImageRecordInput, file_pattern=str(root / '*.images'), image_size=(4, 5)),
    'ImageTextRecordInput': lambda: Config(
      inputs.ImageTextRecordInput, file_pattern=str(root / '*.images'), image_size=(4, 5), text_len=9
    ),
    'TFRecordInput': lambda: Config(inputs.TFRecordInput, file_pattern=str(root / '*.tfrecord'), features=record),
    'ArrayRecordInput': lambda: Config(inputs.ArrayRecordInput, path=str(root / '*.array_record'), features=record),
    'RecordingInput': lambda: Config(inputs.RecordingInput, path=str(root / 'speech.tsv'), num_samples=12, label_len=3),
    'TableInput': lambda: Config(inputs.TableInput, path=str(root / '*.parquet'), features=record, mixed_groups=2),
    'MixtureInput': lambda: Config(inputs.MixtureInput, inputs=sources, weights=[1, 2]),
    'SyntheticInput': lambda: Config(inputs.SyntheticInput, features=features, num_synthetic_examples=NUM_EXAMPLES),
    'SyntheticLMInput': lambda: Config(
      inputs.SyntheticLMInput, seq_len=6, vocab_size=1000, num_synthetic_examples=NUM_EXAMPLES
    ),
    'SyntheticClassifierInput': lambda: Config(
      inputs.SyntheticClassifierInput, image_shape=(2, 2), num_classes=3, num_synthetic_examples=NUM_EXAMPLES
    ),
  }[name]().set(batch_size=BATCH)


# RewardedInput has no real rows until a model has answered; tests/runs/test_policy_runs.py resumes runs with it.
_OTHERS = inputs.BaseInput, inputs.GrainInput, inputs.RandomAccessInput, inputs.RewardedInput
CONCRETE = sorted(
  name
  for name, cls in vars(inputs).items()
  if isinstance(cls, type) and issubclass(cls, inputs.BaseInput) and cls not in _OTHERS
)


# They read records as `TFRecordInput` does; test_image_records.py and test_image_texts.py have quick tests.
_SLOW = ('ImageRecordInput', 'ImageTextRecordInput')


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in CONCRETE])
def config(request, paths):
  return _case(request.param, paths)


def _assert_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)


def _batches(source, count=None):
  out = []
  for batch in source:
    out.append(batch)
    if len(out) == count:
      break
  return out


def _is_real(batch):
  weights = batch['weights']
  return weights.reshape(len(weights), -1).any(axis=1)


def _examples(batches):
  """The real rows, each as bytes."""
  out = []
  for batch in batches:
    for i in np.flatnonzero(_is_real(batch)):
      out.append(b'|'.join(np.ascontiguousarray(x[i]).tobytes() for x in jax.tree.leaves(batch)))
  return out


def test_restoring_any_state_gives_the_same_next_batches(config):
  config.set(is_training=True, seed=3)
  source = config.instantiate()
  states, batches = [], []
  for _ in range(8):  # more than two epochs
    states.append(json.dumps(source.get_state()))
    batches.append(source.get_next())
  for k in (2, 3, 5):
    fresh = config.instantiate()
    fresh.set_state(json.loads(states[k]))
    source.set_state(json.loads(states[k]))
    for expected in batches[k : k + 3]:
      _assert_equal(fresh.get_next(), expected)
      _assert_equal(source.get_next(), expected)


def test_state_at_the_end_restores_to_the_end(config):
  source = config.instantiate()
  _batches(source)
  fresh = config.instantiate()
  fresh.set_state(source.get_state())
  for exhausted in (source, fresh):
    for _ in range(2):
      with pytest.raises(StopIteration):
        exhausted.get_next()


@pytest.mark.parametrize('fields', [{}, {'is_training': True, 'num_epochs': 2, 'seed': 1}])
def test_host_slices_join_to_the_batches_of_one_host(config, fields):
  config.set(**fields)
  whole = _batches(config.instantiate())
  num_hosts = 2 if fields else 4
  hosts = [config.instantiate(num_hosts=num_hosts, host_index=i) for i in range(num_hosts)]
  parts = [_batches(h) for h in hosts]
  assert [len(p) for p in parts] == [len(whole)] * num_hosts
  for batch, *slices in zip(whole, *parts):
    _assert_equal(jax.tree.map(lambda *xs: np.concatenate(xs), *slices), batch)
  assert all(h.get_state() == hosts[0].get_state() for h in hosts)


def test_state_saved_on_one_host_restores_on_two(config):
  config.set(is_training=True)
  source = config.instantiate()
  _batches(source, 4)
  state, expected = source.get_state(), source.get_next()
  hosts = [config.instantiate(num_hosts=2, host_index=i) for i in range(2)]
  for host in hosts:
    host.set_state(state)
  _assert_equal(jax.tree.map(lambda *xs: np.concatenate(xs), *[h.get_next() for h in hosts]), expected)


@pytest.mark.parametrize('fields', [{}, {'is_training': True, 'num_epochs': 2, 'seed': 1}])
def test_hosts_that_come_and_go_see_each_example_once_in_the_same_order(config, fields):
  config.set(**fields)
  whole = [_examples([batch]) for batch in _batches(config.instantiate())]
  state, seen = config.instantiate().get_state(), []
  for number in range(len(whole)):
    count = (1, 3, 2)[number % 3]  # 3 hosts do not divide a batch of 4.
    hosts = [config.instantiate(num_hosts=count, host_index=i) for i in range(count)]
    for host in hosts:
      host.set_state(json.loads(json.dumps(state)))
    parts = [host.get_next() for host in hosts]
    assert len({len(part['weights']) for part in parts}) == 1  # Arrays of the mesh have equal parts.
    seen.append(_examples(parts))
    (state,) = {json.dumps(host.get_state()): host.get_state() for host in hosts}.values()
    for host in hosts:
      host.close()
  assert seen == whole
  if fields and target(config) in (inputs.MaskedTextInput, inputs.ImageRecordInput, inputs.ImageTextRecordInput):
    return  # Each epoch hides other tokens, or crops other parts.
  assert sorted(x for batch in seen for x in batch) == sorted(
    _examples(_batches(config.instantiate(is_training=False, num_epochs=1))) * (2 if fields else 1)
  )


def test_evaluation_sees_each_example_once_and_pads_with_zero_weight(config):
  batches = _batches(config.instantiate())
  assert len(batches) == 3
  examples = _examples(batches)
  assert len(examples) == NUM_EXAMPLES == len(set(examples))
  one_by_one = _examples(_batches(config.instantiate(batch_size=1)))
  assert sorted(examples) == sorted(one_by_one)
  padding = ~_is_real(batches[-1])
  assert padding.sum() == 3 * BATCH - NUM_EXAMPLES
  for x in jax.tree.leaves(batches[-1]):
    assert not x[padding].any()
  if batches[0]['weights'].ndim == 1:
    assert sum(b['weights'].sum() for b in batches) == NUM_EXAMPLES


def test_training_epochs_have_the_same_examples_in_another_order(config):
  of_images = inputs.ImageRecordInput, inputs.ImageTextRecordInput
  if target(config) in (inputs.SpanCorruptionInput, inputs.MaskedTextInput, *of_images):
    pytest.skip('draws other spans, places or crops in each epoch')
  examples = _examples(_batches(config.instantiate(is_training=True, num_epochs=2)))
  seen = collections.Counter()
  passes = ([], [])
  for example in examples:
    passes[seen[example]].append(example)
    seen[example] += 1
  assert sorted(passes[0]) == sorted(passes[1]) == sorted(_examples(_batches(config.instantiate())))
  assert passes[0] != passes[1]


def test_another_seed_gives_another_order(config):
  config.set(is_training=True)
  first, same, other = (_examples(_batches(config.instantiate(seed=s), 3)) for s in (0, 0, 1))
  assert first == same
  assert first != other


def test_reset_starts_over(config):
  source = config.instantiate()
  first = _batches(source)
  again = _batches(source.reset())
  assert len(first) == len(again)
  for a, b in zip(first, again):
    _assert_equal(a, b)


def test_batch_struct_is_that_of_the_global_batch_and_reads_none(config):
  source = config.instantiate(num_hosts=2)
  before = source.get_state()
  struct = source.batch_struct()
  assert source.get_state() == before
  batch = config.instantiate().get_next()
  assert struct == jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
  # What JAX makes of the batch is what a step was compiled for.
  assert struct == jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.numpy.asarray(x).dtype), batch)


def test_drop_remainder_leaves_out_the_short_batch(config):
  batches = _batches(config.instantiate(drop_remainder=True))
  assert len(batches) == 2
  assert all(_is_real(b).all() for b in batches)


def test_state_of_other_settings_is_refused(config):
  from praxis_lite.common.errors import CheckpointError

  source = config.instantiate(is_training=True, seed=1)
  state = source.get_state()
  with pytest.raises(CheckpointError, match=r'seed = 1, but this input has 2.*--norestore_input'):
    config.instantiate(is_training=True, seed=2).set_state(state)
  with pytest.raises(CheckpointError, match='another kind of input'):
    source.set_state({'step': 3})
