"""Scales of inputs: before rounding, weights are multiplied by their input's scale; the layer divides inputs by it.

    y = sum_i (x_i / s_i) (s_i w_i)

    AWQ            s_i = m_i^a, m_i = mean |x_i|; a is the one of 21 numbers from 0 to 1 with the smallest sum of
                   squared errors of y over the rows of calibration. So inputs that matter are rounded more finely
                   (Lin et al., 2024)
    SmoothQuant    s_i = sqrt(max |x_i| / max_o |w_io|) makes inputs and weights equally large, so that both can be
                   rounded to int8 (Xiao et al., 2023, with their alpha = 0.5)

For SmoothQuant, an input that is always 0, or whose weights are all 0, has the scale 1. Without rows, all scales are 1.
The squared errors depend on the rows only through G = sum x x': for d = w - rounded w, they are sum_o d_o' G d_o.

In `_I` and `_IO`, I stands for all inputs of a weight and O for all its outputs, each in one dimension. In the shape of
a weight, [*J, I, *O], I is the last input dimension, *J are the other input dimensions, and *O the output dimensions.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.layers.weight_formats import WeightFormat

_POWERS = np.linspace(0, 1, 21)
_SMALLEST = 1e-4  # Smaller m_i, as fractions of the largest, count as this.


@functools.partial(jax.jit, static_argnums=0)
def awq_scales(form: WeightFormat, w: jax.Array, mean_abs_I: jax.Array, gram_II: jax.Array) -> jax.Array:
  """Returns s, [*J, I, *1] float32, for a weight [*J, I, *O]."""
  w = w.astype(jnp.float32)
  wide = (*w.shape[: w.ndim - form.num_outputs], *(1,) * form.num_outputs)
  most = jnp.max(mean_abs_I)
  m_I = jnp.where(most > 0, jnp.maximum(mean_abs_I / jnp.where(most > 0, most, 1), _SMALLEST), 1)

  def scale_of(power: jax.Array) -> jax.Array:
    s_I = m_I**power
    return (s_I / jnp.sqrt(jnp.max(s_I) * jnp.min(s_I))).reshape(wide)

  def error_of(power: jax.Array) -> jax.Array:
    s = scale_of(power)
    parts = form.quantize(w * s)
    difference_IO = (w - form.dequantize(parts, w.shape[form.group_axis(w.ndim)]) / s).reshape(len(m_I), -1)
    return jnp.sum(difference_IO * jnp.matmul(gram_II, difference_IO, precision='highest'))

  powers = jnp.asarray(_POWERS, jnp.float32)
  return scale_of(powers[jnp.argmin(jax.lax.map(error_of, powers))])


@functools.partial(jax.jit, static_argnums=0)
def smooth_scales(form: WeightFormat, w: jax.Array, max_abs_I: jax.Array) -> jax.Array:
  """Returns s, [*J, I, *1] float32, for a weight [*J, I, *O]."""
  axes = tuple(range(w.ndim - form.num_outputs, w.ndim))
  of_weights = jnp.max(jnp.abs(w.astype(jnp.float32)), axes, keepdims=True)
  of_inputs = max_abs_I.reshape(of_weights.shape)
  is_used = (of_inputs > 0) & (of_weights > 0)
  return jnp.where(is_used, jnp.sqrt(of_inputs / jnp.where(is_used, of_weights, 1)), 1)
