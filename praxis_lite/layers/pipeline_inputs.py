"""What goes into a pipeline: arrays with rows of the batch, which are cut into microbatches, and all else.

B batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.errors import DataError


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

  Attributes:
    rows: arrays [B, ...].
  """

  def __init__(self, args: tuple[object, ...], kwargs: Mapping[str, object], batch_size: int, where: str):
    found, self._structure = jax.tree_util.tree_flatten_with_path((args, dict(kwargs)))
    self._leaves = [leaf for _, leaf in found]
    self._cut: list[int] = []
    for i, (path, leaf) in enumerate(found):
      shape = getattr(leaf, 'shape', ())
      if not shape or shape[0] == 1 != batch_size:
        continue
      if shape[0] != batch_size:
        name = jax.tree_util.keystr(path[1:2], simple=True)  # The number or the name of the argument.
        raise DataError(
          f'{where}: the side input {name} has shape {shape}; in a pipeline, dimension 0 of each is the batch, '
          f'{batch_size}, or 1'
        )
      self._cut.append(i)
    self.rows: list[jax.Array] = [jnp.asarray(self._leaves[i]) for i in self._cut]

  def with_rows(self, rows: Sequence[jax.Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) with these in place of `rows`."""
    filled = list(self._leaves)
    for i, x in zip(self._cut, rows):
      filled[i] = x
    return jax.tree.unflatten(self._structure, filled)
