"""Starting other Python processes from tests."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest
from quick_xla import xla_flags
from warm_python import WarmPopen


@pytest.fixture
def run_python():
  """Starts Python on some code, with `devices` simulated devices; it compiles all but what is in `shared_programs`.

  With warm=False it has imported nothing, see `warm_python.py`.
  """

  def start(code: str, *args: str, devices: int = 1, warm: bool = True, **kwargs) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k not in ('JAX_COMPILATION_CACHE_DIR',)}
    env |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': xla_flags(devices)}
    env['PYTHONPATH'] = os.pathsep.join([os.path.dirname(__file__), env.get('PYTHONPATH', '')])
    if jax.config.jax_compilation_cache_dir:  # `shared_programs` keeps small ones, too.
      for name in (
        'compilation_cache_dir',
        'persistent_cache_min_compile_time_secs',
        'persistent_cache_min_entry_size_bytes',
      ):
        env[f'JAX_{name.upper()}'] = str(getattr(jax.config, f'jax_{name}'))
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    popen = WarmPopen if warm else subprocess.Popen
    return popen([sys.executable, '-c', code, *args], env={**env, **kwargs.pop('env', {})}, **pipes | kwargs)

  return start
