"""Weights with merged adapters, read in parts, so that a large model can be exported without holding it in memory.

I input dims, O output dims, R rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from praxis_lite.bridges.hf.family import Family
from praxis_lite.checkpoints.streamed import PART_BYTES, Box, StreamedArray, whole_box
from praxis_lite.common.trees import NestedDict, leaves, nest
from praxis_lite.layers.lora import AdaptedLayer
from praxis_lite.layers.low_rank import num_stacked
from praxis_lite.models import BaseModel


def merge_streamed(variables: NestedDict, model: BaseModel, family: Family) -> NestedDict:
  """Returns the variables of a model's network without adapters: each part of a weight is merged when it is read."""
  network = family.network_in(model)
  assert network is not None
  merged = leaves(variables)
  for layer in network.descendants():
    if not isinstance(layer, AdaptedLayer):
      continue
    path = layer.path[len(network.path) :]
    for name, paths in layer.adapted_weights.items():
      stored = [merged[*path, *part] for part in paths]
      parts = [x.read(whole_box(x.shape)).astype(np.float32) for x in stored]
      weight = merged[*path, name]
      if type(layer).merge_weight is AdaptedLayer.merge_weight:
        merged[*path, name] = _Merged(weight, parts[0], parts[1], layer.update_scale)
      else:
        merged[*path, name] = _Whole(weight, layer, name, parts)
    for part in {part for paths in layer.adapted_weights.values() for part in paths}:
      del merged[*path, *part]
  return nest(merged)


@dataclasses.dataclass(frozen=True, eq=False)
class _OfWeight(StreamedArray):
  """An array that is computed from a weight of the same shape and dtype."""

  weight: StreamedArray

  @property
  def shape(self) -> tuple[int, ...]:  # type: ignore[override]
    return self.weight.shape

  @property
  def dtype(self) -> np.dtype:  # type: ignore[override]
    return self.weight.dtype

  def part_shape(self, sizes: Sequence[int], part_bytes: int = PART_BYTES) -> tuple[int, ...]:
    return self.weight.part_shape(sizes, part_bytes)


@dataclasses.dataclass(frozen=True, eq=False)
class _Merged(_OfWeight):
  """A weight [*stack, *I, *O] plus `scale` A B, for A [*stack, *I, R] and B [*stack, R, *O]."""

  a: np.ndarray
  b: np.ndarray
  scale: float

  def read(self, box: Box) -> np.ndarray:
    part = self.weight.read(box)
    n, end = num_stacked(self.a.shape, self.b.shape, self.shape), self.a.ndim - 1
    stack, inputs, outputs = box[:n], box[n:end], box[end:]
    a, b = self.a[(*stack, *inputs)], self.b[(*stack, slice(None), *outputs)]
    sizes, rank = a.shape[:n], self.a.shape[-1]
    inner = math.prod(a.shape[n:-1])
    update = a.reshape(*sizes, inner, rank) @ b.reshape(*sizes, rank, -1)
    return (part.astype(np.float32) + self.scale * update.reshape(part.shape)).astype(part.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class _Whole(_OfWeight):
  """A weight that is merged for a whole layer of its stack at a time, because its entries depend on one another."""

  layer: AdaptedLayer
  name: str
  parts: Sequence[np.ndarray]

  def read(self, box: Box) -> np.ndarray:
    n = len(self.shape) - len(self.layer.weight_shape(self.name))
    stack, rest = box[:n], box[n:]
    w = self.weight.read((*stack, *whole_box(self.shape[n:]))).astype(np.float32)
    merged = self.layer.merge_weight(self.name, jnp.asarray(w), [jnp.asarray(part[stack]) for part in self.parts])
    return np.asarray(merged)[(*[slice(None)] * n, *rest)].astype(self.dtype)
