"""Why a step communicates: the declaration that makes XLA add a collective, or a surprise and its remedy."""

from __future__ import annotations

import dataclasses
import enum


class Reason(enum.StrEnum):
  """Why a step has a collective. The reasons after `OTHER` are surprises."""

  GRADIENT = 'gradient reduction'
  WEIGHT = 'gather of a fully sharded weight'
  TENSOR = 'tensor parallel'
  SEQUENCE = 'sequence parallel'
  EXCHANGE = 'exchange that a layer declares'
  INPUTS = 'inputs of the step'
  SUMS = 'losses and statistics'
  OTHER = 'exchange written in the layer'
  WEIGHT_SUMMED = 'weight gathered by an all-reduce'
  WEIGHT_MOVED = 'weight gathered over an axis that does not split the batch'
  ACTIVATION_MOVED = 'activation resharded'
  PARTIAL_SUMS = 'activation summed over an axis of the batch'
  STATE_MOVED = 'state of the optimizer resharded'
  REPLICATED = 'the same computed on several devices'
  REMATERIALIZED = 'involuntary full rematerialization'

  @property
  def expected(self) -> bool:
    return list(Reason).index(self) <= list(Reason).index(Reason.OTHER)


@dataclasses.dataclass(frozen=True)
class Cause:
  """Why a step communicates something, or computes it more than once.

  Attributes:
    reason: the kind of cause.
    layers: paths of the layers involved.
    fields: the config fields that cause it; for a surprise, the suspect field, then the fields that contradict it.
    remedy: for a surprise, what to change; '' if unknown.
    what: for a surprise, what happens; for communication that a layer declares, its purpose.
  """

  reason: Reason
  layers: tuple[str, ...] = ()
  fields: tuple[str, ...] = ()
  remedy: str = ''
  what: str = ''

  @property
  def expected(self) -> bool:
    """Whether the communication or work follows from the declarations; if not, it is a surprise."""
    return self.reason.expected

  def __str__(self) -> str:
    return self.what if self.reason is Reason.EXCHANGE else str(self.reason)
