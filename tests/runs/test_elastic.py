"""Fewer devices than the mesh of a task has."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from tiny_runs import tiny_run

from praxis_lite.common.errors import ConfigError
from praxis_lite.runs import run_train
from praxis_lite.runs.elastic import fit_mesh
from praxis_lite.runs.records.run_config import check_all_take_part

pytestmark = pytest.mark.usefixtures('shared_programs')


def task_of(names, shape, microbatches=1):
  task = tiny_run(1, learner={'num_microbatches': microbatches}).task
  return task.set(mesh_axis_names=names, ici_mesh_shape=shape)


@pytest.mark.parametrize(
  'shape, devices, smaller, microbatches',
  [
    ((2, 4, 2), 16, (2, 4, 2), 3),
    ((2, 4, 2), 8, (1, 4, 2), 6),
    ((2, 4, 2), 7, (1, 3, 2), 9),
    ((2, 4, 2), 2, (1, 1, 2), 24),
  ],
)
def test_replicas_go_first_and_microbatches_make_up_for_them(shape, devices, smaller, microbatches):
  task, line = fit_mesh(task_of(('replica', 'data', 'mdl'), shape, 3), devices)
  assert (task.ici_mesh_shape, task.train.learner.num_microbatches) == (smaller, microbatches)
  assert bool(line) == (smaller != shape)


def test_other_axes_do_not_shrink():
  with pytest.raises(ConfigError, match=re.escape('needs 4 devices, and there are 1; only')):
    fit_mesh(task_of(('data', 'mdl'), (2, 2)), 1)


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_devices_as_with_all(tmp_path, capsys):
  config = tiny_run(4, noise=0.0, num_train_steps=10)
  run_train(config, tmp_path / 'run', devices=jax.devices()[:4])
  config.task.train.num_train_steps = 20
  fewer = run_train(config, tmp_path / 'run', devices=jax.devices()[:3], elastic=True)
  assert '3 devices for a mesh of 4: data 4 becomes data 3, and num_microbatches 1 becomes 2' in capsys.readouterr().out
  assert config.task.ici_mesh_shape == (4,)  # What the run records, and what it has again when the devices are back.
  whole = run_train(tiny_run(4, noise=0.0), tmp_path / 'whole')
  for a, b in zip(fewer.state.mdl_vars.values(), whole.state.mdl_vars.values()):
    a, b = (np.asarray(x)[: min(len(a), len(b))] for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())


def test_a_mesh_that_leaves_a_process_without_a_device_is_refused(monkeypatch):
  mesh = jax.make_mesh((2,), ('data',), devices=jax.devices()[:2])
  check_all_take_part(mesh)
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  with pytest.raises(ConfigError, match=r'has 2 of 8 devices, and none on host 1; make it larger, or start fewer'):
    check_all_take_part(mesh)
