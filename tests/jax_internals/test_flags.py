"""A flag that this XLA does not know is never set, and what a user sets is left as it is."""

import os
import re
import subprocess
import sys

import pytest

from praxis_lite.common.jax_internals import flags


def ends_well(xla_flags):
  """Whether a process with these XLA_FLAGS reads them and goes on."""
  code = 'import jax; jax.devices(); print("well")'
  env = os.environ | {'XLA_FLAGS': xla_flags, 'JAX_PLATFORMS': 'cpu'}
  return subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, check=False).stdout != ''


def test_the_table_says_what_this_jaxlib_says():
  values = {name: '3' if re.search('level|seconds|count', name) else 'false' for name in flags._UNTIL}
  known = flags.known_flags(values)
  refused = flags._refused_flags(tuple(values.items()))
  assert {*known} == {*values} - refused
  assert ends_well(' '.join(f'--{name}={value}' for name, value in known.items()))


def test_a_release_that_is_not_in_the_table_is_asked(monkeypatch):
  wanted = {'xla_cpu_use_fusion_emitters': 'false', 'xla_backend_optimization_level': '0', 'xla_no_such_flag': '1'}
  in_table = flags.known_flags(wanted)
  assert 'xla_no_such_flag' not in in_table and 'xla_backend_optimization_level' in in_table
  for release in ((0, 9), (0, 13), (1, 0)):
    monkeypatch.setattr(flags, '_release', lambda release=release: release)
    assert flags.known_flags(wanted) == in_table


def test_a_jaxlib_that_cannot_be_asked_gets_no_flags(monkeypatch):
  monkeypatch.setattr(flags, '_release', lambda: (9, 9))
  monkeypatch.setattr(sys, 'executable', '/no/such/python')
  assert flags.add_flags('--xla_dump_to=x', {'xla_backend_optimization_level': 1, 'xla_y': 2}) == '--xla_dump_to=x'
  monkeypatch.undo()
  monkeypatch.setattr(flags, '_release', lambda: (9, 9))
  monkeypatch.setattr(flags, '_READ_FLAGS', 'raise SystemExit("another end")')
  assert flags.add_flags('', {'xla_backend_optimization_level': 2, 'xla_y': 2}) == ''


@pytest.mark.parametrize(
  'given, result',
  [
    ('', '--xla_backend_optimization_level=0'),
    ('  ', '--xla_backend_optimization_level=0'),
    ('--xla_backend_optimization_level=3', '--xla_backend_optimization_level=3'),
    ('--xla_backend_optimization_level', '--xla_backend_optimization_level'),
    ('--xla_a=1  --xla_b', '--xla_a=1 --xla_b --xla_backend_optimization_level=0'),
    # A name inside another one, or inside a value, is not that flag.
    ('--xla_backend_optimization_level_x=3', '--xla_backend_optimization_level_x=3 --xla_backend_optimization_level=0'),
    ('--xla_dump_to=xla_backend_optimization_level', None),
  ],
)
def test_what_is_given_comes_first_and_stays(given, result):
  wanted = {'xla_backend_optimization_level': 0}
  assert flags.add_flags(given, wanted) == (result or f'{given} --xla_backend_optimization_level=0')


def test_flags_in_a_file_are_kept(tmp_path):
  (tmp_path / 'flags').write_text('--xla_backend_optimization_level=2\n--xla_cpu_enable_fast_math=false\n')
  wanted = {'xla_backend_optimization_level': 0, 'xla_force_host_platform_device_count': 2}
  made = flags.add_flags(str(tmp_path / 'flags'), wanted)
  assert made == (
    '--xla_backend_optimization_level=2 --xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=2'
  )
  assert ends_well(made)
  assert flags.add_flags(str(tmp_path / 'none'), {}) == str(tmp_path / 'none')


@pytest.mark.parametrize('release, is_set', [((0, 10), False), ((0, 11), True), ((0, 12), True), ((0, 13), False)])
def test_what_a_release_needs_is_set(monkeypatch, release, is_set):
  needed = '--xla_enable_hlo_sharding_v3=false'
  monkeypatch.setattr(flags, '_release', lambda: release)
  for given in ('', '--xla_dump_to=x'):
    monkeypatch.setenv('XLA_FLAGS', given)
    flags.add_needed_flags()
    flags.add_needed_flags()
    assert os.environ['XLA_FLAGS'] == (f'{given} {needed}'.strip() if is_set else given)
  monkeypatch.setenv('XLA_FLAGS', '--xla_enable_hlo_sharding_v3=true')
  flags.add_needed_flags()
  assert os.environ['XLA_FLAGS'] == '--xla_enable_hlo_sharding_v3=true'
  monkeypatch.delenv('XLA_FLAGS')
  flags.add_needed_flags()
  assert os.environ.get('XLA_FLAGS') == (needed if is_set else None)


def test_an_import_of_the_package_suffices_for_reshards_that_end_the_process():
  """With JAX 0.11 and 0.12; section 20 of docs/xla-partitioner-faults.md."""
  code = """
import praxis_lite, jax, jax.numpy as jnp
jax.config.update('jax_num_cpu_devices', 12)
mesh = jax.make_mesh((2, 2, 3), ('a', 'b', 'c'), axis_types=(jax.sharding.AxisType.Auto,) * 3)
at = lambda x, spec: jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(spec)))
whole = jax.jit(lambda: at(jax.lax.optimization_barrier(at(jnp.arange(12.0), ('c', 'a'))), 'a'))()
assert whole.tolist() == [*range(12)]
"""
  env = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'} | {'JAX_PLATFORMS': 'cpu'}
  subprocess.run([sys.executable, '-c', code], env=env, check=True)


def test_only_programs_for_cpus_have_options_that_save_compiling():
  assert flags.quick_options('cpu')['xla_backend_optimization_level'] == 0
  assert flags.quick_options('gpu') is flags.quick_options('tpu') is None
