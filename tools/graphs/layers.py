"""Layers [B, T, D] -> [B, T, D] like those of a user, for random tasks, in addition to those of the package."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from praxis_lite.common.config import Config, child, template
from praxis_lite.layers import Linear
from praxis_lite.layers.base import Layer
from praxis_lite.sharding.weights import WeightHParams


class Tower(Layer):
  """A chain of residual layers, and the mean over the length."""

  layers_tpl: tuple[Config, ...] = ()
  dims: int = 8

  def setup(self) -> None:
    for i, layer in enumerate(self.layers_tpl):
      self.create_child(f'layer_{i}', layer)

  @property
  def output_dims(self) -> int:
    return self.dims

  def __call__(self, x: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    for i in range(len(self.layers_tpl)):
      x = self.shard(x + getattr(self, f'layer_{i}')(x))
    return jnp.mean(x, axis=1)


class Mixer(Layer):
  """A linear layer over the length."""

  length: int = 4
  linear_tpl: Config = template(Linear)

  linear: Linear = child()

  def setup(self) -> None:
    self.create_child('linear', self.linear_tpl.clone(input_dims=self.length, output_dims=self.length))

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.shard(jnp.swapaxes(jnp.tanh(self.linear(jnp.swapaxes(x, 1, 2))), 1, 2))


class HeadProducts(Layer):
  """Products of heads: a reshape divides D, and with it the mesh axes that split D, into heads and dims per head."""

  dims: int = 8
  heads: int = 2

  def setup(self) -> None:
    self.create_variable('w', WeightHParams((self.dims, self.dims)))

  def __call__(self, x: jax.Array) -> jax.Array:
    B, T, D = x.shape
    y = self.shard(x @ self.theta.w).reshape(B, T, self.heads, D // self.heads)
    return jnp.einsum('btnh,bsnh->btns', y, y).mean(-1).repeat(D // self.heads, axis=-1) / T


class Window(Layer):
  """A convolution over the length, for each dim or for groups of dims; then the maximum of neighbouring positions."""

  dims: int = 8
  groups: int = 8
  width: int = 3

  def setup(self) -> None:
    self.create_variable('w', WeightHParams((self.width, self.dims // self.groups, self.dims)))

  def __call__(self, x: jax.Array) -> jax.Array:
    numbers = ('NHC', 'HIO', 'NHC')
    y = lax.conv_general_dilated(
      x, self.theta.w, (1,), 'SAME', dimension_numbers=numbers, feature_group_count=self.groups
    )
    return lax.reduce_window(self.shard(y), -jnp.inf, lax.max, (1, 2, 1), (1, 1, 1), 'SAME')


class IdSums(Layer):
  """Looks up rows of a table by ids computed from x, and sums entries of x with the same id."""

  dims: int = 8
  rows: int = 5

  def setup(self) -> None:
    self.create_variable('w', WeightHParams((self.rows, self.dims)))

  def __call__(self, x: jax.Array) -> jax.Array:
    ids = (jnp.abs(lax.stop_gradient(x[..., 0])) * 7).astype(jnp.int32) % self.rows
    found = self.shard(jnp.take(self.theta.w, ids, axis=0))
    # Rows of the batch are not mixed, because added rows would affect the others.
    sums = jax.vmap(lambda i, y: jnp.zeros((self.rows, self.dims), y.dtype).at[i].add(y))(ids, x) / x.shape[1]
    return found + jnp.cumsum(jnp.take_along_axis(sums, ids[..., None], axis=1), axis=1) / x.shape[1]
