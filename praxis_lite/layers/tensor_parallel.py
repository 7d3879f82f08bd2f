"""TensorParallelLinear: a Linear that stays split over a mesh axis under `partitioning='shard_map'`.

I input dims, O output dims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from praxis_lite.errors import ConfigError, ShardingError, did_you_mean
from praxis_lite.layers.linears import Linear, bias_weight
from praxis_lite.partitioning.explicit import (
  column_parallel_linear,
  row_parallel_linear,
)
from praxis_lite.weights import WeightHParams, WeightHParamsCollection

_STYLES = ('column', 'row')


class TensorParallelLinear(Linear):
  """y = x w + b, with w split over one mesh axis and never gathered (Shoeybi et al., 2019).

      column   w [I, O / n], b [O / n]   whole x -> this device's part of y
      row      w [I / n, O], b [O]       this device's part of x -> whole y

  Under `partitioning='shard_map'` the batch is not split over the axis, and the layer communicates as
  `partitioning/explicit.py` says. Elsewhere it is a `Linear` with that split, whose communication XLA
  places; so a column layer is to be followed, after what is elementwise, by a row layer.

  Attributes: those of `Linear`, and
    parallel: 'column' or 'row'.
    weight_split_dims_mapping: `wt`: (None, axis) of a column layer, (axis, None) of a row layer.
  """

  parallel: str = 'column'

  def setup(self) -> None:
    if self.parallel not in _STYLES:
      close = did_you_mean(str(self.parallel), _STYLES)
      raise ConfigError(f"{self.path_name}.parallel: expected 'column' or 'row', got {self.parallel!r}.{close}")
    wt = self.weight_split_dims_mapping.wt
    split, whole = (1, 0) if self.parallel == 'column' else (0, 1)
    if wt is not None and (len(wt) != 2 or wt[whole] is not None or not isinstance(wt[split], str)):
      right = "(None, 'mdl')" if self.parallel == 'column' else "('mdl', None)"
      raise ShardingError(
        f'{self.path_name}.weight_split_dims_mapping.wt: {wt!r} does not fit a {self.parallel} parallel layer, '
        f'which is split over one mesh axis, as in {right}'
      )
    self._axis: str | None = None if wt is None else wt[split]
    keep = frozenset({WeightHParamsCollection.KEEP_SPLIT}) if self._axis is not None else frozenset()
    shape = (self.input_dims, self.output_dims)
    self.create_variable('w', WeightHParams(shape, tensor_split_dims_mapping=wt, collections=keep))
    if self.use_bias:
      column = self.parallel == 'column' and wt is not None
      bias = bias_weight(self.output_dims, None if wt is None else wt[-1:])
      marks = bias.collections | keep if column else bias.collections
      self.create_variable('b', dataclasses.replace(bias, collections=marks))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., O] of x [..., I], or this device's parts of these; see the class."""
    if self._axis is None or self._axis not in self.surroundings.manual_axes:
      return super().__call__(x)
    fn: Callable[..., jax.Array] = column_parallel_linear if self.parallel == 'column' else row_parallel_linear
    return fn(x.astype(self.fprop_dtype), self.theta.w, self._axis, self.theta.b if self.use_bias else None)
