"""Batches of several sizes: which examples are in them, and runs on meshes, resumed, and against steps by hand."""

import copy
import json
import pickle

import jax
import numpy as np
import optax
import pytest
from tiny_runs import examples, tiny_run

import praxis_lite
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import (
  ArrayInput,
  ArrayRecordInput,
  CharTokenizer,
  Feature,
  GrowingBatches,
  MixtureInput,
  PrefetchIterator,
  TextInput,
  write_array_records,
)
from praxis_lite.models.language_model import LanguageModel
from praxis_lite.runs import run_train
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.records.record import recorded_seed
from praxis_lite.runs.records.run_config import run_keys
from praxis_lite.runs.records.run_inputs import build_datasets
from praxis_lite.runs.replay import compare_with_checkpoint
from praxis_lite.training import PartitionedTask

SIZES, FROM = (4, 6, 14), (2, 5)
PARTS = {'batch_size': 2, 'factors': (2, 3, 7), 'from_batches': FROM}
STEPS = 8
pytestmark = pytest.mark.usefixtures('shared_programs')


def numbers(**fields):
  source = Config(ArrayInput, arrays={'x': np.arange(30)})
  return Config(GrowingBatches, **{'input': source, **PARTS, **fields})


def test_each_example_is_read_once_in_batches_of_the_sizes_of_their_parts():
  batches = list(numbers().instantiate())
  assert [len(b['x']) for b in batches] == [4, 4, 6, 6, 6, 14]
  assert [int(b['weights'].sum()) for b in batches] == [4, 4, 6, 6, 6, 4]
  assert [int(x) for b in batches for x, w in zip(b['x'], b['weights']) if w] == [*range(30)]
  source = numbers().instantiate()
  assert source.batch_struct()['x'].shape == (14,) and source.batch_sizes() == SIZES


@pytest.mark.parametrize('hosts', [1, 3])
def test_hosts_have_the_rows_of_one_and_a_state_continues_on_other_hosts(hosts):
  fields = {'is_training': True, 'shuffle': True}
  whole = numbers(**fields).instantiate()
  expected = [set(whole.get_next()['x'].tolist()) for _ in range(STEPS)]
  parts = [numbers(**fields, num_hosts=hosts, host_index=i).instantiate() for i in range(hosts)]
  for rows in expected[:3]:
    taken = [part.get_next() for part in parts]
    assert {int(x) for b in taken for x, w in zip(b['x'], b['weights']) if w} == rows
    assert len({len(b['x']) for b in taken}) == 1
  later = numbers(**fields).instantiate()
  later.set_state(json.loads(json.dumps(parts[-1].get_state())))
  assert [set(later.get_next()['x'].tolist()) for _ in range(STEPS - 3)] == expected[3:]


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'factors': ()}, 'factors: expected integers of at least 1'),
    ({'factors': (4, 0, 6)}, 'factors: expected integers'),
    ({'from_batches': (2,)}, 'from_batches: expected 2, one less than factors'),
    ({'from_batches': (5, 2)}, 'from_batches: expected numbers of at least 1 that increase'),
    ({'from_batches': (0, 2)}, 'from_batches: expected numbers of at least 1 that increase'),
    ({'input': 3}, 'input: expected a Config'),
    ({'input': Config(dict)}, 'input: expected the config of an input'),
  ],
)
def test_what_cannot_be_is_refused(fields, message):
  with pytest.raises(ConfigError, match=message):
    numbers(**fields).instantiate()


def test_a_schedule_inside_of_a_mixture_or_of_a_schedule_is_refused():
  for outer in (Config(MixtureInput, inputs=[numbers()], batch_size=2), numbers(input=numbers())):
    with pytest.raises(ConfigError, match='must be the outermost input; put the mixture into its `input`'):
      outer.instantiate().get_next()


def characters(path, **fields):
  return Config(TextInput, path=str(path), seq_len=4, tokenizer_tpl=Config(CharTokenizer, path=str(path)), **fields)


def growing_text(source, **fields):
  parts = {'batch_size': 2, 'factors': (1, 2), 'from_batches': (1,)}
  return Config(GrowingBatches, **{'input': source, 'is_training': True, **parts, **fields})


def test_what_the_input_knows_is_known(tmp_path):
  text = tmp_path / 'text'
  text.write_text('abcdefghij' * 20)
  data = growing_text(characters(text)).instantiate()
  for same in (data, copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
    assert same.vocab_size == data.source.tokenizer.vocab_size and same.data_files() == [str(text)]
    assert not hasattr(same, 'mask') and same.rows_in_memory() is None
  arrays = numbers().instantiate()
  assert len(arrays.rows_in_memory()['x']) == 30 and arrays.num_examples == 30


def test_inputs_are_checked_as_without_a_schedule(tmp_path):
  (tmp_path / 'a').write_text('abcdefghij' * 20)
  (tmp_path / 'b').write_text('xyz' * 20)
  one, other = tmp_path / 'a', tmp_path / 'b'
  first = growing_text(characters(one, split='train'))
  held = characters(one, split='validation', heldout_fraction=0.4)
  for valid, message in (
    (characters(other, batch_size=2, name='valid'), 'its 3 characters differ'),
    (held.clone().set(batch_size=2, name='valid'), 'their parts of the same text overlap'),
    (growing_text(held, is_training=False, name='valid'), 'their parts of the same text overlap'),
  ):
    inputs = build_datasets([first, valid])
    with pytest.raises(ConfigError, match=message):
      inputs.check(inputs.inputs, NoChecks())
  model = Config(LanguageModel, vocab_size=3, model_dims=4, num_layers=1, num_heads=1)
  inputs = build_datasets([first])
  with pytest.raises(ConfigError, match='vocab_size'):
    inputs.check(inputs.inputs, model.instantiate())


class NoChecks:
  def check_input(self, data, batch):
    pass


def test_the_examples_of_a_batch_are_named_whatever_its_size(tmp_path):
  write_array_records(str(tmp_path / 'x.array_record'), {'x': np.arange(30)})
  source = Config(ArrayRecordInput, path=str(tmp_path), features={'x': Config(Feature, dtype='int32')})
  data = numbers(input=source, is_training=True).instantiate()
  for size in (4, 4, 6, 6):
    named, rows = data.examples_at(data.get_state()), data.get_next()
    assert named == [f'record {x} of {tmp_path}/x.array_record' for x in rows['x']] and len(rows['x']) == size
  data.close()


def growing(devices, steps=STEPS, **train):
  sgd = {'optimizer': Config(optax.sgd)}
  config = tiny_run(devices, noise=0.0, learner=sgd, num_train_steps=steps, save_interval_steps=100, **train)
  source = Config(ArrayInput, arrays=examples(50, 0))
  config.datasets[0] = Config(GrowingBatches, name='train', input=source, is_training=True, **PARTS)
  return config


def losses_by_hand(initial):
  """Losses of plain steps of SGD in NumPy, on the examples in the order of the input."""
  data = growing(1).datasets[0].input.instantiate(batch_size=1, is_training=True)
  w, v = (np.float64(initial[name]) for name in ('w', 'v'))
  for step in range(STEPS):
    size = SIZES[sum(step >= first for first in FROM)]
    rows, _ = data.take(size, 0, size)
    hidden = np.tanh(rows['x'] @ w)
    error = hidden @ v - rows['y']
    yield float(np.mean(error**2))
    of_hidden = 2 / size * np.outer(error, v) * (1 - hidden**2)
    w, v = w - 0.05 * rows['x'].T @ of_hidden, v - 0.05 * hidden.T @ (2 / size * error)


@pytest.mark.slow
def test_a_run_takes_the_steps_of_each_size_resumes_and_repeats_with_the_same_bits_on_a_mesh(tmp_path):
  whole = run_train(growing(3), tmp_path / 'whole')
  for steps in (1, 3, STEPS):
    resumed = run_train(growing(3, steps), tmp_path / 'parts')
  for step in (1, 3):  # In the second, the size changes.
    assert compare_with_checkpoint(growing(3), tmp_path / 'parts', step, 0) == []
  for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
    np.testing.assert_array_equal(a, b)
  config = growing(3)
  task = PartitionedTask(config.task.instantiate(), examples(6, 0))
  initial = task.unpad(task.init_state(run_keys(recorded_seed(tmp_path / 'whole'), task.mesh).init)).mdl_vars
  curve = praxis_lite.open_run(tmp_path / 'whole').metrics.curve('train/loss')[1]
  np.testing.assert_allclose(curve, list(losses_by_hand(initial)), rtol=1e-4)


def test_a_batch_that_no_step_takes_is_an_error_of_the_data():
  config = growing(1)
  task, data = config.task.instantiate(), config.datasets[0].instantiate()
  steps = TaskOnMesh(task, task.create_mesh()).taking_sizes_of(data)
  large = Config(ArrayInput, arrays=examples(50, 0), batch_size=SIZES[-1] + 1, is_training=True).instantiate()
  with pytest.raises(DataError, match=r'built for \(14,'), PrefetchIterator(large, steps.put) as batches:
    next(batches)


class TwoRowsOfEach(ArrayInput):
  """Batches of twice `batch_size` rows."""

  def batch_struct(self):
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((2 * self.batch_size, *x.shape[1:]), x.dtype), super().batch_struct()
    )

  def get_next(self):
    return jax.tree.map(lambda x: np.concatenate([x, x]), super().get_next())


def test_the_rows_of_a_batch_are_those_of_its_struct(tmp_path):
  config = tiny_run(num_train_steps=4)
  config.datasets[0] = Config(TwoRowsOfEach, name='train', arrays=examples(50, 0), batch_size=6, is_training=True)
  run_train(config, tmp_path)
  metrics = praxis_lite.open_run(tmp_path).metrics
  (_, rows), (_, steps) = (metrics.curve(f'train/speed/{name}_per_second') for name in ('examples', 'steps'))
  np.testing.assert_allclose(np.divide(rows, steps), 12, rtol=1e-6)
