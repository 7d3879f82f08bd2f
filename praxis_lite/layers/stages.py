"""The stages of a pipeline around a layer. Kernels that the compiler cannot split are mapped over these stages."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Stages(NamedTuple):
  """The stages of a pipeline, and the mesh axes that split them."""

  number: int
  axes: tuple[str, ...]

  def even_axes(self, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the entries of `axes` that a mesh of these sizes has; None if they do not split the stages evenly."""
    axes = tuple(axis for axis in self.axes if axis in sizes)
    return None if self.number % math.prod(sizes[axis] for axis in axes) else axes


_stages: contextvars.ContextVar[Stages | None] = contextvars.ContextVar('praxis_lite_stages', default=None)


@contextlib.contextmanager
def building_stages(stages: Stages) -> Iterator[None]:
  """A context: layers that are built in it see `stages`, the stages over which `vmap` will map them."""
  outer = _stages.get()  # Nested stages count as 1 stage, which no axis splits, so that no kernel is mapped over them.
  token = _stages.set(stages if outer is None else Stages(1, (*outer.axes, *stages.axes)))
  try:
    yield
  finally:
    _stages.reset(token)


def surrounding_stages() -> Stages | None:
  """Returns the stages around a layer that is being built; None outside of pipelines."""
  return _stages.get()
