"""GPTQ: rounds a weight one input after the other, and changes the remaining inputs to compensate for the errors.

    minimize  sum_o d_o' G d_o       d = w - rounded w, G = sum x x' over the rows x of calibration

    for i in inputs, those with the largest G_ii first:
      q_i = the nearest values of w_i
      e   = (w_i - rounded w_i) / U_ii
      w_j = w_j - U_ij e             for all remaining inputs j; U'U = (G + damping)^-1, U upper triangular

(Frantar et al., 2023.) Scales and zero points are the same as for rounding to nearest. An input that is always 0 is
rounded to nearest, and so is a weight that has seen no rows.

I all inputs, O all outputs of one weight; in [*J, I, *O], *J and I are the dimensions of its inputs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.layers.weight_formats import WeightFormat

_DAMPING = 0.01  # A fraction of the mean of G's diagonal, as in the paper.
_BLOCK = 128  # The inputs of a block; after each block, its errors are spread over all inputs of later blocks.


class Compensation(NamedTuple):
  """How the error of each input is spread over the inputs that are rounded later."""

  order: np.ndarray  # [I] int32, the inputs in the order of rounding.
  upper: np.ndarray  # [I, I] float32, U in this order.


def compensation(gram_II: np.ndarray) -> Compensation:
  """Computes in float64, and returns, the `Compensation` for the matrix G, [I, I]."""
  gram = np.array(gram_II, np.float64)
  diagonal = np.diag(gram).copy()
  is_used = diagonal > 0
  damping = _DAMPING * diagonal[is_used].mean() if is_used.any() else 0.0
  gram[np.diag_indices_from(gram)] += np.where(is_used, damping, 1.0)
  order = np.argsort(-diagonal, kind='stable')
  # G = V V' for the upper triangular V = U^-1: Cholesky's decomposition from the last input to the first.
  backwards = gram[np.ix_(order, order)][::-1, ::-1]
  upper = np.linalg.inv(np.linalg.cholesky(backwards)[::-1, ::-1])
  return Compensation(order.astype(np.int32), np.triu(upper).astype(np.float32))


@functools.partial(jax.jit, static_argnums=0)
def quantize_in_turn(
  form: WeightFormat, w: jax.Array, errors: Compensation, largest: jax.Array | None = None
) -> dict[str, jax.Array]:
  """Returns the arrays of `form.quantize` for a weight [*J, I, *O], with values that GPTQ chooses."""
  num_outputs = int(np.prod(w.shape[w.ndim - form.num_outputs :]))

  def choose(w: jax.Array, scale: jax.Array, zero: jax.Array | None) -> jax.Array:
    w_IO, scale_IO = (x.reshape(-1, num_outputs)[errors.order] for x in (w, scale))
    zero_IO = None if zero is None else zero.reshape(-1, num_outputs)[errors.order]
    q_IO = _choose_in_order(form, w_IO, scale_IO, zero_IO, jnp.asarray(errors.upper))
    return jnp.zeros_like(q_IO).at[errors.order].set(q_IO).reshape(w.shape)

  return form.quantize(w, choose, largest)


def _choose_in_order(
  form: WeightFormat, w_IO: jax.Array, scale_IO: jax.Array, zero_IO: jax.Array | None, upper_II: jax.Array
) -> jax.Array:
  """Returns the rounded values, [I, O] int32. The inputs of all arguments are in the order of rounding."""
  size = upper_II.shape[0]
  block, missing = min(_BLOCK, size), -size % min(_BLOCK, size)
  fill = functools.partial(jnp.pad, pad_width=((0, missing), (0, 0)))
  w_IO, scale_IO = fill(w_IO), fill(scale_IO, constant_values=1)
  zero_IO = None if zero_IO is None else fill(zero_IO)
  upper_II = jnp.pad(upper_II, (0, missing)) + jnp.diag(jnp.arange(size + missing) >= size).astype(jnp.float32)
  product = functools.partial(jnp.matmul, precision='highest')

  def round_block(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    w_IO, q_IO = carry
    first = n * block

    def rows(x: jax.Array) -> jax.Array:
      return jax.lax.dynamic_slice_in_dim(x, first, block)

    own_BB = jax.lax.dynamic_slice_in_dim(rows(upper_II), first, block, axis=1)
    scales_BO, zeros_BO = rows(scale_IO), None if zero_IO is None else rows(zero_IO)

    def round_one(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
      w_BO, q_BO, error_BO = carry
      scale, zero = scales_BO[i], None if zeros_BO is None else zeros_BO[i]
      q = form.round_values(w_BO[i], scale, zero).astype(jnp.int32)
      error = (w_BO[i] - form.restore_values(q, scale, zero)) / own_BB[i, i]
      later_B = jnp.where(jnp.arange(block) > i, own_BB[i], 0)
      return w_BO - later_B[:, None] * error, q_BO.at[i].set(q), error_BO.at[i].set(error)

    start = rows(w_IO), rows(q_IO), jnp.zeros_like(scales_BO)
    _, q_BO, error_BO = jax.lax.fori_loop(0, block, round_one, start)
    later_BI = jnp.where(jnp.arange(len(w_IO)) >= first + block, rows(upper_II), 0)
    return w_IO - product(later_BI.T, error_BO), jax.lax.dynamic_update_slice_in_dim(q_IO, q_BO, first, axis=0)

  start = w_IO, jnp.zeros(w_IO.shape, jnp.int32)
  return jax.lax.fori_loop(0, len(w_IO) // block, round_block, start)[1][:size]
