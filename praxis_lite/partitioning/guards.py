"""Guards: programs that XLA's partitioner computes wrongly without an error, and what is stated so that it does not.

Each guard names the smallest program that shows the fault, and the test in `tests/partitioning/test_guards.py` that
runs this program without the guard: when it fails, XLA has become right and the guard can go. All faults were seen with
jaxlib 0.4.36 to 0.12, on CPU and in programs compiled for GPU, with Shardy and without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.partitioning.constraints import with_sharding_constraint
from praxis_lite.partitioning.specs import axes_to_entry, spec_axes

_ANY = PartitionSpec.UNCONSTRAINED


def gathered_specs(
  specs: Mapping[tuple[str, ...], PartitionSpec], row_specs: Iterable[PartitionSpec], mesh_sizes: Mapping[str, int]
) -> dict[tuple[str, ...], PartitionSpec]:
  """Returns, for each weight that is gathered before it is multiplied, the spec it is used in.

  Where rows are split over two mesh axes or more, and a weight over some of these, the rows of the product may come
  back permuted. On a mesh r 2 x d 2 x m 2:

      y[b, c] = sum_v x[b, v] w[c, v]        x, y over (('r', 'd'), 'm')        w over ('d', 'm')

  With w gathered over the axes of the rows it is right; fully sharded training gathers it there anyway. Meshes that
  split rows over one axis are left alone. Test: `test_product_with_a_weight_over_one_of_two_row_axes`.

  Args:
    specs, row_specs: of the weights, by path, of full rank; and of all inputs and activations.
    mesh_sizes: size of each mesh axis.
  """
  rows: set[str] = set()
  for spec in row_specs:
    axes = [axis for axis in spec_axes(spec[0]) if mesh_sizes.get(axis, 1) > 1] if len(spec) else []
    if len(axes) > 1:
      rows.update(axes)
  used = {
    path: PartitionSpec(*(axes_to_entry([a for a in spec_axes(entry) if a not in rows]) for entry in spec))
    for path, spec in specs.items()
  }
  return {path: spec for path, spec in used.items() if spec != specs[path]}


def whole_images(x_BHWC: jax.Array) -> jax.Array:
  """Gathers height and width of images before and after a convolution; batch and channels stay as they are.

  Where image rows are split and some mesh axis is not used, the gradient of the filter is summed over that axis too.
  On a mesh a 2 x b 2: `conv(x, w)` with x over (None, 'a', None, None). The constraint holds for gradients too, which
  are convolutions as well. Test: `test_convolution_of_split_images`.
  """
  return with_sharding_constraint(x_BHWC, PartitionSpec(_ANY, None, None, _ANY))


def whole_filters(w_HWIO: jax.Array) -> jax.Array:
  """Gathers height and width of filters before a convolution; see `whole_images`."""
  return with_sharding_constraint(w_HWIO, PartitionSpec(None, None, _ANY, _ANY))


def zero_past_end(rows: jax.Array) -> jax.Array:
  """Returns looked-up vectors [..., D] as they are, with a gradient that is zero in what XLA pads.

  Where a dimension of the ids is split unevenly, XLA pads it, and its partitioned scatter (the gradient of a lookup)
  adds the padding's gradient, which may be anything, to row 0. On a mesh a 2 x b 2: the gradient of
  `jnp.take(table, ids, axis=0)` with 3 ids over 'a'. The mask is true of all entries that exist; the barrier keeps XLA
  from finding that out before it partitions the program. Test: `test_gradient_of_a_lookup_of_uneven_ids`.
  """
  if jax.sharding.get_abstract_mesh().size <= 1:
    return rows
  exists = jnp.ones(rows.shape, bool)
  for dim, size in enumerate(rows.shape[:-1]):
    end = jax.lax.optimization_barrier(jnp.int32(size))
    exists &= jax.lax.broadcasted_iota(jnp.int32, rows.shape, dim) < end
  return jnp.where(exists, rows, 0)
