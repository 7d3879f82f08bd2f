"""JAX's service and its clusters are found in every release; what is not as it was is said to be unknown."""

import sys
import types
from pathlib import Path

import jax
import pytest

from praxis_lite.common.jax_internals import UnknownJax, processes


def test_a_process_that_is_alone_has_no_service():
  assert processes.service_client() is None


@pytest.mark.parametrize('missing', [None, *processes._SERVICE_METHODS])
def test_the_service_offers_what_is_used(monkeypatch, missing):
  from jax._src import distributed

  client = types.SimpleNamespace(**{name: print for name in processes._SERVICE_METHODS if name != missing})
  monkeypatch.setattr(distributed.global_state, 'client', client)
  if missing is None:
    assert processes.service_client() is client
    return
  with pytest.raises(UnknownJax, match=missing):
    processes.service_client()


def test_the_client_of_this_jaxlib_offers_it():
  from jax._src.lib import _jax

  assert not {*processes._SERVICE_METHODS} - {*dir(_jax.DistributedRuntimeClient)}


def test_a_service_that_has_moved(monkeypatch):
  monkeypatch.setitem(sys.modules, 'jax._src.distributed', None)
  monkeypatch.delattr(jax._src, 'distributed')
  with pytest.raises(UnknownJax, match="JAX's service"):
    processes.service_client()


def test_clusters(monkeypatch):
  kinds = processes.cluster_kinds()
  assert {'slurm', 'ompi', 'gketpu', 'gcetpu'} <= {*kinds}
  for kind in kinds.values():
    for name in ('is_env_present', 'get_process_count', 'get_process_id', 'get_coordinator_address'):
      assert callable(getattr(kind, name))
  from jax._src import clusters

  monkeypatch.setattr(clusters, 'ClusterEnv', object())
  with pytest.raises(UnknownJax, match='clusters'):
    processes.cluster_kinds()


def test_machines_with_tpus(monkeypatch):
  from jax._src import cloud_tpu_init

  assert not processes.is_cloud_tpu_machine()
  monkeypatch.setattr(cloud_tpu_init, 'running_in_cloud_tpu_vm', True)
  assert processes.is_cloud_tpu_machine()
  monkeypatch.delattr(cloud_tpu_init, 'running_in_cloud_tpu_vm')
  assert not processes.is_cloud_tpu_machine()


def test_jax_compiles_in_these_files():
  root = Path(jax.__file__).parent.parent
  assert all((root / name).is_file() for name in processes.BUILDING_FILES)
