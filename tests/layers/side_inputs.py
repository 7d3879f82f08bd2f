"""A layer with side inputs of all kinds, and its gradients in a pipeline and in a sequence.

It divides by norms without an epsilon, and by a side input: what is computed on zeros is NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.layers.base import Layer
from praxis_lite.sharding.weights import WeightHParams

D = 4


class Divides(Layer):
  dims: int = REQUIRED

  def setup(self) -> None:
    self.create_variable('w', WeightHParams((self.dims, self.dims)))

  def __call__(self, x, rows, shared, scalar, absent=None, nested=None):
    assert absent is None
    y = x @ self.theta.w
    y = y / jnp.linalg.norm(y, axis=-1, keepdims=True) * shared * scalar / rows
    number, (of_rows, of_all) = nested['number'], nested['pair']
    return y * of_all.real * (1 + number[:, None]) / of_rows['rows']


def side_inputs(B):
  """Returns what has gradients, and what has none."""
  rng = np.random.default_rng(0)

  def some(*shape):
    return jnp.asarray(1.5 + rng.random(shape), jnp.float32)

  given = {'rows': some(B, 1), 'shared': some(1, D), 'scalar': some()}
  given['nested'] = {'pair': ({'rows': some(B, D)}, some(1).astype(jnp.complex64))}
  return given, jnp.asarray(rng.integers(0, 3, B), jnp.int32)


def gradients(cls, B, read=lambda variables: variables, **fields):
  """Returns (layer, function of (variables, x, side inputs) to their gradients, (x, side inputs))."""
  layer = Config(cls, **{'layers_tpl': Config(Divides, dims=D), **fields}).instantiate()
  x, weights = np.random.default_rng(1).standard_normal((2, B, D)).astype(np.float32)
  given, numbers = side_inputs(B)

  def loss(variables, x, given):
    nested = {**given['nested'], 'number': numbers}
    others = {name: given[name] for name in ('shared', 'scalar')}
    y, _ = layer.apply(read(variables), x, given['rows'], absent=None, nested=nested, **others)
    return jnp.sum(y * weights)

  return layer, jax.grad(loss, argnums=(0, 1, 2)), (x, given)
