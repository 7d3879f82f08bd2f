"""Trees and paths: nested dicts of variables by path, and the leaves of any JAX tree by path.

A path is a tuple of names, ('lm', 'softmax', 'w'). It is the same for a config, a layer and a variable. `path_name`
spells it in all messages, tables and summaries.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from praxis_lite.common.errors import ShardingError, did_you_mean

Path = tuple[str, ...]
NestedDict = dict[str, Any]


def path_name(path: Path) -> str:
  """Returns 'lm.softmax.w' for ('lm', 'softmax', 'w')."""
  return '.'.join(path)


def to_path(name: str) -> Path:
  """Returns ('lm', 'softmax', 'w') for 'lm.softmax.w'."""
  return tuple(name.split('.'))


def path_names(key_path: tuple[Any, ...]) -> Path:
  """Returns ('0', 'mu', 'w') for a JAX key path: the name in each key, without brackets and dots."""
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in key_path)


def path_matches(pattern: str, path: Path) -> bool:
  """Whether a regular expression matches a whole path.

  A pattern that contains a slash is matched against 'lm/softmax/w', any other against 'lm.softmax.w'.

  Raises:
    ShardingError: `pattern` is not a regular expression.
  """
  try:
    regex = re.compile(pattern)
  except re.error as error:
    raise ShardingError(f'{pattern!r} is not a regular expression: {error}') from None
  return regex.fullmatch(('/' if '/' in pattern else '.').join(path)) is not None


def suggest_pattern(pattern: str, names: Iterable[str]) -> str:
  """Returns a suggestion for a regex that matches no whole name in `names`, as the end of a message."""
  names, inner = list(names), f'({pattern})' if '|' in pattern else pattern
  for match, wider in ((re.match, f'{inner}.*'), (re.search, f'.*{inner}.*')):
    if any((found := match(pattern, name)) and found[0] for name in names):
      count = sum(re.fullmatch(wider, name) is not None for name in names)
      return f' A pattern matches whole paths: write {wider!r}, which matches {count}.'
  return did_you_mean(pattern, names)


def nearness(name: str, others: Iterable[str]) -> int:
  """Returns how many leading parts a name such as 'lm.softmax.w' has in common with the nearest name in `others`."""
  parts = name.split('.')
  pairs = (zip(parts, other.split('.')) for other in others)
  return max((sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs), default=0)


def leaves_by_path(tree: object, is_leaf: Callable[[Any], bool] | None = None) -> dict[Path, Any]:
  """Returns the leaves of any JAX tree by path, in the order of the tree."""
  return {path_names(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]}


def map_with_path(
  fn: Callable[..., object], tree: object, *trees: object, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
  """Maps leaves by `fn(path, leaf, *leaves of the other trees)`, like `jax.tree.map`."""
  return jax.tree_util.tree_map_with_path(lambda path, *xs: fn(path_names(path), *xs), tree, *trees, is_leaf=is_leaf)


def is_named_box(x: object) -> bool:
  """Whether x is a Flax box around an array, such as `LogicallyPartitioned`, which names the array's axes."""
  return hasattr(x, 'names') and hasattr(x, 'value') and callable(getattr(x, 'replace_boxed', None))


def put_into_boxes(boxed: object, tree: object) -> Any:
  """Returns `tree` with boxes around its leaves: where the tree `boxed` has a box, the leaf is put into such a box."""

  def put(x: Any, leaf: object) -> object:
    return x.replace_boxed(leaf) if is_named_box(x) else leaf

  return jax.tree.map(put, boxed, tree, is_leaf=is_named_box)


# ---------------------------------------------------------------- nested dicts


def node_at(tree: Any, path: Path) -> Any:
  """Returns the subtree or leaf at `path`, or None if there is none."""
  for name in path:
    if not isinstance(tree, Mapping) or name not in tree:
      return None
    tree = tree[name]
  return tree


def insert(tree: NestedDict, path: Path, value: Any) -> NestedDict:
  """Returns a copy of `tree` with `value` at `path`; `tree` itself does not change."""
  if not path:
    return value
  return {**tree, path[0]: insert(tree.get(path[0], {}), path[1:], value)}


def nest(values: Mapping[Path, Any]) -> Any:
  """Returns the nested dict with these values by path: the inverse of `leaves`."""
  tree: Any = {}
  for path, value in values.items():
    tree = insert(tree, path, value)
  return tree


def merge(*trees: Any) -> Any:
  """Returns the union of parts of one tree; where they overlap, the later part wins."""
  merged: NestedDict = {}
  for tree in trees:
    for name, node in tree.items():
      old = merged.get(name)
      merged[name] = merge(old, node) if isinstance(old, dict) and isinstance(node, dict) else node
  return merged


def select(tree: Any, keep: Callable[[Path], bool], path: Path = ()) -> Any:
  """Returns a nested dict with only the leaves whose paths `keep` accepts; dicts that would be empty are left out."""
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
  """Returns the leaves of a nested dict by path, in its order; anything that is not a dict is a leaf."""
  found: dict[Path, Any] = {}
  for name, node in tree.items():
    found.update(leaves(node, (*path, name)) if isinstance(node, dict) else {(*path, name): node})
  return found
