"""Lowered steps that a search keeps, because several estimates, for example for two kinds of GPUs, share a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from praxis_lite.common.config import Config
from praxis_lite.common.trees import leaves_by_path
from praxis_lite.instruments.explain.explanation import Explanation
from praxis_lite.instruments.plan.local_program import LocalProgram
from praxis_lite.instruments.plan.memory import StateBytes
from praxis_lite.instruments.plan.model_work import ModelWork
from praxis_lite.sharding.mesh import have_same_answers


@dataclasses.dataclass(frozen=True)
class StepFacts:
  """The traced step on a mesh, and facts that hold for all kinds of chips; see `Plan` for `pipelines` and `weights`."""

  mesh: Mapping[str, int]
  jaxpr: Any
  work: ModelWork
  pipelines: tuple[str, ...]
  weights: tuple[Explanation, ...]


@dataclasses.dataclass(frozen=True)
class LoweredStep:
  """A step that was lowered for a kind of chip: its program, the state on each device, notes about filler rows."""

  program: LocalProgram
  state: StateBytes
  padding: tuple[str, ...]
  facts: StepFacts


@dataclasses.dataclass(frozen=True)
class StepKey:
  """Everything that a lowered step depends on; `inputs` are the shapes and dtypes of a batch."""

  task: Config
  inputs: Mapping[str, object]
  mesh: Mapping[str, int]
  platform: str
  kind: str

  def is_same_step(self, other: StepKey) -> bool:
    """Whether both keys give the same program. Kinds of devices may differ in facts that tracing does not use."""
    if (self.platform, [*self.mesh.items()]) != (other.platform, [*other.mesh.items()]):
      return False
    try:
      is_same = leaves_by_path(self.inputs) == leaves_by_path(other.inputs) and self.task == other.task
    except ValueError:  # Arrays in a config cannot be compared as a whole.
      return False
    return is_same and have_same_answers(self.kind, other.kind)


class LoweredSteps:
  """The lowered steps of one search."""

  def __init__(self) -> None:
    self._steps: list[tuple[StepKey, LoweredStep]] = []

  def find(self, key: StepKey | None, lower: Callable[[], LoweredStep]) -> LoweredStep:
    """Returns the step of a key. Makes it by `lower` if the key is new, or None; with None, the step is not kept."""
    if key is None:
      return lower()
    known = next((step for other, step in self._steps if key.is_same_step(other)), None)
    if known is None:
      known = lower()
      self._steps.append((key, known))
    return known
