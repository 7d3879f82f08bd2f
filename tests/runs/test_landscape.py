"""Slices of the loss landscape are losses at weights that are moved by hand."""

import numpy as np
import pytest
from tiny_runs import expected_loss, tiny_run

import praxis_lite
from praxis_lite.common.errors import UserError
from praxis_lite.runs import run_train
from praxis_lite.runs.landscape import loss_slice, random_direction


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  folder = tmp_path_factory.mktemp('landscape')
  run_train(tiny_run(1, num_train_steps=6, save_interval_steps=3), folder)
  run = praxis_lite.open_run(folder)
  return run.load(), run.load(step=3), run.load(mesh=(3,))


def test_losses_along_a_line_and_on_a_plane(models):
  model, _, on_mesh = models
  rng = np.random.default_rng(7)
  first, second = random_direction(model, rng), random_direction(model, rng)
  w, d = model.variables['w'], first['w']
  np.testing.assert_allclose(np.linalg.norm(d, axis=0), np.linalg.norm(w, axis=0), rtol=1e-5)
  assert not first['v'].any()
  at = lambda t, s: {'w': w + t * d + s * second['w'], 'v': model.variables['v']}  # noqa: E731
  plane = loss_slice(model, 'valid', (-0.5, 0.0, 1.0), (0.0, 0.5), seed=7)
  expected = [[expected_loss(at(t, s), 33, 1) for s in (0.0, 0.5)] for t in (-0.5, 0.0, 1.0)]
  np.testing.assert_allclose(plane, expected, rtol=1e-4)
  line = loss_slice(on_mesh, 'valid', (-0.5, 0.0, 1.0), seed=7)
  np.testing.assert_allclose(line, plane[:, 0], rtol=1e-4)
  assert plane[1, 0] == pytest.approx(model.evaluate('valid')['loss'], rel=1e-5)


def test_losses_between_two_models(models):
  model, before, _ = models
  losses = loss_slice(model, 'valid', (0.0, 0.5, 1.0), toward=before)
  ends = [each.evaluate('valid')['loss'] for each in (model, before)]
  np.testing.assert_allclose(losses[[0, 2]], ends, rtol=1e-4)
  half = {name: (model.variables[name] + before.variables[name]) / 2 for name in ('w', 'v')}
  assert losses[1] == pytest.approx(expected_loss(half, 33, 1), rel=1e-4)


def test_mistakes_are_told(models):
  model = models[0]
  with pytest.raises(UserError, match=r"there is no metric 'lose'. Did you mean 'loss'"):
    loss_slice(model, 'valid', (0.0,), metric='lose')
  for distances in ((), ((0.0,),) * 3):
    with pytest.raises(UserError, match='expected distances along one or two directions'):
      loss_slice(model, 'valid', *distances)
  for wrong in ((), 0.5, (0.0, np.inf), [[0.0, 1.0]], 'near', [[0.0], [0.0, 1.0]], None):
    with pytest.raises(UserError, match='loss_slice: expected distances as a list of finite numbers'):
      loss_slice(model, 'valid', (0.0,), wrong)
  with pytest.raises(UserError, match='vaild'):
    loss_slice(model, 'vaild', (0.0,))
