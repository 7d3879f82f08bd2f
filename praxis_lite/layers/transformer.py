"""Transformer blocks, and stacks of them: one after the other, or as a scan over one.

B batch, T length, D model dims.

    pre-norm     x = x + attention(norm(x));  x = x + ff(norm(x))
    post-norm    x = norm(x + attention(x));  x = norm(x + ff(x))
"""

from __future__ import annotations

from typing import Any

import jax

from praxis_lite.call import SideOutputs
from praxis_lite.config import REQUIRED, Config, template
from praxis_lite.errors import ConfigError
from praxis_lite.layer import Layer, SplitMapping
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.feedforward import GatedFeedForward
from praxis_lite.layers.normalizations import RMSNorm
from praxis_lite.layers.remat import check_remat, remat
from praxis_lite.layers.repeat import Repeat


class TransformerBlock(Layer):
  """Self-attention and a feed-forward layer, each with a norm and a residual connection.

  Attributes:
    input_dims: D.
    hidden_dims: hidden dims of the feed-forward layer.
    num_heads, num_kv_heads, dims_per_head: see `MultiHeadAttention`.
    norm_policy: 'pre' (as GPT-2 and LLaMA) or 'post' (as the original transformer and BERT).
    norm_tpl: of the children `attention_norm` and `ff_norm`.
    attention_tpl: of the child `attention`.
    ff_tpl: of the child `ff`.
    dropout_tpl: of the child `residual_dropout`, on what is added to the residual stream.
    activation_split_dims_mapping: `out`, [B, T, D]: the residual stream.
  """

  input_dims: int = REQUIRED
  hidden_dims: int = REQUIRED
  num_heads: int = REQUIRED
  num_kv_heads: int | None = None
  dims_per_head: int | None = None
  norm_policy: str = 'pre'
  norm_tpl: Config = template(RMSNorm)
  attention_tpl: Config = template(MultiHeadAttention)
  ff_tpl: Config = template(GatedFeedForward)
  dropout_tpl: Config = template(Dropout)
  weight_split_dims_mapping: Config = template(SplitMapping)

  def setup(self) -> None:
    if self.norm_policy not in ('pre', 'post'):
      raise ConfigError(f"{self.path_name}.norm_policy: expected 'pre' or 'post', got {self.norm_policy!r}")
    attention = self.attention_tpl.clone(
      input_dims=self.input_dims,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      dims_per_head=self.dims_per_head,
    )
    self.create_children('attention_norm', 'ff_norm', template=self.norm_tpl.clone(dims=self.input_dims))
    self.create_child('attention', attention)
    self.create_child('ff', self.ff_tpl.clone(input_dims=self.input_dims, hidden_dims=self.hidden_dims))
    self.create_child('residual_dropout', self.dropout_tpl)

  def __call__(self, x_BTD: jax.Array, **attention: Any) -> jax.Array:
    """Returns [B, T, D].

    Args:
      x_BTD: the residual stream.
      **attention: keyword arguments of `attention`: segment_ids, segment_pos, mask.
    """
    return self._feed_forward(self._attend('__call__', x_BTD, **attention))

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    """Allocates the cache; see `MultiHeadAttention.init_decode_state`."""
    self.attention.init_decode_state(batch_size, max_len)

  def extend_step(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
    """Returns [B, T, D] for the next tokens; see `MultiHeadAttention.extend_step`."""
    return self._feed_forward(self._attend('extend_step', x_BTD, pos_BT))

  def _attend(self, method: str, x_BTD: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
    attention = getattr(self.attention, method)
    if self.norm_policy == 'pre':
      return self._add(x_BTD, attention(self.attention_norm(x_BTD), *args, **kwargs))
    return self.attention_norm(self._add(x_BTD, attention(x_BTD, *args, **kwargs)))

  def _feed_forward(self, x_BTD: jax.Array) -> jax.Array:
    if self.norm_policy == 'pre':
      return self._add(x_BTD, self.ff(self.ff_norm(x_BTD)))
    return self.ff_norm(self._add(x_BTD, self.ff(x_BTD)))

  def _add(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
    return self.shard(x_BTD + self.residual_dropout(y_BTD), self.activation_split_dims_mapping.out)


class StackedTransformer(Layer):
  """`num_layers` layers of one kind, one after the other, each with variables of its own: `layers_0`, `layers_1`, ...

  Attributes:
    layers_tpl: of each layer.
    num_layers: how many there are.
    remat, remat_save_names: what each layer keeps for the backward pass; see `remat.py`.
  """

  layers_tpl: Config = template(TransformerBlock)
  num_layers: int = REQUIRED
  remat: str = 'none'
  remat_save_names: tuple[str, ...] = ()
  weight_split_dims_mapping: Config = template(SplitMapping)
  activation_split_dims_mapping: Config = template(SplitMapping)

  def setup(self) -> None:
    check_remat(self.remat, self.remat_save_names, f'{self.path_name}.remat')
    self.create_children('layers', templates=[self.layers_tpl] * self.num_layers)

  def __call__(self, x: Any, **kwargs: Any) -> Any:
    """Returns the result of the last layer for input `x` of the first; all take the same `kwargs`."""
    for layer in self.layers:
      x = self._apply(layer, x, **kwargs)
    return x

  def init_decode_state(self, *args: Any) -> None:
    """Allocates the caches of all layers."""
    for layer in self.layers:
      layer.init_decode_state(*args)

  def extend_step(self, x: Any, *args: Any) -> Any:
    """As `__call__`, with the layers' `extend_step` and caches."""
    for layer in self.layers:
      x = layer.extend_step(x, *args)
    return x

  def _apply(self, layer: Layer, x: Any, **kwargs: Any) -> Any:
    key = self.next_prng_key() if self.has_prng_key() else None

    def one(variables: Any, x: Any) -> tuple[Any, SideOutputs]:
      return layer.apply(variables, x, key=key, **kwargs)

    x, side = remat(one, self.remat, self.remat_save_names, in_scan=False)(layer.variables, x)
    layer.absorb(side)
    return x


class RepeatedTransformer(Repeat):
  """A scan over transformer blocks with stacked variables: the same function as `StackedTransformer`, compiled once."""

  layers_tpl: Config = template(TransformerBlock)
