"""Configs of language models whose blocks are recurrences, optionally interleaved with attention."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.feedforward import GatedFeedForward
from praxis_lite.layers.mamba2 import Mamba2
from praxis_lite.layers.mixer_block import MixerBlock
from praxis_lite.layers.mixers import Mixer
from praxis_lite.layers.normalizations import RMSNorm
from praxis_lite.layers.partial_rotary import PartialRotaryPositions
from praxis_lite.layers.positions import RotaryPositions
from praxis_lite.layers.rg_lru import RgLru
from praxis_lite.layers.scaled_embedding import ScaledEmbeddingSoftmax
from praxis_lite.layers.softmax import FullSoftmax, SharedEmbeddingSoftmax
from praxis_lite.layers.transformer import RepeatedTransformer
from praxis_lite.layers.transformer_block import TransformerBlock
from praxis_lite.layers.transformer_lm import TransformerLm
from praxis_lite.models.language_model import LanguageModel
from praxis_lite.sharding.weights import WeightInit


def mamba2_lm(
  *,
  vocab_size: int,
  model_dims: int,
  num_layers: int,
  dims_per_head: int = 64,
  expand: int = 2,
  state_dims: int = 128,
  num_groups: int = 1,
  kernel_size: int = 4,
  chunk_size: int = 256,
  attention_every: int | None = None,
  num_attention_heads: int | None = None,
  tie_embeddings: bool = True,
  epsilon: float = 1e-5,
  remat: str = 'auto',
  fprop_dtype: DTypeLike | None = None,
) -> Config[LanguageModel]:
  """Returns the config of a language model of Mamba-2 blocks (Dao and Gu, 2024).

  Args:
    vocab_size, model_dims, num_layers: see `TransformerLm`.
    dims_per_head, state_dims, num_groups, kernel_size, chunk_size: see `Mamba2`.
    expand: the number of dims of all heads of a mixer together, divided by the model dims.
    num_attention_heads: heads of attention; None means one for each 64 model dims, at least one.
    attention_every, tie_embeddings, epsilon, remat, fprop_dtype: see `recurrent_lm`.

  Raises:
    ConfigError: `dims_per_head` does not divide `expand` times the model dims, or `attention_every` is less than 2.
  """
  num_heads, left = divmod(expand * model_dims, dims_per_head)
  if left or not num_heads:
    raise ConfigError(
      f'mamba2_lm: dims_per_head, {dims_per_head}, does not divide expand x model_dims = {expand * model_dims}'
    )
  mixer = Config(Mamba2, num_heads=num_heads, dims_per_head=dims_per_head, state_dims=state_dims)
  mixer.set(num_groups=num_groups, kernel_size=kernel_size, chunk_size=chunk_size)
  mixer.norm_tpl.epsilon = epsilon
  return recurrent_lm(
    mixer,
    vocab_size=vocab_size,
    model_dims=model_dims,
    num_layers=num_layers,
    attention_every=attention_every,
    num_attention_heads=num_attention_heads or max(1, model_dims // 64),
    tie_embeddings=tie_embeddings,
    epsilon=epsilon,
    remat=remat,
    fprop_dtype=fprop_dtype,
  )


def recurrent_lm(
  mixer: Config[Mixer],
  *,
  vocab_size: int,
  model_dims: int,
  num_layers: int,
  hidden_dims: int | None = None,
  attention_every: int | None = None,
  num_attention_heads: int = 1,
  tie_embeddings: bool = True,
  epsilon: float = 1e-5,
  remat: str = 'auto',
  fprop_dtype: DTypeLike | None = None,
) -> Config[LanguageModel]:
  """Returns the config of a language model whose blocks have this mixer.

  Args:
    mixer: config of a `Mixer`, without its `input_dims`.
    vocab_size, model_dims, num_layers: see `TransformerLm`.
    hidden_dims: hidden dims of the gated feed-forward layer of each block. With None, blocks with a mixer have no such
      layer, and blocks with attention have 4 times the model dims.
    attention_every: n, if every n-th block has attention with rotary positions and a gated feed-forward layer; None
      means that no block has attention.
    num_attention_heads: heads of attention.
    tie_embeddings: whether softmax and embedding share a table.
    epsilon: `epsilon` of all norms.
    remat: see `layers/remat.py`.
    fprop_dtype: dtype of the computation; None means the dtype of the weights, float32.
  """
  if attention_every is not None and attention_every < 2:
    raise ConfigError(f'attention_every: expected at least 2, or None for no attention, got {attention_every}')
  lm = Config(TransformerLm, params_init=WeightInit.Gaussian(0.02))
  lm.transformer_tpl = Config(RepeatedTransformer, remat=remat)
  norm = Config(RMSNorm, epsilon=epsilon)
  residual_init = WeightInit.Gaussian(0.02 / math.sqrt(num_layers))
  block = Config(MixerBlock, mixer_tpl=mixer.clone(), norm_tpl=norm, ff_tpl=None)
  if hasattr(block.mixer_tpl, 'out_tpl'):
    block.mixer_tpl.out_tpl.params_init = residual_init
  feed_forward = Config(GatedFeedForward, out_init=residual_init)
  if hidden_dims is not None:
    block.ff_tpl = feed_forward
  lm.transformer_tpl.layers_tpl = block
  if attention_every is not None:
    attention = Config(TransformerBlock, norm_tpl=norm.clone(), ff_tpl=feed_forward.clone())
    attention.attention_tpl.rotary_tpl = Config(RotaryPositions)
    attention.attention_tpl.out_tpl.params_init = residual_init
    lm.transformer_tpl.layers_tpl = (*(block.clone() for _ in range(attention_every - 1)), attention)
  lm.final_norm_tpl = norm.clone()
  if tie_embeddings:
    lm.softmax_tpl = Config(SharedEmbeddingSoftmax)
  else:
    lm.embedding_tpl, lm.softmax_tpl = Config(Embedding), Config(FullSoftmax)
  return Config(
    LanguageModel,
    vocab_size=vocab_size,
    model_dims=model_dims,
    num_layers=num_layers,
    num_heads=num_attention_heads,
    hidden_dims=hidden_dims,
    lm_tpl=lm,
    fprop_dtype=fprop_dtype,
  )


def griffin_lm(
  *,
  vocab_size: int,
  model_dims: int,
  num_layers: int,
  num_heads: int,
  num_kv_heads: int = 1,
  width: int | None = None,
  hidden_dims: int | None = None,
  window: int = 2048,
  kernel_size: int = 4,
  pattern: tuple[str, ...] = ('recurrent', 'recurrent', 'attention'),
  rotary_base: float = 10_000.0,
  rotary_share: float = 0.5,
  activation: str = 'gelu_tanh',
  logit_soft_cap: float | None = 30.0,
  epsilon: float = 1e-6,
  remat: str = 'auto',
  fprop_dtype: DTypeLike | None = None,
) -> Config[LanguageModel]:
  """Returns the config of a language model in the style of Griffin and RecurrentGemma (De et al., 2024).

  Args:
    vocab_size, model_dims, num_layers: see `TransformerLm`.
    num_heads: heads of attention, and of the gates of `RgLru`.
    num_kv_heads: heads of keys and values.
    width: dims of the recurrence; None means the model dims.
    hidden_dims: hidden dims of the gated feed-forward layers; None means 3 times the model dims.
    window: number of last tokens to which a token attends.
    kernel_size: see `RgLru`.
    pattern: 'recurrent' or 'attention' for each of the first blocks, repeated for the others.
    rotary_base: longest wavelength of the rotary positions, in positions, divided by 2 pi.
    rotary_share: fraction of the dims of a head that are rotated.
    activation: activation of the feed-forward layers and of the gates of recurrences; see `activations.py`.
    logit_soft_cap: bound of the absolute values of the logits; None means no bound.
    epsilon: `epsilon` of all norms.
    remat: see `layers/remat.py`.
    fprop_dtype: dtype of the computation; None means the dtype of the weights, float32.
  """
  lm = Config(TransformerLm, params_init=WeightInit.Gaussian(0.02))
  norm = Config(RMSNorm, epsilon=epsilon, zero_centered=True)
  residual_init = WeightInit.Gaussian(0.02 / math.sqrt(2 * num_layers))
  feed_forward = Config(GatedFeedForward, activation=activation, use_bias=True, out_init=residual_init)
  mixer = Config(RgLru, width=width, num_heads=num_heads, kernel_size=kernel_size, activation=activation)
  mixer.out_tpl.params_init = residual_init
  recurrent = Config(MixerBlock, mixer_tpl=mixer, norm_tpl=norm, ff_tpl=feed_forward)
  attention = Config(TransformerBlock, norm_tpl=norm.clone(), ff_tpl=feed_forward.clone())
  attention.attention_tpl.set(sliding_window=window, use_out_bias=True)
  attention.attention_tpl.rotary_tpl = Config(PartialRotaryPositions, share=rotary_share, max_timescale=rotary_base)
  attention.attention_tpl.out_tpl.params_init = residual_init
  of_kind: dict[str, Config[TransformerBlock]] = {'recurrent': recurrent, 'attention': attention}
  for kind in pattern:
    check_choice('griffin_lm: pattern', kind, tuple(of_kind))
  blocks = tuple(of_kind[kind].clone() for kind in pattern)
  lm.transformer_tpl = Config(RepeatedTransformer, layers_tpl=blocks if len(blocks) > 1 else blocks[0], remat=remat)
  lm.final_norm_tpl = norm.clone()
  # The published weights need the square root of D, rounded to bfloat16, as the factor.
  lm.softmax_tpl = Config(
    ScaledEmbeddingSoftmax, embedding_scale=float(np.asarray(math.sqrt(model_dims), jnp.bfloat16))
  )
  lm.softmax_tpl.soft_cap = logit_soft_cap
  return Config(
    LanguageModel,
    vocab_size=vocab_size,
    model_dims=model_dims,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    hidden_dims=3 * model_dims if hidden_dims is None else hidden_dims,
    lm_tpl=lm,
    fprop_dtype=fprop_dtype,
  )
