"""Prompts of different lengths, read by an attention layer with a cache, and then tokens one by one."""

import functools

import jax
import numpy as np

B, T, D = 2, 23, 12
LENGTHS = np.array([7, 13])  # Of the prompts, padded to PROMPT.
PROMPT, STEPS = 13, 4


def inputs():
  return np.random.default_rng(5).standard_normal((B, T, D)).astype(np.float32)


def decoded(layer, variables, x, wrap=jax.jit, prefix=()):
  """Outputs [B, T, D] of the prompts in one call and then a token at a time; zeros where nothing was computed."""

  def extend(variables, x, pos, state):
    y, side = layer.apply(variables, x, pos, *prefix, decode_state=state, method='extend_step')
    return y, side.decode_state

  extend = wrap(extend)
  _, side = layer.apply(variables, B, PROMPT + STEPS, method='init_decode_state')
  pos = np.where(np.arange(PROMPT) < LENGTHS[:, None], np.arange(PROMPT), -1)
  prompt = np.where((pos >= 0)[..., None], x[:, :PROMPT], np.float32(1e3))  # Padding must not matter.
  y, state = extend(variables, prompt, pos, side.decode_state)
  out = np.zeros((B, T, D), np.float32)
  for row, length in enumerate(LENGTHS):
    out[row, :length] = y[row, :length]
  for step in range(STEPS):
    at = (LENGTHS + step)[:, None]
    y, state = extend(variables, np.take_along_axis(x, at[..., None], axis=1), at, state)
    out[np.arange(B), at[:, 0]] = y[:, 0]
  assert np.isfinite(out).all()
  return out, state


def expected(layer, variables, x, **fields):
  y, _ = jax.jit(functools.partial(layer.apply, **fields))(variables, x)
  return np.where(np.arange(T)[:, None] < (LENGTHS + STEPS)[:, None, None], y, 0)
