"""The platform of a mesh is known, whatever JAX calls its devices."""

import types

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from praxis_lite.common.jax_internals import devices


@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'tpu'])
def test_a_mesh_without_devices_has_the_platform_that_it_was_made_for(platform):
  for kind in (platform, {'cpu': 'cpu', 'gpu': 'NVIDIA H100 80GB HBM3', 'tpu': 'TPU v5 lite'}[platform]):
    device = devices.abstract_device(kind, platform)
    assert device.device_kind == kind and devices.device_platform(device) == platform
    mesh = AbstractMesh((2,), ('data',), (AxisType.Auto,), abstract_device=device)
    assert devices.mesh_platform(mesh) == platform
    with jax.sharding.use_abstract_mesh(mesh):
      assert devices.mesh_platform(jax.sharding.get_abstract_mesh()) == platform


def test_a_mesh_of_devices_and_one_that_does_not_say():
  mesh = Mesh(jax.devices()[:2], ('data',))
  assert devices.mesh_platform(mesh) == devices.mesh_platform(mesh.abstract_mesh) == jax.default_backend()
  assert devices.mesh_platform(AbstractMesh((2,), ('data',))) is None
  assert devices.device_platform(None) is None


KINDS = {'NVIDIA GeForce 4090': 'gpu', 'Tesla V100': 'gpu', 'AMD Instinct MI300X': 'gpu', 'TPU v4': 'tpu', 'X': None}


@pytest.mark.parametrize('kind, platform', KINDS.items())
def test_a_device_that_says_only_its_kind(kind, platform):
  assert devices.device_platform(types.SimpleNamespace(device_kind=kind)) == platform


def test_a_kind_that_nobody_knows_is_that_of_the_devices_here(monkeypatch):
  here = types.SimpleNamespace(device_kind='Frontier X', platform='gpu')
  monkeypatch.setattr(jax, 'devices', lambda: [here])
  assert devices.device_platform(types.SimpleNamespace(device_kind='frontier x')) == 'gpu'


def test_whether_backends_have_started(monkeypatch):
  jax.devices()
  assert devices.backends_have_started()
  from jax._src import xla_bridge

  monkeypatch.delattr(xla_bridge, 'backends_are_initialized')
  assert devices.backends_have_started()
