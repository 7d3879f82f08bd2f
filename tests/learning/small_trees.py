"""A variable tree with a stack of layers in it, plain and unrolled, for tests of learners."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.sharding.weights import WeightHParams, WeightHParamsCollection

LAYERS = 3
SKIP = WeightHParamsCollection.SKIP_REGULARIZATION
NON_TRAINABLE = WeightHParamsCollection.NON_TRAINABLE


def weight(*shape: int, repeat: tuple[int, ...] = (), marks: tuple[WeightHParamsCollection, ...] = ()) -> WeightHParams:
  return WeightHParams(
    shape, repeat_prefix=repeat, repeat_prefix_split_dims_mapping=(None,) * len(repeat), collections=frozenset(marks)
  )


def declarations() -> dict[str, Any]:
  return {
    'lm': {
      'emb': {'w': weight(6, 4)},
      'layers': {'ff': {'w': weight(4, 5, repeat=(LAYERS,)), 'b': weight(4, repeat=(LAYERS,), marks=(SKIP,))}},
      'deep': {'w': weight(5, 4, repeat=(2, 2))},
      'scale': weight(4, marks=(SKIP,)),
    }
  }


def values(weights: Any, seed: int = 0, spread: float = 1.0) -> Any:
  """Random values; each layer of a stack gets another scale, so that statistics over the stack would show."""
  leaves, structure = jax.tree.flatten(weights)
  keys = jax.random.split(jax.random.key(seed), len(leaves))

  def value(w: WeightHParams, key: jax.Array) -> jax.Array:
    x = jax.random.normal(key, w.full_shape)
    scale = spread ** jnp.arange(jnp.prod(jnp.asarray(w.repeat_prefix or (1,))), dtype=jnp.float32)
    return x * scale.reshape(w.repeat_prefix + (1,) * len(w.shape)) if w.repeat_prefix else x

  return jax.tree.unflatten(structure, [value(w, k) for w, k in zip(leaves, keys)])


def unrolled(tree: Any, weights: Any) -> Any:
  """The same tree with a list of layers where `tree` has a stack of them."""

  def split(x: jax.Array, w: WeightHParams) -> Any:
    return list(x.reshape(-1, *w.shape)) if w.repeat_prefix else x

  return jax.tree.map(split, tree, weights)


def restacked(tree: Any, weights: Any) -> Any:
  """The inverse of `unrolled`."""
  return jax.tree.map(
    lambda w, x: jnp.stack(x).reshape(w.full_shape) if w.repeat_prefix else x, weights, tree, is_leaf=is_declaration
  )


def is_declaration(x: Any) -> bool:
  return isinstance(x, WeightHParams)
