"""Where mesh and one device differ, float64 says which of the two is wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.instruments.verification import format_verification, steps, verify
from praxis_lite.layers import Dropout
from praxis_lite.layers.base import Layer
from praxis_lite.models import ClassificationModel
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training.task import SingleTask


class Off(Layer):
  """tanh(x w), which is off by a share in float32: by one on the mesh, and by another one on one device."""

  dims: int = 8
  on_mesh: float = 0.0
  on_one: float = 0.0
  dropout_tpl: Config | None = None

  def setup(self):
    self.create_variable('w', WeightHParams((self.dims, self.dims)))
    # As an average of a batch norm, whose dtype is not that of the layer.
    self.create_variable('average', WeightHParams((self.dims,), dtype=jnp.float32), trainable=False)
    if self.dropout_tpl is not None:
      self.create_child('dropout', self.dropout_tpl)

  @property
  def output_dims(self):
    return self.dims

  def __call__(self, x, weights):
    y = jnp.tanh(x @ self.theta.w)
    if self.dropout_tpl is not None:
      y = self.dropout(y)
    if y.dtype == jnp.float64:
      return y
    return y * (1 + (self.on_mesh if jax.sharding.get_abstract_mesh().size > 1 else self.on_one))


def verified(network):
  task = Config(SingleTask, mesh_axis_names=('a', 'b'), ici_mesh_shape=(2, 3))
  task.model = Config(ClassificationModel, num_classes=5, network_tpl=network)
  task.train.inputs_split_mapping = {'map_1d': ('b',), 'map_2d': ('b', 'a')}
  leaves = {'image': ((8,), np.float32), 'label': ((), np.int32), 'weights': ((), np.float32)}
  inputs = {name: jax.ShapeDtypeStruct((12, *shape), dtype) for name, (shape, dtype) in leaves.items()}
  return verify(task, inputs, quick=True, search_seconds=0)


def test_the_mesh_is_wrong():
  found = verified(Config(Off, on_mesh=0.01))
  assert not found.is_right and not found.not_of_the_mesh
  assert 'network.w' in found.variables()
  text = format_verification(found)
  assert 'differ from one device, which agrees with float64' in text and 'neither' not in text


def test_one_device_is_wrong():
  found = verified(Config(Off, on_one=0.01))
  assert found.is_right
  assert any('gradient of network.w' in text for text in found.not_of_the_mesh)
  text = format_verification(found)
  assert 'one device is wrong in float32' in text and 'the mesh agrees with float64' in text
  assert text.splitlines()[-1].startswith('equal to one device: ')


def test_both_are_wrong():
  found = verified(Config(Off, on_mesh=0.01, on_one=-0.01))
  assert not found.is_right
  assert 'float64 on one device agrees with neither' in format_verification(found)


def test_neither_is_wrong_by_more_than_rounding():
  found = verified(Config(Off, on_mesh=0.9e-4, on_one=-0.9e-4))
  assert found.is_right
  assert found.not_of_the_mesh and all('rounding differs' in text for text in found.not_of_the_mesh)


def test_what_is_drawn_in_float64_is_something_else():
  found = verified(Config(Off, on_one=0.01, dropout_tpl=Config(Dropout, rate=0.5)))
  assert not found.is_right
  assert 'not compared with float64' in format_verification(found)


def test_one_device_that_computes_something_else_each_time(monkeypatch):
  """What it computes then is no oracle, and what it does with a little noise no measure of rounding."""
  results, calls = steps.Runner.results, []

  def garbled(self, *args, **kwargs):
    found = results(self, *args, **kwargs)
    if self._layout.mesh.size == 1 and not jax.config.jax_enable_x64:
      calls.append(1)
      found[steps.Name('gradient', 'network.w')] = found[steps.Name('gradient', 'network.w')] * len(calls)
    return found

  monkeypatch.setattr(steps.Runner, 'results', garbled)
  assert verified(Config(Off)).is_right
  found = verified(Config(Off, on_mesh=0.01))
  assert not found.is_right and 'network.w' in found.variables()


def test_gradients_that_are_all_0_are_said_to_show_nothing(monkeypatch):
  results = steps.Runner.results

  def without_gradients(self, *args, **kwargs):
    return {name: x * (name.what != 'gradient') for name, x in results(self, *args, **kwargs).items()}

  monkeypatch.setattr(steps.Runner, 'results', without_gradients)
  assert 'gradients of 5 rows of made-up inputs: all of them are 0' in verified(Config(Off)).not_compared


def fail_on(monkeypatch, is_broken):
  results = steps.Runner.results

  def failing(self, *args, **kwargs):
    if is_broken(self._layout.mesh):
      raise RuntimeError('INTERNAL: no such kernel\nand more')
    return results(self, *args, **kwargs)

  monkeypatch.setattr(steps.Runner, 'results', failing)


def test_a_step_that_does_not_run_on_the_mesh(monkeypatch):
  fail_on(monkeypatch, lambda mesh: mesh.size > 1)
  found = verified(Config(Off))
  assert not found.is_right
  text = format_verification(found)
  assert 'wrong: gradients of 5 rows: it runs on one device, and ends on the mesh in RuntimeError: INTERNAL: no' in text


def test_a_step_that_runs_nowhere(monkeypatch):
  fail_on(monkeypatch, lambda mesh: True)
  with pytest.raises(ConfigError, match=r'on one device too, .* end in RuntimeError: INTERNAL: no such kernel'):
    verified(Config(Off))
