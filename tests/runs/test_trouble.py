"""Going back after a step that is not finite or a jump of the loss, and what a restart makes of it."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_executor import curves
from tiny_runs import Config, TinyModel, examples, tiny_run

from praxis_lite.checkpoints import saved_steps
from praxis_lite.cli.main import main
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.inputs import ArrayInput, PrefetchIterator
from praxis_lite.layers.base import Layer
from praxis_lite.layers.repeat import Repeat
from praxis_lite.runs import Hook, run_train
from praxis_lite.runs.determinism import DeterminismError
from praxis_lite.runs.nonfinite import NonFiniteError
from praxis_lite.runs.replay import replay
from praxis_lite.runs.trouble import LossSpikeError, LossSpikes, Trouble, batches_to_skip, go_back, read_troubles
from praxis_lite.sharding.weights import WeightHParams, WeightInit
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.steps import TrainStepOutput
from praxis_lite.training.task import LossSpikeParams

pytestmark = pytest.mark.usefixtures('shared_programs')


class Killed(BaseException):
  pass


class KillAt(Hook):
  def __init__(self, step):
    self._step = step

  def on_step(self, run, metrics):
    if run.step == self._step:
      raise Killed


def bad_run(*, value=np.nan, **kwargs):
  """A run of 20 steps over 50 examples, one of which is bad: its batch comes once in an epoch of 9 batches."""
  config = tiny_run(1, **{'max_to_keep': 10, **kwargs})
  arrays = examples(50, 0)
  arrays['y'][17] = value
  config.datasets[0].arrays = arrays
  return config


def rollback(**kwargs):
  return bad_run(learner={'on_nonfinite': 'rollback'}, **kwargs)


def same(a, b):
  return all(jax.tree.leaves(jax.tree.map(np.array_equal, a.state, b.state)))


def test_states_left_out_are_read_and_not_returned():
  data = ArrayInput(arrays={'x': np.arange(12)}, batch_size=3, is_training=False)
  states = [data.get_state() for _ in data]
  data.reset()
  with PrefetchIterator(data, left_out=[states[0], states[2]]) as batches:
    seen = []
    for batch in batches:
      seen.append((batch['x'][0], batches.state_before['position'], batches.get_state()['position']))
  assert seen == [(0, 0, 3), (6, 6, 9)]
  assert states[0] == {**states[0], 'position': 3}


def test_what_a_jump_of_the_loss_is():
  spikes = LossSpikes(LossSpikeParams(factor=2.0, steps=2, window=5))
  losses = [1.0, 1.1, 0.9, 1.0, 1.0, 5.0, 1.0, 2.1, 2.2, 9.0, 1.0]
  found = [step for step, loss in enumerate(losses, 1) if spikes.add(step, loss)]
  assert found == [9]  # One high loss is no jump of two, and the third in a row begins another one.
  for field, value in (('factor', 0.5), ('steps', 0), ('window', 1), ('action', 'x')):
    with pytest.raises(ConfigError, match=f'task.train.loss_spike.{field}: expected'):
      LossSpikeParams(**{field: value})


@pytest.mark.slow
def test_a_run_goes_back_leaves_the_batch_out_and_a_restart_does_the_same(tmp_path, capsys):
  result = run_train(rollback(), tmp_path / 'a')
  out = capsys.readouterr().out
  troubles = read_troubles(tmp_path / 'a')
  assert result.step == 20 and len(troubles) in (2, 3)
  for trouble in troubles:
    assert trouble.action == 'rollback' and trouble.first == trouble.last
    assert trouble.back_to == (trouble.first - 1) // 3 * 3
    line = f'step {trouble.first}: the loss or a gradient is not finite (loss nan, grad_norm nan): going back to step'
    assert f'{line} {trouble.back_to}, without 1 batch' in out
  assert len({json.dumps(t.batches) for t in troubles}) == len(troubles)
  assert all(np.isfinite(v) for (split, _, name), v in curves(tmp_path / 'a').items() if name == 'loss')
  assert sum(v for (_, _, name), v in curves(tmp_path / 'a').items() if name == 'skipped') == 0

  # As if it had been known from the beginning.
  (tmp_path / 'b').mkdir()
  shutil.copy(tmp_path / 'a/trouble.jsonl', tmp_path / 'b')
  known = run_train(rollback(), tmp_path / 'b')
  assert 'going back' not in capsys.readouterr().out
  assert same(known, result) and curves(tmp_path / 'a') == curves(tmp_path / 'b')

  # Killed a step before and a step after it would go back.
  for step in (troubles[0].first - 1, troubles[1].first + 1):
    with pytest.raises(Killed):
      run_train(rollback(), tmp_path / 'c', hooks=[KillAt(step)])
  assert same(run_train(rollback(), tmp_path / 'c'), result) and read_troubles(tmp_path / 'c') == troubles

  with pytest.raises(LossSpikeError, match=r'the run has gone back 1 time, as often as task.train.max_rollbacks'):
    run_train(rollback(max_rollbacks=1), tmp_path / 'd')


@pytest.mark.slow
def test_a_jump_of_the_loss(tmp_path, capsys):
  spike = {'loss_spike.factor': 5.0, 'loss_spike.steps': 1, 'loss_spike.window': 4}

  def config(**more):
    made = bad_run(value=100.0)
    for name, value in {**spike, **more}.items():
      setattr(made.task.train.loss_spike, name.partition('.')[2], value)
    return made

  result = run_train(config(), tmp_path / 'a')
  troubles = read_troubles(tmp_path / 'a')
  assert troubles and troubles[0].what.endswith(f'is more than 5 x its median {troubles[0].what.split()[-1]}')
  assert f'going back to step {troubles[0].back_to}' in capsys.readouterr().out
  # Killed shortly before: what the losses were is known after the restart.
  with pytest.raises(Killed):
    run_train(config(), tmp_path / 'b', hooks=[KillAt(troubles[-1].first - 1)])
  assert same(run_train(config(), tmp_path / 'b'), result) and read_troubles(tmp_path / 'b') == troubles

  with pytest.raises(LossSpikeError, match=r'task.train.loss_spike.action is raise; .*--step='):
    run_train(config(**{'loss_spike.action': 'raise'}), tmp_path / 'c')
  (recorded,) = read_troubles(tmp_path / 'c')
  assert recorded.batches == troubles[0].batches and recorded.action == 'raise' and recorded.back_to is None


def test_steps_that_are_skipped_are_recorded_too(tmp_path):
  run_train(bad_run(num_train_steps=9), tmp_path)
  (trouble,) = read_troubles(tmp_path)
  assert (trouble.action, trouble.back_to) == ('skip', None)
  assert trouble.batches[0]['epoch'] == 0 and trouble.batches[0]['position'] == 6 * (trouble.first - 1)


def test_times_that_a_run_went_back_are_recorded_and_limited_after_any_number_of_skipped_steps(tmp_path):
  skipped = ({**Trouble(step, step, 'not finite', 'skip')._asdict()} for step in range(1000))
  (tmp_path / 'trouble.jsonl').write_text(''.join(json.dumps(one) + '\n' for one in skipped))
  for first in (2000, 2001):
    went_back = go_back(tmp_path, Trouble(first, first, 'not finite', 'rollback', [{'position': first}]), 2)
    assert went_back.back_to == 0
  assert [state['position'] for state in batches_to_skip(read_troubles(tmp_path))] == [2000, 2001]
  with pytest.raises(LossSpikeError, match='gone back 2 times'):
    go_back(tmp_path, Trouble(2002, 2002, 'not finite', 'rollback', [{'position': 2002}]), 2)


class Risky(Layer):
  """The logarithm of `scale` times x."""

  def setup(self):
    self.create_variable('scale', WeightHParams((), init=WeightInit.Constant(1.0)))

  def __call__(self, x):
    return jnp.log(self.theta.scale * x) + 2


class RiskyModel(TinyModel):
  """Of an example whose y is more than 90, the second of three logarithms is NaN."""

  def setup(self):
    super().setup()
    self.create_child('stack', Config(Repeat, layers_tpl=Config(Risky), num_layers=3))

  def compute_predictions(self, batch):
    x = self.stack(jnp.where(batch['y'] > 90, 0.1, 1.0))
    return super().compute_predictions(batch) + x


@pytest.fixture(scope='module')
def risky(tmp_path_factory):
  """A run that has skipped steps: its config, its directory and the first step in trouble."""
  directory = tmp_path_factory.mktemp('risky')
  config = bad_run(value=100.0, num_train_steps=9)
  config.task.model = Config(RiskyModel)
  run_train(config, directory)
  return config, directory, read_troubles(directory)[0].first


@pytest.mark.slow
def test_replay_names_the_layer_and_its_number(risky, capsys):
  config, directory, step = risky
  before = sorted(directory.rglob('*'))
  trace = replay(config, directory, step, seed=0)
  out = capsys.readouterr().out
  first = trace.origins[0]
  assert (first.where, first.operation, first.found, first.is_backward) == ('stack[1].layers', 'log', 'nan', False)
  assert f'step {step} was in trouble: step {step}: the loss or a gradient is not finite' in out
  assert f"its batch begins at {{'epoch': 0, 'position': {6 * (step - 1)}" in out
  assert 'first not finite: stack[1].layers: log of [6] from ' in out
  assert trace.layers['stack[0].layers'].not_finite == 0 and trace.layers['stack[2].layers'].not_finite == 1
  assert sorted(directory.rglob('*')) == before
  assert not replay(config, directory, step - 1, seed=0).origins
  assert 'all values are finite' in capsys.readouterr().out
  with pytest.raises(UserError, match='--step=0: expected the number of a step'):
    replay(config, directory, 0, seed=0)
  with pytest.raises(UserError, match=r'^--step=999: the run is at step 9; name a step that it has taken$'):
    replay(config, directory, 999, seed=0)
  assert main(['replay', str(directory)]) == 2 and '--step is missing' in capsys.readouterr().err


def test_debug_nans_names_the_layer(risky, tmp_path):
  config, _, step = risky
  with pytest.raises(NonFiniteError, match=rf'step {step} is not finite; .*: stack\[1\].layers: log of'):
    run_train(config, tmp_path, debug_nans=True)


@pytest.mark.slow
def test_a_flipped_bit_is_found_with_its_device(tmp_path, monkeypatch, capsys):
  config = tiny_run(3, num_train_steps=9)
  clean = run_train(config, tmp_path / 'clean', check_determinism=4)
  assert same(clean, run_train(config, tmp_path / 'plain'))
  saved = PartitionedStep.__call__
  calls = []

  def flipping(self, *args):
    out = saved(self, *args)
    if isinstance(out, TrainStepOutput):
      calls.append(int(args[0].step if not args[0].step.is_deleted() else -1))
    if len(calls) == 9:  # Steps 1 to 3, 4 twice, 5 to 7, and the first of 8.
      w = out.state.mdl_vars['w']
      parts = [np.array(s.data) for s in w.addressable_shards]
      parts[1].view(np.uint32)[0, 2] ^= 1  # The lowest bit of one number.
      arrays = [jax.device_put(part, s.device) for part, s in zip(parts, w.addressable_shards)]
      flipped = jax.make_array_from_single_device_arrays(w.shape, w.sharding, arrays)
      variables = {**out.state.mdl_vars, 'w': flipped}
      out = out._replace(state=out.state.replace(mdl_vars=variables))
    return out

  monkeypatch.setattr(PartitionedStep, '__call__', flipping)
  with pytest.raises(DeterminismError, match=r'step 8 was run twice .* host .*, process 0: device 1 \(cpu\), 1 of'):
    run_train(config, tmp_path / 'flipped', check_determinism=4)
  assert saved_steps(tmp_path / 'flipped') == [3, 6] and DeterminismError.exit_code == 76
  monkeypatch.undo()
  assert same(run_train(config, tmp_path / 'flipped'), clean)
