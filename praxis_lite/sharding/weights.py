"""Weight declarations and initializers.

A `WeightHParams` describes a weight before it exists: shape, dtype, initializer, and how it is split over the mesh.
`Layer.abstract_init()` returns a tree of them, from which specs, padding, optimizer masks, parameter tables and
checkpoints are derived.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from praxis_lite.common.errors import ConfigError, RangeError
from praxis_lite.common.jax_internals.flags import quick_options
from praxis_lite.common.trees import Path

# One entry per dimension: a mesh or logical axis name, an index into mesh_axis_names, a tuple of those, None or -1 for
# a dimension that is not split, or PartitionSpec.UNCONSTRAINED for one that is left to the compiler.
SplitDimsMapping = Sequence[Any] | None
# With fewer parameters, a CPU takes longer to optimize the program that draws them than to run the program without
# optimizations.
FEW_TO_DRAW = 1 << 23


class DeclaredSplit(tuple[Any, ...]):
  """A split mapping that knows which config field each of its entries comes from. It compares equal to the plain tuple.

  The mapping fields of a layer hold such tuples, and slices and `pick` keep the sources. So if a layer derives the
  mapping of a bias, or of an output projection, from one of its fields, `explain` and error messages name that field.
  """

  sources: tuple[str, ...]  # For each entry, the config field, or the reason why the entry is None.

  def __new__(cls, entries: Iterable[Any] = (), sources: Iterable[str] = ()) -> DeclaredSplit:
    self = super().__new__(cls, entries)
    self.sources = tuple(sources)
    return self

  @classmethod
  def make(cls, mapping: Sequence[Any] | PartitionSpec, source: str) -> DeclaredSplit:
    """Returns a mapping whose entries come from `source`; a `DeclaredSplit` is returned unchanged."""
    return mapping if isinstance(mapping, cls) else cls(mapping, [source] * len(mapping))

  def __getitem__(self, index: Any) -> Any:
    return self.pick(*range(len(self))[index]) if isinstance(index, slice) else super().__getitem__(index)

  def pick(self, *dims: int | None) -> DeclaredSplit:
    """Returns a mapping with the entries at the indices `dims`; for a dim None, the entry says 'not split'."""
    entries = [None if dim is None else self[dim] for dim in dims]
    return DeclaredSplit(entries, [self.sources[dim or 0] for dim in dims])

  def followed_by(self, other: DeclaredSplit) -> DeclaredSplit:
    """Returns a mapping with the entries of this one, and then those of `other`."""
    return DeclaredSplit((*self, *other), (*self.sources, *other.sources))


def to_declared_split(mapping: SplitDimsMapping, field: str) -> SplitDimsMapping:
  """Returns a mapping that knows it comes from `field`; returns None and other values unchanged."""
  return DeclaredSplit.make(mapping, field) if isinstance(mapping, tuple | list | PartitionSpec) else mapping


class WeightHParamsCollection(enum.StrEnum):
  """Marks on a weight that the learner and the layers act on.

  Attributes:
    NON_TRAINABLE: no gradient is taken; the layer updates it itself. `create_variable(..., trainable=False)` sets it.
    CONSTANT: with NON_TRAINABLE: the layer does not update it either.
    SKIP_REGULARIZATION: no weight decay, neither by the learner nor by its optimizer.
    KEEP_FLOAT32: `theta` does not cast it to `fprop_dtype`.
    KEEP_SPLIT: under `partitioning='shard_map'` the layer gets this device's part of the weight, not the whole.
  """

  NON_TRAINABLE = 'non_trainable'
  CONSTANT = 'constant'
  SKIP_REGULARIZATION = 'skip_regularization'
  KEEP_FLOAT32 = 'keep_float32'
  KEEP_SPLIT = 'keep_split'


# Marks of weights such as rates, which are neither rounded nor decayed.
NO_DECAY_FLOAT32 = frozenset({WeightHParamsCollection.SKIP_REGULARIZATION, WeightHParamsCollection.KEEP_FLOAT32})


_DISTRIBUTIONS = ('gaussian', 'uniform', 'truncated_gaussian')
_SCALINGS = ('', '_sqrt_dim', '_fan_in', '_fan_out', '_fan_avg')
# For each method: its distribution, and its scaling.
_METHODS = {
  'constant': ('constant', ''),
  'xavier': ('uniform', '_xavier'),
  'geo_mean_xavier': ('uniform', '_geo_mean_xavier'),
  'uniform_unit_scaling': ('uniform', '_unit_scaling'),
  'scaled_delta_orthogonal': ('delta_orthogonal', ''),
  **{distribution + scaling: (distribution, scaling) for distribution in _DISTRIBUTIONS for scaling in _SCALINGS},
}


def _constructor(name: str, default: float = 1.0) -> classmethod[WeightInit, ..., WeightInit]:
  """Returns the class method `name`(scale) of `WeightInit`, as in `WeightInit.GaussianFanIn(0.5)`."""
  method = re.sub('(?<=[a-z])(?=[A-Z])', '_', name).lower()

  def construct(cls: type[WeightInit], scale: float = default) -> WeightInit:
    return cls(method, scale)

  construct.__name__, construct.__qualname__ = name, f'WeightInit.{name}'
  return classmethod(construct)


@dataclasses.dataclass(frozen=True)
class WeightInit:
  """An initializer: a distribution and a scale.

  `stddev` (or the half-width of the uniform distribution) is `scale` times a factor that depends on the method:

    gaussian, uniform, truncated_gaussian          1
    *_sqrt_dim                                     1 / sqrt(first dimension)
    *_fan_in, *_fan_out, *_fan_avg                 1 / sqrt(fan)
    xavier                                         uniform in +-scale * sqrt(6 / (fan_in + fan_out))
    geo_mean_xavier                                uniform in +-scale * sqrt(3 / sqrt(fan_in * fan_out))
    uniform_unit_scaling                           uniform in +-scale * sqrt(3 / product of all dimensions but the last)
    constant                                       every entry is `scale`

  Xavier follows Glorot and Bengio, 2010. The truncated Gaussian is cut at two standard deviations and not rescaled.

  'scaled_delta_orthogonal' makes [..., I, O] from `scale` times a matrix [I, O]. Its rows are orthonormal if I <= O;
  otherwise its columns are orthonormal, times sqrt(I / O). If there are more dimensions, as in a convolution, the
  matrix is at their middle, and all other entries are 0 (Xiao et al., 2018). A vector is Gaussian.
  """

  method: str
  scale: float = 1.0

  def __post_init__(self) -> None:
    if self.method not in _METHODS:
      raise ConfigError(f"unknown initializer '{self.method}'; known: {', '.join(_METHODS)}")

  Gaussian = _constructor('Gaussian')
  Uniform = _constructor('Uniform')
  Xavier = _constructor('Xavier')
  GeoMeanXavier = _constructor('GeoMeanXavier')
  TruncatedGaussian = _constructor('TruncatedGaussian')
  Constant = _constructor('Constant', default=0.0)
  GaussianSqrtDim = _constructor('GaussianSqrtDim')
  GaussianFanIn = _constructor('GaussianFanIn')
  GaussianFanOut = _constructor('GaussianFanOut')
  GaussianFanAvg = _constructor('GaussianFanAvg')
  TruncatedGaussianSqrtDim = _constructor('TruncatedGaussianSqrtDim')
  TruncatedGaussianFanIn = _constructor('TruncatedGaussianFanIn')
  TruncatedGaussianFanOut = _constructor('TruncatedGaussianFanOut')
  UniformSqrtDim = _constructor('UniformSqrtDim')
  UniformFanIn = _constructor('UniformFanIn')
  UniformUnitScaling = _constructor('UniformUnitScaling')
  ScaledDeltaOrthogonal = _constructor('ScaledDeltaOrthogonal')

  @classmethod
  def XavierWithFixupParams(
    cls, scale: float = 1.0, depth: float = 1.0, layers_per_residual_block: float = 1.0
  ) -> WeightInit:
    """Returns Xavier for residual nets without norms, with the scale of a single block made smaller by the depth.

    Its scale is scale * depth^(-1 / (2 * layers_per_residual_block)).

    Args:
      scale: scale of a single block.
      depth: number of residual blocks, L of Fixup (Zhang et al., 2019).
      layers_per_residual_block: number of layers in a block. For the exponent of Fixup, -1 / (2 m - 2) for blocks of
        m layers, pass m - 1.
    """
    return cls('xavier', scale * depth ** (-1 / (2 * layers_per_residual_block)))


@dataclasses.dataclass(frozen=True)
class JointInit:
  """Initial values that one function draws for all weights of a layer, such as a module of another library."""

  below: Path  # The path of this weight below the layer.
  # (key) -> the initial values of the layer's weights, by path below the layer. The key is the one given to `init`,
  # folded with the path of the layer.
  draw: Callable[[jax.Array], Mapping[Path, jax.Array]] = dataclasses.field(compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Growth:
  """How a weight differs from its counterpart in the smaller model whose hyperparameters are used; see `growth.py`."""

  base_shape: tuple[int, ...]  # The shape of the weight in one layer of the smaller model.
  # How many times as many layers the stacks around the weight have as those in the smaller model.
  depth: float = 1.0
  depth_exponent: float = 0.5  # The branches of residual layers are multiplied by depth^-depth_exponent.


@dataclasses.dataclass(frozen=True)
class WeightHParams:
  """The declaration of one weight.

  Attributes:
    shape: shape of the weight in one layer, without the repeat prefix.
    init: initializer; None uses the layer's `params_init`.
    dtype: storage dtype; None uses the layer's `dtype`.
    tensor_split_dims_mapping: one entry per dimension of `shape`; None leaves the weight to the task's strategy, or
      replicates it.
    mapping_field: the config field that sets the mapping, if the mapping does not record it.
    repeat_prefix: leading dimensions added by layers that repeat the declaring one, outermost first.
    repeat_prefix_split_dims_mapping: one entry per dimension of `repeat_prefix`.
    fan_in_axes, fan_out_axes: which axes of `shape` count as input and output; see `get_fan_in_fan_out` for None.
    collections: marks from `WeightHParamsCollection`.
    active_share: the share of the weight that one token uses, less than 1 if it uses only some of the experts.
    growth: how it differs from the weight of a smaller model; None without a smaller model. Learners read it.
    stands_for: the number of parameters that it counts as in one layer; None means its number of entries. A weight in
      few bits counts like the original weight, and its scales count 0.
  """

  shape: tuple[int, ...]
  init: WeightInit | JointInit | None = None
  dtype: DTypeLike | None = None
  tensor_split_dims_mapping: SplitDimsMapping = None
  mapping_field: str = dataclasses.field(default='tensor_split_dims_mapping', compare=False)
  repeat_prefix: tuple[int, ...] = ()
  repeat_prefix_split_dims_mapping: DeclaredSplit = dataclasses.field(default_factory=DeclaredSplit)
  fan_in_axes: tuple[int, ...] | None = None
  fan_out_axes: tuple[int, ...] | None = None
  collections: frozenset[WeightHParamsCollection] = frozenset()
  active_share: float = 1.0
  growth: Growth | None = None
  stands_for: int | None = None

  def __post_init__(self) -> None:
    if not isinstance(self.shape, Iterable) or isinstance(self.shape, str):
      raise ConfigError(f'WeightHParams: the shape is a tuple, such as (6,) or (4, 6), not {self.shape!r}')
    if (self.fan_in_axes is None) != (self.fan_out_axes is None):
      raise ConfigError(
        f'WeightHParams: fan_in_axes={self.fan_in_axes} and fan_out_axes={self.fan_out_axes}: give both, or neither'
      )
    object.__setattr__(self, 'shape', tuple(self.shape))
    object.__setattr__(self, 'collections', frozenset(self.collections))
    prefix = DeclaredSplit.make(self.repeat_prefix_split_dims_mapping, 'the split of the stack')
    object.__setattr__(self, 'repeat_prefix_split_dims_mapping', prefix)

  @property
  def full_shape(self) -> tuple[int, ...]:
    """Shape of the stored array: the repeat prefix, then `shape`."""
    return (*self.repeat_prefix, *self.shape)

  @property
  def full_split_dims_mapping(self) -> DeclaredSplit:
    """Mapping of the stored array, one entry per dimension of `full_shape`."""
    mapping, source = self.tensor_split_dims_mapping, self.mapping_field
    if mapping is None:
      mapping, source = (None,) * len(self.shape), f'{source} is not set'
    return self.repeat_prefix_split_dims_mapping.followed_by(DeclaredSplit.make(mapping, source))

  @property
  def num_params(self) -> int:
    """Number of parameters, in all layers."""
    return math.prod(self.repeat_prefix) * (math.prod(self.shape) if self.stands_for is None else self.stands_for)

  @property
  def num_active(self) -> int:
    """Number of parameters that one token uses."""
    return round(self.num_params * self.active_share)

  @property
  def trainable(self) -> bool:
    return WeightHParamsCollection.NON_TRAINABLE not in self.collections

  @property
  def is_updated_by_layer(self) -> bool:
    """Whether the weight's layer, and not the optimizer, computes new values in training."""
    return not self.trainable and WeightHParamsCollection.CONSTANT not in self.collections

  def repeat(
    self, times: int, split: str | int | Sequence[str | int] | None = None, field: str = 'the split of the stack'
  ) -> WeightHParams:
    """Returns the declaration of `times` such weights, stacked along a new first dimension.

    `split` is the entry of a split mapping for that dimension, from the config field `field`.
    """
    stack = DeclaredSplit.make((split,), field if split is not None else f'{field} is not set')
    return dataclasses.replace(
      self,
      repeat_prefix=(times, *self.repeat_prefix),
      repeat_prefix_split_dims_mapping=stack.followed_by(self.repeat_prefix_split_dims_mapping),
    )

  def as_struct(self) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the stored array."""
    return jax.ShapeDtypeStruct(self.full_shape, jnp.dtype(self.dtype or jnp.float32))


def check_weight(weight: WeightHParams, where: str) -> None:
  """Raises ConfigError, with `where` in front, if a layer cannot declare this weight."""
  if not isinstance(weight, WeightHParams):
    raise ConfigError(f'{where}: create_variable takes WeightHParams(shape, ...), got {type(weight).__name__}')
  for size in weight.shape:
    if not isinstance(size, int | np.integer) or isinstance(size, bool):
      raise ConfigError(f'{where}: shape {weight.shape}; every dimension must be an integer, not {size!r}')
    if size < 1:
      text = f'{where}: shape {weight.shape}; every dimension must be at least 1'
      raise RangeError(text, size, 'at least 1', weight=f'{where} of shape {weight.shape}')
  if not isinstance(weight.init, WeightInit | JointInit | None):
    raise ConfigError(f'{where}: init is a WeightInit, such as WeightInit.Gaussian(0.02), not {weight.init!r}')
  if weight.dtype is not None and not is_dtype(weight.dtype):
    raise ConfigError(f'{where}: expected the name of a dtype, such as float32 or int32, got {weight.dtype!r}')


def is_dtype(value: Any, kind: type[np.generic] | None = None) -> bool:
  """Whether `value` is a dtype or the name of one, and a subtype of `kind` if that is given."""
  try:
    dtype = jnp.dtype(value)
  except TypeError:
    return False
  return kind is None or jnp.issubdtype(dtype, kind)


def get_fan_in_fan_out(
  shape: Sequence[int], fan_in_axes: Sequence[int] | None = None, fan_out_axes: Sequence[int] | None = None
) -> tuple[int | None, int | None]:
  """Returns (fan in, fan out) of a weight of `shape`; (None, None) for a scalar.

  If `fan_in_axes` and `fan_out_axes` are both given, a fan is the product of the sizes of its axes. Otherwise, as in
  convolutions, axis -2 is the input, axis -1 the output, and the other axes are the receptive field, whose size
  multiplies both fans. The size of a vector is its fan in and its fan out.
  """
  if not shape:
    return None, None
  if fan_in_axes is not None and fan_out_axes is not None:
    return math.prod(shape[a] for a in fan_in_axes), math.prod(shape[a] for a in fan_out_axes)
  if len(shape) == 1:
    return shape[0], shape[0]
  receptive_field = math.prod(shape[:-2])
  return receptive_field * shape[-2], receptive_field * shape[-1]


def init_weights(
  weights: Mapping[Path, WeightHParams], fold_in_paths: Callable[[list[Path]], Mapping[Path, jax.Array]]
) -> dict[Path, jax.Array]:
  """Returns the initial values of `weights` by path; a `JointInit` draws once for all weights of its layer.

  `fold_in_paths` returns a key for each path.
  """
  joint = {path: path[: -len(w.init.below)] for path, w in weights.items() if isinstance(w.init, JointInit)}
  keys = fold_in_paths(list(dict.fromkeys(joint.get(path, path) for path in weights)))
  drawn: dict[Path, Mapping[Path, jax.Array]] = {}
  values = {}
  for path, weight in weights.items():
    if not isinstance(weight.init, JointInit):
      values[path] = init_weight(weight, keys[path])
      continue
    layer = joint[path]
    if layer not in drawn:
      drawn[layer] = _draw_repeated(weight.init.draw, weight.repeat_prefix, keys[layer])
    values[path] = drawn[layer][weight.init.below].astype(weight.as_struct().dtype)
  return values


def _draw_repeated(
  draw: Callable[[jax.Array], Mapping[Path, jax.Array]], prefix: tuple[int, ...], key: jax.Array
) -> Mapping[Path, jax.Array]:
  if not prefix:
    return draw(key)
  values = jax.vmap(lambda k: dict(draw(k)))(jax.random.split(key, math.prod(prefix)))
  return {path: value.reshape(*prefix, *value.shape[1:]) for path, value in values.items()}


def init_weight(weight: WeightHParams, key: jax.Array) -> jax.Array:
  """Returns the initial value of `weight`, of shape `full_shape`; repeated layers are drawn independently."""
  if weight.init is None:
    raise ConfigError(
      'a weight without an initializer cannot be created; set WeightHParams.init or the layer params_init'
    )
  keys = jax.random.split(key, math.prod(weight.repeat_prefix)) if weight.repeat_prefix else key
  each = jax.vmap if weight.repeat_prefix else lambda draw: draw
  dtype, shape = weight.as_struct().dtype, weight.shape
  if isinstance(init := weight.init, JointInit):
    return each(lambda k: init.draw(k)[init.below].astype(dtype))(keys).reshape(weight.full_shape)
  distribution, scaling = _METHODS[init.method]
  if distribution == 'constant':
    return jnp.full(weight.full_shape, init.scale, dtype)
  draw_dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.dtype(jnp.float32)
  if distribution == 'delta_orthogonal' and len(shape) > 1:
    values = each(lambda k: _delta_orthogonal(k, shape, init.scale, draw_dtype))(keys)
  else:
    scale, draw = init.scale * _scale_of_shape(scaling, weight), _draw
    keys = jnp.asarray(keys)  # They may be an array of NumPy.
    is_traced = isinstance(keys, jax.core.Tracer)
    if not is_traced and len(devices := keys.devices()) == 1 and math.prod(weight.full_shape) < FEW_TO_DRAW:
      draw = _quick_draw(next(iter(devices)).platform)
    limits = (-scale, scale) if distribution == 'uniform' else (-2.0, 2.0)
    values = draw(keys, limits, distribution, shape, draw_dtype, bool(weight.repeat_prefix))
    values = values if distribution == 'uniform' else scale * values
  return values.astype(dtype).reshape(weight.full_shape)


def _draw(
  keys: jax.Array,
  limits: tuple[float, float],
  distribution: str,
  shape: tuple[int, ...],
  dtype: np.dtype,
  is_repeated: bool,
) -> jax.Array:
  """Returns values of `shape`, standard normal or within `limits`; if `is_repeated`, [R, *shape] for R keys."""

  def draw(key: jax.Array) -> jax.Array:
    if distribution == 'uniform':
      return jax.random.uniform(key, shape, dtype, *limits)
    if distribution == 'truncated_gaussian':
      return jax.random.truncated_normal(key, *limits, shape, dtype)
    return jax.random.normal(key, shape, dtype)

  return jax.vmap(draw)(keys) if is_repeated else draw(keys)


@functools.cache
def _quick_draw(platform: str) -> Callable[..., jax.Array]:
  """Returns `_draw` as a program of its own. XLA would take a second to optimize it for a CPU, and it runs once."""
  static = ('distribution', 'shape', 'dtype', 'is_repeated')
  return jax.jit(_draw, static_argnames=static, compiler_options=quick_options(platform))


def _scale_of_shape(scaling: str, weight: WeightHParams) -> float:
  """Returns the factor that `scaling`, and the weight's shape, give to an initializer's scale."""
  shape = weight.shape
  fan_in, fan_out = (fan or 1 for fan in get_fan_in_fan_out(shape, weight.fan_in_axes, weight.fan_out_axes))
  return {
    '': 1.0,
    '_sqrt_dim': 1 / math.sqrt(max(shape[0], 1) if shape else 1),
    '_fan_in': 1 / math.sqrt(fan_in),
    '_fan_out': 1 / math.sqrt(fan_out),
    '_fan_avg': 1 / math.sqrt((fan_in + fan_out) / 2),
    '_xavier': math.sqrt(6 / (fan_in + fan_out)),
    '_geo_mean_xavier': math.sqrt(3 / math.sqrt(fan_in * fan_out)),
    '_unit_scaling': math.sqrt(3 / math.prod(shape[:-1])),
  }[scaling]


def init_magnitude(weight: WeightHParams) -> float | None:
  """Returns the standard deviation of a weight's initial values, up to a constant factor for each method.

  Returns None for constants, and for values that another library draws.
  """
  if not isinstance(weight.init, WeightInit):
    return None
  distribution, scaling = _METHODS[weight.init.method]
  if distribution == 'constant':
    return None
  if distribution == 'delta_orthogonal' and len(weight.shape) > 1:
    return weight.init.scale / math.sqrt(weight.shape[-1])
  return weight.init.scale * _scale_of_shape(scaling, weight)


def _delta_orthogonal(key: jax.Array, shape: Sequence[int], scale: float, dtype: DTypeLike) -> jax.Array:
  """Returns [..., I, O]: a scaled orthogonal matrix at the middle of the leading dimensions, and zeros elsewhere."""
  *window, inputs, outputs = shape
  orthogonal = jax.nn.initializers.orthogonal(scale * math.sqrt(max(inputs / outputs, 1)))
  matrix = orthogonal(key, (inputs, outputs), jnp.promote_types(dtype, jnp.float32))  # Decompositions need float32.
  return jnp.zeros(shape, dtype).at[tuple((size - 1) // 2 for size in window)].set(matrix.astype(dtype))
