"""Quantizers without a codebook: each dim of a vector is rounded separately, to one digit of the vector's code.

D input dims, V number of codes.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.base import SplitMapping
from praxis_lite.layers.quantizers import Quantizer, pass_gradient


class FiniteScalarQuantizer(Quantizer):
  """Rounds dim d to one of L_d levels (FSQ, Mentzer et al., 2024); it has no weights and needs no further loss.

      bounded_d = h_d tanh(z_d + atanh(o_d / h_d)) - o_d,  with h_d = (L_d - 1) (1 + 1e-3) / 2
      y_d       = round(bounded_d) / floor(L_d / 2)
      code      = sum_d (round(bounded_d) + floor(L_d / 2)) prod_{c < d} L_c

  o_d is 1/2 if L_d is even, otherwise 0.

  Attributes:
    levels: (L_1, ..., L_D), such as (8, 5, 5, 5) for 1,000 codes; each is at least 2.
  """

  levels: tuple[int, ...] = REQUIRED
  weight_split_dims_mapping: Config = template(SplitMapping)

  def setup(self) -> None:
    if not self.levels or min(self.levels) < 2 or math.prod(self.levels) > np.iinfo(np.int32).max:
      raise ConfigError(
        f'{self.path_name}.levels: expected numbers of at least 2 whose product is below 2^31, as in (8, 5, 5, 5), got '
        f'{self.levels!r}'
      )

  @property
  def latent_dims(self) -> int:
    return len(self.levels)

  @property
  def num_codes_per_group(self) -> int:
    return math.prod(self.levels)

  def lookup(self, codes: jax.Array) -> jax.Array:
    """Returns the vectors of codes, [..., D] for [..., 1]."""
    digits = codes // self._place_values() % np.array(self.levels, np.int32)
    return self.shard(((digits - self._middles()) / self._middles()).astype(self.fprop_dtype))

  def _quantize(self, z: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    levels = np.array(self.levels)
    half = ((levels - 1) * (1 + 1e-3) / 2).astype(z.dtype)
    offset = np.where(levels % 2, 0, 0.5).astype(z.dtype)
    bounded = half * jnp.tanh(z + np.arctanh(offset / half)) - offset
    rounded = jnp.round(jax.lax.stop_gradient(bounded))
    codes = jnp.sum((rounded.astype(jnp.int32) + self._middles()) * self._place_values(), axis=-1, keepdims=True)
    return pass_gradient(bounded, rounded) / self._middles().astype(z.dtype), codes.astype(jnp.int32)

  def _middles(self) -> np.ndarray:
    return np.array(self.levels, np.int32) // 2

  def _place_values(self) -> np.ndarray:
    return np.cumprod([1, *self.levels[:-1]]).astype(np.int32)


class LookupFreeQuantizer(Quantizer):
  """Takes the sign of each dim, so that codes are numbers of D bits (LFQ, Yu et al., 2024).

      y_d = 1 if z_d > 0, otherwise -1,  code = sum_d 2^d [z_d > 0]
      p(y_d = 1 | z) = sigmoid(4 z_d / temperature), the softmax of -|z - y|^2 / temperature over the codes
      entropy    = mean_n H(p(. | z_n)) - diversity * H(mean_n p(. | z_n)), in nats
      commitment = mean_n |z_n - y_n|^2 / D

  The first entropy is low if each vector is near its code, and the second one high if all codes are used.

  Attributes:
    input_dims: D, at most 30.
    temperature: see the formula of p; above 0.
    entropy_weight, commitment_weight: weights of the auxiliary losses; 0 disables a loss.
    diversity: the factor in the formula of `entropy`.
    joint_dims: the second entropy is exact if D is at most this. Otherwise it is the sum of the entropies of runs of
      this many dims, because the exact entropy takes 2^D probabilities for each vector.
  """

  input_dims: int = REQUIRED
  temperature: float = 1.0
  entropy_weight: float = 0.1
  diversity: float = 1.0
  commitment_weight: float = 0.25
  joint_dims: int = 9
  weight_split_dims_mapping: Config = template(SplitMapping)

  def setup(self) -> None:
    self._check_range('input_dims', least=1, below=31)
    self._check_range('joint_dims', least=1, below=17)
    self._check_range('temperature', above=0)

  @property
  def latent_dims(self) -> int:
    return self.input_dims

  @property
  def num_codes_per_group(self) -> int:
    return 2**self.input_dims

  def lookup(self, codes: jax.Array) -> jax.Array:
    """Returns the vectors of codes, [..., D] for [..., 1]."""
    return self.shard((2 * (codes // self._place_values() % 2) - 1).astype(self.fprop_dtype))

  def _quantize(self, z: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    is_on = z > 0
    vectors = jnp.where(is_on, 1, -1).astype(z.dtype)
    codes = jnp.sum(jnp.where(is_on, self._place_values(), 0), axis=-1, keepdims=True).astype(jnp.int32)
    if self.commitment_weight:
      losses = jnp.mean(jnp.square(z - vectors), axis=-1)
      self.add_aux_loss('commitment', self._mean(losses, real), self.commitment_weight)
    if self.entropy_weight:
      self.add_aux_loss('entropy', self._entropy_loss(z, real), self.entropy_weight)
    return pass_gradient(z, vectors), codes

  def _entropy_loss(self, z: jax.Array, real: jax.Array) -> jax.Array:
    logits = 4 * z / self.temperature
    log_on, log_off = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    of_vector = -jnp.sum(jnp.exp(log_on) * log_on + jnp.exp(log_off) * log_off, axis=-1)
    of_batch = jnp.zeros((), z.dtype)
    for start in range(0, self.input_dims, self.joint_dims):
      on, off = (x[..., start : start + self.joint_dims] for x in (log_on, log_off))
      size = on.shape[-1]
      bits = (np.arange(2**size)[:, None] >> np.arange(size) & 1).astype(z.dtype)
      log_p = jnp.einsum('...d,cd->...c', on, bits) + jnp.einsum('...d,cd->...c', off, 1 - bits)
      mean_C = self._mean(jnp.exp(log_p), real)
      of_batch -= jnp.sum(jax.scipy.special.xlogy(mean_C, mean_C))
    return self._mean(of_vector, real) - self.diversity * of_batch

  def _place_values(self) -> np.ndarray:
    return (1 << np.arange(self.input_dims)).astype(np.int32)
