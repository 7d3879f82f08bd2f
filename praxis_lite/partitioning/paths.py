"""Paths of leaves in trees, and patterns that match them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax

from praxis_lite.errors import ShardingError

Path = tuple[str, ...]


def path_names(key_path: Any) -> Path:
  """('0', 'mu', 'w') of a JAX key path: what each kind of key names, without its brackets and dots."""
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in key_path)


def leaves_by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[Path, Any]:
  """The leaves of a tree by path, in its order."""
  return {path_names(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]}


def path_matches(pattern: str, path: Path) -> bool:
  """Whether a regular expression matches all of a path, spelt 'lm.softmax.w' or 'lm/softmax/w'.

  Raises:
    ShardingError: `pattern` is not a regular expression.
  """
  try:
    regex = re.compile(pattern)
  except re.error as error:
    raise ShardingError(f'{pattern!r} is not a regular expression: {error}') from None
  return any(regex.fullmatch(separator.join(path)) is not None for separator in './')
