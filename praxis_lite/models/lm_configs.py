"""Configs of language models in two styles, GPT-2 and LLaMA, and the usual ways to split models over a mesh."""

from __future__ import annotations

import math

from jax.typing import DTypeLike

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.feedforward import FeedForward, GatedFeedForward
from praxis_lite.layers.moe import MoeFeedForward
from praxis_lite.layers.normalizations import LayerNorm, RMSNorm
from praxis_lite.layers.positions import LearnedPositions, RotaryPositions
from praxis_lite.layers.softmax import FullSoftmax, SharedEmbeddingSoftmax
from praxis_lite.layers.transformer import RepeatedTransformer, StackedTransformer
from praxis_lite.layers.transformer_lm import TransformerLm
from praxis_lite.models.language_model import LanguageModel
from praxis_lite.sharding.weights import WeightInit


def transformer_lm(
  *,
  vocab_size: int,
  model_dims: int,
  num_layers: int,
  num_heads: int,
  num_kv_heads: int | None = None,
  dims_per_head: int | None = None,
  hidden_dims: int | None = None,
  style: str = 'llama',
  max_len: int = 1024,
  rotary_base: float = 10_000.0,
  tie_embeddings: bool | None = None,
  use_bias: bool | None = None,
  activation: str | None = None,
  dropout: float = 0.0,
  repeat: bool = True,
  remat: str = 'auto',
  experts: Config[MoeFeedForward] | None = None,
  first_hidden_dims: tuple[int, ...] = (),
  fprop_dtype: DTypeLike | None = None,
  matmul: str = 'fprop',
) -> Config[LanguageModel]:
  """Returns the config of a language model.

  Args:
    vocab_size, model_dims, num_layers, num_heads, num_kv_heads, dims_per_head: see `TransformerLm`.
    hidden_dims: hidden dims of the feed-forward layers. None means 4 D for 'gpt2', and 8/3 D, rounded up to a multiple
      of 64, for 'llama', which gives the same number of weights.
    style: 'llama' has RMSNorm, rotary positions, a gated feed-forward layer, no biases, and separate tables for
      softmax and embedding (Touvron et al., 2023); 'gpt2' has LayerNorm, learned positions, GELU, biases, and one
      table for both (Radford et al., 2019).
    max_len: number of learned positions of 'gpt2'.
    rotary_base: longest wavelength of the rotary positions of 'llama', in positions, divided by 2 pi.
    tie_embeddings: whether softmax and embedding share a table; with None, the style decides.
    use_bias: whether linear layers and norms have biases; with None, the style decides.
    activation: activation of the feed-forward layers, see `activations.py`; None means 'silu' for 'llama' and
      'gelu_tanh' for 'gpt2'.
    dropout: rate of dropout on embeddings, and on values that blocks add to the residual stream.
    repeat: whether the blocks are a scan; False makes each block a separate layer.
    remat: see `layers/remat.py`.
    experts: config of a mixture of experts, with `hidden_dims` for each expert, that replaces the feed-forward layer of
      each block; with None, the layer is dense.
    first_hidden_dims: hidden dims of each dense block that comes before the blocks with experts.
    fprop_dtype: dtype of the computation, such as jnp.bfloat16; None means the dtype of the weights, float32.
    matmul: how the projections of attention and the linear layers of dense feed-forward layers multiply: 'fprop', 'fp8'
      or 'int8', see `layers/products.py`. The softmax is computed in `fprop_dtype`.
  """
  if style not in ('llama', 'gpt2'):
    raise ConfigError(f"transformer_lm: style is 'llama' or 'gpt2', got {style!r}")
  gpt2 = style == 'gpt2'
  if hidden_dims is None:
    hidden_dims = 4 * model_dims if gpt2 else math.ceil(8 * model_dims / 3 / 64) * 64
  lm = Config(TransformerLm, params_init=WeightInit.Gaussian(0.02))
  lm.transformer_tpl = Config(RepeatedTransformer if repeat else StackedTransformer, remat=remat)
  block = lm.transformer_tpl.layers_tpl
  # Each block adds to the residual stream twice. With this scale, the variances of all these additions together are the
  # variance of one addition without the scale.
  residual_init = WeightInit.Gaussian(0.02 / math.sqrt(2 * num_layers))
  if gpt2:
    norm: Config[LayerNorm] | Config[RMSNorm] = Config(LayerNorm, epsilon=1e-5)
    lm.position_tpl = Config(LearnedPositions, max_len=max_len)
    block.attention_tpl.use_bias = True
    block.ff_tpl = Config(FeedForward, activation='gelu_tanh', use_bias=True, out_init=residual_init)
  else:
    norm = Config(RMSNorm, epsilon=1e-5)
    block.attention_tpl.rotary_tpl = Config(RotaryPositions, max_timescale=rotary_base)
    block.ff_tpl = Config(GatedFeedForward, out_init=residual_init)
  if activation is not None:
    block.ff_tpl.activation = activation
  block.attention_tpl.out_tpl.params_init = residual_init
  if matmul != 'fprop':
    for projection in (block.attention_tpl.proj_tpl, block.attention_tpl.out_tpl, block.ff_tpl.proj_tpl):
      projection.matmul = matmul
  block.norm_tpl, lm.final_norm_tpl = norm, norm.clone()
  lm.dropout_tpl = Config(Dropout, rate=dropout)
  block.dropout_tpl = Config(Dropout, rate=dropout)
  lm.transformer_tpl.first_tpl = tuple(block.clone(hidden_dims=dims) for dims in first_hidden_dims)
  if experts is not None:
    block.ff_tpl = experts.clone(out_init=residual_init)
    if activation is not None:
      block.ff_tpl.activation = activation
  if tie_embeddings if tie_embeddings is not None else gpt2:
    lm.softmax_tpl = Config(SharedEmbeddingSoftmax)
  else:
    lm.embedding_tpl, lm.softmax_tpl = Config(Embedding), Config(FullSoftmax)
  return Config(
    LanguageModel,
    vocab_size=vocab_size,
    model_dims=model_dims,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    dims_per_head=dims_per_head,
    hidden_dims=hidden_dims,
    use_bias=use_bias,
    lm_tpl=lm,
    fprop_dtype=fprop_dtype,
  )
