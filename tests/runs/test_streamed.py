"""Arrays that are saved and read in parts: the same values, few parts in memory, nothing left of a save that failed."""

from __future__ import annotations

import weakref

import jax
import numpy as np
import pytest
from small_states import layout_on, random_state

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.checkpoints.streamed import StreamedArray, boxes, whole_box
from praxis_lite.common.errors import CheckpointError
from praxis_lite.sharding.padding import slice_to
from praxis_lite.training.state import TrainState


class InMemory(StreamedArray):
  """An array that is read in parts of 6 numbers, and knows how many of them there were at a time."""

  parts: list[weakref.ref[np.ndarray]] = []  # Of all arrays.
  most = 0

  def __init__(self, array, fails_at=-1):
    self.array, self.shape, self.dtype, self.fails_at = array, array.shape, array.dtype, fails_at

  def part_shape(self, sizes, part_bytes=24):
    return super().part_shape(sizes, part_bytes)

  def read(self, box):
    if len(InMemory.parts) == self.fails_at:
      raise OSError(5, 'the disk is gone')
    part = np.array(self.array[box])
    InMemory.parts.append(weakref.ref(part))
    InMemory.most = max(InMemory.most, sum(ref() is not None for ref in InMemory.parts))
    return part


@pytest.fixture
def counted():
  InMemory.parts, InMemory.most = [], 0
  return InMemory


def true_state():
  """A state on one device, where nothing is padded, as NumPy arrays."""
  return jax.tree.map(np.asarray, random_state(layout_on(1, with_ema=True)))


def of_streamed(state):
  """The same variables as arrays that are read in parts, and their shapes."""
  shapes = layout_on(1).true_shapes.replace(opt_states=None)
  return TrainState(np.zeros((), np.int32), jax.tree.map(InMemory, state.mdl_vars), None), shapes


def test_streamed_arrays_are_saved_in_parts_and_restored_on_any_mesh(tmp_path, counted):
  expected = true_state().mdl_vars
  checkpointer = Checkpointer(tmp_path)
  assert checkpointer.save(0, *of_streamed(true_state()), None)
  checkpointer.wait()
  assert checkpointer.has_only_variables() and checkpointer.about()['mesh'] is None
  assert len(counted.parts) > 10 and counted.most <= 4  # One is read, two are being written, one has been.
  for devices in (1, 3):
    layout = layout_on(devices)
    restored = checkpointer.restore(layout.shapes.replace(opt_states=None), layout.true_shapes)
    unpadded = slice_to(jax.tree.map(np.asarray, restored.mdl_vars), layout.true_shapes.mdl_vars)
    jax.tree.map(np.testing.assert_array_equal, unpadded, expected)
  checkpointer.close()


def test_a_save_whose_source_fails_leaves_no_checkpoint(tmp_path, counted):
  state, true_shapes = of_streamed(true_state())
  state.mdl_vars['lm']['w'].fails_at = 5
  checkpointer = Checkpointer(tmp_path)
  with pytest.raises(CheckpointError, match=r'saving a checkpoint in .* failed: OSError: .* the disk is gone'):
    checkpointer.save(0, state, true_shapes, None)
    checkpointer.wait()
  again = Checkpointer(tmp_path)
  assert checkpointer.steps() == again.steps() == []
  again.save(0, *of_streamed(true_state()), None)
  again.close()
  assert [path.name for path in (tmp_path / 'checkpoints').iterdir()] == ['0']


def read_in_parts(array):
  """All of a streamed array, 3 numbers at a time."""
  there = np.zeros(array.shape, array.dtype)
  for box in boxes(whole_box(array.shape), array.part_shape(array.shape, 12)):
    there[box] = array.read(box)
  return there


@pytest.mark.parametrize('devices', [1, 8])
def test_arrays_of_a_checkpoint_are_read_in_parts_without_their_padding(devices, tmp_path):
  layout, true = layout_on(devices, with_ema=True), true_state()
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, random_state(layout), layout.true_shapes, None)
  checkpointer.wait()
  shapes = layout.true_shapes.mdl_vars
  for use_ema, expected in ((False, true.mdl_vars), (True, true.ema_vars)):
    variables = checkpointer.streamed_variables(shapes, use_ema=use_ema)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(read_in_parts, variables), expected)
  for file in (tmp_path / 'checkpoints' / '1' / 'state').rglob('d/*'):
    file.write_bytes(b'')
  with pytest.raises(CheckpointError, match='state cannot be read'):
    checkpointer.streamed_variables(shapes, use_ema=False)
  checkpointer.close()


@pytest.mark.parametrize('shape, part_bytes', [((), 4), ((7,), 12), ((3, 5, 2), 4), ((3, 5, 2), 24), ((3, 5, 2), 999)])
def test_boxes_cover_an_array_once(shape, part_bytes):
  array = InMemory(np.zeros(shape, np.float32))
  seen = np.zeros(shape, int)
  for box in boxes(whole_box(shape), array.part_shape(shape, part_bytes)):
    seen[box] += 1
    assert seen[box].size * 4 <= part_bytes
  assert (seen == 1).all()
