"""Embedding: a table of one vector per id.

V number of ids, D dims of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.common.config import REQUIRED, Config, template
from praxis_lite.common.errors import check_choice
from praxis_lite.common.figures import format_bytes
from praxis_lite.layers.base import Layer, WeightSplit
from praxis_lite.layers.base.facts import Exchange, TokenFlops
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.sharding.constraints import unmapped_axes, with_sharding_constraint
from praxis_lite.sharding.guards.lookups import are_few
from praxis_lite.sharding.specs import axes_to_entry, spec_axes
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
    return embed(self, ids, 'out', self.lookup_style, sqrt_depth(self) if self.scale_sqrt_depth else None)

  def growth_multipliers(self) -> dict[str, float]:
    growth = self.growth_of('input_dims')
    return {} if growth == 1 or not self.scale_sqrt_depth else {'embeddings': growth**-0.5}

  def token_flops(self, length: int) -> TokenFlops:
    return TokenFlops()  # A lookup multiplies nothing.


def embedding_weight(num_classes: int, dims: int, split: SplitDimsMapping = None) -> WeightHParams:
  """Returns the declaration of a table [V, D]; its fan in is D, so that vectors have a norm of about 1."""
  return WeightHParams((num_classes, dims), tensor_split_dims_mapping=split, fan_in_axes=(1,), fan_out_axes=(0,))


def sqrt_depth(layer: Layer) -> float:
  """Returns sqrt(D). If there is a smaller model, its D is used.

  With the D of the model itself, the embeddings would grow with its width.
  """
  dims: int = layer.input_dims  # type: ignore[attr-defined]
  return (dims / layer.growth_of('input_dims')) ** 0.5


def embed(layer: Layer, ids: jax.Array, field: str, style: str, scale: float | None) -> jax.Array:
  """Returns vectors [..., D] of ids [...] from the table `w`, [V, D], of a layer.

  If the table is split along D and the vectors are not, a device needs dims of other devices. Either the table is
  gathered along D before the lookup, or devices exchange vectors after it (`LookupExchange`), whichever sends less.
  The compiler would gather the vectors of the whole batch if a mesh axis splits both D of the table and the batch.
  `field` names the activation mapping of the vectors. If `scale` is not None, the vectors are multiplied by it.
  """
  wt, out = layer.weight_split_dims_mapping.wt, getattr(layer.activation_split_dims_mapping, field)

  def scale_vectors(y: jax.Array) -> jax.Array:
    return y if scale is None else y * scale

  if wt is None or out is None or out[-1] is not None:
    return layer.shard(scale_vectors(lookup_rows(layer.theta.w, ids, style)), field)
  exchange = None if style == 'matmul' else _lookup_exchange(layer, ids, field)
  if exchange is None or not exchange.is_less:
    table_VD = layer.shard(layer.theta.w, wt.pick(0, None), '' if exchange is None else f'gathered {exchange.remark}')
    return layer.shard(scale_vectors(lookup_rows(table_VD, ids, style)), field)
  # This table is not communicated. So it may be in float32, and then the gradients of all ids are summed in float32.
  table_VD = layer.shard(to_sum_dtype(layer._read_weight('w', None)), wt)
  # Without this constraint, XLA might gather the arrays from which the ids are computed.
  own_ids = with_sharding_constraint(ids, exchange.of_own_ids)
  y = lookup_rows(table_VD, with_sharding_constraint(own_ids, exchange.of_ids)).astype(layer.fprop_dtype)
  y = with_sharding_constraint(y, exchange.of_vectors)
  sent = Exchange('exchange of looked-up vectors', _TABLE, exchange.axes, by_compiler=True, kinds=('all-to-all',))
  return layer.shard(scale_vectors(y), field, f'exchanged after the lookup {exchange.remark}', sent)


_TABLE = 'weight_split_dims_mapping.wt'  # The field that splits a table.


class LookupExchange(NamedTuple):
  """How devices exchange vectors of ids instead of gathering the table.

  Some axes split D of the table, and also the ids. Along these axes, each device gathers the ids of all devices, looks
  up its own dims of their vectors, and sends to each device the vectors of its ids: one all-to-all. The gradients go
  back in the same way, and are added to the table in place.
  """

  axes: tuple[str, ...]  # The axes that split D and the ids.
  of_own_ids: PartitionSpec  # Spec of the ids [...], split like the vectors after the exchange.
  of_ids: PartitionSpec  # Spec of the ids in the lookup.
  of_vectors: PartitionSpec  # Spec of the vectors [..., D] in the lookup.
  is_less: bool  # Whether the exchange divides evenly, and sends fewer bytes in a pass than a gather of the table.
  remark: str  # Text with the axes, and the bytes of the exchange and of the gather.


def _lookup_exchange(layer: Layer, ids: jax.Array, field: str) -> LookupExchange | None:
  """Returns how devices exchange vectors; None if they do not.

  They do so only if one dimension of the ids is split over mesh axes that end with the axes that split D.
  """
  out, wt = getattr(layer.activation_split_dims_mapping, field), layer.weight_split_dims_mapping.wt
  vectors = layer._resolve(out, f'{layer.path_name}.activation_split_dims_mapping.{field}', rank=ids.ndim + 1)
  table = layer._resolve(wt, f'{layer.path_name}.{_TABLE}', rank=2)
  if vectors is None or table is None:
    return None
  sizes, (V, D) = unmapped_axes(), layer._weights['w'].shape

  def axes_of(spec: PartitionSpec) -> list[tuple[str, ...]]:
    return [tuple(axis for axis in spec_axes(entry) if axis in sizes) for entry in spec]

  def parts(axes: Sequence[str]) -> int:
    return math.prod(sizes[axis] for axis in axes)

  (of_classes, axes), (*of_ids, _) = axes_of(table.spec), axes_of(vectors.spec)
  dim = next((i for i, own in enumerate(of_ids) if axes and own[-len(axes) :] == axes), None)
  if dim is None or {*of_classes} & {axis for own in of_ids for axis in own}:
    return None
  own_ids = math.prod(-(-size // parts(own)) for size, own in zip(ids.shape, of_ids))
  itemsize, away = jnp.dtype(layer.fprop_dtype).itemsize, 1 - 1 / parts(axes)
  exchanged = away * own_ids * (D * itemsize + parts(axes) * ids.dtype.itemsize)
  gathered = away * -(-V // parts(of_classes)) * D * itemsize
  is_even = not (D % parts(axes) or ids.shape[dim] % parts(of_ids[dim]))
  both = f'{format_bytes(exchanged)} of vectors and ids, or {format_bytes(gathered)} of the table'
  remark = f'over {"+".join(axes)}, {both}{"" if is_even else "; the vectors are not split evenly"}'
  of_ids[dim] = of_ids[dim][: -len(axes)]
  if of_classes and any(of_ids) and are_few(ids.size, V):
    return None  # With so few ids, a guard copies all of them to each device; see `guard_lookup`.
  entries = [axes_to_entry(own) for own in of_ids]
  of_vectors = PartitionSpec(*entries, axes_to_entry(axes))
  is_less, rows = is_even and exchanged < gathered, PartitionSpec(*vectors.spec[:-1])
  return LookupExchange(axes, rows, PartitionSpec(*entries), of_vectors, is_less, remark)


def lookup_rows(table_VD: jax.Array, ids: jax.Array, style: str = 'gather') -> jax.Array:
  """Returns rows [..., D] of a table; NaN for ids out of range."""
  if style == 'matmul':
    in_range = (ids >= 0) & (ids < table_VD.shape[0])
    one_hot = jax.nn.one_hot(ids, table_VD.shape[0], dtype=table_VD.dtype)
    # The highest precision copies rows exactly; the default may round them to bfloat16.
    rows = jnp.matmul(one_hot, table_VD, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(in_range[..., None], rows, jnp.nan)
  return jnp.asarray(table_VD).at[ids].get(mode='fill', fill_value=jnp.nan, wrap_negative_indices=False)
