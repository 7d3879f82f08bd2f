"""Starting from another run's variables: where each comes from, on one device and on meshes that nothing divides by."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import HIDDEN, INPUTS, tiny_run

from praxis_lite import Layer
from praxis_lite.checkpoints import Checkpointer
from praxis_lite.checkpoints.retention import RemovedError
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, UserError
from praxis_lite.layers.base.facts import PositionGrid
from praxis_lite.models.base import BaseModel
from praxis_lite.runs import Hook, open_run, run_train
from praxis_lite.runs.init_from import WarmStart
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training.partitioned_task import PartitionedTask

pytestmark = pytest.mark.usefixtures('shared_programs')


class Body(Layer):
  def setup(self):
    self.create_variable('w', WeightHParams((INPUTS, HIDDEN), tensor_split_dims_mapping=('data', None)))


class OtherModel(BaseModel):
  """TinyModel with its first weight in a layer of its own, a bias, and a head of another size and name."""

  def setup(self):
    self.create_child('body', Config(Body))
    self.create_variable('head', WeightHParams((HIDDEN + 4,), tensor_split_dims_mapping=('data',)))
    self.create_variable('bias', WeightHParams((3,)))

  def compute_predictions(self, batch):
    hidden = jnp.tanh(batch['x'] @ self.body.theta.w)
    return hidden @ self.theta.head[:HIDDEN] + self.theta.bias.sum()

  def compute_loss(self, predictions, batch):
    total = batch['weights'].sum()
    return {'loss': (((predictions - batch['y']) ** 2 * batch['weights']).sum() / total, total)}, {}


RULES = ((r'body\.(.*)', r'\1'), ('head', 'v'), ('bias', None))
SHAPES = {'w': (INPUTS, HIDDEN), 'v': (HIDDEN,), 'body': {'w': (INPUTS, HIDDEN)}, 'head': (HIDDEN + 4,), 'bias': (3,)}


class First(Hook):
  """Keeps the true values of the variables before the first step."""

  def on_start(self, run):
    self.variables = true_values(run.state.mdl_vars, SHAPES)
    self.averages = None if run.state.ema_vars is None else true_values(run.state.ema_vars, SHAPES)


def true_values(tree, shapes):
  if isinstance(tree, dict):
    return {name: true_values(below, shapes[name]) for name, below in tree.items()}
  return np.asarray(tree)[tuple(map(slice, shapes))].copy()


def other_run(devices, path, *, rules=RULES, partial=('head',), learner=None, **init_from):
  config = tiny_run(devices, num_train_steps=3, learner=learner)
  config.task.model = Config(OtherModel)
  config.task.train.init_from.set(path=str(path), rules=rules, partial=partial, **init_from)
  return config


def started(config, directory):
  first = First()
  return first, run_train(config, directory, hooks=[first])


class Seen(Exception):
  pass


class OnlyFirst(First):
  """Ends the run before a step is compiled."""

  def on_start(self, run):
    super().on_start(run)
    raise Seen


def first_values(config, directory):
  """The true values of the variables that a run starts from."""
  first = OnlyFirst()
  with pytest.raises(Seen):
    run_train(config, directory, hooks=[first])
  return first.variables


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """The directory of a run on 8 devices, and the true values of its last step and its averages."""
  directory = tmp_path_factory.mktemp('trained')
  config = tiny_run(8, num_train_steps=4, eval_interval_steps=2, best_metric='loss', learner={'ema_decay': 0.9})
  state = run_train(config, directory).state
  return directory, true_values(state.mdl_vars, SHAPES), true_values(state.ema_vars, SHAPES)


@pytest.mark.slow
def test_renamed_partial_and_fresh_variables_are_the_same_on_one_device_and_on_three(trained, tmp_path, capsys):
  directory, source, _ = trained
  seeded = {}
  for devices in (1, 3):
    plain = other_run(devices, directory)
    plain.task.train.init_from.path = None
    seeded[devices] = first_values(plain, tmp_path / f'seeded{devices}')
  capsys.readouterr()
  runs = {}
  for devices in (1, 3):
    first, result = started(other_run(devices, directory, learner={'ema_decay': 0.5}), tmp_path / str(devices))
    for variables in (first.variables, first.averages):  # The averages start from what was loaded.
      np.testing.assert_array_equal(variables['body']['w'], source['w'])
      np.testing.assert_array_equal(variables['head'][:HIDDEN], source['v'])
      np.testing.assert_array_equal(variables['head'][HIDDEN:], seeded[devices]['head'][HIDDEN:])
      np.testing.assert_array_equal(variables['bias'], seeded[devices]['bias'])
    runs[devices] = true_values(result.state.mdl_vars, SHAPES)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), runs[1], runs[3])
  told = capsys.readouterr().out.splitlines()
  same = 'last values of 2 of 3 variables, 0 with the same name and shape'
  start = told.index(f'init_from {directory}/checkpoints/4: {same}')
  assert told[start + 1 : start + 4] == [
    '  renamed   body.w <- w',
    f'  partial   head <- v: ({HIDDEN},) of ({HIDDEN + 4},)',
    '  fresh     bias (3,)',
  ]


@pytest.mark.slow
def test_a_run_that_resumes_does_not_start_from_it_again(trained, tmp_path, capsys):
  config = other_run(3, trained[0])
  run_train(config, tmp_path)
  config.task.train.init_from.path = '/nowhere/any/more'
  config.task.train.num_train_steps = 5
  capsys.readouterr()
  assert run_train(config, tmp_path).step == 5
  told = capsys.readouterr().out
  assert not any(line.startswith('init_from') for line in told.splitlines())
  assert (
    'task.train.init_from is not used: the run goes on after its own step 3; to start from the other run, name' in told
  )
  config.task.train.init_from.path = None
  assert run_train(config, tmp_path).step == 5 and 'is not used' not in capsys.readouterr().out
  first_values(other_run(1, tmp_path, rules=(), partial=(), use_ema=True), tmp_path / 'without_averages')
  told = 'checkpoints/5, which has no moving averages: last values of 3 of 3 variables, 3 with the same name and shape'
  assert told in capsys.readouterr().out
  with pytest.raises(UserError, match=r'^load\(ema=True\): the run keeps no moving averages: its task\.train\.learner'):
    open_run(tmp_path).load(ema=True)


@pytest.mark.slow
def test_averages_and_earlier_steps_can_be_taken_and_what_is_not_used_is_told(trained, tmp_path, capsys):
  directory, _, averages = trained
  variables = first_values(other_run(1, directory, use_ema=True), tmp_path / 'ema')
  assert 'checkpoints/4: moving averages of 2 of 3 variables' in capsys.readouterr().out
  np.testing.assert_array_equal(variables['body']['w'], averages['w'])
  rules = ((r'body\..*', 'w'), ('.*', None))
  capsys.readouterr()
  first_values(other_run(1, directory, rules=rules, partial=(), step=3), tmp_path / 'earlier')
  told = capsys.readouterr().out
  assert f'init_from {directory}/checkpoints/3: last values of 1 of ' in told and f'  not used  v ({HIDDEN},)' in told
  best = Checkpointer(directory, read_only=True).existing_step('best')
  first_values(other_run(1, directory, step='best'), tmp_path / 'best')
  assert f'init_from {directory}/checkpoints/{best}: ' in capsys.readouterr().out


def test_two_variables_may_come_from_one(trained, tmp_path):
  rules = ((r'body\.w', 'w'), ('head|bias', 'v'))
  variables = first_values(other_run(3, trained[0], rules=rules, partial=('.*',)), tmp_path)
  np.testing.assert_array_equal(variables['bias'], trained[1]['v'][:3])
  np.testing.assert_array_equal(variables['head'][:HIDDEN], trained[1]['v'])


MISTAKES = {
  'matches nothing': (
    {'rules': (*RULES, (r'haed', None))},
    r"rules\[3\]: 'haed' matches no variable of this model\. Did you mean 'head'\?$",
  ),
  'matches the beginning': (
    {'rules': (('bod', None), *RULES)},
    r"'bod' matches no variable of this model\. A pattern matches whole paths: write 'bod\.\*', which matches 1\.$",
  ),
  'partial matches nothing': ({'partial': ('head', 'x')}, r"partial\[1\]: 'x' matches no variable of this model"),
  'no regex': ({'rules': (('(', None),)}, r"rules\[0\]: '\(' is not a regular expression: "),
  'no group': ({'rules': (('head', r'\2'), *RULES)}, r"rules\[0\]: '\\\\2' is not a path with groups of 'head'"),
  'not raw': (
    {'rules': (('(head)', '\1'), *RULES)},
    r"rules\[0\]: '\\x01' is not a path; write groups in a raw string",
  ),
  'no pair': ({'rules': ('head', 'v')}, r'rules\[0\]: expected a pair \(regex, path in the checkpoint or None\)'),
  'no such source': (
    {'rules': ((r'body\.w', 'ww'), *RULES)},
    r"body\.w comes from 'ww', by rules\[0\], and .*/4 has no such variable\. Did you mean 'w'\?",
  ),
  'in neither': (
    {'rules': RULES[:2]},
    r"bias is not in .*/checkpoints/4\. Add a rule: \('bias', None\) starts it from the seed",
  ),
  'shape': (
    {'partial': ()},
    rf"head is float32\[{HIDDEN + 4}\] here, and v is float32\[{HIDDEN}\] in .*; \('head', None\) among the rules "
    rf"starts it from the seed, and 'head' in partial copies the part \({HIDDEN},\) that both have",
  ),
  'step': ({'step': 7}, r'there is no checkpoint of step 7'),
  'no number': ({'step': 'last'}, r"step = 'last'"),
}


@pytest.mark.parametrize(('fields', 'message'), MISTAKES.values(), ids=MISTAKES)
def test_what_does_not_fit_is_told_before_anything_is_written(trained, tmp_path, fields, message):
  with pytest.raises(UserError, match=rf'^task\.train(\.init_from)?[.:].*{message}'):
    run_train(other_run(1, trained[0], **fields), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_without_a_checkpoint_it_is_told(trained, tmp_path):
  with pytest.raises(UserError, match=r'^task\.train\.init_from: there is no checkpoint in .*/nothing/checkpoints'):
    run_train(other_run(1, tmp_path / 'nothing'), tmp_path / 'run')
  with pytest.raises(UserError, match='path is the directory of a run; it is a part of the run '):
    run_train(other_run(1, trained[0] / 'checkpoints' / '5'), tmp_path / 'run')
  assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_the_other_run_removes_meanwhile_is_told_as_such(trained, tmp_path):
  shutil.copytree(trained[0], tmp_path / 'other')
  config = other_run(8, tmp_path / 'other')
  partitioned = PartitionedTask(config.task.instantiate(), config.datasets[0].instantiate().batch_struct())
  start = WarmStart(config.task.train.init_from.instantiate(), partitioned)
  shutil.rmtree(tmp_path / 'other' / 'checkpoints' / '4')
  with pytest.raises(RemovedError, match=r'checkpoints/4 was removed before it was read'):
    start.init_state(jax.random.key(0))


@pytest.mark.parametrize('saved', ['conv.w', 'position.w'])
def test_a_table_of_positions_that_the_run_computes_has_its_own_remedy(saved):
  """A masked autoencoder has sinusoidal positions, which are no variable; positions from the seed would be noise."""
  start = object.__new__(WarmStart)
  start._wanted, start._saved = {'network.position.w': {}}, {f'mdl_vars.{saved}': {}}
  start._grids, start._where = {'network.position.w': PositionGrid(2, 2, 1)}, 'runs/mae/checkpoints/1'
  with pytest.raises(CheckpointError) as told:
    start._origin('network.position.w', (), False, False)
  assert ("set positions='sinusoidal' here too. Or add a rule" in str(told.value)) == (saved == 'conv.w')
