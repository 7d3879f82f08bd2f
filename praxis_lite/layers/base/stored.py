"""StoredWeight: a weight that a layer declares as one array but that is stored as others, such as integers and scales.

The layer's own code sees the declaration, in `layer.theta.w`, and everything else sees the variables that are stored:
`abstract_init`, specs, checkpoints and optimizers. I are the dimensions of a weight's inputs, O those of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import jax
from jax.typing import DTypeLike

from praxis_lite.sharding.weights import WeightHParams


class StoredWeight(Protocol):
  """How a weight is stored."""

  @property
  def weight(self) -> WeightHParams:
    """The weight as the layer declares it."""

  @property
  def parts(self) -> Mapping[str, WeightHParams]:
    """The declarations of the variables that store the weight, by name."""

  def store(self, w: jax.Array) -> dict[str, jax.Array]:
    """Returns the values of `parts`, given the weight; `w` and the values may be stacked over repeated layers."""

  def read(self, parts: Mapping[str, jax.Array], dtype: DTypeLike | None) -> jax.Array:
    """Returns the weight from the values of `parts`, in `dtype`; None means the dtype of the weight."""

  @property
  def multiply(self) -> Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array] | None:
    """A function of the result of `scale_inputs` and of the values of `parts`: returns inputs times weight, [..., *O].

    It does not compute the weight, [*I, *O], itself. None if there is no such function.
    """

  def scale_inputs(self, x: jax.Array, parts: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the inputs [..., *I] that `multiply` takes, given the inputs of the layer."""

  def input_range(self, parts: Mapping[str, jax.Array]) -> jax.Array | None:
    """Returns the range of inputs in int8, a scalar; None if it follows from their current values."""
