"""Start-up: times, simulated devices, several processes, the compilation cache, the run's directory."""

from __future__ import annotations

import os

import jax
import pytest

from praxis_lite.common.devices import simulate_cpu_devices
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.runs.cluster.distributed import initialize_distributed
from praxis_lite.runs.records.run_config import job_directory
from praxis_lite.runs.throughput import StartupTimes


def test_every_second_before_the_first_step_is_accounted_for():
  now = [100.0]
  startup = StartupTimes(99.5, lambda: now[0])
  startup.mark('import')
  now[0] = 102.0
  startup.mark('data')
  now[0] = 106.0
  startup.mark_parts({'trace+lower': 1.0, 'compile': 3.0})
  now[0] = 106.25
  startup.mark('first step')
  assert startup.report() == (
    'first step after 6.8 s: import 0.5, data 2.0, trace+lower 1.0, compile 3.0, first step 0.2'
  )


def finish(process):
  out, err = process.communicate(timeout=600)
  assert process.returncode == 0, err
  return out.strip()


@pytest.mark.slow
def test_devices_are_simulated_whatever_the_flags_say(run_python):
  code = """
import jax
from praxis_lite.common.devices import simulate_cpu_devices
simulate_cpu_devices(5)
simulate_cpu_devices(5)
print(jax.device_count(), jax.default_backend())
"""
  assert finish(run_python(code, devices=2)) == '5 cpu'


def test_simulating_devices_too_late_is_an_error():
  jax.devices()
  simulate_cpu_devices(jax.device_count())  # what is there already is no mistake
  with pytest.raises(ConfigError, match='cannot simulate 3 CPU devices: JAX already runs on'):
    simulate_cpu_devices(3)
  with pytest.raises(ConfigError, match='devices = 0'):
    simulate_cpu_devices(0)


def test_one_process_needs_no_arguments():
  initialize_distributed()
  assert jax.process_count() == 1


@pytest.mark.slow
def test_half_of_the_arguments_is_an_error(run_python):
  code = """
from praxis_lite.common.errors import ConfigError
from praxis_lite.runs.cluster.distributed import initialize_distributed
try:
  initialize_distributed('localhost:1234')
except ConfigError as error:
  print(error)
"""
  assert 'num_processes, process_id must be set too' in finish(run_python(code))
  env = {'JAX_COORDINATOR_ADDRESS': 'localhost:1234', 'JAX_NUM_PROCESSES': 'two', 'JAX_PROCESS_ID': '0'}
  assert "JAX_NUM_PROCESSES = 'two'" in finish(run_python(code, env=env))


@pytest.mark.slow
def test_compiled_programs_are_found_again_in_the_cache(run_python, tmp_path):
  code = """
import sys, jax, jax.numpy as jnp
from praxis_lite.runs import compilation_cache
compilation_cache._MIN_CACHED_COMPILE_SECONDS = 0
print(compilation_cache.set_up_compilation_cache(enabled=sys.argv[1] == 'on'))
hits = []
jax.monitoring.register_event_listener(lambda name, **kw: hits.append(name) if name.endswith('cache_hits') else None)
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8))).block_until_ready()
print('hit' if hits else 'miss')
"""
  env = {'XDG_CACHE_HOME': str(tmp_path)}
  cache = str(tmp_path / 'praxis_lite')
  assert finish(run_python(code, 'on', env=env)).split() == [cache, 'miss']
  assert finish(run_python(code, 'on', env=env)).split() == [cache, 'hit']
  assert finish(run_python(code, 'off', env=env)).split() == ['None', 'miss']


@pytest.mark.slow
def test_results_of_xlas_autotuning_are_kept_beside_the_programs(run_python, tmp_path):
  """Of the options that every program is compiled with; a process without a GPU does not tune."""
  code = """
import sys, jax, jax.numpy as jnp
from jax._src import compiler
from praxis_lite.runs.compilation_cache import set_up_compilation_cache
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.xla_flags import XlaFlags
set_up_compilation_cache(enabled=sys.argv[1] == 'on')
compile_and_load, folders = compiler.backend_compile_and_load, []
def compile(backend, module, devices, options, *others):
  debug = options.executable_build_options.debug_options
  folders.append(debug.xla_gpu_per_fusion_autotune_cache_dir or 'none')
  return compile_and_load(backend, module, devices, options, *others)
compiler.backend_compile_and_load = compile
x = jax.device_put(jnp.ones((8, 8)))
folders.clear()
GuardedJit(lambda x: jnp.sin(x) @ x)(x)
XlaFlags({'xla_backend_optimization_level': 0}).compile(jax.jit(lambda x: jnp.cos(x) @ x).lower(x))
print(*folders)
"""
  env = {'XDG_CACHE_HOME': str(tmp_path)}
  kept = str(tmp_path / 'praxis_lite' / 'xla_gpu_per_fusion_autotune_cache_dir')
  assert finish(run_python(code, 'on', env=env)).split() == [kept, kept]
  assert finish(run_python(code, 'off', env=env)).split() == ['none', 'none']
  env['JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES'] = 'none'  # The user's own choice stays.
  assert finish(run_python(code, 'on', env=env)).split() == ['none', 'none']


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_done_without(run_python, tmp_path):
  (tmp_path / 'file').write_text('')
  code = """
import jax.numpy as jnp
from praxis_lite.runs.compilation_cache import set_up_compilation_cache
print(set_up_compilation_cache())
print(float(jnp.ones(()) + 1))
"""
  assert finish(run_python(code, env={'XDG_CACHE_HOME': str(tmp_path / 'file')})).split() == ['None', '2.0']


def test_the_directory_of_a_run_is_made(tmp_path):
  with job_directory(tmp_path / 'runs' / '1') as path:
    assert path.is_dir() and list(path.iterdir()) == []


def test_after_a_mistake_no_empty_directory_is_left(tmp_path):
  kept = tmp_path / 'kept'
  kept.mkdir()
  with pytest.raises(UserError, match=r'^wrong$'), job_directory(kept / 'runs' / '1'):
    raise UserError('wrong')
  assert list(kept.iterdir()) == []
  with pytest.raises(KeyboardInterrupt), job_directory(kept / 'runs' / '1'):
    raise KeyboardInterrupt
  assert list(kept.iterdir()) == []
  with pytest.raises(UserError), job_directory(kept / 'runs' / '1') as path:
    (path / 'something').write_text('')
    raise UserError('wrong')
  assert [p.name for p in path.iterdir()] == ['something']


def test_a_directory_that_was_there_stays_after_a_mistake(tmp_path):
  with pytest.raises(UserError), job_directory(tmp_path):
    raise UserError('wrong')
  assert tmp_path.is_dir()


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
  (tmp_path / 'file').write_text('')
  with (
    pytest.raises(UserError, match=r'job_log_dir .*file/run is not writable: .*/file is a file'),
    job_directory(tmp_path / 'file' / 'run'),
  ):
    pass


@pytest.mark.parametrize(('name', 'where'), [('checkpoints/20/new', 'is in'), ('checkpoints', 'is')])
def test_no_run_begins_among_the_checkpoints_of_another(tmp_path, name, where):
  (tmp_path / 'run.json').touch()
  told = f'{name} {where} the checkpoints of the run .*; name another one'
  with pytest.raises(UserError, match=told), job_directory(tmp_path / name):
    pass
  assert not (tmp_path / 'checkpoints').exists()


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write anywhere')
def test_a_directory_without_permission_is_told(tmp_path):
  tmp_path.chmod(0o500)
  with pytest.raises(UserError, match='is not writable: Permission denied'), job_directory(tmp_path):
    pass
