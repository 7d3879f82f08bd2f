"""The inputs of a pipeline: arrays with rows of the batch, which are cut into microbatches, and all other inputs.

Rows that only fill up the last microbatches are copies of other rows, so they add no values that are not finite. `real`
is False for these copies, and arguments that mark padding, such as `paddings`, mark them too.

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

# The name of the argument that marks the rows and tokens that count in taps; layers do not receive it.
TAPPED_ROWS = '~tapped_rows'


def num_rows(x: object, where: str) -> int:
  """Returns B for a tree of arrays [B, ...]; raises DataError if they differ in B."""
  sizes = {v.shape[:1] for v in jax.tree.leaves(x)}
  if len(sizes) != 1 or () in sizes:
    shapes = ', '.join(str(v.shape) for v in jax.tree.leaves(x)) or 'no arrays'
    raise DataError(
      f'{where}: the arrays that go through a pipeline have the same dimension 0, the batch; got {shapes}'
    )
  return sizes.pop()[0]


class SideInputs:
  """The arguments of a call besides the first one. Those with a batch dimension are cut into microbatches.

  `names` are the names of the positional arguments `args`, and `marks` is the layer's `marks_of_padding`. `outer_real`
  is [B] bool, False for rows that fill up a microbatch of an enclosing pipeline; None if there is no such pipeline.
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
        name = jax.tree_util.keystr(path[1:2], simple=True)  # An argument's index or name.
        raise DataError(
          f'{where}: the side input {name} has shape {shape}; in a pipeline, dimension 0 of each is the batch, '
          f'{batch_size}, or 1'
        )
      self._cut.append(i)
      self._marks.append(next((marks[name] for name in _names_on(path, names) if name in marks), None))

  def cut(self, M: int, multiple: int) -> list[jax.Array]:
    """Returns the arrays that have rows, as microbatches [M, mb, ...].

    Rows of padding are added until the number of rows is a multiple of `multiple`. If there are any, one more array
    follows, [M, mb] bool, which is False for rows of padding.
    """
    arrays = [(jnp.asarray(self._leaves[i]), mark) for i, mark in zip(self._cut, self._marks)]
    self._says_real = self._real is not None or bool(self._batch_size % multiple)
    if self._says_real:
      arrays.append((jnp.ones(self._batch_size, bool) if self._real is None else self._real, False))
    return [microbatches(x, M, multiple, mark) for x, mark in arrays]

  def held(self, rows: Sequence[jax.Array], sum_over_rows: Callable[[jax.Array], jax.Array]) -> jax.Array | None:
    """Returns [M] bool, False for microbatches that contain only padding; None if no argument marks padding.

    If all microbatches contain only padding, all entries are True. A microbatch of padding occurs if a mesh has filled
    up a batch that has fewer rows than there are microbatches. `rows` is the result of `cut`.
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
    """The arrays that have no batch dimension, but may get a gradient."""
    return [self._leaves[i] for i in self._shared]

  def layer_arguments(
    self, rows: Sequence[jax.Array], shared: Sequence[jax.Array], at_work: jax.Array
  ) -> tuple[tuple[Any, ...], dict[str, Any], jax.Array | None]:
    """Returns the arguments of a layer, and which rows are real, [mb] bool; None if all are.

    `rows` has the layer's microbatch of each array that `cut` returns, and `shared` the stage's copies of the arrays
    that the property of this name returns. `at_work` is False in a bubble, and for a layer that only pads its group.
    Then no gradient flows through the arguments.
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
    """Whether the call has no argument of this name."""
    return name not in self._given


def argument_names(method: Callable[..., object]) -> list[str]:
  """Returns the names of a method's positional arguments without the first one."""
  kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
  return [p.name for p in inspect.signature(method).parameters.values() if p.kind in kinds][1:]


def _names_on(path: Sequence[Any], names: Sequence[str]) -> list[str]:
  """Returns the names of the arguments, fields and keys on the path of an array in (args, kwargs), innermost first."""
  top, *below = (getattr(entry, 'key', getattr(entry, 'name', getattr(entry, 'idx', None))) for entry in path[1:])
  if isinstance(top, int):
    top = names[top] if top < len(names) else None
  return [name for name in (*reversed(below), top) if isinstance(name, str)]
