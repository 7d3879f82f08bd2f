"""Batches of several sizes: which examples are in them, and runs on meshes, resumed, and against steps by hand."""

import json

import jax
import numpy as np
import optax
import pytest
from tiny_runs import examples, tiny_run

import praxis_lite
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import ArrayInput, GrowingBatches
from praxis_lite.runs import run_train
from praxis_lite.runs.records.record import recorded_seed
from praxis_lite.runs.records.run_config import run_keys
from praxis_lite.training import PartitionedTask

SIZES, FROM = (4, 6, 14), (2, 5)
PARTS = {'batch_size': 2, 'factors': (2, 3, 7), 'from_batches': FROM}
STEPS = 8


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


def test_a_run_takes_the_steps_of_each_size_and_resumes_with_the_same_bits_on_a_mesh(tmp_path):
  whole = run_train(growing(3), tmp_path / 'whole')
  for steps in (1, 3, STEPS):
    resumed = run_train(growing(3, steps), tmp_path / 'parts')
  for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
    np.testing.assert_array_equal(a, b)
  config = growing(3)
  task = PartitionedTask(config.task.instantiate(), examples(6, 0))
  initial = task.unpad(task.init_state(run_keys(recorded_seed(tmp_path / 'whole'), task.mesh).init)).mdl_vars
  curve = praxis_lite.open_run(tmp_path / 'whole').metrics.curve('train/loss')[1]
  np.testing.assert_allclose(curve, list(losses_by_hand(initial)), rtol=1e-4)
