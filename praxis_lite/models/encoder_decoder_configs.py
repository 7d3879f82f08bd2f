"""Configs of encoder-decoders in four styles: T5 v1.1, the first T5, the transformer of 2017, and BART."""

from __future__ import annotations

from jax.typing import DTypeLike

from praxis_lite.common.config import Config
from praxis_lite.common.errors import check_choice
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.encoder_decoder import DecoderBlock, TransformerEncoderDecoder
from praxis_lite.layers.feedforward import FeedForward, GatedFeedForward
from praxis_lite.layers.normalizations import LayerNorm, RMSNorm
from praxis_lite.layers.positions import LearnedPositions, RelativeBias, SinusoidalPositions
from praxis_lite.layers.softmax import FullSoftmax, SharedEmbeddingSoftmax
from praxis_lite.layers.transformer import RepeatedTransformer, StackedTransformer
from praxis_lite.layers.transformer_block import TransformerBlock
from praxis_lite.models.encoder_decoder_model import EncoderDecoderModel
from praxis_lite.sharding.weights import WeightInit

STYLES = ('t5', 't5_v1_0', 'classical', 'bart')


def encoder_decoder(
  *,
  vocab_size: int,
  model_dims: int,
  num_layers: int,
  num_encoder_layers: int | None = None,
  num_heads: int,
  dims_per_head: int | None = None,
  hidden_dims: int | None = None,
  style: str = 't5',
  activation: str | None = None,
  tie_embeddings: bool | None = None,
  num_buckets: int = 32,
  max_distance: int = 128,
  max_len: int = 1024,
  dropout: float = 0.0,
  repeat: bool = True,
  remat: str = 'auto',
  start_id: int = 0,
  fprop_dtype: DTypeLike | None = None,
) -> Config[EncoderDecoderModel]:
  """Returns the config of an encoder-decoder.

  Args:
    vocab_size, model_dims, num_layers, num_encoder_layers, num_heads, dims_per_head: see `TransformerEncoderDecoder`.
    hidden_dims: hidden dims of the feed-forward layers; None means 4 D.
    style: 't5' has RMSNorm, relative position biases, attention logits that are not scaled, gated feed-forward layers
      with GELU, no biases, and separate tables for softmax and embedding (T5 v1.1; Shazeer, 2020). 't5_v1_0' differs by
      feed-forward layers with ReLU, and one table for both (Raffel et al., 2020). 'classical' has post-norm blocks with
      LayerNorm, sinusoidal positions, ReLU, biases, and one table (Vaswani et al., 2017). 'bart' is 'classical' with
      learned positions, GELU, norms after the embeddings, and a bias in the softmax (Lewis et al., 2020).
    activation: activation of the feed-forward layers, see `activations.py`; with None, the style decides.
    tie_embeddings: whether softmax and embedding share a table; with None, the style decides.
    num_buckets, max_distance: see `RelativeBias`; for the styles of T5.
    max_len: number of positions of a source, and of a target; for the style 'bart'.
    dropout: rate of dropout on embeddings, on values that blocks add to the residual stream, in feed-forward layers,
      on the outputs of both stacks, and on attention probabilities.
    repeat: whether each stack is a scan over its blocks; False makes each block a separate layer.
    remat: see `layers/remat.py`.
    start_id: see `EncoderDecoderModel`.
    fprop_dtype: dtype of the computation, such as jnp.bfloat16; None means the dtype of the weights, float32.
  """
  check_choice('encoder_decoder: style', style, STYLES)
  is_t5, is_gated, is_bart = style in ('t5', 't5_v1_0'), style == 't5', style == 'bart'
  lm = Config(TransformerEncoderDecoder, num_encoder_layers=num_encoder_layers, params_init=WeightInit.GaussianFanIn())
  stack = RepeatedTransformer if repeat else StackedTransformer
  lm.encoder_tpl = Config(stack, layers_tpl=Config(TransformerBlock), remat=remat)
  lm.decoder_tpl = Config(stack, layers_tpl=Config(DecoderBlock), remat=remat)
  feed_forward: Config = Config(GatedFeedForward if is_gated else FeedForward, use_bias=not is_t5)
  feed_forward.activation = activation or ('gelu_tanh' if is_gated else 'gelu' if is_bart else 'relu')
  norm: Config = Config(RMSNorm, epsilon=1e-6) if is_t5 else Config(LayerNorm, epsilon=1e-5 if is_bart else 1e-6)
  for block in lm.encoder_tpl.layers_tpl, lm.decoder_tpl.layers_tpl:
    block.set(norm_policy='pre' if is_t5 else 'post', ff_tpl=feed_forward.clone(), norm_tpl=norm.clone())
    block.dropout_tpl = Config(Dropout, rate=dropout)
    block.ff_tpl.dropout_tpl = Config(Dropout, rate=dropout)
    names = ('attention_tpl', 'cross_attention_tpl')
    for attention in [getattr(block, name) for name in names if hasattr(block, name)]:
      attention.set(dropout_rate=dropout, use_bias=not is_t5)
      if is_t5:
        _unscale(attention, model_dims // num_heads if dims_per_head is None else dims_per_head)
  if is_t5:
    lm.relative_bias_tpl = Config(RelativeBias, num_buckets=num_buckets, max_distance=max_distance)
    lm.relative_bias_tpl.params_init = WeightInit.Gaussian(model_dims**-0.5)
    lm.final_norm_tpl = norm.clone()
  else:
    lm.set(relative_bias_tpl=None, position_tpl=Config(SinusoidalPositions), final_norm_tpl=None)
  if is_bart:
    lm.set(
      position_tpl=Config(LearnedPositions, max_len=max_len + 2), first_position=2, embedding_norm_tpl=norm.clone()
    )
    lm.params_init = WeightInit.Gaussian(0.02)
  lm.dropout_tpl = Config(Dropout, rate=dropout)
  if not is_gated if tie_embeddings is None else tie_embeddings:
    lm.softmax_tpl = Config(SharedEmbeddingSoftmax, scale_sqrt_depth=style == 'classical', use_bias=is_bart)
    lm.scale_output_sqrt_depth = is_t5
    if is_t5:
      lm.softmax_tpl.params_init = WeightInit.Gaussian(1.0)
  else:
    lm.embedding_tpl = Config(Embedding, scale_sqrt_depth=style == 'classical')
    lm.softmax_tpl = Config(FullSoftmax, use_bias=is_bart)
    if is_t5:
      lm.embedding_tpl.params_init = WeightInit.Gaussian(1.0)
  return Config(
    EncoderDecoderModel,
    vocab_size=vocab_size,
    model_dims=model_dims,
    num_layers=num_layers,
    num_heads=num_heads,
    dims_per_head=dims_per_head,
    hidden_dims=hidden_dims,
    lm_tpl=lm,
    start_id=start_id,
    fprop_dtype=fprop_dtype,
  )


def _unscale(attention: Config, dims_per_head: int) -> None:
  """Removes the scale of attention logits, and changes initial scales so that their initial variance stays 1.

  With H dims per head, T5 makes initial query weights H^(1/2) times smaller. Here queries, keys and values share a
  template, so the weights of all three become H^(1/4) times smaller. To make up for the smaller values, the output
  weights become H^(1/4) times larger.
  """
  factor = dims_per_head**0.25
  attention.scale = 1.0
  attention.proj_tpl.params_init = WeightInit.GaussianFanIn(1 / factor)
  attention.out_tpl.params_init = WeightInit.GaussianFanIn(factor)
