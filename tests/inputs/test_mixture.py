"""MixtureInput: proportions, exhaustion, nesting, and sources of any kind."""

import jax
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError, DataError
from praxis_lite.inputs import ArrayInput, MixtureInput, TFDataInput


def _source(start, count, **fields):
  return Config(ArrayInput, arrays={'x': np.arange(start, start + count)}, **fields)


def _values(batches):
  return [int(v) for b in batches for v, w in zip(b['x'], b['weights']) if w]


def test_examples_come_in_proportion_to_the_weights():
  config = Config(MixtureInput, inputs=[_source(0, 50), _source(100, 3)], weights=[1, 3], batch_size=100)
  source = config.instantiate(is_training=True)
  values = np.array(_values(source.get_next() for _ in range(20)))
  # 2000 draws with probability 3/4: standard deviation 0.0097.
  assert np.mean(values >= 100) == pytest.approx(0.75, abs=0.05)
  assert set(values.tolist()) == {*range(50), 100, 101, 102}


def test_each_source_is_read_in_its_own_order_by_its_own_epochs():
  fields = {'batch_size': 4, 'is_training': True}
  alone = _source(0, 7, seed=3).instantiate(**fields)
  mixed = Config(MixtureInput, inputs=[_source(0, 7, seed=3), _source(100, 5)], **fields).instantiate()
  of_first = [v for v in _values(mixed.get_next() for _ in range(20)) if v < 100]
  expected = _values(alone.get_next() for _ in range(20))
  assert len(of_first) > 21  # three epochs
  # Short batches end an epoch of the source alone; its examples are the same.
  assert of_first == expected[: len(of_first)]


def test_an_exhausted_source_leaves_the_rest_to_the_others():
  config = Config(MixtureInput, inputs=[_source(0, 3), _source(100, 40)], weights=[9, 1], batch_size=8)
  values = _values(config.instantiate())
  assert sorted(values) == [*range(3), *range(100, 140)]
  assert min(values.index(v) for v in (0, 1, 2)) < 8


def _dataset():
  import tensorflow as tf

  return tf.data.Dataset.from_tensor_slices({'x': np.arange(200, 209)})


@pytest.mark.parametrize('num_hosts', [1, 3])
def test_mixtures_of_mixtures_and_datasets_give_each_example_once(num_hosts):
  inner = Config(MixtureInput, inputs=[_source(0, 5), _source(100, 4)], seed=1)
  config = Config(MixtureInput, inputs=[inner, Config(TFDataInput, dataset_fn=_dataset)], batch_size=6)
  whole = list(config.instantiate())
  assert sorted(_values(whole)) == [*range(5), *range(100, 104), *range(200, 209)]
  parts = [list(config.instantiate(num_hosts=num_hosts, host_index=i)) for i in range(num_hosts)]
  for batch, *slices in zip(whole, *parts, strict=True):
    jax.tree.map(np.testing.assert_array_equal, batch, jax.tree.map(lambda *xs: np.concatenate(xs), *slices))


def test_nested_state_restores_every_source():
  inner = Config(MixtureInput, inputs=[_source(0, 5), _source(100, 4)], seed=1)
  config = Config(MixtureInput, inputs=[inner, Config(TFDataInput, dataset_fn=_dataset)], batch_size=6)
  source = config.set(is_training=True).instantiate()
  for _ in range(5):
    source.get_next()
  fresh = config.instantiate()
  fresh.set_state(source.get_state())
  for _ in range(5):
    assert _values([fresh.get_next()]) == _values([source.get_next()])


def test_other_weights_are_another_mixture():
  config = Config(MixtureInput, inputs=[_source(0, 5), _source(100, 4)], batch_size=6)
  state = config.instantiate(weights=[1, 2]).get_state()
  with pytest.raises(CheckpointError, match=r'weights = \[1.0, 2.0\]'):
    config.instantiate(weights=[1, 3]).set_state(state)


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'inputs': []}, r'inputs: expected the configs of the inputs to mix, got none'),
    ({'inputs': [3]}, r'inputs\[0\]: expected the config of an input, got 3'),
    ({'inputs': [Config(dict)]}, r'inputs\[0\]: expected the config of an input'),
    ({'weights': [1.0]}, r'weights: expected 2 positive numbers'),
    ({'weights': [1.0, 0.0]}, r'weights: expected 2 positive numbers'),
    ({'weights': [1.0, float('nan')]}, r'weights: expected 2 positive numbers'),
  ],
)
def test_bad_fields_are_named(fields, message):
  with pytest.raises(ConfigError, match=message):
    Config(MixtureInput, inputs=[_source(0, 5), _source(9, 5)], batch_size=4).instantiate(**fields)


def test_sources_of_different_structure_are_refused():
  other = Config(ArrayInput, arrays={'x': np.zeros((3, 2)), 'y': np.zeros(3)})
  with pytest.raises(DataError, match=r"inputs: \['x'\] is .* in inputs\[0\] and .* in inputs\[1\]"):
    Config(MixtureInput, inputs=[_source(0, 5), other], batch_size=4).instantiate().get_next()
