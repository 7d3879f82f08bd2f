"""PrefetchIterator: same batches, exact state, errors that surface, threads that end."""

import gc
import threading

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import ArrayInput, BaseInput, PrefetchIterator

WAIT = 300.0  # seconds until a test gives up on another thread; never reached when all is well


def _source(count=10, **fields):
  return ArrayInput(**{'arrays': {'x': np.arange(count)}, 'batch_size': 2, **fields})


def _values(batches):
  return [b['x'].tolist() for b in batches]


def _threads():
  return [t for t in threading.enumerate() if t.name.startswith('prefetch-')]


@pytest.fixture(autouse=True)
def no_thread_is_left():
  yield
  for thread in _threads():
    thread.join(WAIT)
  assert not _threads()


def test_batches_are_those_of_the_input_and_then_it_is_over():
  with PrefetchIterator(_source()) as batches:
    assert _values(batches) == _values(_source())
    for _ in range(2):
      with pytest.raises(StopIteration):
        batches.get_next()


def test_put_fn_runs_in_the_thread_and_its_result_is_returned():
  mesh = jax.make_mesh((2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
  sharding = NamedSharding(mesh, PartitionSpec('data'))
  names = []

  def put(batch):
    names.append(threading.current_thread().name)
    return jax.device_put(batch, sharding)

  with PrefetchIterator(_source(name='toy'), put) as batches:
    first = next(batches)
  assert first['x'].sharding == sharding
  assert set(names) == {'prefetch-toy_0'}


@pytest.mark.parametrize('depth', [1, 3])
def test_the_thread_is_depth_batches_ahead_and_no_more(depth):
  source = _source(100)
  made = threading.Semaphore(0)
  count = 0

  def put(batch):
    nonlocal count
    count += 1
    made.release()
    return batch

  with PrefetchIterator(source, put, depth) as batches:
    for _ in range(depth):
      assert made.acquire(timeout=WAIT)
    assert not made.acquire(timeout=0.05)
    batches.get_next()
    assert made.acquire(timeout=WAIT)
    assert not made.acquire(timeout=0.05)
    assert count == depth + 1


def test_state_is_that_of_the_last_batch_returned_not_read():
  expected = _source(100, is_training=True)
  with PrefetchIterator(_source(100, is_training=True), depth=4) as batches:
    assert batches.get_state() == expected.get_state()
    for _ in range(7):
      batches.get_next()
      expected.get_next()
      assert batches.get_state() == expected.get_state()
    state, following = batches.get_state(), _values(batches.get_next() for _ in range(3))
  restored = _source(100, is_training=True)
  restored.set_state(state)
  assert _values(restored.get_next() for _ in range(3)) == following


def test_set_state_and_reset_drop_what_was_read_ahead():
  with PrefetchIterator(_source(), depth=3) as batches:
    batches.get_next()
    state = batches.get_state()
    assert _values([batches.get_next(), batches.get_next()]) == [[2, 3], [4, 5]]
    batches.set_state(state)
    assert _values([batches.get_next()]) == [[2, 3]]
    assert _values(batches.reset()) == _values(_source())
    assert _values([batches.reset().get_next()]) == [[0, 1]]


def test_close_leaves_the_input_where_the_last_batch_was():
  source = _source()
  batches = PrefetchIterator(source, depth=3)
  batches.get_next()
  batches.close()
  batches.close()
  assert _values([source.get_next()]) == [[2, 3]]
  with pytest.raises(RuntimeError, match='closed'):
    batches.get_next()


def test_errors_of_the_input_and_of_put_fn_surface_after_the_batches_before_them():
  def put(batch):
    if batch['x'][0] == 4:
      raise ValueError('the device is on fire')
    return batch

  with PrefetchIterator(_source(), put) as batches:
    assert _values([batches.get_next(), batches.get_next()]) == [[0, 1], [2, 3]]
    for _ in range(2):
      with pytest.raises(ValueError, match='the device is on fire'):
        batches.get_next()
    assert batches.get_state() == {**_source().get_state(), 'position': 4}

  class Broken(BaseInput):
    def example_struct(self):
      return {}

    def read(self, *args):
      raise DataError('shard 3 is gone')

  with PrefetchIterator(Broken(batch_size=2)) as batches, pytest.raises(DataError, match='shard 3 is gone'):
    batches.get_next()


def test_close_does_not_wait_for_batches_to_be_taken():
  entered, leave = threading.Event(), threading.Event()

  def slow(batch):
    entered.set()
    leave.wait(WAIT)
    return batch

  batches = PrefetchIterator(_source(100), slow, depth=2)
  assert entered.wait(WAIT)
  leave.set()
  batches.close()


@pytest.mark.slow
def test_an_iterator_nobody_holds_ends_its_thread():
  batches = PrefetchIterator(_source(100))
  batches.get_next()
  [thread] = _threads()
  del batches
  gc.collect()
  thread.join(WAIT)
  assert not thread.is_alive()


def test_depth_must_be_positive():
  with pytest.raises(ConfigError, match='depth: expected at least 1, got 0'):
    PrefetchIterator(_source(), depth=0)
