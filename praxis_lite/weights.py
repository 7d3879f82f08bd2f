"""Weight declarations and initializers.

A `WeightHParams` describes a weight before it exists: shape, dtype, initializer, and how it is split over the mesh.
`Layer.abstract_init()` returns a tree of them, from which specs, padding, optimizer masks, parameter tables and
checkpoints are derived.

Fans follow the convention of convolutions: the last axis is the output, the one before it the input, and all others the
receptive field that multiplies both.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from praxis_lite.errors import ConfigError

# One entry per dimension: a mesh or logical axis name, an index into mesh_axis_names, a tuple of those, None / -1 for a
# dimension that is not split, or PartitionSpec.UNCONSTRAINED for one that is left to the compiler.
SplitDimsMapping = Sequence[Any] | None


class DeclaredSplit(tuple[Any, ...]):
  """A split mapping that knows which config field each of its entries comes from. It equals the plain tuple.

  The mapping fields of a layer hold such tuples. A slice keeps the fields, and so does `pick`; a layer that derives the
  mapping of a bias, or of a projection back, from a field of its own has `explain` and error messages name that field.

  Attributes:
    sources: for each entry, the config field, or why there is nothing but None.
  """

  sources: tuple[str, ...]

  def __new__(cls, entries: Iterable[Any] = (), sources: Iterable[str] = ()) -> DeclaredSplit:
    self = super().__new__(cls, entries)
    self.sources = tuple(sources)
    return self

  @classmethod
  def of(cls, mapping: Sequence[Any] | PartitionSpec, source: str) -> DeclaredSplit:
    """Returns a mapping whose entries come from `source`; one that knows its sources already stays as it is."""
    return mapping if isinstance(mapping, cls) else cls(mapping, [source] * len(mapping))

  def __getitem__(self, index: Any) -> Any:
    return self.pick(*range(len(self))[index]) if isinstance(index, slice) else super().__getitem__(index)

  def pick(self, *dims: int | None) -> DeclaredSplit:
    """Returns the mapping of these dimensions, in this order; a None in it is a dimension that is not split."""
    entries = [None if dim is None else self[dim] for dim in dims]
    return DeclaredSplit(entries, [self.sources[dim or 0] for dim in dims])

  def followed_by(self, other: DeclaredSplit) -> DeclaredSplit:
    """Returns the mapping of the dimensions of this one and then of the other."""
    return DeclaredSplit((*self, *other), (*self.sources, *other.sources))


def declared(mapping: SplitDimsMapping, field: str) -> SplitDimsMapping:
  """Returns a mapping that knows it comes from `field`; None, and what is not a mapping, are returned as they are."""
  return DeclaredSplit.of(mapping, field) if isinstance(mapping, tuple | list | PartitionSpec) else mapping


class WeightHParamsCollection(enum.StrEnum):
  """Marks on a weight that the learner and the layers act on.

  KEEP_SPLIT: under `partitioning='shard_map'` the layer takes this device's part of the weight, not the whole.
  """

  NON_TRAINABLE = 'non_trainable'
  SKIP_REGULARIZATION = 'skip_regularization'
  KEEP_FLOAT32 = 'keep_float32'
  KEEP_SPLIT = 'keep_split'


@dataclasses.dataclass(frozen=True)
class WeightInit:
  """An initializer: a distribution and a scale.

  `stddev` (or the half-width of the uniform distribution) is `scale` times a factor that depends on the method:

    gaussian, uniform, truncated_gaussian          1
    *_sqrt_dim                                     1 / sqrt(first dimension)
    *_fan_in, *_fan_out, *_fan_avg                 1 / sqrt(fan)
    xavier                                         uniform in +-scale * sqrt(6 / (fan_in + fan_out))
    constant                                       every entry is `scale`

  Xavier is that of Glorot and Bengio, 2010. The truncated Gaussian is cut at two standard deviations and not rescaled.
  """

  method: str
  scale: float = 1.0

  def __post_init__(self) -> None:
    if self.method not in _METHODS:
      raise ConfigError(f"unknown initializer '{self.method}'; known: {', '.join(_METHODS)}")

  @classmethod
  def Gaussian(cls, scale: float = 1.0) -> WeightInit:
    return cls('gaussian', scale)

  @classmethod
  def Uniform(cls, scale: float = 1.0) -> WeightInit:
    return cls('uniform', scale)

  @classmethod
  def Xavier(cls, scale: float = 1.0) -> WeightInit:
    return cls('xavier', scale)

  @classmethod
  def TruncatedGaussian(cls, scale: float = 1.0) -> WeightInit:
    return cls('truncated_gaussian', scale)

  @classmethod
  def Constant(cls, scale: float = 0.0) -> WeightInit:
    return cls('constant', scale)

  @classmethod
  def GaussianSqrtDim(cls, scale: float = 1.0) -> WeightInit:
    return cls('gaussian_sqrt_dim', scale)

  @classmethod
  def GaussianFanIn(cls, scale: float = 1.0) -> WeightInit:
    return cls('gaussian_fan_in', scale)

  @classmethod
  def GaussianFanOut(cls, scale: float = 1.0) -> WeightInit:
    return cls('gaussian_fan_out', scale)

  @classmethod
  def GaussianFanAvg(cls, scale: float = 1.0) -> WeightInit:
    return cls('gaussian_fan_avg', scale)

  @classmethod
  def TruncatedGaussianFanIn(cls, scale: float = 1.0) -> WeightInit:
    return cls('truncated_gaussian_fan_in', scale)

  @classmethod
  def UniformSqrtDim(cls, scale: float = 1.0) -> WeightInit:
    return cls('uniform_sqrt_dim', scale)

  @classmethod
  def UniformFanIn(cls, scale: float = 1.0) -> WeightInit:
    return cls('uniform_fan_in', scale)


_DISTRIBUTIONS = ('gaussian', 'uniform', 'truncated_gaussian')
_SCALINGS = ('', '_sqrt_dim', '_fan_in', '_fan_out', '_fan_avg')
_METHODS = ('constant', 'xavier', *(d + s for d in _DISTRIBUTIONS for s in _SCALINGS))


@dataclasses.dataclass(frozen=True)
class WeightHParams:
  """The declaration of one weight.

  Attributes:
    shape: shape of the weight in one layer, without the repeat prefix.
    init: initializer; None: the layer's `params_init`.
    dtype: dtype it is stored in; None: the layer's `dtype`.
    tensor_split_dims_mapping: one entry per dimension of `shape`; None leaves the weight to the task's strategy, or
      replicates it.
    mapping_field: the config field to set the mapping by, where the mapping does not know it itself.
    repeat_prefix: leading dimensions added by layers that repeat the declaring one, outermost first.
    repeat_prefix_split_dims_mapping: one entry per dimension of `repeat_prefix`.
    fan_in_axes, fan_out_axes: which axes of `shape` count as input and output; None: the convention above.
    collections: marks from `WeightHParamsCollection`.
  """

  shape: tuple[int, ...]
  init: WeightInit | None = None
  dtype: DTypeLike | None = None
  tensor_split_dims_mapping: SplitDimsMapping = None
  mapping_field: str = dataclasses.field(default='tensor_split_dims_mapping', compare=False)
  repeat_prefix: tuple[int, ...] = ()
  repeat_prefix_split_dims_mapping: DeclaredSplit = dataclasses.field(default_factory=DeclaredSplit)
  fan_in_axes: tuple[int, ...] | None = None
  fan_out_axes: tuple[int, ...] | None = None
  collections: frozenset[WeightHParamsCollection] = frozenset()

  def __post_init__(self) -> None:
    object.__setattr__(self, 'shape', tuple(self.shape))
    object.__setattr__(self, 'collections', frozenset(self.collections))
    prefix = DeclaredSplit.of(self.repeat_prefix_split_dims_mapping, 'the split of the stack')
    object.__setattr__(self, 'repeat_prefix_split_dims_mapping', prefix)

  @property
  def full_shape(self) -> tuple[int, ...]:
    """Shape of the stored array: the repeat prefix, then `shape`."""
    return (*self.repeat_prefix, *self.shape)

  @property
  def full_split_dims_mapping(self) -> DeclaredSplit:
    """Mapping of the stored array, of the rank of `full_shape`."""
    own = self.tensor_split_dims_mapping
    if own is None:
      mapping = DeclaredSplit.of((None,) * len(self.shape), f'{self.mapping_field} is not set')
    else:
      mapping = DeclaredSplit.of(own, self.mapping_field)
    return self.repeat_prefix_split_dims_mapping.followed_by(mapping)

  @property
  def trainable(self) -> bool:
    return WeightHParamsCollection.NON_TRAINABLE not in self.collections

  def repeated(
    self, times: int, split: str | int | Sequence[str | int] | None = None, field: str = 'the split of the stack'
  ) -> WeightHParams:
    """Returns the declaration of `times` such weights stacked along a new leading dimension.

    Args:
      times: size of the new dimension.
      split: how it is split: an entry of a split mapping.
      field: the config field that says so.
    """
    stack = DeclaredSplit.of((split,), field if split is not None else f'{field} is not set')
    return dataclasses.replace(
      self,
      repeat_prefix=(times, *self.repeat_prefix),
      repeat_prefix_split_dims_mapping=stack.followed_by(self.repeat_prefix_split_dims_mapping),
    )

  def as_struct(self) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the stored array."""
    return jax.ShapeDtypeStruct(self.full_shape, jnp.dtype(self.dtype or jnp.float32))


def get_fan_in_fan_out(
  shape: Sequence[int],
  fan_in_axes: Sequence[int] | None = None,
  fan_out_axes: Sequence[int] | None = None,
) -> tuple[int | None, int | None]:
  """Returns (fan in, fan out) of a weight of `shape`; (None, None) for a scalar.

  With axes given, each fan is the product of its axes. Without, axis -2 is the input, axis -1 the output, and the
  others multiply both; a vector is its own fan in and fan out.
  """
  if not shape:
    return None, None
  if fan_in_axes is not None and fan_out_axes is not None:
    return math.prod(shape[a] for a in fan_in_axes), math.prod(shape[a] for a in fan_out_axes)
  if len(shape) == 1:
    return shape[0], shape[0]
  receptive_field = math.prod(shape[:-2])
  return receptive_field * shape[-2], receptive_field * shape[-1]


def init_weight(weight: WeightHParams, key: jax.Array) -> jax.Array:
  """Returns a first value of `weight`, of shape `full_shape`; repeated layers draw independently of each other.

  Args:
    weight: its `init` and `dtype` must be filled in.
    key: PRNG key of this weight.
  """
  if not weight.repeat_prefix:
    return _init_one(weight, key)
  keys = jax.random.split(key, math.prod(weight.repeat_prefix))
  stacked = jax.vmap(lambda k: _init_one(weight, k))(keys)
  return stacked.reshape(weight.full_shape)


def _init_one(weight: WeightHParams, key: jax.Array) -> jax.Array:
  if weight.init is None:
    raise ConfigError(
      'a weight without an initializer cannot be created; set WeightHParams.init or the layer params_init'
    )
  dtype, shape, scale = jnp.dtype(weight.dtype or jnp.float32), weight.shape, weight.init.scale
  method = weight.init.method
  if method == 'constant':
    return jnp.full(shape, scale, dtype)
  fan_in, fan_out = get_fan_in_fan_out(shape, weight.fan_in_axes, weight.fan_out_axes)
  draw_dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32
  if method == 'xavier':
    limit = scale * math.sqrt(6.0 / ((fan_in or 1) + (fan_out or 1)))
    return jax.random.uniform(key, shape, draw_dtype, -limit, limit).astype(dtype)
  distribution = next(d for d in sorted(_DISTRIBUTIONS, key=len, reverse=True) if method.startswith(d))
  scale *= _factor(method.removeprefix(distribution), shape, fan_in, fan_out)
  match distribution:
    case 'gaussian':
      value = scale * jax.random.normal(key, shape, draw_dtype)
    case 'uniform':
      value = jax.random.uniform(key, shape, draw_dtype, -scale, scale)
    case _:
      value = scale * jax.random.truncated_normal(key, -2.0, 2.0, shape, draw_dtype)
  return value.astype(dtype)


def _factor(scaling: str, shape: tuple[int, ...], fan_in: int | None, fan_out: int | None) -> float:
  match scaling:
    case '':
      denominator = 1.0
    case '_sqrt_dim':
      denominator = shape[0] if shape else 1.0
    case '_fan_in':
      denominator = fan_in or 1.0
    case '_fan_out':
      denominator = fan_out or 1.0
    case _:
      denominator = ((fan_in or 1.0) + (fan_out or 1.0)) / 2
  return 1.0 / math.sqrt(max(denominator, 1.0))
