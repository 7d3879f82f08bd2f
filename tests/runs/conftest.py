"""Starting other Python processes from tests."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest
from quick_xla import xla_flags
from warm_python import WarmPopen

CACHE = ('jax_compilation_cache_dir', 'jax_persistent_cache_min_compile_time_secs')


@pytest.fixture
def run_python(request):
  """Starts Python on some code, with `devices` simulated devices; it compiles all but what is in `shared_programs`.

  With warm=False it has imported nothing, see `warm_python.py`.
  """

  def start(code: str, *args: str, devices: int = 1, warm: bool = True, **kwargs) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k not in ('JAX_COMPILATION_CACHE_DIR',)}
    env |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': xla_flags(devices)}
    env['PYTHONPATH'] = os.pathsep.join([os.path.dirname(__file__), env.get('PYTHONPATH', '')])
    if 'shared_programs' in request.fixturenames:
      env |= {name.upper(): str(getattr(jax.config, name)) for name in CACHE}
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    popen = WarmPopen if warm else subprocess.Popen
    return popen([sys.executable, '-c', code, *args], env={**env, **kwargs.pop('env', {})}, **pipes | kwargs)

  return start
