"""Lazy arrays, computed when they are read: weights in few bits, and the plain weights that follow from them."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.checkpoints.streamed import PART_BYTES, Box, StreamedArray, boxes, whole_box
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.common.trees import NestedDict, Path, leaves, nest
from praxis_lite.layers.quantized_weights import QuantizedWeight, RoundedWeight
from praxis_lite.layers.weight_formats import WeightFormat, quantize
from praxis_lite.models import BaseModel
from praxis_lite.models.quantization import stored_weights
from praxis_lite.runs.calibration import CalibratedWeight
from praxis_lite.runs.shared_scales import InputScales, shared_inputs


def quantize_streamed(
  model: BaseModel, streamed: NestedDict, calibrated: Mapping[Path, CalibratedWeight] | None = None
) -> NestedDict:
  """Returns the variables of a model with weights in few bits, as arrays that are computed when they are read.

  Args:
    model: the instantiated model with weights in few bits.
    streamed: the variables of the model with plain weights.
    calibrated: the weights whose values are chosen by data, by path; others are rounded to nearest.
  """
  variables, chosen = leaves(streamed), calibrated or {}
  scales: dict[Path, InputScales] = {}
  for shared in shared_inputs(model):
    readers = [path for path in shared.readers if path in chosen]
    scales |= dict.fromkeys(readers, InputScales([(variables[path], chosen[path]) for path in readers], shared.repeats))
  for path, layer, stored in stored_weights(model):
    if isinstance(stored, RoundedWeight):  # The weight will be trained further, so it is pruned but not rounded.
      variables[path] = _Pruned({path[-1]: variables[path]}, stored)
      continue
    assert isinstance(stored, QuantizedWeight)
    weight, choice = variables.pop(path), chosen.get(path)
    if choice is not None:
      scales.setdefault(path, InputScales([(weight, choice)]))
    where, of_inputs = f'{layer.path_name}.{path[-1]}', scales.get(path)
    largest: dict[tuple[int, ...], jax.Array] = {}
    for part in stored.parts:
      variables[*path[:-1], part] = _Part(weight, stored, part, where, choice, of_inputs, largest)
  return nest(variables)


def apply_masks(model: BaseModel, streamed: NestedDict) -> NestedDict:
  """Returns variables without the masks that training has chosen, and with zeros for weights that these do not keep.

  Args:
    model: the instantiated model that was trained.
    streamed: its variables, as arrays that are read in parts.
  """
  variables = leaves(streamed)
  for path, _, stored in stored_weights(model):
    if isinstance(stored, RoundedWeight) and stored.shots is not None:
      variables[path] = _Pruned({part: variables.pop((*path[:-1], part)) for part in stored.parts}, stored)
  return nest(variables)


def dequantize_streamed(model: BaseModel, streamed: NestedDict) -> NestedDict:
  """Returns the variables of the model with plain weights, as arrays that are computed when they are read.

  Args:
    model: the instantiated model with weights in few bits, or with weights that are rounded where they are used.
    streamed: its variables.
  """
  variables = leaves(streamed)
  for path, _, stored in stored_weights(model):
    assert isinstance(stored, QuantizedWeight | RoundedWeight)
    parts = {part: variables.pop((*path[:-1], part)) for part in stored.parts}
    variables[path] = _Plain(parts, stored)
  return nest(variables)


def spread_streamed(model: BaseModel, streamed: NestedDict) -> dict[str, NestedDict]:
  """Returns the parts of weights in few bits, each spread out to an array with an entry for each entry of the weight.

  The result has up to three trees of `SpreadPart`, by name: 'integers', from -2^(b-1) on for b bits; 'scale'; and, if
  some weights have zero points, 'zero', in the same range as the integers. Scales of inputs are ignored;
  `fold_input_scales` makes them 1.
  """
  variables = leaves(streamed)
  found: dict[str, dict[tuple[str, ...], StreamedArray]] = {'integers': {}, 'scale': {}, 'zero': {}}
  for path, layer, stored in stored_weights(model):
    if not isinstance(stored, QuantizedWeight):
      raise ConfigError(
        f'{layer.path_name}.{path[-1]} is stored as it is trained; `praxis-lite quantize` without a format stores it '
        'in few bits'
      )
    parts = {part: variables[*path[:-1], part] for part in stored.parts}
    for kind in ('integers', 'scale', *(['zero'] if stored.format.has_zeros else [])):
      found[kind][path] = SpreadPart(parts, stored, kind)
  return {kind: nest(tree) for kind, tree in found.items() if tree}


@dataclasses.dataclass(frozen=True, eq=False)
class _Part(StreamedArray):
  """One of the variables that store a weight in few bits.

  Attributes:
    weight: the weight [*stack, *I, *O].
    choice: chooses the values by data; None rounds to nearest.
    scales: the scales of inputs, which all parts of all weights that read these inputs share; None without `choice`.
    largest: a cache, shared by all parts, of the largest |w| of each layer of the stack and each expert read so far.
  """

  weight: StreamedArray
  stored: QuantizedWeight
  part: str
  where: str
  choice: CalibratedWeight | None
  scales: InputScales | None
  largest: dict[tuple[int, ...], jax.Array]

  @property
  def shape(self) -> tuple[int, ...]:  # type: ignore[override]
    declared, own = self.stored.parts[self.part].shape, len(self.stored.weight.shape)
    return (*self.weight.shape[: len(self.weight.shape) - own], *declared)

  @property
  def dtype(self) -> np.dtype:  # type: ignore[override]
    return self.stored.parts[self.part].as_struct().dtype

  def read(self, box: Box) -> np.ndarray:
    """Returns the entries at the indices `box`; raises CheckpointError if the weight has NaN or infinities there."""
    first, last = _dims_of_inputs(self.stored.format, len(self.weight.shape))
    w = self._read_finite((*box[:first], *whole_box(self.weight.shape)[first:last], *box[last:]))
    if self.choice is None and not self.stored.format.has_tensor_scale:
      whole = np.asarray(self.stored.store(jnp.asarray(w))[self.part])
    else:
      each = [self._choose(w[at], tuple(b.start + i for b, i in zip(box, at))) for at in np.ndindex(w.shape[:first])]
      whole = np.stack(each).reshape(*w.shape[:first], *each[0].shape)
    return whole[(*[slice(None)] * first, *box[first:last])]

  def _read_finite(self, box: Box) -> np.ndarray:
    w = self.weight.read(box)
    if not np.isfinite(w).all():
      raise CheckpointError(f'{self.where} has NaN or infinities, so it cannot be quantized')
    return w

  def _choose(self, w: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    """Returns this part of one weight in a stack or among experts, or of some of its outputs, [*J, I, *O]."""
    form = self.stored.format
    scale = jnp.ones(form.input_scale_shape(w.shape))
    if self.scales is not None and self.stored.has_input_scale:
      scale = self.scales.at(*index).reshape(scale.shape)
    scaled = jnp.asarray(w, jnp.float32) * scale
    largest = self._find_largest(index, scale) if form.has_tensor_scale else None
    parts = (
      quantize(form, scaled, largest=largest) if self.choice is None else self.choice.quantize(scaled, index, largest)
    )
    of_inputs = None
    if self.choice is not None and self.stored.has_input_range:
      of_inputs = jnp.full(form.tensor_scale_shape(w.shape), self.choice.input_range(index, scale))
    return np.asarray(self.stored.name_parts(parts, scale, of_inputs)[self.part])

  def _find_largest(self, index: tuple[int, ...], scale: jax.Array) -> jax.Array:
    """Returns max |w| of one weight, [*1, 1, *1], with the scales of its inputs; reads the weight in parts."""
    if index not in self.largest:
      box = (*(slice(i, i + 1) for i in index), *whole_box(self.weight.shape)[len(index) :])
      parts = boxes(box, self.part_shape([b.stop - b.start for b in box]))
      largest = max(float(jnp.max(jnp.abs(self._read_finite(part) * scale))) for part in parts)
      self.largest[index] = jnp.full((1,) * scale.ndim, largest)
    return self.largest[index]

  def part_shape(self, sizes: Sequence[int], part_bytes: int = PART_BYTES) -> tuple[int, ...]:
    return _outputs_within(self.stored.format, self.weight.shape, sizes, part_bytes)


@dataclasses.dataclass(frozen=True, eq=False)
class _OfParts(StreamedArray):
  """An array of the shape of a weight, computed from the variables that store the weight."""

  parts: Mapping[str, StreamedArray]
  stored: QuantizedWeight | RoundedWeight

  @abc.abstractmethod
  def _compute(self, parts: Mapping[str, jax.Array]) -> jax.Array:
    """Computes a part of the array: some outputs, with all their inputs. `parts` has the same part of each variable."""

  @property
  def shape(self) -> tuple[int, ...]:  # type: ignore[override]
    own = self.stored.weight.shape
    values = self.parts[self.stored.name].shape
    return (*values[: len(values) - len(own)], *own)

  def read(self, box: Box) -> np.ndarray:
    first, last = _dims_of_inputs(self.stored.format, len(box))
    parts = {}
    for name, part in self.parts.items():
      outputs = [b if size > 1 else slice(0, 1) for b, size in zip(box[last:], part.shape[last:])]
      parts[name] = jnp.asarray(part.read((*box[:first], *whole_box(part.shape)[first:last], *outputs)))
    w = np.asarray(self._compute(parts))
    return w[(*[slice(None)] * first, *box[first:last])]

  def part_shape(self, sizes: Sequence[int], part_bytes: int = PART_BYTES) -> tuple[int, ...]:
    return _outputs_within(self.stored.format, self.shape, sizes, part_bytes)


class _Plain(_OfParts):
  """The plain weight, computed from its parts."""

  @property
  def dtype(self) -> np.dtype:  # type: ignore[override]
    return self.stored.weight.as_struct().dtype

  def _compute(self, parts: Mapping[str, jax.Array]) -> jax.Array:
    return self.stored.read(parts, self.dtype)


class _Pruned(_OfParts):
  """The plain weight, with zeros for the entries that pruning does not keep."""

  @property
  def dtype(self) -> np.dtype:  # type: ignore[override]
    return self.parts[self.stored.name].dtype

  def _compute(self, parts: Mapping[str, jax.Array]) -> jax.Array:
    assert isinstance(self.stored, RoundedWeight)
    return self.stored.prune(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class SpreadPart(_OfParts):
  """The 'integers', the 'scale', or the 'zero' point of each entry of a weight; see `spread_streamed`."""

  stored: QuantizedWeight
  kind: str

  @property
  def dtype(self) -> np.dtype:  # type: ignore[override]
    return np.dtype(np.float32 if self.kind == 'scale' else np.int8)

  def _compute(self, parts: Mapping[str, jax.Array]) -> jax.Array:
    return self.stored.spread(parts)[self.kind]


def _dims_of_inputs(form: WeightFormat, rank: int) -> tuple[int, int]:
  """Returns the range (first, last + 1) of the dimensions of inputs, for a weight of this rank."""
  last = rank - form.num_outputs
  return last - form.num_inputs, last


def _outputs_within(
  form: WeightFormat, weight: Sequence[int], sizes: Sequence[int], part_bytes: int
) -> tuple[int, ...]:
  """Returns the shape of the parts in which an array is read: all inputs of one layer, and as many outputs as fit.

  A part of the plain weight, in float32, has at most `part_bytes`. `weight` is the shape of the plain weight, and
  `sizes` the shape of the array to read.
  """
  first, last = _dims_of_inputs(form, len(weight))
  shape = [*[1] * first, *sizes[first:last], *[1] * (len(sizes) - last)]
  most = part_bytes // (4 * math.prod(weight[first:last]))
  for axis in reversed(range(last, len(sizes))):
    shape[axis] = max(1, min(sizes[axis], most))
    most //= shape[axis]
    if shape[axis] < sizes[axis]:
      break
  return tuple(shape)
