"""Scales of inputs, one for all weights that read the same inputs; an export divides what makes these inputs by them.

    norm(x) -> query, key, value        the norm's scale and bias are divided
    value   -> attention -> out         the weight and bias of values are divided
    up      -> hidden    -> down        the weight and bias of `up`, which the gate multiplies, are divided

`layers/input_scales.py` has the formulas. `InputSource` of a layer says which layers are such.

I the last dimension of inputs, J their other dimensions, O outputs; * marks any number of dimensions.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.checkpoints.streamed import PART_BYTES, Box, StreamedArray, whole_box
from praxis_lite.common.errors import ConfigError, first_names
from praxis_lite.common.trees import NestedDict, Path, leaves, nest, path_name
from praxis_lite.layers.base import Layer
from praxis_lite.layers.quantized_weights import INPUT_SCALE, QuantizedWeight
from praxis_lite.layers.weight_formats import SCALE
from praxis_lite.models import BaseModel
from praxis_lite.models.quantization import stored_weights
from praxis_lite.runs.calibration import CalibratedWeight


class SharedInputs(NamedTuple):
  """Weights that read the same inputs, and the layer whose outputs these inputs are proportional to."""

  source: Layer
  readers: tuple[Path, ...]  # The paths of the weights below the model.
  repeats: int  # See `InputSource`.


def shared_inputs(model: BaseModel) -> Iterator[SharedInputs]:
  """Yields what the layers of a model say about the inputs of their weights."""
  for layer in model.descendants():
    for shared in layer.input_sources():
      readers = [_layer_at(layer, path) for path in shared.readers]
      paths = tuple((*_path_in(model, reader), name) for reader in readers for name in reader.product_weights)
      yield SharedInputs(_layer_at(layer, shared.source), paths, shared.repeats)


def _layer_at(layer: Layer, path: str) -> Layer:
  return operator.attrgetter(path)(layer)


def _path_in(model: BaseModel, layer: Layer) -> Path:
  return layer.path[len(model.path) :]


@dataclasses.dataclass(frozen=True, eq=False)
class InputScales:
  """The scales of inputs of some weights that read the same inputs, computed when they are read."""

  weights: Sequence[tuple[StreamedArray, CalibratedWeight]]
  repeats: int = 1  # See `InputSource`.

  @functools.cached_property
  def at(self) -> functools._lru_cache_wrapper[jax.Array]:
    """A function that returns the scales [I] for an index in a stack or among experts; they are computed only once."""
    return functools.cache(self._choose)

  def _choose(self, *index: int) -> jax.Array:
    first = (*(slice(i, i + 1) for i in index),)
    whole = [w.read((*first, *whole_box(w.shape)[len(index) :]))[(0,) * len(index)] for w, _ in self.weights]
    forms = tuple(choice.stored.format for _, choice in self.weights)
    return self.weights[0][1].input_scale(forms, [jnp.asarray(w) for w in whole], index, self.repeats)


def fold_input_scales(model: BaseModel, streamed: NestedDict) -> NestedDict:
  """Returns variables with which the model computes the same, and whose scales of inputs are all 1.

  Args:
    model: the instantiated model with weights in few bits.
    streamed: its variables, as arrays that are read in parts.

  Raises:
    ConfigError: a weight has scales of inputs that nothing before it can take; the message names it.
  """
  variables = leaves(streamed)
  scaled = {
    path: stored
    for path, _, stored in stored_weights(model)
    if isinstance(stored, QuantizedWeight) and stored.has_input_scale
  }
  folded = set()
  for source, readers, repeats in shared_inputs(model):
    if not any(path in scaled for path in readers):
      continue
    divided, by = source.output_factors(), _shared_scale(scaled, variables, readers, repeats)
    if by is None or not divided:
      continue
    folded |= {*readers}
    num_stack = by.ndim - scaled[readers[0]].format.num_inputs
    for name, offset in divided.items():
      stored = source._stored.get(name)
      path = (*_path_in(model, source), stored.name_of(SCALE) if isinstance(stored, QuantizedWeight) else name)
      ones = (1,) * (len(variables[path].shape) - by.ndim)
      variables[path] = _Divided(
        variables[path], by.reshape(*by.shape[:num_stack], *ones, *by.shape[num_stack:]), offset
      )
  if left := [path_name(path) for path in scaled if path not in folded]:
    raise ConfigError(
      f'--quantized: {first_names(left)}: the scales of their inputs cannot be moved into the layer before '
      'them. That is possible after a norm with a scale whose readers all have the same scales, for `down` of a gated '
      'feed-forward layer, and for `out` of attention with a weight `value`. Leave out --quantized, or make the run by '
      '`praxis-lite quantize` with --method=gptq'
    )
  for path, stored in scaled.items():
    at = (*path[:-1], stored.name_of(INPUT_SCALE))
    variables[at] = _Divided(variables[at], variables[at].read(whole_box(variables[at].shape)))
  return nest(variables)


def _shared_scale(
  scaled: dict[Path, QuantizedWeight], variables: dict[Path, StreamedArray], readers: Sequence[Path], repeats: int
) -> np.ndarray | None:
  """Returns the scales that all readers share, by outputs of their source: [*stack, *J, I]; None if they share none."""
  found = []
  for path in readers:
    if path not in scaled:
      return None
    scale, form = variables[*path[:-1], scaled[path].name_of(INPUT_SCALE)], scaled[path].format
    by_input = scale.read(whole_box(scale.shape)).reshape(scale.shape[: len(scale.shape) - form.num_outputs])
    if repeats > 1:
      heads = by_input.reshape(*by_input.shape[:-2], -1, repeats, by_input.shape[-1])
      if (heads != heads[..., :1, :]).any():
        return None
      by_input = heads[..., 0, :]
    found.append(by_input)
  return found[0] if all(np.array_equal(found[0], other) for other in found) else None


@dataclasses.dataclass(frozen=True, eq=False)
class _Divided(StreamedArray):
  """An array divided by another one, `by`, which broadcasts with it: (array + offset) / by - offset."""

  array: StreamedArray
  by: np.ndarray
  offset: float = 0.0

  @property
  def shape(self) -> tuple[int, ...]:  # type: ignore[override]
    return self.array.shape

  @property
  def dtype(self) -> np.dtype:  # type: ignore[override]
    return self.array.dtype

  def read(self, box: Box) -> np.ndarray:
    by = self.by[tuple(slice(None) if size == 1 else part for size, part in zip(self.by.shape, box))]
    x = self.array.read(box).astype(np.float32)
    return ((x + self.offset) / by - self.offset).astype(self.dtype)

  def part_shape(self, sizes: Sequence[int], part_bytes: int = PART_BYTES) -> tuple[int, ...]:
    return self.array.part_shape(sizes, part_bytes)
