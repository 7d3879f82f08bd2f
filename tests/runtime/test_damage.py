"""Damaged checkpoints: nothing changed on the disk is restored as if it were what was written."""

from __future__ import annotations

import numpy as np
import pytest
from small_states import assert_same, layout_on, random_state, true_values

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.checkpoints.contents import DamagedError


@pytest.fixture
def saved(tmp_path):
  """A run with checkpoints of steps 1, 2 and 3, and its layout."""
  layout = layout_on(2, with_key=True, rows=99)  # Chunks of more than 1 kB are in files of their own.
  checkpointer = Checkpointer(tmp_path)
  for step in (1, 2, 3):
    checkpointer.save(step, random_state(layout, seed=step, step=step), layout.true_shapes, {'position': step})
  checkpointer.close()
  return tmp_path, layout


def files_of(directory, step):
  return sorted(p for p in (directory / 'checkpoints' / str(step)).rglob('*') if p.is_file())


def test_a_flipped_bit_is_noticed_wherever_it_changes_what_is_restored(saved):
  """Bits of every file: restoring fails, or returns what was saved, with the position in the input."""
  directory, layout = saved
  expected = true_values(random_state(layout, seed=3, step=3), layout)
  rng = np.random.default_rng(0)
  noticed = dict.fromkeys(('state/ocdbt.process_0', 'state/manifest', 'about', 'inputs'), 0)
  checkpointer = Checkpointer(directory, read_only=True)
  for path in files_of(directory, 3):
    whole = path.read_bytes()
    name = str(path.relative_to(directory / 'checkpoints' / '3'))
    for at in rng.choice(len(whole), min(len(whole), 6), replace=False):
      data = bytearray(whole)
      data[at] ^= 1 << int(rng.integers(8))
      path.write_bytes(data)
      try:
        state = checkpointer.restore(*layout, step=3)
        assert checkpointer.input_state(3) == {'position': 3}
        assert_same(true_values(state, layout), expected)
      except DamagedError:
        for part in noticed:
          noticed[part] += name.startswith(part)
    path.write_bytes(whole)
  checkpointer.close()
  assert all(noticed.values()), noticed
