"""Where JAX lowers programs in a way that is not known, they run without guards, and the user is told so once."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.common import jax_internals
from praxis_lite.common.config import Config
from praxis_lite.layers import Linear
from praxis_lite.sharding import propagation
from praxis_lite.sharding.guards import GuardedJit, guard
from praxis_lite.sharding.mesh import create_device_mesh


def without_shardy(monkeypatch):
  monkeypatch.setattr(propagation, '_PROPAGATE', 'builtin.module(sdy-of-tomorrow)')


def without_compatible_splits(monkeypatch):
  monkeypatch.setattr(propagation, '_MAKE_COMPATIBLE', 'builtin.module(sdy-of-tomorrow)')


def with_other_attributes(monkeypatch):
  monkeypatch.setattr(propagation, 'sdy', types.SimpleNamespace(MeshAttr=propagation.sdy.MeshAttr))


def with_other_operations(monkeypatch):
  monkeypatch.setattr(propagation, 'ir', types.SimpleNamespace(WalkResult=propagation.ir.WalkResult))


def without_a_module(monkeypatch):
  monkeypatch.setattr(jax.stages.Lowered, 'compiler_ir', lambda *_: 1 / 0)


FAKES = [without_shardy, without_compatible_splits, with_other_attributes, with_other_operations, without_a_module]


@pytest.mark.parametrize('fake', FAKES, ids=lambda f: f.__name__)
def test_a_step_runs_without_guards_and_the_user_is_told_once(monkeypatch, capsys, fake):
  mesh = create_device_mesh((4,), None, ('data',))
  layer = Config(Linear, input_dims=8, output_dims=6).instantiate()
  variables, x = layer.init(jax.random.key(0)), jnp.arange(32.0).reshape(4, 8)

  def loss(variables, x):
    return (layer.apply(variables, x)[0] ** 2).sum()

  placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec('data')))
  wanted = jax.grad(loss)(variables, x)
  monkeypatch.setattr(jax_internals, 'told', [])
  fake(monkeypatch)
  for _ in range(2):
    found = GuardedJit(jax.grad(loss))(variables, placed)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, wanted)
  (line,) = capsys.readouterr().out.splitlines()
  assert line.startswith('guards are not applied') and 'praxis-lite verify' in line and jax.__version__ in line
  assert guard(jax.jit(lambda x: x).lower(x)) == []
