"""Whole runs of a tiny task: training, evaluation, decoding, and what happens when they stop."""

from __future__ import annotations

import json
import random
import re
import signal

import jax
import numpy as np
import optax
import pytest
from tiny_runs import ArrayInput, Config, examples, expected_loss, open_gate, tiny_run

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.common.config import config_values
from praxis_lite.common.errors import CheckpointError, ConfigError, DataError, NumericsError, UserError
from praxis_lite.runs import NonFiniteError, TrainOptions, run_decode, run_eval, run_train
from praxis_lite.runs.loop import training_loop
from praxis_lite.runs.records.heartbeat import read_heartbeats
from praxis_lite.runs.records.record import read_record
from praxis_lite.runs.records.status import status_of

pytestmark = pytest.mark.usefixtures('shared_programs')

DEVICES = 8
SELDOM = {'save_interval_steps': 100}  # For runs whose checkpoints on the way do not matter: the last step is saved.
TIMEOUT = 600  # seconds, for a process that hangs: no test waits as long when all is well, on a busy machine either
RUN = """
import sys
from tiny_runs import tiny_run
from praxis_lite.runs import run_train
config = tiny_run(int(sys.argv[2]), gate=sys.argv[3], eval_gate=sys.argv[4], eval_interval_steps=5)
result = run_train(config, sys.argv[1])
print('ended by', result.ended_by, result.step, flush=True)
"""


def parameters(result):
  """All true values of the final state: the padding of each mesh is cut off."""
  true = {'w': (10, 7), 'v': (7,)}
  return {name: np.asarray(result.state.mdl_vars[name])[tuple(map(slice, true[name]))] for name in true}


def opt_leaves(result):
  return [np.asarray(x) for x in jax.tree.leaves(result.state)]


def wait_for(start, stream):
  """Reads lines from a process until one starts like this."""
  assert any(line.startswith(start) for line in stream), f'it ended without {start!r}'


def curves(directory):
  """(split, step, name) -> value; fails if anything was written twice."""
  values = {}
  for line in (directory / 'metrics.jsonl').read_text().splitlines():
    record = json.loads(line)
    for name, value in record['metrics'].items():
      if not name.startswith('speed/'):
        assert (record['split'], record['step'], name) not in values
        values[record['split'], record['step'], name] = value
  return values


@pytest.fixture(scope='module')
def whole_run(tmp_path_factory):
  """A run on 8 devices that nothing interrupts: its directory and its result."""
  directory = tmp_path_factory.mktemp('whole')
  return directory, run_train(tiny_run(DEVICES, eval_interval_steps=5), directory)


@pytest.mark.slow
def test_a_run_learns_saves_and_evaluates_the_whole_set(whole_run):
  directory, result = whole_run
  assert (result.step, result.ended_by, int(result.state.step)) == (20, 'done', 20)
  found = curves(directory)
  assert found['train', 20, 'loss'] < found['train', 1, 'loss']
  assert {step for split, step, _ in found if split == 'eval/valid'} == {5, 10, 15, 20}
  assert found['eval/valid', 20, 'loss'] == pytest.approx(expected_loss(result.state.mdl_vars, 33, 1), rel=1e-5)
  assert found['eval/valid', 20, 'loss'] == result.metrics['eval/valid']['loss']
  assert any(name.endswith('w_rms') for _, _, name in found)
  reader = Checkpointer(directory, read_only=True)
  assert reader.steps() == [15, 18, 20]


@pytest.mark.slow_cases
@pytest.mark.parametrize('times', [1, 2])
def test_killed_anywhere_it_resumes_and_ends_with_the_same_bits(times, tmp_path, run_python, whole_run):
  for kill_at in sorted(random.sample(range(2, 19), times)):
    # It goes on for a batch or two while it is killed, and cannot come to its end however late that is.
    gate = open_gate(tmp_path / 'gate', min(kill_at + 2, 19))
    process = run_python(RUN, str(tmp_path), str(DEVICES), gate, '', devices=DEVICES)
    for line in process.stdout:
      if line.startswith(f'step {kill_at}/'):
        break
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
  result = run_train(tiny_run(DEVICES, eval_interval_steps=5), tmp_path)
  directory, uninterrupted = whole_run
  for a, b in zip(opt_leaves(result), opt_leaves(uninterrupted), strict=True):
    np.testing.assert_array_equal(a, b)
  # The lines are as if nothing had happened, too; only the first step of each process is logged in any case.
  assert curves(tmp_path) == curves(directory)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['SIGTERM', 'SIGINT'])
def test_a_signal_saves_the_step_it_came_in_and_the_run_goes_on_from_there(tmp_path, run_python, whole_run, name):
  process = run_python(RUN, str(tmp_path), str(DEVICES), open_gate(tmp_path / 'gate', 10), '', devices=DEVICES)
  wait_for('step 7/', process.stdout)
  process.send_signal(signal.Signals[name])
  wait_for(name, process.stderr)
  open_gate(tmp_path / 'gate')
  out, err = process.communicate(timeout=TIMEOUT)
  assert process.returncode == 0, err
  ended, step = out.splitlines()[-1].rsplit(' ', 1)
  assert ended == f'ended by {name}' and 7 <= int(step) < 20
  assert Checkpointer(tmp_path, read_only=True).latest_step() == int(step)
  result = run_train(tiny_run(DEVICES, eval_interval_steps=5), tmp_path)
  for a, b in zip(opt_leaves(result), opt_leaves(whole_run[1]), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_signal_cuts_an_evaluation_short_which_the_next_run_makes_up_for(tmp_path, run_python, whole_run):
  process = run_python(RUN, str(tmp_path), str(DEVICES), '', open_gate(tmp_path / 'gate', 1), devices=DEVICES)
  wait_for('step 5/', process.stdout)
  process.send_signal(signal.SIGTERM)
  wait_for('SIGTERM', process.stderr)
  open_gate(tmp_path / 'gate')
  out, err = process.communicate(timeout=TIMEOUT)
  assert process.returncode == 0, err
  assert 'eval/valid' not in out and out.splitlines()[-1] == 'ended by SIGTERM 5'
  run_train(tiny_run(DEVICES, eval_interval_steps=5), tmp_path)
  assert curves(tmp_path) == curves(whole_run[0])


@pytest.mark.slow_cases
@pytest.mark.parametrize(('first', 'then'), [(8, 3), (8, 1), (1, 8)])
def test_it_goes_on_on_another_mesh(tmp_path, whole_run, first, then):
  run_train(tiny_run(first, num_train_steps=10, **SELDOM), tmp_path)
  result = run_train(tiny_run(then, **SELDOM), tmp_path)
  for name, value in parameters(whole_run[1]).items():
    # Sums over other devices end in other bits, and Adam takes them as far as a few 1e-5 of the largest elements.
    np.testing.assert_allclose(parameters(result)[name], value, rtol=0, atol=1e-4 * np.abs(value).max())


def test_a_finished_run_says_so_and_evaluates_only_what_was_not(whole_run, capsys):
  directory, _ = whole_run
  before = (directory / 'metrics.jsonl').read_text()
  result = run_train(tiny_run(DEVICES, eval_interval_steps=5), directory)
  assert result.step == 20 and 'all steps are taken' in capsys.readouterr().out
  assert (directory / 'metrics.jsonl').read_text() == before
  lines = before.splitlines(keepends=True)
  assert json.loads(lines[-1])['split'] == 'eval/valid'
  (directory / 'metrics.jsonl').write_text(''.join(lines[:-1]))  # killed before its last evaluation
  run_train(tiny_run(DEVICES, eval_interval_steps=5), directory)
  assert (
    json.loads((directory / 'metrics.jsonl').read_text().splitlines()[-1])['metrics']
    == json.loads(lines[-1])['metrics']
  )


def test_a_checkpoint_is_evaluated_and_decoded_on_another_mesh_without_the_optimizer(whole_run):
  directory, result = whole_run
  config = tiny_run(3, learner={'optimizer': Config(optax.sgd)})
  metrics = run_eval(config, directory)
  assert metrics['eval/valid']['loss'] == pytest.approx(result.metrics['eval/valid']['loss'], rel=1e-5)
  earlier = run_eval(config, directory, step=15)
  assert earlier['eval/valid']['loss'] == pytest.approx(curves(directory)['eval/valid', 15, 'loss'], rel=1e-5)
  assert run_decode(config, directory)['decode/prompts']['num_decoded'] == pytest.approx(3.5)
  decoded = [json.loads(x)['y'] for x in (directory / 'decoded/prompts/step_00000020.jsonl').read_text().splitlines()]
  params = parameters(result)
  np.testing.assert_allclose(decoded, np.tanh(examples(7, 2)['x'] @ params['w']) @ params['v'], rtol=1e-4, atol=1e-5)


def test_decoding_runs_at_its_interval_and_at_the_end(tmp_path):
  run_train(tiny_run(1, num_train_steps=5, decode_interval_steps=4, **SELDOM), tmp_path)
  assert sorted(p.name for p in (tmp_path / 'decoded' / 'prompts').iterdir()) == [
    'step_00000004.jsonl',
    'step_00000005.jsonl',
  ]


def test_moving_averages_are_evaluated_unless_asked_otherwise(tmp_path, capsys):
  config = tiny_run(3, num_train_steps=6, learner={'ema_decay': 0.9}, **SELDOM)
  result = run_train(config, tmp_path)
  averages, variables = result.state.ema_vars, result.state.mdl_vars
  with_averages, without = expected_loss(averages, 33, 1), expected_loss(variables, 33, 1)
  assert abs(with_averages - without) > 1e-3
  assert result.metrics['eval/valid']['loss'] == pytest.approx(with_averages, rel=1e-5)
  assert re.search(r'step 6 eval/valid loss .* s, of the average\)\n', capsys.readouterr().out)
  config.task.evaluate.use_ema = False
  assert run_eval(config, tmp_path)['eval/valid']['loss'] == pytest.approx(without, rel=1e-5)
  assert 'of the average' not in capsys.readouterr().out


def test_advice_is_printed_before_the_first_step(tmp_path, capsys):
  asked = []

  def advise(task, batch_struct):
    asked.append((task.mesh_sizes(), batch_struct['x'].shape))
    return ['warning: one', 'warning: two']

  run_train(tiny_run(3, num_train_steps=1), tmp_path, advise=advise)
  assert asked == [({'data': 3}, (6, 10))]
  unused, *lines = capsys.readouterr().out.splitlines()[1:4]
  assert unused == '8 devices, and the mesh uses 3: to use all, --set "task.ici_mesh_shape=(8,)"'
  assert lines == ['warning: one', 'warning: two']


def test_an_experiment_in_place_of_its_config(tmp_path):
  with pytest.raises(ConfigError, match=r'expected configure\(BreakingInput\), got ABCMeta'):
    run_train(BreakingInput, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_something_else_in_place_of_the_directory(tmp_path):
  config = tiny_run(1, num_train_steps=1)
  for given, told in ((None, 'NoneType'), (3, 'int')):
    with pytest.raises(ConfigError, match=rf"job_log_dir\): expected a directory, such as 'runs/1', got {told}$"):
      run_train(config, given)


def test_options_are_given_as_one_object_or_by_name(tmp_path, capsys):
  options = TrainOptions(seed=3, debug_nans=True)
  run_train(tiny_run(num_train_steps=1), tmp_path / 'one', options)
  assert read_record(tmp_path / 'one').seed == 3
  run_train(tiny_run(num_train_steps=1), tmp_path / 'both', options, seed=4)
  assert read_record(tmp_path / 'both').seed == 4 and options.seed == 3
  with pytest.raises(TypeError, match=r"no option 'check_determinisim'\. Did you mean 'check_determinism'\?"):
    run_train(tiny_run(), tmp_path / 'none', options, check_determinisim=3)
  with pytest.raises(ConfigError, match='check_determinism = 0: expected a number of steps, at least 1'):
    TrainOptions(check_determinism=0)
  assert not (tmp_path / 'none').exists()


def test_when_the_data_is_over_the_run_ends_with_a_checkpoint(tmp_path, capsys):
  config = tiny_run(1, **SELDOM)
  config.datasets[0].num_epochs = 1
  result = run_train(config, tmp_path)
  assert (result.step, result.ended_by) == (9, 'data')
  assert 'reached the end of the training data after 9 of 20 steps' in capsys.readouterr().out
  assert Checkpointer(tmp_path, read_only=True).latest_step() == 9
  assert type(result.metrics['eval/valid']['loss']) is float
  again = run_train(tiny_run(1, num_train_steps=5), tmp_path)  # A shorter run than it was.
  assert again.step == 9 and again.metrics == result.metrics
  out = capsys.readouterr().out
  assert 'step 9, past the 5 of task.train.num_train_steps, so no step was taken: saved in' in out
  assert 'the recorded one, which is kept:\n  task.train.num_train_steps: 20 -> 5' in out
  assert read_record(tmp_path).config.task.train.num_train_steps == 20


def test_only_a_run_that_has_its_recorded_number_of_steps_is_done(tmp_path):
  def status(num_train_steps, ends=False):
    config = tiny_run(1, num_train_steps=num_train_steps, **SELDOM)
    config.datasets[0].num_epochs = 1 if ends else None
    run_train(config, tmp_path)
    told = status_of(read_heartbeats(tmp_path), is_held=False)
    assert told.is_well
    return told.lines[0].partition(',')[0], told.lines[1]

  assert status(2) == ('ended (done)', 'step 2 of 2')
  assert status(1) == status(2) == ('ended (done)', 'step 2 of 2')
  assert status(20, ends=True) == ('ended (data)', 'step 9 of 20')
  assert status(5) == status(9) == ('ended (no step taken)', 'step 9 of 20')
  assert status(10) == ('ended (done)', 'step 10 of 10')


class BreakingInput(ArrayInput):
  """Cannot be read from its eighth batch on."""

  def read(self, epoch, position, count, start, stop):
    if position >= 7 * self.batch_size:
      raise DataError('the disk is gone')
    return super().read(epoch, position, count, start, stop)


def test_when_the_data_breaks_the_steps_taken_are_saved(tmp_path):
  config = tiny_run(1, save_interval_steps=100)
  fields = dict(config_values(config.datasets[0]))
  del fields['gate']
  whole, config.datasets[0] = config.datasets[0], Config(BreakingInput, **fields)
  with pytest.raises(DataError, match='the disk is gone'):
    run_train(config, tmp_path)
  assert Checkpointer(tmp_path, read_only=True).latest_step() == 7
  config.datasets[0] = whole
  config.task.train.num_train_steps = 9
  assert run_train(config, tmp_path, restore_input=False).step == 9


def with_bad_example(config):
  data = examples(50, 0)
  data['y'][17] = np.nan
  config.datasets[0].set(arrays=data, shuffle=False)  # batches of 6: the third one is bad
  return config


def test_a_step_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path):
  config = with_bad_example(tiny_run(1, save_interval_steps=1, learner={'on_nonfinite': 'raise'}))
  with pytest.raises(NonFiniteError, match='step 3: the loss or a gradient is not finite'):
    run_train(config, tmp_path)
  assert Checkpointer(tmp_path, read_only=True).steps() == [1, 2]


def test_a_step_that_is_skipped_is_reported(tmp_path, capsys):
  result = run_train(with_bad_example(tiny_run(1, num_train_steps=5, log_interval_steps=5, **SELDOM)), tmp_path)
  skipped = 'step 3: the loss or a gradient is not finite (loss nan, grad_norm nan); the update was skipped'
  assert skipped in capsys.readouterr().out
  assert result.step == 5 and all(np.isfinite(x).all() for x in parameters(result).values())


def test_too_many_skipped_steps_in_a_row_end_the_run_with_its_state_saved(tmp_path, capsys):
  config = tiny_run(1, num_train_steps=12, max_skipped_steps=5, **SELDOM)
  data = examples(50, 0)
  data['y'][6:] = np.nan  # All batches but the first one are bad.
  config.datasets[0].set(arrays=data, shuffle=False)
  with pytest.raises(NonFiniteError, match=r"^from step 2 on, .*The last batch has values in 'y' that are not finite"):
    run_train(config, tmp_path)
  saved = Checkpointer(tmp_path, read_only=True).latest_step()
  assert 6 <= saved <= 8 and 'eval/valid' not in capsys.readouterr().out
  config.task.train.max_skipped_steps = None  # The same programs, as compiled.
  assert run_train(config, tmp_path).ended_by == 'done'


def test_a_run_of_which_all_steps_are_skipped_has_failed(tmp_path):
  config = tiny_run(1, num_train_steps=3)
  config.datasets[0].arrays['y'][:] = np.inf
  with pytest.raises(NonFiniteError, match=r'^from step 1 on, .*still those that the run started from'):
    run_train(config, tmp_path)
  assert Checkpointer(tmp_path, read_only=True).latest_step() == 3


def test_changed_data_is_refused_and_can_be_started_anew(tmp_path):
  run_train(tiny_run(1, num_train_steps=3, **SELDOM), tmp_path)
  config = tiny_run(1, num_train_steps=6, **SELDOM)
  config.datasets[0].arrays = examples(60, 5)
  with pytest.raises(CheckpointError, match='num_examples'):
    run_train(config, tmp_path)
  assert run_train(config, tmp_path, restore_input=False).step == 6


def test_a_directory_is_trained_in_by_one_run_at_a_time(tmp_path, run_python):
  process = run_python(RUN, str(tmp_path), '1', open_gate(tmp_path / 'gate', 10), '')
  wait_for('step 5/', process.stdout)
  before = sorted(p.name for p in tmp_path.iterdir())
  with pytest.raises(UserError, match='another run is training in job_log_dir'):
    run_train(tiny_run(1), tmp_path)
  assert sorted(p.name for p in tmp_path.iterdir()) == before
  open_gate(tmp_path / 'gate')
  out, err = process.communicate(timeout=TIMEOUT)
  assert out.splitlines()[-1] == 'ended by done 20', err


def test_another_model_in_the_directory_is_refused(tmp_path):
  run_train(tiny_run(1, num_train_steps=1, learner={'ema_decay': 0.9}), tmp_path)
  with pytest.raises(CheckpointError, match=r'another learner: opt_states'):
    run_train(tiny_run(1, learner={'optimizer': Config(optax.lion)}), tmp_path)


def test_evaluating_without_a_checkpoint_is_an_error(tmp_path):
  with pytest.raises(CheckpointError, match='there is no checkpoint in'):
    run_eval(tiny_run(1), tmp_path)
  assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_run_is_told_before_anything_is_compiled(tmp_path):
  config = tiny_run(1)
  with pytest.raises(ConfigError, match='exactly one input must have is_training=True, and 0 of 1 have it; set it for'):
    run_train(config._replace(datasets=config.datasets[1:]), tmp_path)
  with pytest.raises(ConfigError, match='and 2 of 3 have it; to train on several, mix them'):
    run_train(config._replace(datasets=[config.datasets[0], *config.datasets]), tmp_path)
  with pytest.raises(ConfigError, match="2 inputs are called 'valid'"):
    run_train(config._replace(datasets=[*config.datasets, config.datasets[1]]), tmp_path)
  both_named = r"datasets\[0\]\.name and datasets\[1\]\.name, of training and evaluation data, are both 'train'"
  with pytest.raises(ConfigError, match=both_named):
    run_train(config._replace(datasets=[config.datasets[0], config.datasets[1].clone(name='train')]), tmp_path)
  with pytest.raises(ConfigError, match=r'task\.train\.save_interval_steps = 0'):
    run_train(tiny_run(1, save_interval_steps=0), tmp_path)
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match=r'job_log_dir .* is not writable'):
    run_train(config, tmp_path / 'file' / 'run')
  with pytest.raises(ConfigError, match='there is no input to decode'):
    run_decode(config._replace(decode_datasets=[]), tmp_path)
  assert not (tmp_path / 'checkpoints').exists()


def test_inputs_of_other_shapes_are_evaluated_too(tmp_path):
  config = tiny_run(3, num_train_steps=2)
  wide = Config(ArrayInput, name='wide', arrays=examples(20, 3), batch_size=20)
  result = run_train(config._replace(datasets=[*config.datasets, wide]), tmp_path)
  assert result.metrics['eval/wide']['loss'] == pytest.approx(expected_loss(result.state.mdl_vars, 20, 3), rel=1e-5)


@pytest.mark.slow
def test_verified_gradients_change_nothing(whole_run, tmp_path, capsys):
  result = run_train(tiny_run(DEVICES, eval_interval_steps=5, **SELDOM), tmp_path, verify_numerics=True)
  assert 'norms, of each variable and layer, agree with those computed on one device' in capsys.readouterr().out
  for a, b in zip(opt_leaves(result), opt_leaves(whole_run[1]), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_wrong_gradients_stop_a_run_before_its_first_step(tmp_path, monkeypatch):
  def wrong(*arguments):
    raise NumericsError('norm of lm.softmax.w')

  monkeypatch.setattr(training_loop, 'compare_gradients', wrong)
  with pytest.raises(NumericsError):
    run_train(tiny_run(DEVICES), tmp_path, verify_numerics=True)
  assert not any((tmp_path / 'checkpoints').glob('[0-9]*'))
