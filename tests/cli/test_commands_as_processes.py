"""Commands as the shell runs them: exit codes, one line on stderr, no traceback, nothing left behind."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from quick_xla import xla_flags
from warm_python import started

SCRIPT = pathlib.Path(sys.executable).parent / 'praxis-lite'
PROGRAM = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, '-m', 'praxis_lite.cli.main']


def environment(cwd):
  return os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': xla_flags(), 'XDG_CACHE_HOME': str(cwd / 'cache')}


def run(*arguments, cwd):
  command = started(*arguments, cwd=cwd, env=environment(cwd))
  out, err = command.communicate()
  return subprocess.CompletedProcess(arguments, command.returncode, out, err)


def run_script(*arguments, cwd):
  """The same, from the start of Python on."""
  env = environment(cwd)
  return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, check=False, cwd=cwd, env=env)


MISTAKES = {
  'experiment': (['train', '--exp=lm.Nothing', '--job_log_dir=run'], "there is no experiment 'lm.Nothing'"),
  'devices': (
    ['train', '--exp=lm.StdlibLmMixed', '--job_log_dir=run'],
    "task: ici_mesh_shape: the mesh {'replica': 2, 'data': 2, 'mdl': 2} needs 8 devices, and there is 1",
  ),
  'devices of a long run': (  # Told before the verification, which would take up to 20 seconds.
    ['train', '--exp=lm.StdlibLmMixed', '--job_log_dir=run', '--set=task.train.num_train_steps=2000'],
    "task: ici_mesh_shape: the mesh {'replica': 2, 'data': 2, 'mdl': 2} needs 8 devices",
  ),
  'simulated devices': (
    ['train', '--exp=lm.StdlibLmMixed', '--job_log_dir=run', '--devices=3'],
    "task: ici_mesh_shape: the mesh {'replica': 2, 'data': 2, 'mdl': 2} needs 8 devices, and there are 3",
  ),
  'data': (
    ['train', '--exp=lm.TextLm', '--job_log_dir=run', '--set', 'datasets[*].path=nothing/*.txt'],
    'datasets[0].path: no file matches nothing/*.txt',
  ),
  'checkpoint': (['decode', '--exp=lm.StdlibLmTiny', '--job_log_dir=run', '--prompt=a'], 'there is no checkpoint in '),
}


HOSTS = ['train', '--exp=lm.SyntheticLmTiny', '--job_log_dir=run', '--num_processes=1']
NO_PORT, NO_SUCH = ['--process_id=0', '--coordinator_address=a'], ['--process_id=1', '--coordinator_address=a:1']
MISTAKES |= {
  'coordinator': (
    [*HOSTS, '--process_id=0', '--coordinator_address=a'],
    "coordinator_address = 'a': expected host:port",
  ),
  'process': (
    [*HOSTS, '--process_id=1', '--coordinator_address=a:1'],
    'process_id = 1: expected 0 to num_processes - 1',
  ),
  'cluster': (
    [*HOSTS, '--coordinator_address=auto'],
    'coordinator_address=auto: this process runs in no known cluster',
  ),
}


@pytest.mark.parametrize('name', MISTAKES)
def test_a_mistake_is_one_line_and_an_exit_code(tmp_path, name):
  arguments, message = MISTAKES[name]
  done = (run_script if name == 'simulated devices' else run)(*arguments, cwd=tmp_path)
  assert done.returncode == 2
  assert done.stdout == ''
  assert len(done.stderr.splitlines()) == 1, done.stderr
  assert done.stderr.startswith(f'praxis-lite {arguments[0]}: error: {message}')
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_training_on_a_mesh_warns_of_what_check_finds(tmp_path):
  arguments = ['--exp=lm.SyntheticLmTiny', '--set', 'task.train.num_train_steps=1', '--job_log_dir=run']
  arguments += ['--set', 'task.train.learner.schedule.warmup_steps=1']
  one = run('train', *arguments, cwd=tmp_path)
  assert 'warning' not in one.stdout
  mesh = run('train', *arguments, '--set', 'task.ici_mesh_shape=(1,4,1)', '--devices=4', cwd=tmp_path)
  assert mesh.returncode == 0
  assert 'warning: padding: inputs: 25.0% of the rows of a batch only fill up the mesh' in mesh.stdout


def test_a_bug_in_the_users_own_code_is_one_line(tmp_path):
  (tmp_path / 'buggy.py').write_text(
    'from praxis_lite.experiments.lm import StdlibLmTiny as Tiny\n'
    'class A(Tiny):\n  def task(self): return self.nothing\n'
  )
  done = run('show', '--exp=buggy.py:A', cwd=tmp_path)
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert "has no attribute 'nothing' (buggy.py:3); --traceback shows" in line


# An exception would be swallowed, as some imports do, or would come only when a compilation is done.
SLOW = (
  'import pathlib, time\npathlib.Path("started").touch()\n'
  'try: time.sleep(600)\nexcept KeyboardInterrupt: time.sleep(600)\n'
)


@pytest.mark.slow_cases
@pytest.mark.parametrize('module', ['slow.py', 'absl.py'], ids=['in user code', 'in the first imports'])
def test_an_interrupt_before_the_first_step_ends_the_process_at_once(tmp_path, module):
  (tmp_path / module).write_text(SLOW)
  arguments = [*PROGRAM, 'train', '--exp=slow.py:A', '--job_log_dir=run']
  # As from a terminal: these tests may run in a shell's background, whose processes ignore interrupts.
  listening = (
    'import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])'
  )
  folders = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get('PYTHONPATH')]))
  started = subprocess.Popen(
    [sys.executable, '-c', listening, *arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=tmp_path,
    env=os.environ | {'PYTHONPATH': folders},
  )
  while not (tmp_path / 'started').exists():
    assert started.poll() is None
    time.sleep(0.05)
  started.send_signal(signal.SIGINT)
  assert started.communicate(timeout=300) == ('', 'praxis-lite: interrupted\n')
  assert started.returncode == 130


# Imports the package as the console script does, and gets a signal at the first import after the handler is set.
EARLY = """
import os, signal, sys
for name in ('contextlib', 'threading'):
  sys.modules.pop(name, None)
class Interrupts:
  def find_spec(self, name, path=None, target=None):
    if name == 'contextlib':
      os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
sys.argv = ['praxis-lite']
import praxis_lite
"""


def test_an_interrupt_during_the_first_imports_is_one_line():
  ended = subprocess.run([sys.executable, '-c', EARLY], capture_output=True, text=True, check=False)
  assert (ended.returncode, ended.stderr) == (130, 'praxis-lite: interrupted\n')


# A process that trains, and is inside of a computation that no handler interrupts, as a compilation.
COMPILING = """
import hashlib, signal
from praxis_lite.common.interrupts import end_on_interrupt
from praxis_lite.runs.stop_signals import StopSignals
signal.signal(signal.SIGINT, signal.default_int_handler)
end_on_interrupt()
with StopSignals():
  print('compiling', flush=True)
  hashlib.pbkdf2_hmac('sha256', b'', b'', 2_000_000_000)
"""


@pytest.mark.slow
def test_an_interrupt_of_a_compilation_is_told_and_a_second_one_ends_it():
  process = subprocess.Popen(
    [sys.executable, '-c', COMPILING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )
  assert process.stdout.readline() == 'compiling\n'
  time.sleep(0.5)  # Until it is in the computation.
  process.send_signal(signal.SIGINT)
  assert process.stderr.readline().startswith('SIGINT: waiting for a compilation or a step; a second Ctrl-C ends')
  process.send_signal(signal.SIGINT)
  assert process.communicate(timeout=60) == ('', 'praxis-lite: interrupted\n')
  assert process.returncode == 130


@pytest.mark.slow
def test_a_prompt_of_stray_bytes_is_told(tmp_path):
  done = run(
    'train', '--exp=lm.StdlibLmTiny', '--job_log_dir=run', '--set', 'task.train.num_train_steps=1', cwd=tmp_path
  )
  assert done.returncode == 0
  done = run('decode', '--exp=lm.StdlibLmTiny', '--job_log_dir=run', '--prompt=a\udcff', cwd=tmp_path)
  assert done.returncode == 2
  assert done.stderr == (
    "praxis-lite decode: error: --prompt='a\\udcff' is not UTF-8 text: character 1 is a stray byte\n"
  )


def ended_after_a_line(*arguments, cwd):
  """As in `praxis-lite ... | head -n 1`: the line, the exit code, and what is on stderr."""
  command = started(*arguments, cwd=cwd, env=environment(cwd))
  line = command.stdout.readline()
  command.stdout.close()
  _, err = command.communicate()
  return line, command.returncode, err


@pytest.mark.slow
def test_training_that_loses_its_reader_is_not_done(tmp_path):
  flags = ['--exp=lm.SyntheticLmTiny', '--job_log_dir=run', '--set=task.train.num_train_steps=3000']
  _, code, err = ended_after_a_line('train', *flags, cwd=tmp_path)
  assert code == 2
  assert err.startswith('praxis-lite train: error: the process that read its output has ended')


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
  line, code, err = ended_after_a_line('show', '--exp=lm.StdlibLm', cwd=tmp_path)
  assert line and (code, err) == (0, '')
