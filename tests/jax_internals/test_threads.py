"""Simulated devices have enough threads to wait in several collectives at a time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from praxis_lite.common.jax_internals import threads


@pytest.mark.parametrize(
  'environment, num_devices, expected',
  [
    ({}, None, None),
    ({}, 1, None),
    ({}, 8, '32'),
    ({}, 100, '256'),
    ({'XLA_FLAGS': '--xla_force_host_platform_device_count=1'}, None, None),
    ({'XLA_FLAGS': '--xla_dump_to=x --xla_force_host_platform_device_count=6'}, None, '24'),
    ({'JAX_NUM_CPU_DEVICES': '5'}, None, '20'),
    ({'JAX_NUM_CPU_DEVICES': ''}, None, None),
    ({'PJRT_NPROC': '3'}, 8, '3'),
    ({'NPROC': '3'}, 8, None),
  ],
)
def test_threads_are_four_for_each_simulated_device_unless_given(monkeypatch, environment, num_devices, expected):
  for name in ('XLA_FLAGS', 'JAX_NUM_CPU_DEVICES', 'NPROC', 'PJRT_NPROC'):
    monkeypatch.setenv(name, '')
    monkeypatch.delenv(name)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setattr(os, 'cpu_count', lambda: 2)
  threads.provide_threads(num_devices)
  assert os.environ.get('PJRT_NPROC') == expected


def test_more_cores_have_more_threads(monkeypatch):
  monkeypatch.setenv('PJRT_NPROC', '')
  monkeypatch.delenv('PJRT_NPROC')
  monkeypatch.setattr(os, 'cpu_count', lambda: 64)
  threads.provide_threads(8)
  assert os.environ['PJRT_NPROC'] == '64'


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'begin',
  [
    'import praxis_lite',
    'import praxis_lite; praxis_lite.simulate_cpu_devices(6)',
    'import jax, praxis_lite; jax.config.update("jax_num_cpu_devices", 6); '
    'from praxis_lite.common.devices import start_devices; start_devices()',
  ],
)
def test_xla_starts_them(begin):
  """Also if the number of devices comes from the environment, from a call, or from JAX's own setting."""
  code = f"""
{begin}
import os, jax
jax.numpy.zeros(1).block_until_ready()
names = [open(f'/proc/self/task/{{task}}/comm').read().strip() for task in os.listdir('/proc/self/task')]
print(len(jax.devices()), names.count('tf_XLAEigen'))
"""
  given = {n: x for n, x in os.environ.items() if n not in ('XLA_FLAGS', 'PJRT_NPROC', 'NPROC', 'JAX_NUM_CPU_DEVICES')}
  if begin == 'import praxis_lite':
    given['XLA_FLAGS'] = '--xla_force_host_platform_device_count=6'
  done = subprocess.run([sys.executable, '-c', code], env=given, capture_output=True, text=True, check=True)
  devices, num_threads = map(int, done.stdout.split())
  assert devices == 6 and num_threads >= 24
