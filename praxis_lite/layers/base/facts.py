"""What a layer tells the tools that explain, check and plan a step, because the program does not show it.

exchanges     communication that the layer programs itself, and the field that asks for it
token_flops   FLOPs that its formula has for one token
loop_trips    iterations of a loop whose end depends on data
call_flops    FLOPs of a custom call
knobs         hyperparameters that a search may change
problems      settings that waste memory, time or communication
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from praxis_lite.sharding.weights import WeightHParams


class Exchange(NamedTuple):
  """Communication that a layer programs itself, such as a gather inside `shard_map`.

  Attributes:
    purpose: why it communicates, in a few words: 'exchange between experts'.
    field: the field of the layer that asks for it: 'expert_axis'.
    axes: the mesh axes that it communicates over.
    by_compiler: whether XLA adds the collectives, for example where the layer rolls an array along a split dimension.
      Otherwise only collectives inside `shard_map` belong to the exchange.
  """

  purpose: str
  field: str
  axes: tuple[str, ...]
  by_compiler: bool = False


class TokenFlops(NamedTuple):
  """FLOPs of a forward pass for one token: of products with weights, and of attention without a mask."""

  products: float = 0.0
  attention: float = 0.0


class KnobKind(enum.StrEnum):
  """What a knob trades: memory for work, memory for the length of a step, or something else."""

  REMATERIALISATION = 'rematerialisation'
  MICROBATCHES = 'microbatches'
  OTHER = 'other'


@dataclasses.dataclass(frozen=True)
class Knob:
  """A hyperparameter that a search may change, because it does not change what the layer computes.

  Attributes:
    field: the field of the layer.
    value: its value, which is hashable.
    neighbours: (a value) -> the values that a search tries after it.
    kind: what it trades. A search changes a rematerialisation policy in all layers that have that policy at once.
  """

  field: str
  value: Any
  neighbours: Callable[[Any], Sequence[Any]]
  kind: KnobKind = KnobKind.OTHER


class LayerProblem(NamedTuple):
  """A warning: its kind, the path of the field that it is about, what was found, and what to change."""

  kind: str
  path: str
  message: str
  remedy: str


class Facts:
  """The fields and methods of a `Layer` that tools read. A layer overrides those whose defaults are wrong for it.

  Attributes:
    has_microbatches: whether the layer cuts a batch into microbatches, so that the learner should not.
    length_fields: hyperparameters that have to grow with the length of the sequences.
    noise_fields: rates of random noise, which is off at 0.
    count_fields: integers that count chunks or iterations, and are not sizes of arrays.
  """

  has_microbatches: ClassVar[bool] = False
  length_fields: ClassVar[tuple[str, ...]] = ()
  noise_fields: ClassVar[tuple[str, ...]] = ()
  count_fields: ClassVar[tuple[str, ...]] = ()
  _weights: dict[str, WeightHParams]

  def exchanges(self) -> Sequence[Exchange]:
    """Returns the communication that this layer programs itself, without that of its children."""
    return ()

  def token_flops(self, length: int) -> TokenFlops:
    """Returns the FLOPs of this layer for one token, without those of its children.

    Args:
      length: tokens of a sequence.
    """
    del length
    return TokenFlops(2.0 * sum(weight.num_active for weight in self._weights.values() if len(weight.shape) > 1))

  def loop_trips(self, loop: str) -> int | None:
    """Returns the number of iterations of a loop whose end depends on data; None if it is unknown.

    Args:
      loop: the scopes of the loop inside the layer: 'while', or 'search/while' below `jax.named_scope('search')`.
    """
    del loop
    return None

  def call_flops(self, target: str, shapes: Sequence[tuple[int, ...]]) -> float:
    """Returns the FLOPs of a custom call on one device; 0 leaves the call uncounted.

    Args:
      target: the target of the custom call, such as 'lapack_spotrf_ffi'.
      shapes: the shapes of its operands on one device.
    """
    del target, shapes
    return 0.0

  def knobs(self) -> Sequence[Knob]:
    """Returns the hyperparameters of this layer that a search may change, without those of its children."""
    return ()

  def problems(self, mesh_sizes: Mapping[str, int]) -> Iterable[LayerProblem]:
    """Returns warnings about this layer on mesh axes of these sizes, without those about its children."""
    del mesh_sizes
    return ()


def double_or_halve(count: int, most: int = 64) -> list[int]:
  """Returns the neighbours of a number of microbatches: half if it is even, and twice if it is below `most`."""
  return [*([count // 2] if count % 2 == 0 else []), *([count * 2] if count < most else [])]
