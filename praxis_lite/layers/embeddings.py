"""Embedding: a table of one vector per id.

V number of ids, D dims of a vector.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, template
from praxis_lite.common.errors import check_choice
from praxis_lite.layers.base import Layer, WeightSplit
from praxis_lite.layers.base.facts import TokenFlops
from praxis_lite.sharding.weights import SplitDimsMapping, WeightHParams

LOOKUP_STYLES = ('gather', 'matmul')


class Embedding(Layer):
  """y = w[ids], optionally times sqrt(D).

  Attributes:
    num_classes: V, such as the size of a vocabulary.
    input_dims: D, the model dims.
    scale_sqrt_depth: multiply by sqrt(D) (Vaswani et al., 2017).
    lookup_style: 'gather', or 'matmul' with one-hot ids: more work, but no scatter in the gradient.
    weight_split_dims_mapping: `wt`, [V, D], of `w`.
  """

  num_classes: int = REQUIRED
  input_dims: int = REQUIRED
  scale_sqrt_depth: bool = False
  lookup_style: str = 'gather'
  weight_split_dims_mapping: Config = template(WeightSplit)

  def setup(self) -> None:
    check_choice(f'{self.path_name}.lookup_style', self.lookup_style, LOOKUP_STYLES)
    wt = self.weight_split_dims_mapping.wt
    self.create_variable('w', embedding_weight(self.num_classes, self.input_dims, wt))

  def __call__(self, ids: jax.Array) -> jax.Array:
    """Returns vectors [..., D] for integer ids [...]; NaN for an id that is not in [0, V)."""
    return embed(self, ids, 'out', self.lookup_style, self.input_dims**0.5 if self.scale_sqrt_depth else None)

  def token_flops(self, length: int) -> TokenFlops:
    return TokenFlops()  # A lookup multiplies nothing.


def embedding_weight(num_classes: int, dims: int, split: SplitDimsMapping = None) -> WeightHParams:
  """Returns the declaration of a table [V, D]; its fan in is D, so that vectors have a norm of about 1."""
  return WeightHParams((num_classes, dims), tensor_split_dims_mapping=split, fan_in_axes=(1,), fan_out_axes=(0,))


def embed(layer: Layer, ids: jax.Array, field: str, style: str, scale: float | None) -> jax.Array:
  """Returns vectors [..., D] of ids [...] from the table `w`, [V, D], of a layer.

  Args:
    layer: the layer, in a call.
    ids: integers.
    field: the activation mapping of the vectors. If it does not split D, the table is gathered along D before the
      lookup. Otherwise the compiler would gather the vectors of the whole batch if a mesh axis splits both D of the
      table and the batch.
    style: one of `LOOKUP_STYLES`.
    scale: factor of the vectors; None means 1.
  """
  table_VD = layer.theta.w
  wt, out = layer.weight_split_dims_mapping.wt, getattr(layer.activation_split_dims_mapping, field)
  if wt is not None and out is not None and out[-1] is None:
    table_VD = layer.shard(table_VD, wt.pick(0, None))
  y = lookup_rows(table_VD, ids, style)
  return layer.shard(y if scale is None else y * scale, field)


def lookup_rows(table_VD: jax.Array, ids: jax.Array, style: str = 'gather') -> jax.Array:
  """Returns rows [..., D] of a table; NaN for ids out of range."""
  if style == 'matmul':
    in_range = (ids >= 0) & (ids < table_VD.shape[0])
    one_hot = jax.nn.one_hot(ids, table_VD.shape[0], dtype=table_VD.dtype)
    # The highest precision copies rows exactly; the default may round them to bfloat16.
    rows = jnp.matmul(one_hot, table_VD, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(in_range[..., None], rows, jnp.nan)
  ids = jnp.where(ids < 0, table_VD.shape[0], ids)  # Without this, -1 would select the last row.
  return jnp.take(table_VD, ids, axis=0, mode='fill', fill_value=jnp.nan)
