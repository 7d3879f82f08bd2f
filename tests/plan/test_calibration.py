"""What programs reach on this machine, measured in small, kept, and read by plans."""

import dataclasses
import json
import re
import types

import pytest

from praxis_lite.cli.main import main
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.instruments.plan import calibration
from praxis_lite.instruments.plan.calibration import apply_calibration, calibrate
from praxis_lite.instruments.plan.targets import TARGETS
from praxis_lite.instruments.plan.topology import parse_topology


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  file = tmp_path_factory.mktemp('cache') / 'praxis_lite' / 'calibration.json'
  calibrate(file, matrix=64, megabytes=1, seconds=0.002)
  return file


@pytest.mark.slow
def test_what_is_measured_is_what_plans_take(file):
  assumed, measured = TARGETS['cpu'].efficiency, apply_calibration(parse_topology('cpu:8'), file).target.efficiency
  for name in ('compute', 'memory', 'links', 'seconds_per_operation', 'seconds_per_hop'):
    assert getattr(measured, name) > 0
    assert getattr(measured, name) != getattr(assumed, name)
  assert measured.network == assumed.network
  assert re.search(r'^8 x cpu, \d{4}-\d\d-\d\d, jax .*; assumed: network$', measured.calibrated)
  # Nothing was measured of others.
  assert apply_calibration(parse_topology('h100:8'), file) == parse_topology('h100:8')


@pytest.mark.slow
def test_a_further_target_is_kept_beside_the_first(file):
  kept = json.loads(file.read_text())
  file.write_text(json.dumps(kept | {'h100': dataclasses.asdict(TARGETS['h100'].efficiency) | {'compute': 0.123}}))
  assert apply_calibration(parse_topology('h100:8'), file).target.efficiency.compute == 0.123
  calibrate(file, matrix=8, megabytes=1, seconds=1e-4)
  assert apply_calibration(parse_topology('h100:8'), file).target.efficiency.compute == 0.123


def test_a_measured_time_is_that_of_one_run():
  import jax.numpy as jnp

  def least_time(size):  # Other programs on this machine make single times too long, never too short.
    return min(
      calibration._time(lambda i, x: jnp.sin(jnp.tanh(x @ x)), jnp.zeros((size, size)), seconds=0.02) for _ in range(4)
    )

  assert 1e-8 < least_time(16) < least_time(256) < 1


def test_bad_files_and_unknown_devices_are_told(tmp_path):
  file = tmp_path / 'calibration.json'
  for text in ('{', '[]', '{"h100": {"speed": 1}}'):
    file.write_text(text)
    with pytest.raises(UserError, match='remove it, and measure again with `praxis-lite plan --calibrate`'):
      apply_calibration(parse_topology('h100:8'), file)
  device = types.SimpleNamespace(device_kind='Radeon', platform='gpu')
  with pytest.raises(ConfigError, match="no figures of 'Radeon' are known"):
    calibrate(devices=[device])


@pytest.mark.slow
def test_the_command_reads_the_file_that_it_writes(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  perfect = dataclasses.replace(TARGETS['h100'].efficiency, compute=1.0, calibrated='a dream')

  def measure(file, report):
    calibration.write_measurements(file, {'h100': dataclasses.asdict(perfect)})
    return dataclasses.replace(TARGETS['h100'], efficiency=perfect)

  monkeypatch.setattr(calibration, 'calibrate', measure)
  assert main(['plan', '--calibrate']) == 0
  assert re.search(r'compute +1\n', capsys.readouterr().out)
  named = ['plan', '--exp=lm.SyntheticLmTiny', '--nocompile', '--set', 'task.ici_mesh_shape=(1,8,1)']
  assert main([*named, '--topology=h100:8']) == 0
  assert 'times take shares of the published figures that were measured: a dream' in capsys.readouterr().out
