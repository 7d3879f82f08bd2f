"""A stand-in with the surface of Flax's `LogicallyPartitioned`: an array with the names of its axes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class LogicallyPartitioned:
  value: Any
  names: tuple[Any, ...]
  rules: Any = None

  def unbox(self) -> Any:
    return self.value

  def replace_boxed(self, value: Any) -> LogicallyPartitioned:
    return dataclasses.replace(self, value=value)


jax.tree_util.register_dataclass(LogicallyPartitioned, data_fields=['value'], meta_fields=['names', 'rules'])
