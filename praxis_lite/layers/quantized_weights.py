"""QuantizedWeights: which weights of a model are stored in few bits, or rounded as if they were, and how.

    frozen     integers w_q and scales s are stored; a layer computes s w_q just before the product that needs it
    trained    w is stored and trained; a layer reads w rounded, and w gets the gradient of the rounded weight

`praxis_lite.models.quantize_weights` adds it to a model's config; `weight_formats.py` has the formats.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, check_choice, check_range
from praxis_lite.layers.base import Layer
from praxis_lite.layers.layer_patterns import LayerPatterns
from praxis_lite.layers.weight_formats import BITS, BLOCKS, SCALE, TENSOR, VALUES, ZERO, WeightFormat, quantize
from praxis_lite.sharding.weights import (
  DeclaredSplit,
  JointInit,
  WeightHParams,
  WeightHParamsCollection,
  WeightInit,
  init_weight,
  is_dtype,
)

INPUT_SCALE, INPUT_RANGE = 'input scale', 'input range'
SUFFIXES = {
  VALUES: '',
  SCALE: '_quantized_scale',
  ZERO: '_quantized_zp',
  TENSOR: '_quantized_tensor_scale',
  INPUT_SCALE: '_quantized_input_scale',
  INPUT_RANGE: '_quantized_input_range',
}
"""How the names of stored variables end, after the name of the weight; the first three as in Praxis."""


class QuantizedWeights(LayerPatterns):
  """Weights of linear layers, projections of attention and experts in few bits.

  Attributes:
    layers: a regex, or several, that match whole paths of layers below the model, such as r'lm\\..*\\.ff\\..*'; every
      layer that they match must be a linear layer, a projection of attention or experts. None means all of these.
      Tables of embeddings, the softmax, norms, biases, routers and adapters are never quantized.
    format: 'int8', 'int4', 'int2', 'nf4', 'mxfp8' or 'nvfp4'; see `weight_formats.py`.
    group_size: number of inputs that share a scale, along the last dimension of the inputs: in the projection from
      heads back to model dims, a group stays within one head. None gives each output one scale. NF4 is meant for
      groups of 64, and 'mxfp8' and 'nvfp4' have groups of 32 and 16.
    symmetric: whether integers have no zero points.
    percentile: a scale covers this percentage of its weights, more than 50 and at most 100; larger weights are clipped.
    scale_dtype: storage dtype of scales; 'mxfp8' and 'nvfp4' have their own.
    kept: (n, m), such as (2, 4): of each m neighbouring inputs of an output, only the n with the largest |w| are kept,
      and the others are 0 (structured sparsity). None keeps all. With the format 'float', for training only, kept
      weights are not rounded.
    num_shots: with `trained` and `kept`, how often training chooses the kept weights: at the step `target_step`, and
      then every `mask_update_interval` steps (Praxis's modes ONESHOT and FEWSHOT). Before that, all weights are kept.
      Between, the choice stays: the other weights count as 0 and get no gradient, but keep their values. None chooses
      at each use (TRAINING).
    mask_update_interval, target_step: see `num_shots`; steps are counted from 0.
    mask_stays: with `trained`, whether weights that are not kept get no gradient, so that zeros stay zeros. If False,
      they get the gradient of the zero in their place, and may be kept later.
    input_scale: whether each input of a weight has a scale. The weights of the input are multiplied by the scale before
      rounding, and the layer divides the input by it. `praxis-lite quantize --method=awq` and `--method=smooth` choose
      these scales.
    input_range: whether inputs in int8 (`matmul='int8'`) have a fixed range, which `praxis-lite quantize
      --input_percentile` finds; otherwise each row has the range of its current values.
    trained: whether the weights themselves are stored and trained, and only rounded where they are used (quantization-
      aware training, with straight-through gradients). Otherwise they are stored in few bits, and frozen.
  """

  format: str = 'int8'
  group_size: int | None = None
  symmetric: bool = True
  percentile: float = 100.0
  scale_dtype: DTypeLike = 'float32'
  kept: tuple[int, int] | None = None
  num_shots: int | None = None
  mask_update_interval: int = 1
  target_step: int = 0
  mask_stays: bool = False
  input_scale: bool = False
  input_range: bool = False
  trained: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    check_choice('QuantizedWeights.format', self.format, (*BITS, 'float'))
    if self.format == 'float' and (self.kept is None or not self.trained):
      raise ConfigError("QuantizedWeights.format: 'float' is for weights with `kept`, such as (2, 4), and trained=True")
    if self.kept is not None and not (len(self.kept) == 2 and 0 < self.kept[0] < self.kept[1]):
      raise ConfigError(f'QuantizedWeights.kept: expected (n, m) with 0 < n < m, such as (2, 4), got {self.kept}')
    if self.mask_stays and (self.kept is None or not self.trained):
      raise ConfigError('QuantizedWeights.mask_stays: it is for weights with `kept` and trained=True; leave it False')
    if self.num_shots is not None and (self.kept is None or not self.trained or self.mask_stays):
      raise ConfigError('QuantizedWeights.num_shots: it is for weights with `kept`, trained=True and mask_stays=False')
    check_range('QuantizedWeights.group_size', self.group_size, least=1)
    check_range('QuantizedWeights.num_shots', self.num_shots, least=1)
    check_range('QuantizedWeights.mask_update_interval', self.mask_update_interval, least=1)
    check_range('QuantizedWeights.target_step', self.target_step, least=0)
    if not 50 < self.percentile <= 100:
      raise ConfigError(f'QuantizedWeights.percentile: expected a number above 50, at most 100, got {self.percentile}')
    if not (self.format.startswith('int') or self.symmetric):
      raise ConfigError(
        f'QuantizedWeights.symmetric: only integers have zero points; leave it True for {self.format!r}'
      )
    if (block := BLOCKS.get(self.format)) is not None:
      if self.group_size not in (None, block):
        raise ConfigError(f'QuantizedWeights.group_size: {self.format} has groups of {block}; leave it None')
      if self.percentile != 100 or np.dtype(self.scale_dtype) != np.float32:
        field = 'scale_dtype' if self.percentile == 100 else 'percentile'
        raise ConfigError(f'QuantizedWeights.{field}: {self.format} says how its scales are stored; leave it out')
    for field in ('input_scale', 'input_range'):
      if getattr(self, field) and self.trained:
        raise ConfigError(f'QuantizedWeights.{field}: weights that are trained have none; leave it False')
    if self.input_range and not scales_outputs(self):
      raise ConfigError(
        'QuantizedWeights.input_range: it is for integers with one scale for each output; leave out the group size and '
        'zero points, and choose int8, int4 or int2'
      )
    if not is_dtype(self.scale_dtype, jnp.floating):
      raise ConfigError(
        f'QuantizedWeights.scale_dtype: expected a floating dtype, such as float32, got {self.scale_dtype!r}'
      )

  def is_for(self, name: str) -> bool:
    """Whether `layers` selects the layer at this path below the model."""
    return self.layers is None or self.matches(name)

  def store(self, layer: Layer, name: str, weight: WeightHParams) -> QuantizedWeight | RoundedWeight:
    """In the `setup` of a layer: returns how a weight is stored; `name` is one of `layer.product_weights`."""
    if WeightHParamsCollection.KEEP_SPLIT in weight.collections:
      raise ConfigError(f'{layer.path_name}.{name}: a tensor-parallel layer has only a part of this weight')
    num_inputs, num_outputs = _count_axes(weight)
    kept = None if self.kept is None else (self.kept[0], self.kept[1])
    scales = self.group_size or BLOCKS.get(self.format), self.symmetric, self.percentile, self.scale_dtype
    form = WeightFormat(self.format, num_inputs, num_outputs, *scales, kept, self.mask_stays)
    if self.trained:
      shots = None
      if self.num_shots is not None:
        shots = MaskShots(self.num_shots, self.mask_update_interval, self.target_step)
      return RoundedWeight(name, weight, form, shots)
    if self.input_range and (getattr(layer, 'matmul', '') != 'int8' or len(weight.shape) > num_inputs + num_outputs):
      raise ConfigError(
        f"{layer.path_name}.matmul: a fixed range of inputs is for linear layers and projections with matmul='int8'; "
        'set it, or leave out the layer in `layers`'
      )
    return QuantizedWeight(layer, name, weight, form, self.input_scale, self.input_range)


def _count_axes(weight: WeightHParams) -> tuple[int, int]:
  """Returns how many dimensions of a weight are inputs, and how many after them are outputs."""
  if weight.fan_in_axes is None or weight.fan_out_axes is None:
    return 1, 1
  return len(weight.fan_in_axes), len(weight.fan_out_axes)


def scales_outputs(rule: QuantizedWeights | Config) -> bool:
  """Whether weights become integers with one scale for each output, so that their inputs may be rounded, too."""
  return bool(rule.format.startswith('int') and rule.symmetric and rule.group_size is None)


class MaskShots(NamedTuple):
  """When training chooses the kept weights: at `first`, `first + interval`, ..., `number` times."""

  number: int
  interval: int
  first: int

  def is_due(self, step: jax.Array) -> jax.Array:
    """Returns whether the choice is made at this step, bool."""
    since = step - self.first
    return (since >= 0) & (since % self.interval == 0) & (since // self.interval < self.number)


@dataclasses.dataclass(frozen=True)
class RoundedWeight:
  """A weight that is stored and trained as declared, and rounded or pruned where it is read; see `StoredWeight`."""

  name: str
  weight: WeightHParams
  format: WeightFormat
  shots: MaskShots | None = None

  @property
  def mask_name(self) -> str:
    """The name of the variable that is 1 for weights that are kept, and 0 for others, with `shots`."""
    return f'{self.name}_sparsity_mask'

  @property
  def parts(self) -> dict[str, WeightHParams]:
    if self.shots is None:
      return {self.name: self.weight}
    mask = dataclasses.replace(
      self.weight,
      dtype='uint8',
      init=WeightInit.Constant(1.0),
      collections=self.weight.collections | {WeightHParamsCollection.NON_TRAINABLE},
      growth=None,
      stands_for=0,
    )
    return {self.name: self.weight, self.mask_name: mask}

  def store(self, w: jax.Array) -> dict[str, jax.Array]:
    return {self.name: w} if self.shots is None else {self.name: w, self.mask_name: jnp.ones(w.shape, jnp.uint8)}

  def read(self, parts: Mapping[str, jax.Array], dtype: DTypeLike | None) -> jax.Array:
    form = self.format if self.shots is None else dataclasses.replace(self.format, kept=None)
    w = form.round_weight(parts[self.name] if self.shots is None else self.prune(parts))
    return w if dtype is None else w.astype(dtype)

  def prune(self, parts: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the weight with zeros for the entries that are not kept, and not rounded."""
    w = parts[self.name]
    return self.format.prune(w) if self.shots is None else jnp.where(parts[self.mask_name] > 0, w, 0)

  def renew_mask(self, variables: Mapping[str, jax.Array], step: jax.Array) -> dict[str, jax.Array]:
    """Returns the mask for this step by name, given the variables of the layer; {} without `shots`."""
    if self.shots is None:
      return {}
    w, mask = variables[self.name], variables[self.mask_name]

    def choose() -> jax.Array:
      return self.format.find_kept(w).astype(mask.dtype)

    return {self.mask_name: jax.lax.cond(self.shots.is_due(step), choose, lambda: mask)}

  @property
  def multiply(self) -> None:
    return None

  def scale_inputs(self, x: jax.Array, parts: Mapping[str, jax.Array]) -> jax.Array:
    return x

  def input_range(self, parts: Mapping[str, jax.Array]) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
  """A weight that is stored in few bits; see `StoredWeight`."""

  layer: Layer  # The layer that has the weight.
  name: str
  weight: WeightHParams
  format: WeightFormat
  has_input_scale: bool = False  # Whether a variable has a scale for each input, which multiplies w before rounding.
  has_input_range: bool = False  # Whether a variable has the range of inputs in int8.

  @property
  def parts(self) -> dict[str, WeightHParams]:
    shape, form = self.weight.shape, self.format
    declared = {
      VALUES: self._part(VALUES, form.values_shape(shape), form.values_dtype),
      SCALE: self._part(SCALE, form.scale_shape(shape), form.stored_scale_dtype),
    }
    if form.has_zeros:
      declared[ZERO] = self._part(ZERO, form.scale_shape(shape), 'uint8')
    if form.has_tensor_scale:
      declared[TENSOR] = self._part(TENSOR, form.tensor_scale_shape(shape), 'float32')
    if self.has_input_scale:
      declared[INPUT_SCALE] = self._part(INPUT_SCALE, form.input_scale_shape(shape), 'float32')
    if self.has_input_range:
      declared[INPUT_RANGE] = self._part(INPUT_RANGE, form.tensor_scale_shape(shape), 'float32')
    return {self.name_of(kind): part for kind, part in declared.items()}

  def store(self, w: jax.Array) -> dict[str, jax.Array]:
    form = self.format
    of_inputs = jnp.ones(form.input_scale_shape(w.shape)), jnp.ones(form.tensor_scale_shape(w.shape))
    return self.name_parts(quantize(form, w), *of_inputs)

  def name_parts(
    self, parts: Mapping[str, jax.Array], input_scale: jax.Array, input_range: jax.Array | None = None
  ) -> dict[str, jax.Array]:
    """Returns the arrays of a quantized weight by the names of their variables: `parts`, input scales and their range.

    `parts` is the result of `WeightFormat.quantize`.
    """
    more = {INPUT_SCALE: input_scale} if self.has_input_scale else {}
    if self.has_input_range and input_range is not None:
      more[INPUT_RANGE] = input_range
    return {self.name_of(kind): part for kind, part in {**parts, **more}.items()}

  def read(self, parts: Mapping[str, jax.Array], dtype: DTypeLike | None) -> jax.Array:
    dtype, by_kind = dtype or self.weight.dtype, self._parts_by_kind(parts)
    if not self.has_input_scale:
      return self.format.dequantize(by_kind, self._num_last, dtype)
    return (self.format.dequantize(by_kind, self._num_last) / by_kind[INPUT_SCALE]).astype(dtype)

  @property
  def multiply(self) -> Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array] | None:
    return self._multiply if self.format.scales_outputs else None

  def scale_inputs(self, x: jax.Array, parts: Mapping[str, jax.Array]) -> jax.Array:
    if not self.has_input_scale:
      return x
    scale = self._parts_by_kind(parts)[INPUT_SCALE]
    return (x.astype(jnp.float32) / scale.reshape(scale.shape[: self.format.num_inputs])).astype(x.dtype)

  def input_range(self, parts: Mapping[str, jax.Array]) -> jax.Array | None:
    return self._parts_by_kind(parts)[INPUT_RANGE].reshape(()) if self.has_input_range else None

  def _multiply(self, x: jax.Array, parts: Mapping[str, jax.Array]) -> jax.Array:
    return self.format.multiply(x, self._parts_by_kind(parts), self._num_last)

  def spread(self, parts: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the integers and scales of all entries, as arrays of the weight's shape, by name.

    'integers' are from -2^(b-1) to 2^(b-1) - 1 for b bits. With zero points there is also 'zero', the integer that
    represents 0; the scales are 'scale'.
    """
    return self.format.spread(self._parts_by_kind(parts), self._num_last)

  @property
  def _num_last(self) -> int:
    return self.weight.shape[self.format.group_axis(len(self.weight.shape))]

  def _parts_by_kind(self, parts: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {kind: parts[name] for kind in SUFFIXES if (name := self.name_of(kind)) in parts}

  def name_of(self, kind: str) -> str:
    """Returns the name of a variable of the weight; `kind` is a key of `SUFFIXES`."""
    return self.name + SUFFIXES[kind]

  def _part(self, kind: str, shape: tuple[int, ...], dtype: DTypeLike) -> WeightHParams:
    """Returns the declaration of the part `kind`, split like the weight except along dimensions of size 1."""
    split = self.weight.tensor_split_dims_mapping
    if split is not None:
      whole = DeclaredSplit.make(split, self.weight.mapping_field)
      own = whole.pick(*(i if n > 1 or self.weight.shape[i] == 1 else None for i, n in enumerate(shape)))
      split = DeclaredSplit(
        own, [f'{s}, derived from the weight {self.layer.path_name}.{self.name}' for s in own.sources]
      )
    return dataclasses.replace(
      self.weight,
      shape=shape,
      dtype=dtype,
      tensor_split_dims_mapping=split,
      init=JointInit((self.name_of(kind),), self._draw),
      fan_in_axes=None,
      fan_out_axes=None,
      collections=self.weight.collections
      | {WeightHParamsCollection.NON_TRAINABLE, WeightHParamsCollection.CONSTANT, WeightHParamsCollection.KEEP_FLOAT32},
      growth=None,
      stands_for=math.prod(self.weight.shape) if kind == VALUES else 0,
    )

  def _draw(self, key: jax.Array) -> dict[tuple[str, ...], jax.Array]:
    """Returns initial values of the parts of all quantized weights of the layer."""
    values: dict[tuple[str, ...], jax.Array] = {}
    for i, stored in enumerate(self.layer._stored.values()):
      if isinstance(stored, QuantizedWeight):
        w = init_weight(stored.weight, jax.random.fold_in(key, i))
        values |= {(name,): part for name, part in stored.store(w).items()}
    return values
