"""What goes into a pipeline: arrays with rows of the batch, which are cut into microbatches, and all else.

Rows that fill up the last microbatches are copies of others, so that what layers make of them is as finite as what they
make of those. Which rows they are says `real`; and so do the arguments that say it of any row, such as `paddings`.

B batch, M microbatches, mb rows in each.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import DataError
from praxis_lite.layers.pipeline_arrays import mask_gradients, may_have_gradient, microbatches


def num_rows(x: object, where: str) -> int:
  """Returns B of what goes through a pipeline, a tree of arrays [B, ...]; raises DataError if they differ in it."""
  sizes = {v.shape[:1] for v in jax.tree.leaves(x)}
  if len(sizes) != 1 or () in sizes:
    shapes = ', '.join(str(v.shape) for v in jax.tree.leaves(x)) or 'no arrays'
    raise DataError(
      f'{where}: the arrays that go through a pipeline have the same dimension 0, the batch; got {shapes}'
    )
  return sizes.pop()[0]


class SideInputs:
  """The arguments of a call beside the first one, of which those with a dimension for the batch are cut.

  Args:
    args, kwargs: the arguments.
    names: those of `args`, as far as they have any.
    marks: what arguments have, by name, for a row that is padding; see `Layer.marks_of_padding`.
    batch_size, where: B, and the path of the pipeline, for messages.
    outer_real: [B] bool, False for rows that fill up a microbatch of a pipeline around this one; None: there are none.
  """

  def __init__(
    self,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    names: Sequence[str],
    marks: Mapping[str, int],
    batch_size: int,
    where: str,
    outer_real: jax.Array | None = None,
  ):
    found, self._structure = jax.tree_util.tree_flatten_with_path((args, dict(kwargs)))
    self._leaves = [leaf for _, leaf in found]
    self._cut: list[int] = []
    self._batch_size, self._real = batch_size, outer_real
    self._given = {*names[: len(args)], *(name for name, value in kwargs.items() if value is not None)}
    self._marks: list[int | None] = []
    self._shared: list[int] = []
    for i, (path, leaf) in enumerate(found):
      shape = getattr(leaf, 'shape', ())
      if not shape or shape[0] == 1 != batch_size:
        if may_have_gradient(leaf):
          self._shared.append(i)
        continue
      if shape[0] != batch_size:
        name = jax.tree_util.keystr(path[1:2], simple=True)  # The number or the name of the argument.
        raise DataError(
          f'{where}: the side input {name} has shape {shape}; in a pipeline, dimension 0 of each is the batch, '
          f'{batch_size}, or 1'
        )
      self._cut.append(i)
      self._marks.append(next((marks[name] for name in _names_on(path, names) if name in marks), None))

  def cut(self, M: int, multiple: int) -> list[jax.Array]:
    """Returns the arrays with rows as microbatches [M, mb, ...]; the last one says which rows are real, if not all are.

    Args:
      M, multiple: number of microbatches; and what the number of all their rows is a multiple of.
    """
    arrays = [(jnp.asarray(self._leaves[i]), mark) for i, mark in zip(self._cut, self._marks)]
    self._says_real = self._real is not None or bool(self._batch_size % multiple)
    if self._says_real:
      arrays.append((jnp.ones(self._batch_size, bool) if self._real is None else self._real, False))
    return [microbatches(x, M, multiple, mark) for x, mark in arrays]

  def held(self, rows: Sequence[jax.Array], sum_over_rows: Callable[[jax.Array], jax.Array]) -> jax.Array | None:
    """Returns [M] bool, False for microbatches of padding alone, if not all are; None where nothing says so of any.

    There are such where a mesh has filled up a batch of fewer rows than there are microbatches.

    Args:
      rows: what `cut` has returned.
      sum_over_rows: see `Surroundings`.
    """
    marks = [*self._marks, *([False] if self._says_real else [])]
    marked = [(x, mark) for x, mark in zip(rows, marks) if mark is not None]
    # Rows that this pipeline itself adds do not make up a whole microbatch.
    if len(rows[0] if rows else ()) == 1 or len(marked) == (self._says_real and self._real is None):
      return None
    real = functools.reduce(jnp.logical_and, [jnp.any(x != mark, axis=range(2, x.ndim)) for x, mark in marked])
    held = sum_over_rows(jnp.sum(real, axis=1, dtype=jnp.float32)) > 0
    return held | ~jnp.any(held)

  @property
  def shared(self) -> list[jax.Array]:
    """The arrays without rows that a gradient may flow through."""
    return [self._leaves[i] for i in self._shared]

  def layer_arguments(
    self, rows: Sequence[jax.Array], shared: Sequence[jax.Array], at_work: jax.Array
  ) -> tuple[tuple[Any, ...], dict[str, Any], jax.Array | None]:
    """Returns the arguments of a layer, through which no gradient flows in a bubble, and which rows [mb] are real.

    Args:
      rows: of its microbatch, of each array that `cut` has returned.
      shared: what its stage has in place of those of `shared`.
      at_work: False in a bubble, and for a layer that is missing in its stage.
    """
    real = None
    if self._says_real:
      *rows, real = rows
    filled = list(self._leaves)
    for i, x in zip((*self._cut, *self._shared), (*rows, *shared)):
      filled[i] = x
    args, kwargs = jax.tree.unflatten(self._structure, mask_gradients(at_work, filled))
    return args, kwargs, real

  def lacks(self, name: str) -> bool:
    """Whether no argument of this name is given."""
    return name not in self._given


def argument_names(method: Callable[..., object]) -> list[str]:
  """Returns the names of the positional arguments of a method after the first one."""
  kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
  return [p.name for p in inspect.signature(method).parameters.values() if p.kind in kinds][1:]


def _names_on(path: Sequence[Any], names: Sequence[str]) -> list[str]:
  """Returns the names on the path of an array in (args, kwargs), innermost first."""
  top, *below = (getattr(entry, 'key', getattr(entry, 'name', getattr(entry, 'idx', None))) for entry in path[1:])
  if isinstance(top, int):
    top = names[top] if top < len(names) else None
  return [name for name in (*reversed(below), top) if isinstance(name, str)]
