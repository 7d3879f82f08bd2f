"""Computes shards with Ray actors, through Ray Data. Each actor holds a model, and all write to the same ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from praxis_lite.common.errors import ConfigError

Worker = Callable[[int], None]


class _Actor:
  """A Ray actor, which loads its model once."""

  def __init__(self, make: Callable[[], Worker]):
    self._work = make()

  def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
    for number in batch['shard']:
      self._work(int(number))
    return batch


def run_on_ray(make: Callable[[], Worker], shards: Sequence[int], num_actors: int, *, uses_gpus: bool = True) -> None:
  """Computes shards.

  Args:
    make: returns a function that computes a shard; called once in each actor, so it must be picklable.
    uses_gpus: whether each actor needs a GPU of its own, if the cluster has GPUs.

  Raises:
    ConfigError: Ray is not installed, or the cluster has GPUs, but fewer GPUs than actors.
  """
  try:
    import ray
    import ray.data
  except ImportError:
    raise ConfigError("--ray needs praxis_lite[ray]: pip install 'praxis_lite[ray]'") from None
  ray.init(ignore_reinit_error=True, logging_level='warning')
  rows = ray.data.from_items([{'shard': number} for number in shards], override_num_blocks=len(shards))
  count, gpus = min(num_actors, len(shards)), int(ray.cluster_resources().get('GPU', 0)) if uses_gpus else 0
  if gpus and count > gpus:
    raise ConfigError(f'--processes needs a GPU for each of {count} actors, and the cluster has {gpus}')
  actors, own = ray.data.ActorPoolStrategy(size=count), {'num_gpus': 1} if gpus else {}
  rows.map_batches(_Actor, fn_constructor_args=(make,), batch_size=1, compute=actors, **own).materialize()
