"""Registered experiments compute the same with the kernels of TPUs, interpreted, as without them on another mesh."""

from __future__ import annotations

import math

import jax
import pytest

from praxis_lite.instruments.verification import format_verification, verify
from praxis_lite.layers import attention, cached_attention, decode_kernel, dot_product, splash, splash_ring
from praxis_lite.layers.implementations import describe_implementations
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure


@pytest.fixture
def use_kernels(monkeypatch):
  """A function that makes layers choose as on TPUs, also for short sequences, on one device or on larger meshes.

  The kernels still know that they run on a CPU. The function returns a set, to which kernels add their names.
  """
  called = set()
  monkeypatch.setattr(dot_product, '_FUSED_FROM', 1)
  monkeypatch.setattr(cached_attention, '_KERNEL_FROM', 1)

  def note(module, name):
    fn = getattr(module, name)
    monkeypatch.setattr(
      module, name, lambda *args, **more: called.add(module.__name__.rpartition('.')[2]) or fn(*args, **more)
    )

  note(splash, 'forward_rows')
  note(splash_ring, 'forward_rows')
  note(decode_kernel, 'attend_by_kernel')

  def use(on_meshes):
    def platform():
      return 'tpu' if (jax.sharding.get_abstract_mesh().size > 1) == on_meshes else 'cpu'

    for module in (attention, cached_attention, dot_product):
      monkeypatch.setattr(module, 'platform', platform)
    return called

  yield use
  jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize('name', registry.names_in_sources())
def test_right_with_kernels(use_kernels, name):
  config = configure(registry.get(name))
  task = config.task.instantiate()
  sizes = task.mesh_sizes()
  called = use_kernels(on_meshes=math.prod(sizes.values()) > 1)
  with jax.sharding.use_abstract_mesh(abstract_mesh(sizes, 'tpu')):
    choices = describe_implementations(task.model, 64, packed=False)
  if not any('splash on tpu' in choice for choice in choices):
    pytest.skip('no layer uses the kernels on this mesh')
  found = verify(config, most_devices=8, search_seconds=0, quick='Tiny' not in name)
  assert found.is_right, format_verification(found)
  assert called & {'splash', 'splash_ring'}
  print(name, sorted(called), *found.not_compared, f'{found.seconds:.0f} s')
