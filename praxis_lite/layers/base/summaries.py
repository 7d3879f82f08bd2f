"""Summary: a named value that a call reports, and how the values of several devices are combined."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from praxis_lite.common.statistics import PartKind


@dataclasses.dataclass(frozen=True)
class Summary:
  """A named value to log: a 'scalar', 'histogram', 'image' or 'text'. Layers repeated by scan add leading axes.

  Taps add two kinds: parts of statistics, whose kind is a `PartKind`, and whole values, of kind 'array', whose rows are
  the rows of the batch.
  """

  value: jax.Array
  kind: str = 'scalar'


_PART_KINDS = frozenset(PartKind)


def part_kind(summary: Summary) -> PartKind | None:
  """Returns how a summary that is a part of a statistic combines with other parts; None for other summaries."""
  return PartKind(summary.kind) if summary.kind in _PART_KINDS else None


jax.tree_util.register_dataclass(Summary, data_fields=['value'], meta_fields=['kind'])


def summary_over_devices(summary: Summary, axes: tuple[str, ...]) -> Summary:
  """Inside `shard_map`: averages scalars over the devices along `axes`, and combines parts of statistics.

  A summary of any other kind gets the value of the first device.
  """
  x = summary.value
  if not axes:
    return summary
  if (kind := part_kind(summary)) is not None:
    return Summary(kind.combine_devices(x, axes), summary.kind)
  if summary.kind == 'scalar' and jnp.issubdtype(x.dtype, jnp.floating):
    return Summary(jax.lax.pmean(x, axes), summary.kind)
  first = jnp.where(jax.lax.axis_index(axes) == 0, x, jnp.zeros_like(x))
  return Summary(jax.lax.psum(first, axes), summary.kind)
