"""Runs in stages of a pipeline: on meshes as on one device, step by step; killed, and continued on other stages."""

from __future__ import annotations

import functools
import math
import shutil
import signal

import jax
import numpy as np
import optax
import pytest
from staged_runs import flat_layers, staged_run
from tiny_runs import open_gate

from praxis_lite.common.config import Config
from praxis_lite.instruments.testing import collectives
from praxis_lite.runs import run_train
from praxis_lite.training.partitioned_task import PartitionedTask

pytestmark = pytest.mark.usefixtures('shared_programs')


def batches(config, steps):
  data = config.datasets[0].instantiate()
  return [data.get_next() for _ in range(steps)]


def train(config, steps=20, seed=0):
  """Returns (the loss of each step, variables after the first and the last one, the task on its mesh)."""
  found = batches(config, steps)
  struct = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), found[0])
  task = PartitionedTask(config.task.instantiate(), struct)
  state, losses, variables = task.init_state(jax.random.key(seed)), [], []
  for i, batch in enumerate(found):
    out = task.train_step(state, jax.random.key(1), batch)
    state = out.state
    losses.append(float(out.weighted_loss))
    if i in (0, steps - 1):
      variables.append(task.unpad(state).mdl_vars)
  return np.array(losses), variables, task


@functools.cache
def repeated_on_one_device(num_layers, aux):
  return train(staged_run(num_layers, block={'aux': aux}))


# layers, mesh (stage, data, mdl), S, M, R
RUNS = {
  '2 stages, fsdp and tensor': (7, (2, 2, 2), 2, 2, 1),
  '7 layers over 3 stages, which do not divide their axis': (7, (2, 4, 1), 3, 3, 1),
  '4 stages, circular': (8, (4, 1, 2), 4, 4, 2),
  '8 stages': (8, (8, 1, 1), 8, 4, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize('L, mesh, S, M, R', RUNS.values(), ids=RUNS)
def test_20_steps_in_stages_are_those_of_one_device(L, mesh, S, M, R):
  aux = 0.0 if 8 % M else 0.01  # A mean over the rows of a microbatch counts those that fill it up.
  expected, variables, _ = repeated_on_one_device(L, aux)
  assert expected[-1] < 0.7 * expected[0]
  stages = {'num_stages': S, 'num_microbatches': M, 'circular_repeat': R, 'stage_remat': 'full' if R > 1 else 'none'}
  losses, staged, task = train(staged_run(L, mesh, stages, block={'aux': aux}))
  np.testing.assert_allclose(losses, expected, rtol=1e-4)
  for tree, other in zip(staged, variables):
    for x, y in zip(jax.tree.leaves(flat_layers(tree, L)), jax.tree.leaves(flat_layers(other, L))):
      np.testing.assert_allclose(x, y, rtol=0, atol=2e-4 * np.abs(y).max())
  # A device has the layers of its stages, of weights and slots alike.
  for shape in jax.tree.leaves(task.state_shapes.mdl_vars):
    parts = shape.sharding.shard_shape(shape.shape)
    assert math.prod(parts[:R]) <= math.ceil(L / mesh[0])
  assert collectives(task.train_step.compiled)['all-to-all'].count == 0


RUN = """
import sys
from staged_runs import staged_run
from praxis_lite.runs import run_train
S = int(sys.argv[2])
config = staged_run(7, (S, 1, 1), {'num_stages': S, 'num_microbatches': 4}, sys.argv[3], {'rate': 0.2})
result = run_train(config, sys.argv[1])
print('ended', result.step, flush=True)
"""


@pytest.mark.slow
def test_a_run_killed_in_two_stages_continues_in_four_and_ends_as_one_device_does(tmp_path, run_python):
  gate = tmp_path / 'gate'
  first = run_python(RUN, str(tmp_path / 'killed'), '2', open_gate(gate, 11), devices=2)
  for line in first.stdout:
    if line.startswith('step 9/'):  # Saved, since it is a multiple of 3, and no later one can be.
      break
  first.kill()
  assert first.wait() == -signal.SIGKILL
  first.communicate()
  second = run_python(RUN, str(tmp_path / 'killed'), '4', '', devices=4)
  out, err = second.communicate(timeout=600)
  assert second.returncode == 0, err
  assert 'restored step' in out and 'ended 20' in out

  whole = run_train(
    staged_run(7, stages={'num_stages': 1, 'num_microbatches': 4}, block={'rate': 0.2}), tmp_path / 'whole'
  )
  # The finished run, opened once more as a scan over layers: nothing in its checkpoint knows of stages.
  again = run_train(staged_run(7), tmp_path / 'killed')
  assert again.step == 20
  for x, y in zip(jax.tree.leaves(again.state.mdl_vars), jax.tree.leaves(whole.state.mdl_vars)):
    np.testing.assert_allclose(x, y, rtol=0, atol=2e-4 * np.abs(np.asarray(y)).max())


@pytest.mark.slow
def test_a_run_goes_from_rounds_to_none_and_back_and_ends_as_the_unchanged_one(tmp_path):
  """LAMB sees each layer alone, so the names of its states have the sizes of the stack; no size divides its axis."""

  def run(directory, steps, S, R, mesh):
    stages = {'num_stages': S, 'num_microbatches': 4, 'circular_repeat': R}
    config = staged_run(6, mesh, stages, block={'rate': 0.2}, num_train_steps=steps, save_interval_steps=2)
    config.task.train.learner.optimizer = Config(optax.lamb)
    return run_train(config, tmp_path / directory)

  whole = run('whole', 6, 2, 2, (2, 2, 1))
  shutil.copytree(tmp_path / 'whole', tmp_path / 'changed')
  for step in (4, 6):  # It is as it was after two steps.
    shutil.rmtree(tmp_path / 'changed' / 'checkpoints' / str(step))
  for steps, S, R, mesh in ((4, 4, 1, (4, 1, 2)), (6, 2, 2, (2, 2, 1))):
    changed = run('changed', steps, S, R, mesh)
    assert changed.step == steps
  states = [jax.tree.leaves((r.state.mdl_vars, r.state.opt_states)) for r in (changed, whole)]
  for x, y in zip(*states, strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * max(1, np.abs(np.asarray(y)).max()))
