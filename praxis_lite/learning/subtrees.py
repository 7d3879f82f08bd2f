"""Parts of a variable tree: the nested dict with some of its leaves left out, and no empty dict in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Path = tuple[str, ...]


def select(tree: Any, keep: Callable[[Path], bool], path: Path = ()) -> Any:
  """Returns the part of a nested dict whose leaves' paths `keep` accepts."""
  selected = {}
  for name, node in tree.items():
    at = (*path, name)
    if isinstance(node, dict):
      below = select(node, keep, at)
      if below:
        selected[name] = below
    elif keep(at):
      selected[name] = node
  return selected


def leaves(tree: Any, path: Path = ()) -> dict[Path, Any]:
  """Returns the leaves of a nested dict by path."""
  found: dict[Path, Any] = {}
  for name, node in tree.items():
    found.update(leaves(node, (*path, name)) if isinstance(node, dict) else {(*path, name): node})
  return found


def merge(*trees: Any) -> Any:
  """Returns the union of parts of one tree; where they overlap, the later part counts."""
  merged: dict[str, Any] = {}
  for tree in trees:
    for name, node in tree.items():
      old = merged.get(name)
      merged[name] = merge(old, node) if isinstance(old, dict) and isinstance(node, dict) else node
  return merged
