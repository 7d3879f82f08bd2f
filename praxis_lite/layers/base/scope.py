"""How a layer's methods run in a call: in their own named scope, and with explanations of errors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from praxis_lite.common.errors import ConfigError, DataError, UserError
from praxis_lite.common.mistakes import explain_error, missing_return_hint, name_method
from praxis_lite.layers.base import call
from praxis_lite.layers.base.splits import MappedSplits
from praxis_lite.layers.base.taps import edit_and_tap


def run_in_scope(method: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a method that constrains its first argument by the layer's mapping, then calls `method` in a named scope.

  If the layer itself calls one of its methods, nothing is added.
  """
  first = (*inspect.signature(method).parameters, '')[1]  # The name of the parameter after self, or ''.

  @functools.wraps(method)
  def run(self: MappedSplits, *args: Any, **kwargs: Any) -> Any:
    frame = call.frame_holding(self.path)
    if frame is None or frame.active is self:
      return method(self, *args, **kwargs)
    if args:
      args = (self._shard_input(args[0]), *args[1:])
    elif first in kwargs:
      kwargs[first] = self._shard_input(kwargs[first])
    taps_inputs = frame.surroundings.taps is not None and frame.surroundings.taps.wants_inputs
    if taps_inputs and args:
      args = (edit_and_tap(frame, self.path, method.__name__, args[0], '.in'), *args[1:])
    outer, frame.active = frame.active, self
    try:
      with jax.named_scope(self.name or type(self).__name__):
        result = method(self, *args, **kwargs)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
      if isinstance(error, UserError) and type(error) is not DataError:
        raise  # The message already says where.
      weights = {name: weight.shape for name, weight in self._weights.items()}
      explanation = explain_error(error, self, self.path_name, weights)
      if explanation is None:
        raise
      raise explanation from error
    finally:
      frame.active = outer
    if result is None and method.__name__ == '__call__':
      raise ConfigError(f'{name_method(self, self.path_name, "__call__")} {missing_return_hint(method)}')
    return edit_and_tap(frame, self.path, method.__name__, result)

  return run
