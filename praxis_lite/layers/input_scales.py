"""Scales of inputs: before rounding, weights are multiplied by their input's scale; the layer divides inputs by it.

    y = sum_i (x_i / s_i) (s_i w_i)

    AWQ            s_i = m_i^a, m_i = mean |x_i|; a is the one of 21 numbers from 0 to 1 with the smallest sum of
                   squared errors of y over the rows of calibration. So inputs that matter are rounded more finely
                   (Lin et al., 2024)
    SmoothQuant    s_i = sqrt(max |x_i| / max_o |w_io|) makes inputs and weights equally large, so that both can be
                   rounded to int8 (Xiao et al., 2023, with their alpha = 0.5)

Weights that read the same inputs share their scales: o counts the outputs of all of them. So the layer that makes these
inputs can be divided by s instead. In grouped attention, the results of r heads come from one head of values; these r
heads share their scales too, by the mean of their m_i, or the maximum of their max |x_i| and max |w_io|.

For SmoothQuant, an input that is always 0, or whose weights are all 0, has the scale 1. Without rows, all scales are 1.
The squared errors depend on the rows only through G = sum x x': for d = w - rounded w, they are sum_o d_o' G d_o.

In `_I` and `_IO`, I stands for all inputs of a weight and O for all its outputs, each in one dimension. In the shape of
a weight, [*J, I, *O], I is the last input dimension, *J are the other input dimensions, and *O the output dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.layers.weight_formats import WeightFormat

_POWERS = np.linspace(0, 1, 21)
_SMALLEST = 1e-4  # Smaller m_i, as fractions of the largest, count as this.


@functools.partial(jax.jit, static_argnames=('forms', 'repeats'))
def awq_scales(
  forms: tuple[WeightFormat, ...],
  weights: Sequence[jax.Array],
  mean_abs_I: jax.Array,
  gram_II: jax.Array,
  repeats: int = 1,
) -> jax.Array:
  """Returns s, [I] float32, for weights [*J, I, *O] that read the same inputs, each with its format.

  `repeats` is r, the number of successive entries along *J that share their scales.
  """
  mean_abs_I = _share(mean_abs_I, repeats, forms[0], weights[0], jnp.mean)
  most = jnp.max(mean_abs_I)
  m_I = jnp.where(most > 0, jnp.maximum(mean_abs_I / jnp.where(most > 0, most, 1), _SMALLEST), 1)

  def scale_of(power: jax.Array) -> jax.Array:
    s_I = m_I**power
    return s_I / jnp.sqrt(jnp.max(s_I) * jnp.min(s_I))

  def error_of(power: jax.Array) -> jax.Array:
    s_I, errors = scale_of(power), []
    for form, w in zip(forms, weights):
      s, w = s_I.reshape(form.input_scale_shape(w.shape)), w.astype(jnp.float32)
      rounded = form.dequantize(form.quantize(w * s), w.shape[form.group_axis(w.ndim)]) / s
      difference_IO = (w - rounded).reshape(len(s_I), -1)
      errors.append(jnp.sum(difference_IO * jnp.matmul(gram_II, difference_IO, precision='highest')))
    return sum(errors, jnp.zeros(()))

  powers = jnp.asarray(_POWERS, jnp.float32)
  return scale_of(powers[jnp.argmin(jax.lax.map(error_of, powers))])


@functools.partial(jax.jit, static_argnames=('forms', 'repeats'))
def smooth_scales(
  forms: tuple[WeightFormat, ...], weights: Sequence[jax.Array], max_abs_I: jax.Array, repeats: int = 1
) -> jax.Array:
  """Returns s, [I] float32; for the arguments, see `awq_scales`."""
  largest_I = [jnp.max(jnp.abs(w.astype(jnp.float32)).reshape(len(max_abs_I), -1), axis=1) for w in weights]
  share = functools.partial(_share, repeats=repeats, form=forms[0], w=weights[0], combine=jnp.max)
  of_weights, of_inputs = share(jnp.max(jnp.stack(largest_I), axis=0)), share(max_abs_I)
  is_used = (of_inputs > 0) & (of_weights > 0)
  return jnp.where(is_used, jnp.sqrt(of_inputs / jnp.where(is_used, of_weights, 1)), 1)


def _share(
  x_I: jax.Array, repeats: int, form: WeightFormat, w: jax.Array, combine: Callable[..., jax.Array]
) -> jax.Array:
  """Returns x_I with the same value for all inputs that share a scale."""
  heads = x_I.reshape(-1, repeats, w.shape[form.group_axis(w.ndim)])
  return jnp.broadcast_to(combine(heads, axis=1, keepdims=True), heads.shape).reshape(x_I.shape)
