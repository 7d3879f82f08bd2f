"""One run in two processes: real collectives, one checkpoint, one log, and signals that reach only one of them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess

import numpy as np
import pytest
from tiny_runs import expected_loss, open_gate, shared_rows_run, tiny_run

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.runs import run_train

pytestmark = pytest.mark.usefixtures('shared_programs')

RUN = """
import os, signal, sys
from praxis_lite.checkpoints import Checkpointer
from praxis_lite.runs import Hook, initialize_distributed, run_train
initialize_distributed(sys.argv[1], 2, int(sys.argv[2]))
from tiny_runs import tiny_run
if sys.argv[5:] == ['interrupted'] and sys.argv[2] == '1':
  save = Checkpointer.save
  def save_interrupted(self, step, *args):
    if step == 20:  # the last one: no step is left after which both could agree to stop, batches of evaluations may be
      os.kill(os.getpid(), signal.SIGINT)
    return save(self, step, *args)
  Checkpointer.save = save_interrupted
config = tiny_run(4, noise=0.0, gate=sys.argv[4], eval_interval_steps=8, decode_interval_steps=15, best_metric='loss')
config.task.train.early_stopping.patience = 9
class Raises(Hook):
  def on_step(self, run, metrics):
    if run.step == 4 and sys.argv[2] == '1':
      raise RuntimeError('an error in a hook')
result = run_train(config, sys.argv[3], hooks=[Raises()] if sys.argv[5:] == ['raising'] else [])
print('ended by', result.ended_by, result.step, flush=True)
"""

# The context axis is split between the processes, so that each row is computed by both of them.
SHARED_ROWS = """
import sys
from praxis_lite.runs import initialize_distributed, run_train
initialize_distributed(sys.argv[1], 2, int(sys.argv[2]))
from tiny_runs import shared_rows_run
from praxis_lite.training.partitioned_task import PartitionedTask
config = shared_rows_run((2, 2))
rows = PartitionedTask(config.task.instantiate(), config.datasets[0].instantiate().batch_struct()).train_rows
print('rows', rows.apart, rows.entering, rows.computed, flush=True)
result = run_train(config, sys.argv[3])
print('ended by', result.ended_by, result.step, flush=True)
"""

# The second process moves the directory while a checkpoint is written, where the first has made a folder for both.
MOVED = """
import os, sys, time
from praxis_lite.common.errors import UserError
from praxis_lite.runs import initialize_distributed, run_train
initialize_distributed(sys.argv[1], 2, int(sys.argv[2]), hang_timeout_s=30)
from tiny_runs import tiny_run
from praxis_lite.checkpoints.orbax import work_arounds
work_arounds._TO_BE_SEEN = 1.0
work_arounds.load_orbax()
from orbax.checkpoint._src.metadata.array_metadata_store import Store
if sys.argv[2] == '1':
  write = Store.write
  async def moved(store, *, checkpoint_dir, **more):
    if '/6.' in str(checkpoint_dir):
      while not os.path.exists(checkpoint_dir / 'array_metadatas'):
        time.sleep(0.01)
      os.rename(sys.argv[3], sys.argv[3] + ' moved')
    await write(store, checkpoint_dir=checkpoint_dir, **more)
  Store.write = moved
try:
  run_train(tiny_run(4, noise=0.0), sys.argv[3])
except UserError as error:
  sys.exit(f'error: {error}')
"""


# Without noise: with two processes the rows that fill up the mesh lie between the others, which then draw other noise.


def start_both(run_python, directory, gate='', *args, run=RUN):
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  return [run_python(run, address, str(i), str(directory), gate, *args, devices=2) for i in range(2)]


def last_line(process):
  out, err = process.communicate(timeout=600)
  assert process.returncode == 0, err
  return out.splitlines()[-1]


def let_them_stop(first, gate, batches):
  """JAX's service looks for a signal each second and tells the others, later on a busy machine: one step at a time."""
  for more in range(batches + 1, 20):
    try:
      first.wait(timeout=2 * (more - batches))
      break
    except subprocess.TimeoutExpired:
      open_gate(gate, more)
  open_gate(gate)


@pytest.mark.slow
def test_what_a_hook_raises_in_one_of_them_ends_both_with_the_state_saved(tmp_path, run_python):
  gate = tmp_path / 'gate'
  first, second = start_both(run_python, tmp_path / 'two', open_gate(gate, 6), 'raising')
  let_them_stop(first, gate, 6)
  step = int(last_line(first).removeprefix('ended by SIGTERM '))
  assert 4 < step < 20 and Checkpointer(tmp_path / 'two', read_only=True).latest_step() == step
  _, err = second.communicate(timeout=600)
  assert second.returncode == 1 and 'RuntimeError: an error in a hook' in err
  assert 'the hook Raises.on_step raised RuntimeError after step 4; all processes stop after a step, and save' in err


@pytest.mark.slow
def test_both_stop_after_the_same_step_and_together_end_as_one_process_does(tmp_path, run_python):
  gate = tmp_path / 'gate'
  first, second = start_both(run_python, tmp_path / 'two', open_gate(gate, 9))
  for line in first.stdout:
    if line.startswith('step 6/'):
      break
  second.send_signal(signal.SIGTERM)
  let_them_stop(first, gate, 9)
  ended = last_line(first)
  assert ended == last_line(second)
  step = int(ended.removeprefix('ended by SIGTERM '))
  assert 6 <= step < 20
  assert Checkpointer(tmp_path / 'two', read_only=True).latest_step() == step

  processes = start_both(run_python, tmp_path / 'two', '', 'interrupted')
  # A signal during the last save may come in time for all to agree to leave out what is left to evaluate.
  first, second = (last_line(p) for p in processes)
  # Each names the signal that it got itself.
  assert (first, second) in (('ended by done 20',) * 2, ('ended by SIGTERM 20', 'ended by SIGINT 20'))
  alone = run_train(tiny_run(4, noise=0.0, save_interval_steps=100), tmp_path / 'one')
  # Restores what two processes have saved, and does what they may have left out.
  intervals = {'eval_interval_steps': 8, 'decode_interval_steps': 15}
  together = run_train(tiny_run(4, noise=0.0, best_metric='loss', **intervals), tmp_path / 'two')
  for a, b in zip(together.state.mdl_vars.values(), alone.state.mdl_vars.values()):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-4 * np.abs(np.asarray(b)).max())
  lines = [json.loads(line) for line in (tmp_path / 'two' / 'metrics.jsonl').read_text().splitlines()]
  assert [r['step'] for r in lines if r['split'] == 'train'] == list(range(1, 21))
  losses = {r['step']: r['metrics']['loss'] for r in lines if r['split'] == 'eval/valid'}
  best = json.loads((tmp_path / 'two' / 'best.json').read_text())
  assert {8, 16, 20} <= losses.keys() and (best['value'], best['step']) == min((v, k) for k, v in losses.items())
  (last,) = (r for r in lines if (r['split'], r['step']) == ('eval/valid', 20))
  assert abs(last['metrics']['loss'] - expected_loss(together.state.mdl_vars, 33, 1)) < 1e-5
  assert len((tmp_path / 'two' / 'decoded' / 'prompts' / 'step_00000020.jsonl').read_text().splitlines()) == 7


@pytest.mark.slow
def test_processes_that_share_rows_train_evaluate_and_decode_as_one_device_does(tmp_path, run_python):
  for process in start_both(run_python, tmp_path / 'two', run=SHARED_ROWS):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert 'rows True 8 6' in out and out.splitlines()[-1] == 'ended by done 4'
  alone = run_train(shared_rows_run((1, 1)), tmp_path / 'one')
  together = run_train(shared_rows_run((1, 1)), tmp_path / 'two')  # Restores what two processes have saved.
  for a, b in zip(together.state.mdl_vars.values(), alone.state.mdl_vars.values()):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6)
  losses = [
    [json.loads(line) for line in (tmp_path / name / 'metrics.jsonl').read_text().splitlines()]
    for name in ('two', 'one')
  ]
  for two, one in zip(*losses, strict=True):
    assert (two['split'], two['step']) == (one['split'], one['step'])
    metric = 'num_decoded' if two['split'].startswith('decode') else 'loss'
    assert two['metrics'][metric] == pytest.approx(one['metrics'][metric], rel=1e-5)
  decoded = [
    [
      json.loads(line)['y']
      for line in (tmp_path / name / 'decoded/prompts/step_00000004.jsonl').read_text().splitlines()
    ]
    for name in ('two', 'one')
  ]
  np.testing.assert_allclose(*decoded, rtol=1e-5)


@pytest.mark.slow
def test_a_directory_that_is_moved_while_both_write_ends_both_in_one_line_with_the_state_saved_there(
  tmp_path, run_python
):
  directory, moved = tmp_path / 'two', tmp_path / 'two moved'
  for process in start_both(run_python, directory, run=MOVED):
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    (told,) = [line for line in err.splitlines() if 'error: ' in line]
    assert f'job_log_dir {directory} was moved to {moved} while it trained; step ' in told
    assert told.endswith(f'of 20 is saved in {moved}: to go on, train with --job_log_dir={moved}')
    assert 'Traceback' not in err and 'Thread' not in err
  step = int(told.partition('; step ')[2].partition(' ')[0])
  assert not directory.exists() and Checkpointer(moved, read_only=True).latest_step() == step >= 6
  steps = [json.loads(line)['step'] for line in (moved / 'metrics.jsonl').read_text().splitlines()]
  assert [*dict.fromkeys(steps)] == [*range(1, step + 1)]
  assert run_train(tiny_run(4, noise=0.0), moved).step == 20
