"""Names of the arrays of a train state, and whether two states are of the same model.

    TrainState(step, mdl_vars={'lm': {'w': ...}}, opt_states=(ScaleByAdamState(mu=...), ...), ...)
    'step', 'mdl_vars.lm.w', 'opt_states.0.mu.lm.w', ...

A checkpoint stores arrays under these names, as nested dicts, so that no class of an optimizer library is needed to
read it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.errors import CheckpointError

Record = dict[str, Any]  # {'shape': [...], 'dtype': 'float32'}
_SHOWN = 3


def paths_of(tree: Any) -> list[tuple[str, ...]]:
  """Returns the path of each leaf, in the order of `jax.tree.leaves`."""
  return [tuple(map(_part, path)) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def to_nested_dict(tree: Any) -> dict[str, Any]:
  """Returns the same leaves in nested dicts, whatever the tree is made of."""
  nested: dict[str, Any] = {}
  for path, leaf in zip(paths_of(tree), jax.tree.leaves(tree)):
    below = nested
    for part in path[:-1]:
      below = below.setdefault(part, {})
    below[path[-1]] = leaf
  return nested


def from_nested_dict(like: Any, nested: dict[str, Any]) -> Any:
  """Returns the leaves of `nested`, made by `to_nested_dict`, in a tree of the structure of `like`."""
  leaves = []
  for path in paths_of(like):
    below: Any = nested
    for part in path:
      below = below[part]
    leaves.append(below)
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def records_of(shapes: Any) -> dict[str, Record]:
  """Returns the shape and dtype of each array by name, as JSON holds them.

  Args:
    shapes: a tree of arrays, or of things with a shape and a dtype.
  """
  return {
    '.'.join(path): {'shape': list(leaf.shape), 'dtype': str(leaf.dtype)}
    for path, leaf in zip(paths_of(shapes), jax.tree.leaves(shapes))
  }


def check_same_model(saved: dict[str, Record], wanted: dict[str, Record], where: str) -> None:
  """Checks that a checkpoint holds what is wanted of it.

  Parts of the state (`mdl_vars`, `opt_states`, `ema_vars`) of which nothing is wanted are not compared. A float may
  differ from a float, which is cast.

  Args:
    saved: records of the true shapes in the checkpoint.
    wanted: records of the true shapes to restore.
    where: the checkpoint's path.

  Raises:
    CheckpointError: an array is missing, left over, or of another shape or kind; names the first of them.
  """
  parts = {name.partition('.')[0] for name in wanted}
  saved = {name: record for name, record in saved.items() if name.partition('.')[0] in parts}
  differences = [
    (name, _difference(saved.get(name), wanted.get(name))) for name in sorted(saved.keys() | wanted.keys())
  ]
  different = {name: text for name, text in differences if text}
  if not different:
    return
  only_learner = not any(name.startswith('mdl_vars') for name in different)
  whose, remedy = ('another learner', 'task.train.learner') if only_learner else ('another model', 'task.model')
  shown = [f'{name} is {text}' for name, text in list(different.items())[:_SHOWN]]
  more = [f'and {len(different) - _SHOWN} more'] if len(different) > _SHOWN else []
  raise CheckpointError(
    f'{where} is a checkpoint of {whose}: {"; ".join([*shown, *more])}. Set {remedy} back to what it was '
    'trained with, or start a new run in another --job_log_dir.'
  )


def _difference(saved: Record | None, wanted: Record | None) -> str:
  if saved is None:
    return f'not in it and {_show(wanted)} here'
  if wanted is None:
    return f'{_show(saved)} in it and not here'
  if saved['shape'] != wanted['shape'] or not _castable(saved['dtype'], wanted['dtype']):
    return f'{_show(saved)} in it and {_show(wanted)} here'
  return ''


def _castable(saved: str, wanted: str) -> bool:
  return saved == wanted or all(_is_float(dtype) for dtype in (saved, wanted))


def _is_float(dtype: str) -> bool:
  return not dtype.startswith('key<') and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)


def _show(record: Record | None) -> str:
  return '' if record is None else f'{record["dtype"]}{record["shape"]}'


def _part(key: Any) -> str:
  for attribute in ('key', 'idx', 'name'):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  return str(key)
