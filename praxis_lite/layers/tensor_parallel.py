"""TensorParallelLinear: a Linear that stays split over a mesh axis under `partitioning='shard_map'`.

I input dims, O output dims, n devices along the mesh axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax

from praxis_lite.common.errors import ShardingError, check_choice
from praxis_lite.layers.linears import Linear
from praxis_lite.sharding.explicit import column_parallel_linear, row_parallel_linear
from praxis_lite.sharding.specs import spec_axes
from praxis_lite.sharding.weights import WeightHParams, WeightHParamsCollection


class TensorParallelLinear(Linear):
  """y = x w + b, with w split over one mesh axis and never gathered (Shoeybi et al., 2019).

      column   w [I, O / n], b [O / n]   whole x -> this device's part of y
      row      w [I / n, O], b [O]       this device's part of x -> whole y

  Under `partitioning='shard_map'`, the axis must not split the batch, and the layer calls the corresponding function of
  `sharding/explicit.py`. Otherwise it is a `Linear` with that split, and XLA inserts the communication. A column layer
  is followed by a row layer, with only elementwise functions in between.

  Attributes: the same as for `Linear`, and
    parallel: 'column' or 'row'.
    weight_split_dims_mapping: `wt`: (None, axis) for a column layer, (axis, None) for a row layer, with a mesh axis or
      a logical name of one.
  """

  parallel: str = 'column'

  def setup(self) -> None:
    check_choice(f'{self.path_name}.parallel', self.parallel, ('column', 'row'))
    wt, field = self.weight_split_dims_mapping.wt, f'{self.path_name}.weight_split_dims_mapping.wt'
    split, whole = (1, 0) if self.parallel == 'column' else (0, 1)
    axes: Sequence[str] = ()
    fits = wt is None or (len(wt) == 2 and wt[whole] is None and isinstance(wt[split], str))
    if fits and wt is not None:
      placement = self._resolve(wt, field, rank=2)  # A logical name may correspond to no axis, or to several.
      axes = (wt[split],) if placement is None else spec_axes(placement.spec[split])
    if not fits or len(axes) > 1:
      right = "(None, 'mdl')" if self.parallel == 'column' else "('mdl', None)"
      raise ShardingError(
        f'{field}: {wt!r} does not fit a {self.parallel} parallel layer, which is split over one mesh axis, as in '
        f'{right}'
      )
    self._axis = axes[0] if axes else None
    super().setup()

  def create_variable(self, name: str, weight: WeightHParams, trainable: bool = True) -> None:
    if self._axis is not None and (name == 'w' or self.parallel == 'column'):
      weight = dataclasses.replace(weight, collections=weight.collections | {WeightHParamsCollection.KEEP_SPLIT})
    super().create_variable(name, weight, trainable)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., O] for x [..., I], or this device's part of it; see the class."""
    if self._axis is None or self._axis not in self.surroundings.manual_axes:
      return super().__call__(x)
    fn: Callable[..., jax.Array] = column_parallel_linear if self.parallel == 'column' else row_parallel_linear
    return fn(x.astype(self.fprop_dtype), self.theta.w, self._axis, self.theta.b if self.use_bias else None)
