"""JAX's service that connects the processes of a run, the clusters that JAX knows, and files of its compiler."""

from __future__ import annotations

from typing import Any, Protocol

from praxis_lite.common.jax_internals import UnknownJax, reading

# JAX's files that the main thread executes while it traces, lowers and compiles.
BUILDING_FILES = ('jax/_src/compiler.py', 'jax/_src/interpreters/partial_eval.py', 'jax/_src/interpreters/mlir.py')
_SERVICE_METHODS = ('key_value_set', 'key_value_dir_get', 'key_value_try_get', 'wait_at_barrier')


class Client(Protocol):
  """The methods of JAX's service used here: a key-value store of texts, and barriers, for all processes of a run."""

  def key_value_set(self, key: str, value: str, allow_overwrite: bool = ...) -> None: ...
  def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...
  def key_value_try_get(self, key: str) -> str: ...
  def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None: ...


def service_client() -> Client | None:
  """Returns the client of JAX's service, which has a store and barriers; None if there is only this process."""
  with reading("JAX's service"):
    from jax._src import distributed

    client = distributed.global_state.client
    missing = [] if client is None else [name for name in _SERVICE_METHODS if not hasattr(client, name)]
  if missing:
    raise UnknownJax(f"JAX's service has no {missing[0]}")
  return client


def cluster_kinds() -> dict[str, Any]:
  """Returns, by name, the kinds of clusters that JAX can detect."""
  with reading('the clusters that JAX knows'):
    from jax._src.clusters import ClusterEnv

    return {kind.name: kind for kind in ClusterEnv._cluster_types}


def is_cloud_tpu_machine() -> bool:
  """Whether this is a Google Cloud TPU machine; False if JAX does not say."""
  try:
    from jax._src import cloud_tpu_init

    return bool(cloud_tpu_init.running_in_cloud_tpu_vm)
  except (ImportError, AttributeError):
    return False
