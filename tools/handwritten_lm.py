"""A language model's training step written by hand in plain JAX: the baseline that the framework's overhead is measured against.

The same architecture as `praxis_lite.models.transformer_lm` in its LLaMA style, in the way a careful engineer writes it for one
model: a dict of stacked arrays, one `lax.scan` over layers, optax, donation.

Legend: B batch, T length, D model dims, N heads, H dims per head, F hidden dims, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Size(NamedTuple):
  """Dimensions of the model and its batch."""

  batch: int = 8
  length: int = 256
  model_dims: int = 256
  num_layers: int = 4
  num_heads: int = 4
  hidden_dims: int = 1024
  vocab: int = 256

  @property
  def dims_per_head(self) -> int:
    return self.model_dims // self.num_heads


def init_params(size: Size, key: jax.Array) -> dict[str, jax.Array]:
  """Returns parameters drawn from Gaussians of standard deviation 1/sqrt(fan in)."""
  L, D, N, H, F, V = (
    size.num_layers,
    size.model_dims,
    size.num_heads,
    size.dims_per_head,
    size.hidden_dims,
    size.vocab,
  )
  shapes = {
    'embedding': (V, D),
    'q': (L, D, N, H),
    'k': (L, D, N, H),
    'v': (L, D, N, H),
    'o': (L, D, N, H),
    'gate': (L, D, F),
    'up': (L, D, F),
    'down': (L, F, D),
    'softmax': (D, V),
  }
  keys = jax.random.split(key, len(shapes))
  fan_in = {'embedding': D, 'down': F}
  params = {
    name: jax.random.normal(k, shape) / jnp.sqrt(fan_in.get(name, D)) for k, (name, shape) in zip(keys, shapes.items())
  }
  return params | {'norm1': jnp.ones((L, D)), 'norm2': jnp.ones((L, D)), 'final_norm': jnp.ones((D,))}


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
  x32_BTD = x_BTD.astype(jnp.float32)
  y_BTD = x32_BTD * jax.lax.rsqrt(jnp.mean(jnp.square(x32_BTD), -1, keepdims=True) + 1e-6)
  return (y_BTD * scale_D).astype(x_BTD.dtype)


def rotate(x_BTNH: jax.Array, sin_BT1h: jax.Array, cos_BT1h: jax.Array) -> jax.Array:
  first, second = jnp.split(x_BTNH, 2, axis=-1)
  return jnp.concatenate([first * cos_BT1h - second * sin_BT1h, second * cos_BT1h + first * sin_BT1h], axis=-1)


def logits_fn(params: dict[str, jax.Array], ids_BT: jax.Array, size: Size) -> jax.Array:
  """Returns logits [B, T, V]."""
  H = size.dims_per_head
  x_BTD = params['embedding'][ids_BT]
  position_T = jnp.arange(ids_BT.shape[1], dtype=jnp.float32)
  angle_BT1h = (position_T[:, None] / 10_000 ** (jnp.arange(H // 2) / (H // 2)))[None, :, None, :]
  sin_BT1h, cos_BT1h = jnp.sin(angle_BT1h), jnp.cos(angle_BT1h)

  def block(x_BTD: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    h_BTD = rms_norm(x_BTD, w['norm1'])
    q_BTNH = rotate(jnp.einsum('btd,dnh->btnh', h_BTD, w['q']), sin_BT1h, cos_BT1h)
    k_BTNH = rotate(jnp.einsum('btd,dnh->btnh', h_BTD, w['k']), sin_BT1h, cos_BT1h)
    v_BTNH = jnp.einsum('btd,dnh->btnh', h_BTD, w['v'])
    mixed_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BTNH, v_BTNH, is_causal=True)
    x_BTD = x_BTD + jnp.einsum('btnh,dnh->btd', mixed_BTNH, w['o'])
    h_BTD = rms_norm(x_BTD, w['norm2'])
    h_BTF = jax.nn.silu(h_BTD @ w['gate']) * (h_BTD @ w['up'])
    return x_BTD + h_BTF @ w['down'], None

  stacked = {k: v for k, v in params.items() if k not in ('embedding', 'softmax', 'final_norm')}
  x_BTD, _ = jax.lax.scan(block, x_BTD, stacked)
  return rms_norm(x_BTD, params['final_norm']) @ params['softmax']


def make_optimizer(learning_rate: float, decay_mask: Any) -> optax.GradientTransformation:
  return optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, b2=0.95, weight_decay=0.1, mask=decay_mask)
  )


def make_step(size: Size, tx: optax.GradientTransformation) -> Callable[..., Any]:
  """Returns `(params, opt_state, batch) -> (params, opt_state, metrics)`, to be jitted with donation."""

  def loss_fn(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    logits_BTV = logits_fn(params, batch['ids'], size).astype(jnp.float32)
    xent_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch['labels'])
    return jnp.sum(xent_BT * batch['weights']) / jnp.maximum(jnp.sum(batch['weights']), 1e-6)

  def step(params: dict[str, jax.Array], opt_state: Any, batch: dict[str, jax.Array]) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, {'loss': loss, 'grad_norm': optax.global_norm(grads)}

  return step
