"""What an expert computes for its rows: a feed-forward layer, gated or not, with biases or without.

    gated      (f(x W_gate + b_gate) * (x W_up + b_up)) W_down + b_down
    otherwise  f(x W_up + b_up) W_down + b_down

With a limit l and an offset o, gated experts compute f(min(gate, l)) * (clip(up, -l, l) + o) (GPT-OSS; OpenAI, 2025).

D model dims, F hidden dims, E experts, M rows; I inputs and O outputs of a product: D and F, or F and D.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.int8 import RowProduct, multiply_experts_in_int8


@dataclasses.dataclass(frozen=True)
class ExpertMlp:
  """The formula of experts; for the fields, see `MoeFeedForward`."""

  activation: str
  gated: bool = True
  hidden_limit: float | None = None
  up_offset: float = 0.0
  matmul: str = 'fprop'
  hidden_axes: tuple[str, ...] = ()  # Inside `shard_map`, the mesh axes that split F.

  def __call__(self, weights: Mapping[str, jax.Array], product: RowProduct, rows: jax.Array) -> jax.Array:
    """Returns the outputs of experts, [..., D].

    Args:
      weights: `up`, `down` and, if experts are gated, `gate`, [E, D, F] or [E, F, D]; with biases, also `up_bias`, ...
      product: the product of rows and weights.
      rows: [..., D].
    """
    return self.multiply(weights, product, self.compute_hidden(weights, product, rows), 'down')

  def compute_hidden(self, weights: Mapping[str, jax.Array], product: RowProduct, rows: jax.Array) -> jax.Array:
    """Returns the rows that the weights `down` multiply, [..., F]; the arguments are the same as for `__call__`."""
    multiply = functools.partial(self.multiply, weights, product)
    fn, limit = get_activation(self.activation), self.hidden_limit
    up = checkpoint_name(multiply(rows, 'up'), 'ffn_up')
    if not self.gated:
      return fn(up)
    gate = checkpoint_name(multiply(rows, 'gate'), 'ffn_gate')
    if limit is not None:
      gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    if self.up_offset:
      up += self.up_offset
    return fn(gate) * up

  def multiply(self, weights: Mapping[str, jax.Array], product: RowProduct, rows: jax.Array, name: str) -> jax.Array:
    """Returns the products of rows with the weights of this name, with their biases if they have any."""
    w, biases = weights[name], weights.get(f'{name}_bias')
    if self.matmul == 'fprop':
      return product(rows, w, biases)
    return multiply_experts_in_int8(rows, w, biases, product, self.hidden_axes if name == 'down' else ())
