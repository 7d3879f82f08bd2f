"""TransformerBlock: attention and a feed-forward layer on a residual stream. Also what models need to set up blocks.

    pre-norm     x = x + attention(norm(x));  x = x + ff(norm(x))
    post-norm    x = norm(x + attention(x));  x = norm(x + ff(x))
    hybrid       x = x + norm(attention(norm(x)));  x = x + norm(ff(norm(x)))

B batch, T length, D model dims, K kv heads, H dims per head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, field_names, target, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.facts import InputSource, LayerProblem
from praxis_lite.layers.dropout import Dropout, StochasticResidual
from praxis_lite.layers.feedforward import FeedForward, GatedFeedForward
from praxis_lite.layers.moe import MoeFeedForward
from praxis_lite.layers.normalizations import Norm, RMSNorm

# The fields of a model that it passes on to its attention layers.
HEADS = ('num_heads', 'num_kv_heads', 'dims_per_head')
NORM_POLICIES = ('pre', 'post', 'post_sublayer', 'primer_hybrid')


class TransformerBlock(Layer):
  """Self-attention and a feed-forward layer, each with a norm and a residual connection.

  Attributes:
    input_dims: D.
    hidden_dims: hidden dims of the feed-forward layer.
    num_heads, num_kv_heads, dims_per_head: see `MultiHeadAttention`.
    norm_policy: what is normalized. 'pre': the input of a sublayer (GPT-2, LLaMA). 'post': the sum of its input and its
      output (the original transformer, BERT; Praxis's 'post_skip'). 'post_sublayer': its output (OLMo 2; Praxis's
      'post'). 'primer_hybrid': both its input and its output (Gemma 2).
    norm_tpl: template of the children `attention_norm` and `ff_norm`, and with 'primer_hybrid' of `attention_out_norm`
      and `ff_out_norm`.
    attention_tpl: template of the child `attention`.
    ff_tpl: template of the child `ff`, such as a `MoeFeedForward`.
    dropout_tpl: template of the child `residual_dropout`, on values that are added to the residual stream.
    residual_tpl: template of the child `residual`, a `StochasticResidual` that adds these values; None just adds them.
    activation_split_dims_mapping: `out`, [B, T, D]: the residual stream.
  """

  scales_branches: ClassVar[bool] = True

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
  residual_tpl: Config | None = None

  attention: MultiHeadAttention = child()
  ff: FeedForward | MoeFeedForward = child()
  attention_norm: Norm = child()
  ff_norm: Norm = child()
  attention_out_norm: Norm = child()
  ff_out_norm: Norm = child()
  residual_dropout: Dropout = child()
  residual: StochasticResidual = child()

  def setup(self) -> None:
    check_choice(f'{self.path_name}.norm_policy', self.norm_policy, NORM_POLICIES)
    heads = {field: getattr(self, field) for field in HEADS}
    norms = ['attention_norm', 'ff_norm']
    if self.norm_policy == 'primer_hybrid':
      norms += ['attention_out_norm', 'ff_out_norm']
    self.create_children(*norms, template=self._set_sizes('norm_tpl', dims=self.input_dims))
    self.create_child('attention', self._set_sizes('attention_tpl', input_dims=self.input_dims, **heads))
    self.create_child('ff', self._set_sizes('ff_tpl', input_dims=self.input_dims, hidden_dims=self.hidden_dims))
    self.create_child('residual_dropout', self.dropout_tpl)
    if self.residual_tpl is not None:
      self.create_child('residual', self.residual_tpl)

  def _set_sizes(self, name: str, **sizes: object) -> Config:
    """Returns the template in field `name` with `sizes` set; raises a `ConfigError` if its layer lacks such fields."""
    config: Config = getattr(self, name)
    known = field_names(config)
    lacks = [size for size in sizes if known is not None and size not in known]
    if lacks:
      layer = getattr(target(config), '__name__', 'the layer')
      raise ConfigError(
        f'{self.path_name}.{name}: {layer} does not declare {", ".join(lacks)}; {type(self).__name__} sets '
        f'{", ".join(sizes)} on its {name}, so the layer must declare them, as in {lacks[0]}: int = REQUIRED'
      )
    return config.clone(**sizes)

  def __call__(self, x_BTD: jax.Array, *, paddings: jax.Array | None = None, **attention: Any) -> jax.Array:
    """Returns [B, T, D].

    Args:
      x_BTD: the residual stream.
      paddings: [B, T], nonzero for padding tokens, for feed-forward layers that take them; None means no padding.
      **attention: keyword arguments of `attention`: segment_ids, segment_pos, prefix_lengths, mask, logit_bias,
        first_values.
    """
    x_BTD = self._add_attention(x_BTD, lambda x: self.attention(x, **attention))
    return self._add_feed_forward(x_BTD, paddings)

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    """Allocates the cache; see `MultiHeadAttention.init_decode_state`."""
    self.attention.init_decode_state(batch_size, max_len)

  def extend_step(self, x_BTD: jax.Array, pos_BT: jax.Array, *attention: Any, **more: Any) -> jax.Array:
    """Returns [B, T, D] for the next tokens; the other arguments are passed on to the attention's `extend_step`."""
    x_BTD = self._add_attention(x_BTD, lambda x: self.attention.extend_step(x, pos_BT, *attention, **more))
    return self._add_feed_forward(x_BTD, pos_BT < 0)

  def first_values(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the values of this block's attention, [B, T, K, H], for later layers with a `ValueResidual`."""
    return self.attention.first_values(self.attention_norm(x_BTD) if self._norms_inputs else x_BTD)

  def problems(self, mesh_sizes: Mapping[str, int]) -> Iterator[LayerProblem]:
    router: Any = getattr(self.ff, 'router', None)
    if getattr(router, 'choice', '') == 'expert' and getattr(self.attention, 'causal', False):
      yield LayerProblem(
        'experts see later tokens',
        f'{router.path_name}.choice',
        'experts choose among all tokens of a row, and the attention of this block is causal: the loss is of a model '
        'that knows what comes next, and decoding differs from training',
        "set it to 'token'",
      )

  def input_sources(self) -> tuple[InputSource, ...]:
    if not self._norms_inputs:
      return ()
    children = dict(self.named_children())
    return tuple(
      InputSource(f'{name}_norm', tuple(f'{name}.{reader}' for reader in children[name].input_readers()))
      for name in ('attention', 'mixer', 'ff')
      if name in children and children[name].input_readers()
    )

  @property
  def _norms_inputs(self) -> bool:
    return self.norm_policy in ('pre', 'primer_hybrid')

  @property
  def _is_hybrid(self) -> bool:
    return self.norm_policy == 'primer_hybrid'

  def _add_attention(self, x_BTD: jax.Array, attend: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return self._add_sublayer(x_BTD, attend, self.attention_norm, self.attention_out_norm if self._is_hybrid else None)

  def _add_feed_forward(self, x_BTD: jax.Array, paddings: jax.Array | None) -> jax.Array:
    feed_forward: Callable[..., jax.Array] = self.ff
    if self.ff.takes_paddings:
      feed_forward = functools.partial(feed_forward, paddings=self.mark_filler_rows(paddings, x_BTD.shape[:2]))
    return self._add_sublayer(x_BTD, feed_forward, self.ff_norm, self.ff_out_norm if self._is_hybrid else None)

  def _add_sublayer(
    self, x_BTD: jax.Array, sublayer: Callable[[jax.Array], jax.Array], norm: Norm, out_norm: Norm | None
  ) -> jax.Array:
    y_BTD = sublayer(norm(x_BTD) if self._norms_inputs else x_BTD)
    if self.norm_policy == 'post_sublayer':
      y_BTD = norm(y_BTD)
    elif out_norm is not None:
      y_BTD = out_norm(y_BTD)
    y_BTD = self.scale_branch(self.residual_dropout(y_BTD))
    x_BTD = self.shard(x_BTD + y_BTD if self.residual_tpl is None else self.residual(x_BTD, y_BTD))
    return norm(x_BTD) if self.norm_policy == 'post' else x_BTD


def set_biases(use_bias: bool | None, configs: Iterable[Config | None]) -> None:
  """Sets `use_bias` of the configs that have this field; None leaves them as they are."""
  for config in configs:
    if use_bias is not None and config is not None and 'use_bias' in (field_names(config) or ()):
      config.use_bias = use_bias


def token_paddings(weights_BT: jax.Array | None, segment_ids_BT: jax.Array | None) -> jax.Array | None:
  """Returns [B, T] bool, True for padding; None if no argument marks padding.

  A token is padding if its segment is 0, or if it and all later tokens of its row have weight 0. So tokens of a prompt,
  which have weight 0 but are followed by tokens with a weight, are not padding.
  """
  padding = None if segment_ids_BT is None else segment_ids_BT == 0
  if weights_BT is None:
    return padding
  positions_T = jnp.arange(weights_BT.shape[1])
  last_B = jnp.max(jnp.where(weights_BT > 0, positions_T, -1), axis=1)
  after = positions_T > last_B[:, None]
  return after if padding is None else after | padding
