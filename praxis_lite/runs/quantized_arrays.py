"""Lazy arrays, computed when they are read: weights in few bits, and the plain weights that follow from them."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.checkpoints.streamed import PART_BYTES, Box, StreamedArray, whole_box
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.common.trees import NestedDict, Path, leaves, nest
from praxis_lite.layers.quantized_weights import QuantizedWeight, RoundedWeight
from praxis_lite.layers.weight_formats import WeightFormat
from praxis_lite.models import BaseModel
from praxis_lite.runs.calibration import CalibratedWeight


def quantize_streamed(
  model: BaseModel, streamed: NestedDict, calibrated: Mapping[Path, CalibratedWeight] | None = None
) -> NestedDict:
  """Returns the variables of a model with weights in few bits, as arrays that are computed when they are read.

  Args:
    model: the instantiated model with weights in few bits.
    streamed: the variables of the model with plain weights.
    calibrated: the weights whose values are chosen by data, by path; others are rounded to nearest.
  """
  variables = leaves(streamed)
  for layer in model.descendants():
    for name, stored in layer._stored.items():
      path = layer.path[len(model.path) :]
      if isinstance(stored, RoundedWeight):  # The weight will be trained further, so it is pruned but not rounded.
        variables[*path, name] = _Pruned({name: variables[*path, name]}, stored)
        continue
      assert isinstance(stored, QuantizedWeight)
      weight, choice = variables.pop((*path, name)), (calibrated or {}).get((*path, name))
      scales: dict[tuple[int, ...], jax.Array] = {}
      for part in stored.parts:
        variables[*path, part] = _Part(weight, stored, part, f'{layer.path_name}.{name}', choice, scales)
  return nest(variables)


def dequantize_streamed(model: BaseModel, streamed: NestedDict) -> NestedDict:
  """Returns the variables of the model with plain weights, as arrays that are computed when they are read.

  Args:
    model: the instantiated model with weights in few bits, or with weights that are rounded where they are used.
    streamed: its variables.
  """
  variables = leaves(streamed)
  for layer in model.descendants():
    for name, stored in layer._stored.items():
      path = layer.path[len(model.path) :]
      assert isinstance(stored, QuantizedWeight | RoundedWeight)
      parts = {part: variables.pop((*path, part)) for part in stored.parts}
      variables[*path, name] = _Plain(parts, stored)
  return nest(variables)


def spread_streamed(model: BaseModel, streamed: NestedDict) -> dict[str, NestedDict]:
  """Returns the parts of weights in few bits, each spread out to an array with an entry for each entry of the weight.

  The result has up to three trees of `SpreadPart`, by name: 'integers', from -2^(b-1) on for b bits; 'scale'; and, if
  some weights have zero points, 'zero', in the same range as the integers.
  """
  variables = leaves(streamed)
  found: dict[str, dict[tuple[str, ...], StreamedArray]] = {'integers': {}, 'scale': {}, 'zero': {}}
  for layer in model.descendants():
    for name, stored in layer._stored.items():
      path = layer.path[len(model.path) :]
      if not isinstance(stored, QuantizedWeight):
        raise ConfigError(
          f'{layer.path_name}.{name} is stored as it is trained; `praxis-lite quantize` without a format stores it in '
          'few bits'
        )
      if stored.has_input_scale:
        raise ConfigError(
          f'{layer.path_name}.{name} has scales of its inputs, which this format does not have; leave out --quantized, '
          'or make the run by `praxis-lite quantize` with --method=gptq'
        )
      parts = {part: variables[*path, part] for part in stored.parts}
      for kind in ('integers', 'scale', *(['zero'] if stored.format.has_zeros else [])):
        found[kind][*path, name] = SpreadPart(parts, stored, kind)
  return {kind: nest(tree) for kind, tree in found.items() if tree}


@dataclasses.dataclass(frozen=True, eq=False)
class _Part(StreamedArray):
  """One of the variables that store a weight in few bits.

  Attributes:
    weight: the weight [*stack, *I, *O].
    choice: chooses the values by data; None rounds to nearest.
    scales: a cache, shared by all parts, of the input scales of each layer of the stack and each expert read so far.
  """

  weight: StreamedArray
  stored: QuantizedWeight
  part: str
  where: str
  choice: CalibratedWeight | None
  scales: dict[tuple[int, ...], jax.Array]

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
    if self.choice is None:
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
    """Returns this part of the values `w`, [*J, I, *O]: of one layer of a stack, and of one expert.

    `index` is the number of the layer and of the expert. `w` may have only some of the outputs.
    """
    assert self.choice is not None
    scale: jax.Array = jnp.ones(())
    if self.stored.has_input_scale:
      if index not in self.scales:
        all_outputs = whole_box(self.weight.shape)[len(index) :]
        whole = self._read_finite((*(slice(i, i + 1) for i in index), *all_outputs))
        self.scales[index] = self.choice.input_scale(whole[(0,) * len(index)], index)
      scale = self.scales[index]
    parts = self.choice.quantize(jnp.asarray(w, jnp.float32) * scale, index)
    return np.asarray(self.stored.name_parts(parts, scale)[self.part])

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
      whole = whole_box(part.shape)
      parts[name] = jnp.asarray(part.read((*box[:first], *whole[first:last], *box[last:])))
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
    return self.stored.format.prune(parts[self.stored.name])


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
