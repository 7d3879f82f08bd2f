"""SIGKILL at a random moment of saving: whatever is found afterwards is a whole checkpoint of one step."""

from __future__ import annotations

import random
import signal
import time

import numpy as np
import pytest
from small_states import layout_on, random_state

from praxis_lite.checkpoints import Checkpointer

# Every array of the state saved at step n is the number n, so a mixture of two steps would show.
SAVE_FOR_EVER = """
import sys, jax, jax.numpy as jnp
from small_states import layout_on, random_state
from praxis_lite.checkpoints import Checkpointer
layout = layout_on(4)
checkpointer = Checkpointer(sys.argv[1], max_to_keep=2)
step = checkpointer.latest_step() or 0
shapes = layout.shapes
state = random_state(layout)
def save():
  global step, state
  step += 1
  state = jax.tree.map(lambda x: x * 0 + step, state)
  checkpointer.save(step, state, layout.true_shapes, {'position': step})
save()
checkpointer.wait()
print('saving', flush=True)  # one checkpoint more than before is there; now it may be killed
while True:
  save()
"""


@pytest.mark.slow
def test_what_is_found_after_sigkill_is_whole_and_newer_than_before(tmp_path, run_python):
  layout = layout_on(3)
  before = 0
  for seed in range(4):
    process = run_python(SAVE_FOR_EVER, str(tmp_path), devices=4)
    assert process.stdout.readline() == 'saving\n', process.stderr.read()
    time.sleep(random.Random(seed).uniform(0.2, 0.6))
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    reader = Checkpointer(tmp_path, read_only=True)
    step = reader.latest_step()
    assert step > before
    state = reader.restore(*layout)
    for values in (np.asarray(v) for v in true_values_ignoring_padding(state, layout)):
      np.testing.assert_array_equal(values, np.full_like(values, step))
    assert reader.input_state() == {'position': step}
    reader.close()
    before = step
  checkpointer = Checkpointer(tmp_path, max_to_keep=2)
  checkpointer.save(before + 1, random_state(layout), layout.true_shapes, None)
  checkpointer.close()
  left = sorted(p.name for p in (tmp_path / 'checkpoints').iterdir())
  assert all(name.isdecimal() for name in left), left


def true_values_ignoring_padding(state, layout):
  import jax

  for x, true in zip(jax.tree.leaves(state), jax.tree.leaves(layout.true_shapes)):
    yield x[tuple(slice(d) for d in true.shape)]
