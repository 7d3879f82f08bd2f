"""`train` as a process: exit codes of signals, traces of steps, the best checkpoint, and what is not imported."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest
from quick_xla import xla_flags
from warm_python import started

from praxis_lite.cli.main import main

RUNTIME = pathlib.Path(__file__).parent.parent / 'runs'
EXPERIMENT = f"""
import os, sys
sys.path.insert(0, {str(RUNTIME)!r})
from tiny_runs import tiny_run
from praxis_lite import BaseExperiment

class Tiny(BaseExperiment):
  config = tiny_run(1, gate=os.environ.get('GATE', ''), eval_interval_steps=5)
  def task(self): return self.config.task
  def datasets(self): return self.config.datasets
"""
COMMAND = """
import sys
from praxis_lite.cli.main import main
code = main(sys.argv[1:])
print('IMPORTED', sorted({'tensorflow', 'tensorboard', 'sklearn', 'matplotlib'} & set(sys.modules)), flush=True)
sys.exit(code)
"""


ENVIRONMENT = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': xla_flags(1)}


@pytest.fixture
def flags(tmp_path):
  """Those of a tiny run."""
  (tmp_path / 'tiny.py').write_text(EXPERIMENT)
  return [f'--exp={tmp_path}/tiny.py:Tiny', f'--job_log_dir={tmp_path}/run', '--nocompilation_cache']


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', ['SIGINT', 'SIGTERM'])
def test_a_run_that_a_signal_ends_is_saved_and_exits_as_shells_expect(tmp_path, flags, name):
  gate = tmp_path / 'gate'
  gate.write_text('6')
  process = started('train', *flags, cwd=tmp_path, env=ENVIRONMENT | {'GATE': str(gate)})
  assert any(line.startswith('step 3/') for line in process.stdout), process.stderr.read()
  process.send_signal(signal.Signals[name])
  assert process.stderr.readline().startswith(name)
  (tmp_path / 'new').write_text('1000')
  (tmp_path / 'new').rename(gate)
  out, err = process.communicate(timeout=600)
  assert process.returncode == 128 + signal.Signals[name], err
  assert 'saved in' in out and any((tmp_path / 'run' / 'checkpoints').iterdir())


@pytest.mark.slow
def test_steps_are_profiled_the_best_is_kept_and_nothing_heavy_is_imported(tmp_path, flags, capsys):
  best = ['--set=task.train.best_metric=loss', '--set=task.train.best_metric_mode=max', '--set=datasets[*].gate=']
  command = [sys.executable, '-c', COMMAND, 'train', *flags, '--profile_steps=3:4', *best]
  done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
  out, err = done.stdout, done.stderr
  assert 'IMPORTED []' in out and err == '', err
  told = [line for line in out.splitlines() if line.startswith('profile of steps')]
  assert told == [
    f'profile of steps 3 to 4 in {tmp_path}/run/profile; tensorboard --logdir={tmp_path}/run shows it'
  ]  # fmt: skip
  (folder,) = (tmp_path / 'run' / 'profile' / 'plugins' / 'profile').iterdir()
  (planes,) = folder.glob('*.xplane.pb')
  assert any('/host' in plane.name for plane in jax.profiler.ProfileData.from_file(str(planes)).planes)
  (events,) = folder.glob('*.trace.json.gz')
  traced = json.loads(gzip.decompress(events.read_bytes()))['traceEvents']
  assert sorted(int(event['args']['step_num']) for event in traced if event.get('name') == 'train') == [3, 4]
  record = json.loads((tmp_path / 'run' / 'best.json').read_text())
  evaluate = ['eval', f'--exp={tmp_path}/tiny.py:Tiny', f'--job_log_dir={tmp_path}/run', '--nocompilation_cache']
  sys.path.insert(0, str(RUNTIME))
  try:
    assert main([*evaluate, '--step=best']) == 0
  finally:
    sys.path.remove(str(RUNTIME))
  assert f'step {record["step"]} eval/valid loss {record["value"]:.4}'[:30] in capsys.readouterr().out


@pytest.mark.parametrize('steps', ['15:10', '3', '0:4', 'a:b'])
def test_steps_that_cannot_be_profiled_are_told(capsys, tmp_path, steps):
  flags = ['train', '--exp=lm.SyntheticLmTiny', f'--job_log_dir={tmp_path}/run', f'--profile_steps={steps}']
  assert main(flags) == 2
  assert f"profile_steps = '{steps}': expected the first and the last step, as in 10:15" in capsys.readouterr().err
  assert not (tmp_path / 'run').exists()


def test_a_step_that_is_no_step_is_told(capsys):
  assert main(['eval', '--exp=lm.SyntheticLmTiny', '--job_log_dir=x', '--step=last']) == 2
  assert '--step=last: expected a step such as 500, or best' in capsys.readouterr().err


@pytest.mark.slow
def test_on_windows_the_command_line_says_what_is_supported(tmp_path):
  windows = 'import sys; sys.modules["fcntl"] = None; import jax; sys.platform = "win32"\n'
  code = """
from praxis_lite.cli.main import main
exp = '--exp=lm.SyntheticLmTiny'
print('CODES', main(['--help']), main(['show', exp]), main(['train', exp, f'--job_log_dir={sys.argv[1]}']))
"""
  command = [sys.executable, '-c', windows + code, f'{tmp_path}/run']
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.stdout.endswith('CODES 0 0 2\n') and 'Traceback' not in done.stderr
  assert done.stderr.splitlines()[-1] == (  # JAX may warn of locks before.
    'praxis-lite train: error: on Windows, praxis-lite lists, shows and checks experiments; run it in WSL 2 to train, '
    'evaluate and decode'
  )
