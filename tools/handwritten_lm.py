"""A training step of a language model in plain JAX, with which the framework's overhead is measured.

The architecture is the same as that of `praxis_lite.models.transformer_lm` in its LLaMA style. It is written as a
careful engineer would write it for one model: a dict of stacked arrays, one `lax.scan` over layers, optax, donation.
`Tuning` has the settings that such an engineer would try on a GPU.

Legend: B batch, T length, D model dims, N heads, H dims per head, F hidden dims, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Primitive
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike

NamedArrays = dict[str, jax.Array]
SplitActivation = Callable[..., jax.Array]
HandwrittenStep = Callable[[NamedArrays, optax.OptState, NamedArrays], tuple[NamedArrays, optax.OptState, NamedArrays]]


class Size(NamedTuple):
  """Dimensions of the model and its batch."""

  batch: int = 8
  length: int = 256
  model_dims: int = 256
  num_layers: int = 4
  num_heads: int = 4
  hidden_dims: int = 1024
  vocab: int = 256
  head_dims: int | None = None
  num_kv_heads: int | None = None  # None means N.
  tied: bool = False  # Whether the softmax shares the table of the embedding.

  @property
  def dims_per_head(self) -> int:
    return self.head_dims or self.model_dims // self.num_heads


class Tuning(NamedTuple):
  """Settings that change how the model is computed, but not what it computes.

  Attributes:
    dtype: dtype of activations and operands of products; None uses the dtype of the parameters.
    attention: the implementation of `jax.nn.dot_product_attention`; None leaves the choice to JAX.
    remat: True keeps only the results of products with weights for the backward pass of a layer; 'full' keeps only its
      input.
    unroll: whether the loop over layers is unrolled.
    loss_parts: number of parts into which rows are cut for the logits, which are computed part by part, and again in
      the backward pass.
    exchange: whether devices exchange looked-up vectors instead of gathering the table.
  """

  dtype: DTypeLike | None = None
  attention: Literal['xla', 'cudnn'] | None = None
  remat: bool | Literal['full'] = False
  unroll: bool = False
  loss_parts: int = 1
  exchange: bool = False


def init_params(size: Size, key: jax.Array) -> NamedArrays:
  """Returns Gaussian parameters with standard deviation 0.02, or less for weights that add to the residual stream."""
  L, D, N, H, F, V = (
    size.num_layers,
    size.model_dims,
    size.num_heads,
    size.dims_per_head,
    size.hidden_dims,
    size.vocab,
  )
  K = size.num_kv_heads or N
  shapes = {
    'embedding': (V, D),
    'q': (L, D, N, H),
    'k': (L, D, K, H),
    'v': (L, D, K, H),
    'o': (L, N, H, D),
    'gate': (L, D, F),
    'up': (L, D, F),
    'down': (L, F, D),
    'softmax': (D, V),
  }
  residual = 0.02 / (2 * L) ** 0.5
  if size.tied:
    del shapes['softmax']
  params = {
    name: (residual if name in ('o', 'down') else 0.02) * jax.random.normal(k, shape)
    for k, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items())
  }
  return params | {'norm1': jnp.ones((L, D)), 'norm2': jnp.ones((L, D)), 'final_norm': jnp.ones((D,))}


def sharding_specs() -> dict[str, P]:
  """Returns how the parameters are split over a mesh ('data', 'mdl')."""
  projection = P(None, 'data', 'mdl', None)
  return {
    'embedding': P('mdl', 'data'),
    'q': projection,
    'k': projection,
    'v': projection,
    'o': P(None, 'mdl', None, 'data'),
    'gate': P(None, 'data', 'mdl'),
    'up': P(None, 'data', 'mdl'),
    'down': P(None, 'mdl', 'data'),
    'softmax': P('data', 'mdl'),
    'norm1': P(),
    'norm2': P(),
    'final_norm': P(),
  }


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
  x32_BTD = x_BTD.astype(jnp.float32)
  y_BTD = x32_BTD * jax.lax.rsqrt(jnp.mean(jnp.square(x32_BTD), -1, keepdims=True) + 1e-5)
  return (y_BTD * scale_D).astype(x_BTD.dtype)


def rotate(x_BTNH: jax.Array, sin_BT1h: jax.Array, cos_BT1h: jax.Array) -> jax.Array:
  first, second = jnp.split(x_BTNH, 2, axis=-1)
  both = [first * cos_BT1h - second * sin_BT1h, second * cos_BT1h + first * sin_BT1h]
  return jnp.concatenate(both, axis=-1).astype(x_BTNH.dtype)


def hidden_fn(params: NamedArrays, ids_BT: jax.Array, size: Size, split: SplitActivation, tuning: Tuning) -> jax.Array:
  """Returns the input of the softmax layer, [B, T, D]."""
  H, dtype = size.dims_per_head, tuning.dtype or params['embedding'].dtype
  if tuning.exchange:
    of_all = split(params['embedding'][split(ids_BT, None, None)], None, None, 'data')
    x_BTD = split(split(of_all.astype(dtype), None, None, 'data'), 'data', None, None)
  else:
    x_BTD = split(params['embedding'][ids_BT].astype(dtype), 'data', None, None)
  position_T = jnp.arange(ids_BT.shape[1], dtype=jnp.float32)
  angle_BT1h = (position_T[:, None] / 10_000 ** (jnp.arange(H // 2) / (H // 2)))[None, :, None, :]
  sin_BT1h, cos_BT1h = jnp.sin(angle_BT1h), jnp.cos(angle_BT1h)

  def block(x_BTD: jax.Array, w: NamedArrays) -> tuple[jax.Array, None]:
    w = {name: x if 'norm' in name else x.astype(dtype) for name, x in w.items()}
    h_BTD = rms_norm(x_BTD, w['norm1'])
    q_BTNH, k_BTNH, v_BTNH = (
      split(jnp.einsum('btd,dnh->btnh', h_BTD, w[name]), 'data', None, 'mdl', None) for name in 'qkv'
    )
    q_BTNH, k_BTNH = rotate(q_BTNH, sin_BT1h, cos_BT1h), rotate(k_BTNH, sin_BT1h, cos_BT1h)
    mixed_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BTNH, v_BTNH, is_causal=True, implementation=tuning.attention)
    mixed_BTNH = split(mixed_BTNH, 'data', None, 'mdl', None)
    x_BTD = x_BTD + split(jnp.einsum('btnh,nhd->btd', mixed_BTNH, w['o']), 'data', None, None)
    h_BTD = rms_norm(x_BTD, w['norm2'])
    h_BTF = split(jax.nn.silu(h_BTD @ w['gate']) * (h_BTD @ w['up']), 'data', None, 'mdl')
    return split(x_BTD + split(h_BTF @ w['down'], 'data', None, None), 'data', None, None), None

  stacked = {k: v for k, v in params.items() if k not in ('embedding', 'softmax', 'final_norm')}
  if tuning.remat:
    policy = None if tuning.remat == 'full' else _keep_products
    block = jax.checkpoint(block, policy=policy, prevent_cse=tuning.unroll)
  x_BTD, _ = jax.lax.scan(block, x_BTD, stacked, unroll=size.num_layers if tuning.unroll else 1)
  return rms_norm(x_BTD, params['final_norm'])


def _keep_products(primitive: Primitive, *args: object, **params: object) -> bool:
  return primitive.name in ('dot_general', 'dot_product_attention_fwd_wrapper')


def logits_fn(params: NamedArrays, hidden_BTD: jax.Array, split: SplitActivation) -> jax.Array:
  """Returns logits [B, T, V]."""
  table_DV = params['softmax'] if 'softmax' in params else params['embedding'].T
  return split(hidden_BTD @ table_DV.astype(hidden_BTD.dtype), 'data', None, 'mdl')


_AS_IT_IS = Tuning()


def make_optimizer(learning_rate: float, decay_mask: dict[str, bool]) -> optax.GradientTransformation:
  return optax.adamw(learning_rate, b2=0.95, weight_decay=0.1, mask=decay_mask)


def make_step(
  size: Size, tx: optax.GradientTransformation, mesh: Mesh | None = None, tuning: Tuning = _AS_IT_IS
) -> HandwrittenStep:
  """Returns `(params, opt_state, batch) -> (params, opt_state, metrics)`, to be jitted with donation."""

  def split(x: jax.Array, *axes: str | None) -> jax.Array:
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

  def xent_of(params: NamedArrays, hidden_BTD: jax.Array, labels_BT: jax.Array) -> jax.Array:
    logits_BTV = logits_fn(params, hidden_BTD, split).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, labels_BT)

  def loss_fn(params: NamedArrays, batch: NamedArrays) -> jax.Array:
    hidden_BTD, labels_BT = hidden_fn(params, batch['ids'], size, split, tuning), batch['labels']
    if (parts := tuning.loss_parts) == 1:
      xent_BT = xent_of(params, hidden_BTD, labels_BT)
    else:
      rows = (x.reshape(parts, -1, *x.shape[2:]) for x in (hidden_BTD, labels_BT))
      again = jax.checkpoint(xent_of, prevent_cse=False)
      xent_BT = jax.lax.map(lambda part: again(params, *part), tuple(rows)).reshape(labels_BT.shape)
    return jnp.sum(xent_BT * batch['weights']) / jnp.maximum(jnp.sum(batch['weights']), 1e-6)

  def step(
    params: NamedArrays, opt_state: optax.OptState, batch: NamedArrays
  ) -> tuple[NamedArrays, optax.OptState, NamedArrays]:
    batch = {name: split(x, 'data', None) for name, x in batch.items()}
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    norm = optax.global_norm(grads)
    scale = 1 / jnp.maximum(norm, 1)
    updates, opt_state = tx.update(jax.tree.map(lambda g: g * scale, grads), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, {'loss': loss, 'grad_norm': norm}

  return step
