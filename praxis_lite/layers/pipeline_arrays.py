"""Arrays of a pipeline: queues of microbatches, stacks from which each stage reads an entry, and the shift by a stage.

Some functions define their own gradients. The gradients that JAX derives would add arrays as large as a whole stack,
keep masks of that size, or communicate twice.

B batch, M microbatches, mb rows in each, S stages; n entries of a stack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

_TreeT = TypeVar('_TreeT')


class Stacks(NamedTuple):
  """Stacks of arrays, from which a stage reads one entry in each tick; their gradients accumulate in place.

  The gradient that `jax.grad` derives would add an array as large as the whole stack in each tick.
  """

  values: Any  # A tree of arrays [n, ...].
  gradients: Any  # The same values again, through which gradients flow; None for arrays without gradients.

  def read(self, index: jax.Array, real: jax.Array) -> tuple[Any, Any]:
    """Returns a pair: the entries at an index, and the `gradients` of the stacks for the next `read`.

    If `real` is False, no gradient flows from these entries to the stacks.
    """

    def one(value: jax.Array, gradient: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
      return (entry_at(value, index), None) if gradient is None else _read(value, gradient, index, real)

    return unzip(one, self.values, self.gradients)


def is_float(x: jax.Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating)


def microbatches(x: jax.Array, M: int, multiple: int, mark: int | None = None) -> jax.Array:
  """Cuts [B, ...] into [M, mb, ...]: microbatch i has the rows i, i + M, ...

  With these strides, devices that share the batch cut their own rows. If B is not a multiple of `multiple`, itself a
  multiple of M, rows are added. They have the value `mark`; if `mark` is None, they are copies of rows of the same
  microbatch, so that they cause no new NaNs or large numbers.
  """
  missing = -x.shape[0] % multiple
  if missing:
    if mark is None:
      last = x[-M:]  # There are no more microbatches than rows.
      more = jnp.concatenate([last] * -(-missing // M))[:missing]
    else:
      more = jnp.full((missing, *x.shape[1:]), mark, x.dtype)
    x = jnp.concatenate([x, more])
  return jnp.swapaxes(x.reshape(-1, M, *x.shape[1:]), 0, 1)


def batch(x: jax.Array) -> jax.Array:
  """The inverse of `microbatches`; rows that `microbatches` added stay at the end."""
  return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])


def take_last(queue: jax.Array) -> jax.Array:
  """Returns the last entry of dimension 0, computed as a sum, which is one all-reduce if the dimension is split."""
  is_last = jnp.arange(queue.shape[0]) == queue.shape[0] - 1
  return jnp.sum(where(is_last, queue, jnp.zeros_like(queue)), axis=0, dtype=queue.dtype)


def broadcast_to_stages(x: jax.Array, S: int) -> jax.Array:
  return jnp.broadcast_to(x[None], (S, *x.shape))


def may_have_gradient(x: Any) -> bool:
  """Whether a gradient may flow through a leaf.

  No gradient flows through a value that is not a tracer. Such a value is passed on unchanged, so that layers can read
  it.
  """
  return isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)


def mask_gradients(real: jax.Array, tree: _TreeT) -> _TreeT:
  """Returns the tree unchanged; if `real`, a scalar, is False, its gradients are 0, even where they would be NaN.

  In a `vmap` over stages, each stage must have its own arrays, because the gradients of a shared array are summed
  before they arrive here.
  """
  return jax.tree.map(lambda x: _mask(real, x) if may_have_gradient(x) else x, tree)


@jax.custom_vjp
def _mark_stage(stage: jax.Array, x: jax.Array) -> jax.Array:
  """In a `vmap` over stages, returns a copy of x for each stage; `stage` is the number of the stage."""
  return jnp.where(stage >= 0, x, x)


_mark_stage.defvjp(lambda stage, x: (_mark_stage(stage, x), None), lambda _, gradient: (None, gradient))


def read_outside(stage: jax.Array, real: jax.Array, weight: jax.Array) -> jax.Array:
  """In a `vmap` over stages, returns a weight from outside of the pipeline; no gradient flows if `real` is False."""
  return _mask(real, _mark_stage(stage, weight)) if may_have_gradient(weight) else weight


@jax.custom_vjp
def _mask(real: jax.Array, x: jax.Array) -> jax.Array:
  return x


_mask.defvjp(
  lambda real, x: (x, real),
  lambda real, gradient: (None, jnp.where(real, gradient, jnp.zeros_like(gradient))),
)


def where(condition: jax.Array, x: _TreeT, y: _TreeT) -> _TreeT:
  return jax.tree.map(lambda a, b: _select(condition, a, b) if is_float(a) else _choose(condition, a, b), x, y)


def _choose(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns `jnp.where(condition, x, y)`, with a condition that has only the first dimensions of x and y."""
  return jnp.where(condition.reshape(*condition.shape, *(1,) * (x.ndim - condition.ndim)), x, y)


# With `jnp.where`, the backward pass would keep a mask as large as the arrays.
_select = jax.custom_vjp(_choose)
_select.defvjp(
  lambda condition, x, y: (_choose(condition, x, y), condition),
  lambda condition, ct: (None, _choose(condition, ct, jnp.zeros_like(ct)), _choose(condition, jnp.zeros_like(ct), ct)),
)


def unzip(fn: Callable[..., tuple[Any, Any]], tree: _TreeT, *trees: object) -> tuple[_TreeT, _TreeT]:
  """Maps trees by a function that returns pairs; returns a tree of the first values, and a tree of the second ones."""
  structure: Any = jax.tree.structure(tree)
  pairs = [fn(*xs) for xs in zip(*map(structure.flatten_up_to, (tree, *trees)))]
  first, second = (jax.tree.unflatten(structure, [pair[i] for pair in pairs]) for i in (0, 1))
  return first, second


def entry_at(stack: _TreeT, index: jax.Array) -> _TreeT:
  """Returns the entry of each array at an index of dimension 0.

  An array with only one entry is not indexed, so that the result does not depend on the index.
  """
  return jax.tree.map(
    lambda x: x[0] if x.shape[0] == 1 else jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stack
  )


def replace_entry(stack: _TreeT, entry: _TreeT, index: jax.Array) -> _TreeT:
  return jax.tree.map(
    lambda x, e: e[None] if x.shape[0] == 1 else jax.lax.dynamic_update_index_in_dim(x, e, index, 0), stack, entry
  )


@jax.custom_vjp
def _read(stack: jax.Array, gradients: jax.Array, index: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
  return entry_at(stack, index), gradients


def _read_backward(
  residuals: tuple[jax.Array, jax.Array], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[None, jax.Array, None, None]:
  (index, real), (entry, gradients) = residuals, cotangents
  # The gradient of a bubble is 0 times a value that may be NaN.
  total = entry_at(gradients, index) + jnp.where(real, entry, jnp.zeros_like(entry))
  return None, replace_entry(gradients, total, index), None, None


_read.defvjp(lambda stack, gradients, index, real: ((entry_at(stack, index), gradients), (index, real)), _read_backward)


def shift(x: jax.Array) -> jax.Array:
  """Returns, for each stage, the entry of the previous stage; for the first stage, the entry of the last stage."""
  return _shift_float(x) if is_float(x) else jnp.roll(x, 1, axis=0)


@jax.custom_vjp
def _shift_float(x: jax.Array) -> jax.Array:
  return jnp.roll(x, 1, axis=0)


# The transpose of a roll would be two permutes.
_shift_float.defvjp(lambda x: (jnp.roll(x, 1, axis=0), None), lambda _, gradient: (jnp.roll(gradient, -1, axis=0),))


def take(queue: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns entry `index` of dimension 1, and the unchanged queue, which callers use from then on.

  In the backward pass, the gradient of the entry is added in place to the gradient of the returned queue.
  """
  return _take_float(queue, index) if is_float(queue) else (_take(queue, index), queue)


def _take(queue: jax.Array, index: jax.Array) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(queue, index, axis=1, keepdims=False)


@jax.custom_vjp
def _take_float(queue: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
  return _take(queue, index), queue


def _take_backward(index: jax.Array, cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
  entry, queue = cotangents
  return jax.lax.dynamic_update_index_in_dim(queue, _take(queue, index) + entry, index, 1), None


_take_float.defvjp(lambda queue, index: (_take_float(queue, index), index), _take_backward)
