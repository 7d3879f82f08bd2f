"""Who listens to the constraints that layers put on activations and inputs while a model is traced.

`Layer.shard` and the entry of a layer with `inputs_split_mapping` report here. Nobody listens in training; `explain`
does, to know every activation of a model without running it.

    with observing(found.append):
      jax.eval_shape(...)
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec


class Constraint(NamedTuple):
  """A constraint that a layer has put on an array.

  Attributes:
    field: the field that gives it, as in 'lm.softmax.activation_split_dims_mapping.out'.
    mapping: its value, as written in the config.
    spec: what it stands for; None leaves the array to the compiler.
    shape, dtype: of the array.
  """

  field: str
  mapping: Any
  spec: PartitionSpec | None
  shape: tuple[int, ...]
  dtype: Any


_listener: contextvars.ContextVar[Callable[[Constraint], Any] | None] = contextvars.ContextVar(
  'praxis_lite_constraint_listener', default=None
)


@contextlib.contextmanager
def observing(listener: Callable[[Constraint], Any]) -> Iterator[None]:
  """Calls `listener` with each constraint that is traced inside."""
  token = _listener.set(listener)
  try:
    yield
  finally:
    _listener.reset(token)


def report_constraint(field: str, mapping: Any, spec: PartitionSpec | None, x: Any) -> None:
  """Tells the listener, if there is one, that `x` is constrained."""
  listener = _listener.get()
  if listener is not None:
    listener(Constraint(field, mapping, spec, tuple(x.shape), x.dtype))
