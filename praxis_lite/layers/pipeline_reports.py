"""The reports of a pipeline's layers, and how they are combined over microbatches, and over devices that split rows.

M microbatches, S stages, c repetitions in a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import mean_of_means
from praxis_lite.layers.base.call import Summary, summary_over_devices
from praxis_lite.layers.pipeline_arrays import is_float
from praxis_lite.sharding.specs import axes_to_entry


class Place(NamedTuple):
  """The work that a stage does in a tick.

  Fields are scalars for one stage and tick, arrays [S] for all stages in one tick, or [ticks, S] for all ticks.
  """

  stage: jax.Array
  round: jax.Array
  microbatch: jax.Array  # Number in [0, M), also in a bubble.
  real: jax.Array  # False in a bubble.
  counts: jax.Array  # False in a bubble, and for a microbatch of padding; neither affects means and variables.


class Reported(NamedTuple):
  """What layers report, with leading dimensions for layers, stages and ticks."""

  summaries: dict[str, Summary]
  aux_losses: dict[str, tuple[jax.Array, jax.Array]]

  def combine_over_devices(self, axes: tuple[str, ...]) -> Reported:
    """Inside `shard_map`: returns the reports of all rows; each device along `axes` has the reports of its own rows."""
    aux = {name: _mean_over_devices(*aux, axes) for name, aux in self.aux_losses.items()}
    return Reported({name: summary_over_devices(summary, axes) for name, summary in self.summaries.items()}, aux)


class TickResults(NamedTuple):
  """The queue, non-trainable variables and caches after all ticks; what stages did in each tick; reports by layer."""

  queue: Any
  others: NestedDict
  caches: NestedDict
  places: Place
  reported: dict[str, Reported]


def map_over_rows(run: Callable[..., TickResults], axes: tuple[str, ...]) -> Callable[..., TickResults]:
  """Returns the function `run`, which runs all ticks, wrapped in a `shard_map` over `axes`.

  So each device has its own rows of a microbatch. Without axes, returns `run` itself.

  Gradients of values that are the same on all devices, such as weights, are summed where they enter the `shard_map`.
  """
  if not axes:
    return run

  def mean(x: jax.Array) -> jax.Array:
    return jax.lax.pmean(x, axes) if is_float(x) else x

  def run_own_rows(key: jax.Array | None, *arrays: Any) -> TickResults:
    key = None if key is None else jax.random.fold_in(key, jax.lax.axis_index(axes))
    queue, others, caches, places, reported = run(key, *arrays)
    combined = {name: of_layer.combine_over_devices(axes) for name, of_layer in reported.items()}
    return TickResults(queue, jax.tree.map(mean, others), caches, places, combined)

  whole, rows = PartitionSpec(), axes_to_entry(axes)
  of_queue, of_side = PartitionSpec(None, None, rows), PartitionSpec(None, rows)
  return jax.shard_map(
    run_own_rows,
    in_specs=(whole, whole, whole, whole, whole, whole, of_queue, of_side, PartitionSpec(rows)),
    out_specs=TickResults._make((of_queue, whole, whole, whole, whole)),
    axis_names={*axes},
    check_vma=False,  # The code itself ensures that outputs are equal where the specs say that they are replicated.
  )


def _mean_over_devices(value: jax.Array, weight: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
  total, weight = jax.lax.pmean((value * weight, weight), axes)
  return total / jnp.where(weight == 0, 1, weight), weight


def mean_over_microbatches(
  values: jax.Array, weights: jax.Array, places: Place, num_counted: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
  """Returns the weighted mean of values [ticks, S, c, ...] over the microbatches that count, and the mean's weight.

  The weight is the total weight divided by `num_counted`, the number of microbatches that count.
  """
  weights = jnp.where(places.counts[..., None], weights, 0)
  values, weights = (x.reshape(-1, *x.shape[3:]) for x in (values, weights))
  mean, weight = mean_of_means(values, weights)
  return mean, weight / num_counted
