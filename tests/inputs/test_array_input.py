"""ArrayInput: loaders, dtypes, and errors that name the field."""

import copy

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError, DataError
from praxis_lite.common.importing import user_code_error
from praxis_lite.inputs import ArrayInput, MixtureInput


def _toy(count=5):
  return {'image': np.arange(count * 2.0).reshape(count, 2), 'label': np.arange(count)}


def read_table(path, split='train'):
  raise OSError(f'{path} is no table')


def test_an_error_of_a_function_of_the_users_says_which_and_with_what():
  with pytest.raises(OSError, match='no table') as told:
    Config(ArrayInput, arrays=Config(read_table, path='a.csv'), batch_size=2).instantiate().get_next()
  assert told.value.__notes__ == ["praxis_lite: in read_table(path='a.csv', split='train'), a function of the data"]
  said = str(user_code_error(told.value))
  assert said.endswith("), in read_table(path='a.csv', split='train'), a function of the data")


def test_arrays_may_be_given_or_loaded_by_a_function_or_its_config():
  for arrays in (_toy(5), _toy, Config(_toy), Config(_toy, count=5)):
    source = Config(ArrayInput, arrays=arrays, batch_size=5).instantiate()
    np.testing.assert_array_equal(source.get_next()['label'], np.arange(5))
    assert source.num_examples == 5


def test_a_config_and_what_is_made_of_it_share_the_arrays():
  arrays = {**_toy(5), 'nested': {'mask': np.ones(5)}}
  config = Config(ArrayInput, arrays=arrays, batch_size=5)
  mixture = Config(MixtureInput, inputs=[config], batch_size=5)
  for made in (config.instantiate(), config.clone(batch_size=2), copy.deepcopy(config), mixture.clone().inputs[0]):
    assert made.arrays is not arrays
    assert made.arrays['image'] is arrays['image'] and made.arrays['nested']['mask'] is arrays['nested']['mask']
  assert mixture.instantiate().sources[0].arrays['image'] is arrays['image']
  given = np.zeros(3)
  assert Config(dict, x=[(given, [given])]).clone().x[0][1][0] is given


def test_a_loader_is_called_once_and_not_before_it_is_needed():
  calls = []

  def load():
    calls.append(1)
    return _toy()

  source = ArrayInput(arrays=load, batch_size=2, is_training=True)
  assert not calls
  for _ in range(7):
    source.get_next()
  assert len(calls) == 1


def test_rows_are_padded_with_zeros_of_zero_weight():
  batches = list(ArrayInput(arrays=_toy(5), batch_size=4))
  np.testing.assert_array_equal(batches[0]['weights'], [1, 1, 1, 1])
  np.testing.assert_array_equal(batches[1]['weights'], [1, 0, 0, 0])
  np.testing.assert_array_equal(batches[1]['image'], [[8, 9], [0, 0], [0, 0], [0, 0]])
  assert batches[0]['image'].dtype == np.float32
  assert batches[0]['label'].dtype == np.int32


def test_given_weights_are_kept_and_padded():
  arrays = {**_toy(3), 'weights': [[0.5, 2], [1, 0], [3, 3]]}
  [batch] = ArrayInput(arrays=arrays, batch_size=4)
  np.testing.assert_array_equal(batch['weights'], [[0.5, 2], [1, 0], [3, 3], [0, 0]])


def test_fewer_examples_than_hosts_still_give_every_host_a_batch():
  hosts = [ArrayInput(arrays=_toy(2), batch_size=8, num_hosts=4, host_index=i) for i in range(4)]
  batches = [list(h) for h in hosts]
  assert [len(b) for b in batches] == [1] * 4
  assert [b[0]['weights'].sum() for b in batches] == [2, 0, 0, 0]
  assert batches[3][0]['image'].shape == (2, 2)


@pytest.mark.parametrize('drop_remainder, expected', [(False, 3), (True, 2)])
def test_batches_per_epoch_counts_them(drop_remainder, expected):
  source = ArrayInput(arrays=_toy(5), batch_size=2, drop_remainder=drop_remainder)
  assert source.batches_per_epoch() == expected == len(list(source))


def test_batch_size_may_change_between_saving_and_restoring():
  source = ArrayInput(arrays=_toy(8), batch_size=2, is_training=True)
  first = source.get_next()['label']
  rest = ArrayInput(arrays=_toy(8), batch_size=6, is_training=True)
  rest.set_state(source.get_state())
  assert sorted([*first, *rest.get_next()['label']]) == list(range(8))


def test_state_of_other_data_is_refused():
  state = ArrayInput(name='train', arrays=_toy(5), batch_size=2).get_state()
  with pytest.raises(CheckpointError, match=r'^train: .* num_examples = 5, but this input has 6'):
    ArrayInput(name='train', arrays=_toy(6), batch_size=2).set_state(state)


@pytest.mark.parametrize(
  'arrays, message',
  [
    ([1, 2], 'expected a dict of arrays, got list'),
    ({}, 'the dict of arrays is empty'),
    ({'a': np.zeros((0, 3))}, 'there are no examples'),
    (
      {'a': np.zeros(3), 'b': {'c': np.zeros(2)}},
      r"same number of examples in dim 0, got \['a'\]: 3, \['b'\]\['c'\]: 2",
    ),
    ({'a': 3.0}, r"\['a'\]: a scalar has no dim 0"),
    (
      {'a': [1, 2], 'weights': [1, -2]},
      r"\['weights'\]: expected numbers of at least 0, got -2: they say how much each",
    ),
    ({'a': [1, 2], 'weights': [np.nan, 1]}, r"\['weights'\]: expected numbers of at least 0, got nan"),
    ({'a': ['x', 'y']}, r"\['a'\]: arrays of text cannot go to a device"),
    ({'a': [2**40]}, r"\['a'\]: values from 1099511627776 to 1099511627776 do not fit in int32"),
  ],
)
def test_bad_arrays_are_named(arrays, message):
  with pytest.raises(DataError, match=r'digits\.arrays' + '.*' + message):
    ArrayInput(name='digits', arrays=arrays, batch_size=2).get_next()


def test_an_epoch_without_a_batch_is_an_error_and_not_a_loop():
  with pytest.raises(DataError, match='5 examples, less than a batch of 8, and drop_remainder is set'):
    ArrayInput(arrays=_toy(5), batch_size=8, drop_remainder=True, is_training=True).get_next()


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'batch_size': 0}, r'digits\.batch_size: expected an integer of at least 1, got 0'),
    ({'batch_size': None}, r'digits\.batch_size: expected an integer'),
    ({'batch_size': 2.0}, r'digits\.batch_size: expected an integer'),
    ({'seed': -1}, r'digits\.seed'),
    ({'num_epochs': 0}, r'digits\.num_epochs'),
    ({'num_hosts': 2, 'host_index': 2}, r'host_index: expected less than num_hosts = 2'),
  ],
)
def test_bad_fields_are_named(fields, message):
  with pytest.raises(ConfigError, match=message):
    ArrayInput(**{'name': 'digits', 'arrays': _toy, 'batch_size': 4, **fields})


def test_required_fields_are_named():
  with pytest.raises(ConfigError, match=r'ArrayInput\.batch_size: a value is required'):
    ArrayInput(arrays=_toy)
  with pytest.raises(ConfigError, match=r'ArrayInput\.arrays: a value is required'):
    Config(ArrayInput, batch_size=2).instantiate()
