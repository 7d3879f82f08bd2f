"""praxis-lite verify, and the line of train before a long run."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from praxis_lite.cli import verify
from praxis_lite.cli.main import main
from praxis_lite.common.errors import UserError
from praxis_lite.instruments.verification.verify import _describe_guarded
from praxis_lite.training import partitioned_step

EXP = '--exp=digits.DigitsMlpSharded'


@pytest.mark.slow
def test_an_experiment_that_is_right(capsys):
  assert main(['verify', EXP]) == 0
  out = capsys.readouterr().out
  assert 'mesh data 2 x mdl 4 = 8 devices' in out and 'equal to one device: gradients of 7 rows' in out


@pytest.mark.slow
def test_an_experiment_that_is_wrong_exits_with_1(capsys, monkeypatch):
  """Without guards, and with rows over two axes, one of which splits the weight."""
  monkeypatch.setattr(partitioned_step, 'guard', lambda lowered: [])
  wrong = [
    '--set=task.mesh_axis_names=("replica","data","mdl")',
    '--set=task.ici_mesh_shape=(2,2,2)',
    '--set=task.model.network_tpl.linear_tpl.activation_split_dims_mapping.out=(("replica","data"),"mdl")',
    '--set=task.model.network_tpl.hidden_dims=(64,64)',
    '--set=task.train.inputs_split_mapping.map_4d=(("replica","data"),None,None,None)',
  ]
  assert main(['verify', EXP, '--quick', *wrong]) == 1
  out = capsys.readouterr().out
  assert 'wrong: gradient of network.linear_' in out and 'right with network.linear_' in out


@pytest.mark.parametrize(
  ('override', 'message'),
  [
    (
      'task.model.softmax_tpl.weight_split_dims_mapping.wt=("mdl","dta")',
      "softmax.weight_split_dims_mapping.wt: axis 'dta'",
    ),
    ('task.train.inputs_split_mapping={"map_1d":("data",)}', 'inputs_split_mapping'),
    ('task.model.num_clases=3', 'num_clases'),
  ],
)
def test_a_users_mistake_is_one_line(capsys, override, message):
  assert main(['verify', EXP, f'--set={override}']) == 2
  err = capsys.readouterr().err
  assert message in err and len(err.strip().splitlines()) == 1


def test_sizes_that_do_not_fit_into_memory(capsys):
  assert main(['verify', '--exp=lm_sizes.Llama8B', '--full', '--devices=8']) == 2
  assert 'leave out --full' in capsys.readouterr().err


# ---------------------------------------------------------------- train


def ended_with(monkeypatch, code, out='', err=''):
  seen = []

  def run(command, **kwargs):
    seen.append((command, kwargs['env']))
    return subprocess.CompletedProcess(command, code, out, err)

  monkeypatch.setattr(subprocess, 'run', run)
  return seen


def test_train_names_the_variable_that_is_wrong(monkeypatch):
  ended_with(monkeypatch, 1, 'mesh\nwrong: gradient of lm.w: off by 3 times its largest entry\n1 results differ\n')
  with pytest.raises(UserError, match=r'gradient of lm\.w: off by 3 times.*--noverify'):
    verify.verify_first(['--exp=lm.X', '--set=task.a=1'])


@pytest.mark.parametrize(
  ('code', 'out', 'err', 'line'),
  [
    (0, 'mesh\nequal to one device: gradients (3 s)\n', '', 'verified: equal to one device: gradients (3 s)'),
    (2, '', 'praxis-lite verify: no data\n', 'not verified: praxis-lite verify: no data'),
    (1, '', 'Traceback\nKeyError: 3\n', 'not verified: it ended with exit code 1'),
    (-9, '', '', 'not verified: it ended with exit code -9'),
  ],
)
def test_train_prints_one_line(monkeypatch, capsys, code, out, err, line):
  seen = ended_with(monkeypatch, code, out, err)
  verify.verify_first(['--exp=lm.X', '--set=task.a=1'])
  assert capsys.readouterr().out == f'{line}\n'
  ((command, environment),) = seen
  assert {'--exp=lm.X', '--set=task.a=1', '--quick'} <= set(command) and environment['JAX_PLATFORMS'] == 'cpu'


@pytest.mark.parametrize(
  ('progress', 'far'),
  [
    (None, 'nothing was compared'),
    (b'W1 some warning\n', 'nothing was compared'),
    (b'verify: mesh a 2 = 2 devices\n', 'still compiling, nothing was compared'),
    (
      b'verify: mesh a 2\nW1\nverify: compared gradients of 1 rows: equal (9.0 s)\n',
      'compared gradients of 1 rows: equal (9.0 s)',
    ),
  ],
)
def test_train_says_so_when_verifying_takes_too_long(monkeypatch, capsys, progress, far):
  def run(command, timeout, **kwargs):
    raise subprocess.TimeoutExpired(command, timeout, stderr=progress)

  monkeypatch.setattr(subprocess, 'run', run)
  verify.verify_first(['--exp=lm.X', '--set=task.mesh=(2, 2)'])
  command = "praxis-lite verify --exp=lm.X '--set=task.mesh=(2, 2)'"
  text = f'not verified: the check did not finish within 20 s ({far}); to complete it: {command}\n'
  assert capsys.readouterr().out == text


def test_progress_is_said_while_it_verifies(monkeypatch, capsys):
  """What the process before a long run says until it is ended."""
  assert main(['verify', EXP, '--quick']) == 0
  lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith('verify: ')]
  assert lines[0].startswith('verify: mesh data 2 x mdl 4 = 8 devices; sizes replaced: ')
  assert lines[1].startswith('verify: compared gradients of 7 rows: equal (')


def test_more_devices_than_are_allowed(capsys):
  axes = '--set=task.mesh_axis_names=("a","b","c","data","mdl")'
  assert main(['verify', EXP, axes, '--set=task.ici_mesh_shape=(2,2,2,2,2)']) == 2
  err = capsys.readouterr().err.strip()
  assert '32 simulated devices' in err and 'pass --devices=32' in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
  ('arguments', 'verifies'),
  [
    (['--set=task.train.num_train_steps=1000'], True),
    (['--set=task.train.num_train_steps=999'], False),
    (['--set=task.train.num_train_steps=1000', '--noverify'], False),
    (['--set=task.train.num_train_steps=1000', '--set=task.ici_mesh_shape=(1,1)'], False),
  ],
)
def test_which_runs_are_verified_first(monkeypatch, tmp_path, arguments, verifies):
  from praxis_lite.runs import executor

  seen = []
  done = types.SimpleNamespace(ended_by='done')
  monkeypatch.setattr(executor, 'run_train', lambda *args, **kwargs: done)
  monkeypatch.setattr(verify.subprocess, 'run', lambda *args, **kwargs: seen.append(1) or ended(0))
  command = ['train', EXP, f'--job_log_dir={tmp_path}', '--nocompilation_cache', *arguments]
  assert main(command) == 0
  assert bool(seen) == verifies
  (tmp_path / 'checkpoints' / '10').mkdir(parents=True)
  seen.clear()
  assert main(command) == 0 and not seen


def ended(code):
  return subprocess.CompletedProcess([], code, 'equal to one device\n', '')


@pytest.mark.slow
def test_a_file_that_uses_a_device_when_it_is_imported(tmp_path):
  text = 'import jax.numpy as jnp\nfrom experiments.digits import DigitsMlp\n\nONES = jnp.ones(3)\n\n'
  (tmp_path / 'own.py').write_text(text + '\nclass Own(DigitsMlp):\n  pass\n')
  command = [sys.executable, '-m', 'praxis_lite', 'verify', '--quick', f'--exp={tmp_path}/own.py:Own']
  ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
  assert ended.returncode == 0 and 'equal to one device: ' in ended.stdout, ended.stderr


@pytest.mark.slow
def test_train_verifies_in_a_process_of_its_own(capsys):
  verify.verify_first([EXP, '--set=task.train.num_train_steps=1000'])
  out = capsys.readouterr().out
  assert out.startswith(('verified: equal to one device', 'not verified: the check did not finish')), out


def test_the_results_of_a_step_are_not_called_return():
  assert _describe_guarded('return', '') == 'results of the step'
  assert _describe_guarded('dot_general', 'lm.softmax') == 'dot_general in lm.softmax'
