"""Activation functions by name, and as a layer. D is the last dimension."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED
from praxis_lite.common.errors import ConfigError, did_you_mean
from praxis_lite.layers.base import Layer

ActivationFunction = Callable[[jax.Array], jax.Array]

ACTIVATIONS: dict[str, ActivationFunction] = {
  'identity': lambda x: x,
  'relu': jax.nn.relu,
  'relu6': jax.nn.relu6,
  'squared_relu': lambda x: jnp.square(jax.nn.relu(x)),  # So et al., 2021.
  'cubed_relu': lambda x: jax.nn.relu(x) ** 3,
  'leaky_relu': jax.nn.leaky_relu,
  'elu': jax.nn.elu,
  'gelu': functools.partial(jax.nn.gelu, approximate=False),  # x Phi(x) (Hendrycks and Gimpel, 2016).
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),  # The tanh approximation of GELU, as in GPT-2.
  'gelu_sigmoid': lambda x: x * jax.nn.sigmoid(1.702 * x),  # The sigmoid approximation of GELU, in the same paper.
  'silu': jax.nn.silu,  # x sigmoid(x), also known as swish.
  'sigmoid': jax.nn.sigmoid,
  'tanh': jnp.tanh,
  'softplus': jax.nn.softplus,
  'exp': jnp.exp,
}
"""Activation functions by the name that configs give them."""


def get_activation(name: str, where: str = 'activation') -> ActivationFunction:
  """Returns the activation function called `name`.

  Args:
    name: a key of `ACTIVATIONS`.
    where: path of the field that sets `name`, for the error message.

  Raises:
    ConfigError: there is no such function.
  """
  if name not in ACTIVATIONS:
    raise ConfigError(
      f'{where}: unknown activation {name!r}.{did_you_mean(name, ACTIVATIONS)} Known: {", ".join(ACTIVATIONS)}'
    )
  return ACTIVATIONS[name]


class Activation(Layer):
  """A layer that computes y = f(x), for chains such as `Sequential`; other layers have a field for their activation.

  Attributes:
    activation: name of f, a key of `ACTIVATIONS`.
  """

  activation: str = REQUIRED

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns an array of the shape of x, [..., D]."""
    return self.shard(get_activation(self.activation)(x))
