"""Storage that goes away while a run trains, comes back or not, or has changed: nothing that was saved is lost."""

from __future__ import annotations

import json
import time

import jax
import numpy as np
import pytest
from test_damage import flip_a_chunk
from tiny_runs import tiny_run

from praxis_lite.checkpoints import saved_steps
from praxis_lite.common.errors import CheckpointError
from praxis_lite.runs.executor import run_train
from praxis_lite.runs.hooks import Hook


class LoseStorage(Hook):
  """Puts a file in the place of the checkpoints' folder after one step, and the folder back after another."""

  def __init__(self, directory, lost_at, back_at):
    self.folder, self.lost_at, self.back_at = directory / 'checkpoints', lost_at, back_at
    self.aside = directory / 'aside'

  def on_step(self, run, metrics):
    if run.step == self.lost_at:
      run.save()  # Nothing is being written.
      while saved_steps(run.directory)[-1] != run.step:
        time.sleep(0.01)
      self.folder.rename(self.aside)
      self.folder.write_text('')
    if run.step == self.back_at:
      self.back()

  def back(self):
    self.folder.unlink()
    self.aside.rename(self.folder)


@pytest.mark.slow
def test_training_goes_on_without_storage_and_ends_as_undisturbed(tmp_path, shared_programs, capsys):
  expected = jax.device_get(run_train(tiny_run(), tmp_path / 'undisturbed').state.mdl_vars)

  def assert_undisturbed(state):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.mdl_vars), expected)

  directory = tmp_path / 'back'
  directory.mkdir()
  result = run_train(tiny_run(max_to_keep=99), directory, hooks=[LoseStorage(directory, 7, 13)])
  out = capsys.readouterr().out
  told = [line for line in out.splitlines() if 'saving a checkpoint in' in line]
  assert [line.partition(':')[0] for line in told] == ['step 9', 'step 12']
  assert all(line.startswith(f'step {s}: saving a checkpoint in {directory}') for line, s in zip(told, (9, 12)))
  assert saved_steps(directory) == [3, 6, 7, 15, 18, 20]
  assert_undisturbed(result.state)
  records = [json.loads(line) for line in (directory / 'metrics.jsonl').read_text().splitlines()]
  stalls = [r['step'] for r in records if 'speed/save_stall_seconds' in r['metrics']]
  assert len(stalls) >= 6

  directory = tmp_path / 'gone'
  directory.mkdir()
  lost = LoseStorage(directory, 7, None)
  with pytest.raises(CheckpointError, match=rf'saving a checkpoint in {directory}.* failed: .*; step 20 is not saved'):
    run_train(tiny_run(max_to_keep=99), directory, hooks=[lost])
  lost.back()
  assert saved_steps(directory) == [3, 6, 7]
  assert_undisturbed(run_train(tiny_run(max_to_keep=99), directory).state)

  flip_a_chunk(directory, 20)
  with pytest.raises(CheckpointError, match=f'{directory}/checkpoints/20 cannot be read'):
    run_train(tiny_run(max_to_keep=99), directory, on_damage='fail')
  capsys.readouterr()
  assert_undisturbed(run_train(tiny_run(max_to_keep=99), directory).state)
  out = capsys.readouterr().out
  assert f'is kept in {directory}/checkpoints/20.damaged; the checkpoint of step 18 is used instead' in out
  assert 'restored step 18 of 20' in out and saved_steps(directory)[-2:] == [18, 20]
