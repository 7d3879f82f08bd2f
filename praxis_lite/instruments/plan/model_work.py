"""The work that a model requires in a step, independent of the program that computes it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from praxis_lite.common.trees import leaves_by_path
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training.flops import model_flops
from praxis_lite.training.partitioned_task import PartitionedTask


@dataclasses.dataclass(frozen=True)
class ModelWork:
  """The work that the model requires in a step, on all devices together, without other work of the program.

  Attributes:
    parameters, active_parameters: numbers of all parameters, and of those that one token uses.
    tokens: tokens of a step; None if the batch has no `ids` of shape [B, T].
    flops: 6 N + 12 L d S for each token, with N weights in matrix products, S keys, L layers and d = heads x dims. If
      not `is_by_token`, three times the FLOPs of the forward pass.
    causal_flops: 6 N + 6 L d S for each token, because a causal mask leaves half of the attention. If not
      `is_by_token`, the same as `flops`.
    is_by_token: whether all of the work is on the tokens of `ids`. False if there are no `ids`, or if a model also
      reads images, sound or sources; see `BaseModel.has_work_besides_ids`.
  """

  parameters: int
  active_parameters: int
  tokens: int | None
  flops: float
  causal_flops: float
  is_by_token: bool

  def unit(self, other: ModelWork) -> str:
    """Returns the unit for comparing this work with other work: 'tokens' for models of the same size, or 'FLOPs'."""
    return 'tokens' if self.tokens and other.tokens and self.parameters == other.parameters else 'FLOPs'

  def ratio_to(self, other: ModelWork) -> float:
    """Returns this work divided by other work, both in `unit`."""
    if self.tokens and other.tokens and self.unit(other) == 'tokens':
      return self.tokens / other.tokens
    return self.flops / other.flops


def model_work(partitioned: PartitionedTask) -> ModelWork:
  """Returns the work that the model of a task requires in a step."""
  jax_task, ids = partitioned.jax_task, partitioned.inputs_shape.get('ids')
  parameters, active = jax_task.model.total_num_params, jax_task.model.active_num_params
  tokens = math.prod(ids.shape) if ids is not None and len(ids.shape) == 2 else None
  if ids is None or tokens is None or jax_task.model.has_work_besides_ids:
    flops = model_flops(partitioned)
    return ModelWork(parameters, active, tokens, flops, flops, is_by_token=False)
  length = ids.shape[1]
  weights = leaves_by_path(jax_task.model.abstract_init())
  products = attention = 0.0
  for layer in jax_task.model.descendants():
    of_layer, repeats = layer.token_flops(length), _repeats(layer.path, weights)
    products += repeats * of_layer.products
    attention += repeats * of_layer.attention
  # The backward pass takes twice the FLOPs of the forward pass.
  flops, causal_flops = (tokens * 3 * (products + share * attention) for share in (1, 0.5))
  return ModelWork(parameters, active, tokens, flops, causal_flops, is_by_token=True)


def _repeats(path: tuple[str, ...], weights: Mapping[tuple[str, ...], WeightHParams]) -> int:
  """Returns how often a layer is repeated, 1 if it has no weights and nothing around it has.

  This is the number of layers in the stack of the nearest weights: those below the layer, or else around it.
  """
  for length in range(len(path), 0, -1):
    near = next((w for p, w in weights.items() if p[:length] == path[:length]), None)
    if near is not None:
      return math.prod(near.repeat_prefix)
  return 1
