"""A release of JAX whose programs have another shape costs advice and explanations, one line each, and no training."""

import json
import types

import jax
import jax.numpy as jnp
import pytest

from praxis_lite.cli.main import main
from praxis_lite.common import jax_internals
from praxis_lite.common.jax_internals import UnknownJax, programs
from praxis_lite.runs import replay
from praxis_lite.runs.loop import train_log
from praxis_lite.runs.nonfinite import NonFiniteError
from praxis_lite.sharding import propagation

FLAGS = ['--exp=lm.SyntheticLmTiny', '--nocompilation_cache', '--set=task.ici_mesh_shape=(1,4,2)']


def train(directory, *sets):
  sets = ['task.train.num_train_steps=3', 'task.train.log_interval_steps=1', *sets]
  return main(['train', *FLAGS, f'--job_log_dir={directory}', *(f'--set={one}' for one in sets)])


@pytest.fixture(scope='module')
def known(tmp_path_factory):
  """The losses of the run where JAX is known."""
  directory = tmp_path_factory.mktemp('known')
  assert train(directory) == 0
  return losses(directory)


def losses(directory):
  lines = map(json.loads, (directory / 'metrics.jsonl').read_text().splitlines())
  return [line['metrics']['loss'] for line in lines if line['split'] == 'train']


def with_loops_of_another_shape(monkeypatch):
  def refuse(equation, sizes, fit):
    raise UnknownJax(f'{equation.primitive.name} has no sizes')

  monkeypatch.setattr(programs, '_check_sizes', refuse)


def with_calls_of_another_shape(monkeypatch):
  monkeypatch.setattr(programs, '_CALLED', ())


def without_the_passes(monkeypatch):
  monkeypatch.setattr(propagation, '_PROPAGATE', 'builtin.module(sdy-of-tomorrow)')


@pytest.mark.slow
@pytest.mark.parametrize(
  'fake, told',
  [
    (with_loops_of_another_shape, ['no advice on products', 'no share of the peak']),
    (with_calls_of_another_shape, []),
    (without_the_passes, ['guards are not applied']),
  ],
  ids=lambda x: getattr(x, '__name__', ''),
)
def test_training_goes_on_with_the_same_losses(monkeypatch, tmp_path, capsys, known, fake, told):
  monkeypatch.setattr(train_log, 'peak_flops', lambda device: 1e12)
  monkeypatch.setattr(jax_internals, 'told', [])
  fake(monkeypatch)
  assert train(tmp_path / 'unknown') == 0
  lines = [line for line in capsys.readouterr().out.splitlines() if 'is not as praxis_lite knows it' in line]
  assert [line for line, start in zip(sorted(lines), told, strict=True) if not line.startswith(start)] == []
  assert all(f'JAX {jax.__version__}' in line for line in lines)
  assert losses(tmp_path / 'unknown') == known != []


def test_a_step_that_is_not_finite_is_reported_all_the_same(monkeypatch):
  def trace_step(*_):
    raise KeyError('num_consts')

  monkeypatch.setattr(replay, 'trace_on_one_device', trace_step)
  state = types.SimpleNamespace(step=jnp.zeros(()), replace=lambda step: None)
  with pytest.raises(NonFiniteError, match=r'^step 8 is not finite; the layer is not known: .*num_consts'):
    replay.check_finite(None, 7, state, None, {})
