"""Facts about a layer that a program does not show, for the tools that explain, check and plan a step."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from praxis_lite.layers.base.call import Exchange as Exchange
from praxis_lite.sharding.weights import WeightHParams


class TokenFlops(NamedTuple):
  """FLOPs of a forward pass for one token: of products with weights, and of attention without a mask."""

  products: float = 0.0
  attention: float = 0.0


class KnobKind(enum.StrEnum):
  """The trade-off of a knob: memory against work, memory against the length of a step, or something else."""

  REMATERIALISATION = 'rematerialisation'
  MICROBATCHES = 'microbatches'
  OTHER = 'other'


@dataclasses.dataclass(frozen=True)
class Knob:
  """A hyperparameter that a search may change, because it does not change what the layer computes.

  A search changes a rematerialisation policy in all layers that have that policy at once.
  """

  field: str  # The field of the layer.
  value: Any  # Its value, which is hashable.
  neighbours: Callable[[Any], Sequence[Any]]  # Given a value, returns the values that a search tries next.
  kind: KnobKind = KnobKind.OTHER  # The trade-off that the value sets.


class LayerProblem(NamedTuple):
  """A warning: its kind, the path of the field that it is about, what was found, and what to change."""

  kind: str
  path: str
  message: str
  remedy: str


class PipelineStages(NamedTuple):
  """How a layer cuts its stack of layers into the stages of a pipeline."""

  number: int  # The number of stages.
  field: str  # The field of the layer that sets this number.
  axes: tuple[str, ...]  # The mesh axes that split the stages.
  rounds: int = 1  # The number of groups of layers in each stage.
  period: int = 1  # The number of layers in the repeated pattern, all of them in the same group.


class PositionGrid(NamedTuple):
  """Where patches are in a table of positions: after the entries of other tokens, row by row."""

  rows: int  # Patches along the height of an image.
  columns: int  # Patches along its width.
  others: int = 0  # Tokens before the patches, such as a class token.


class InputSource(NamedTuple):
  """Layers whose inputs are proportional to the outputs of another layer, entry by entry.

  Dividing the outputs of `source` by numbers divides the inputs of all `readers` by them, and changes nothing else.
  """

  source: str  # The path of the layer, such as 'attention.value', from the layer that says so.
  readers: tuple[str, ...]  # The paths of the layers that read it.
  repeats: int = 1  # How many successive heads of the readers' inputs come from one head of the source.


class Facts:
  """The fields and methods of a `Layer` that tools read. A layer overrides those whose defaults are wrong for it.

  Attributes:
    has_microbatches: whether the layer itself cuts a batch into microbatches. If so, the learner should not cut it.
    length_fields: hyperparameters that have to grow with the length of the sequences.
    noise_fields: rates of random noise, which is off at 0.
    count_fields: integers that count chunks or iterations, and are not sizes of arrays.
    product_weights: the weights with which the layer multiplies inputs. The key is the weight's name; the value is the
      name, below the layer, of the point (see `taps.py`) whose value is these inputs. The layer reads these weights
      only as `self.theta.<name>`, so they may be stored in another form. The dimensions of a weight that belong to
      inputs come before those that belong to outputs.
  """

  has_microbatches: ClassVar[bool] = False
  length_fields: ClassVar[tuple[str, ...]] = ()
  noise_fields: ClassVar[tuple[str, ...]] = ()
  count_fields: ClassVar[tuple[str, ...]] = ()
  product_weights: ClassVar[Mapping[str, str]] = {}
  _weights: dict[str, WeightHParams]

  def exchanges(self) -> Sequence[Exchange]:
    """Returns the communication that this layer programs itself, not that of its children."""
    return ()

  def token_flops(self, length: int) -> TokenFlops:
    """Returns the FLOPs of this layer for one token of a sequence of this length, not counting its children."""
    return TokenFlops(2.0 * sum(weight.num_active for weight in self._weights.values() if len(weight.shape) > 1))

  def call_flops(self, target: str, shapes: Sequence[tuple[int, ...]]) -> float:
    """Returns the FLOPs of a custom call on one device; 0 leaves the call uncounted.

    `target` names what is called, such as 'lapack_spotrf_ffi'; `shapes` has the shape of each operand on one device.
    """
    return 0.0

  def knobs(self) -> Sequence[Knob]:
    """Returns the hyperparameters of this layer itself, not of its children, that a search may change."""
    return ()

  def pipeline_stages(self) -> PipelineStages | None:
    """Returns the stages of a pipeline that this layer runs; None if it runs none."""
    return None

  def position_grids(self) -> Mapping[str, PositionGrid]:
    """Returns the grids of learned positions below this layer, by the table's path from this layer, e.g. `position.w`.

    A warm start resamples such a table if the table of the other run has another grid.
    """
    return {}

  def input_readers(self) -> Sequence[str]:
    """Returns the children that multiply the inputs of this layer; () if anything else is computed from the inputs."""
    return ()

  def input_sources(self) -> Sequence[InputSource]:
    """Returns where inputs of weights below this layer come from; the layers are this layer's children, or theirs."""
    return ()

  def output_factors(self) -> Mapping[str, float]:
    """Returns variables [..., *O], and a number for each, such that outputs [..., *O] are linear in variable + number.

    {} if there are no such variables.
    """
    return {}

  def implementation_of(self, length: int, packed: bool) -> str:
    """Returns how this layer computes sequences of this length, and why, in one line; '' if there is only one way.

    `packed` says whether a row has several sequences.
    """
    return ''

  def problems(self, mesh_sizes: Mapping[str, int]) -> Iterable[LayerProblem]:
    """Returns warnings about this layer itself, not about its children, on mesh axes of these sizes."""
    return ()


def double_or_halve(count: int, most: int = 64) -> list[int]:
  """Returns numbers of microbatches to try: half of `count` if it is even, and its double if it is below `most`."""
  return [*([count // 2] if count % 2 == 0 else []), *([count * 2] if count < most else [])]
