"""Configs of models of speech."""

from __future__ import annotations

from typing import Any

from jax.typing import DTypeLike

from praxis_lite.common.config import Config
from praxis_lite.layers.audio_encoder_decoder import AudioEncoderDecoder
from praxis_lite.layers.conformer import ConformerBlock, ConformerEncoder
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.encoder_decoder import DecoderBlock
from praxis_lite.layers.feedforward import FeedForward
from praxis_lite.layers.log_mel import LogMel
from praxis_lite.layers.normalizations import LayerNorm
from praxis_lite.layers.positions import LearnedPositions
from praxis_lite.layers.repeat import Repeat
from praxis_lite.layers.softmax import SharedEmbeddingSoftmax
from praxis_lite.layers.time_convolutions import ConvolutionModule
from praxis_lite.layers.transducer import LabelNetwork, TransducerJoint
from praxis_lite.layers.transformer import RepeatedTransformer
from praxis_lite.layers.transformer_block import TransformerBlock
from praxis_lite.models.ctc_model import CtcModel
from praxis_lite.models.speech_to_text_model import SpeechToTextModel
from praxis_lite.models.transducer_model import TransducerModel
from praxis_lite.sharding.weights import WeightInit


def conformer_encoder(
  *,
  model_dims: int,
  num_layers: int,
  num_heads: int,
  hidden_dims: int | None = None,
  kernel_size: int = 31,
  channels: int | None = None,
  causal: bool = False,
  window: int | None = None,
  dropout: float = 0.0,
  remat: str = 'auto',
) -> Config[ConformerEncoder]:
  """Returns the config of a Conformer with rotary positions, whose blocks are a scan.

  Args:
    model_dims, num_layers, num_heads, hidden_dims, kernel_size, causal: see `ConformerEncoder`.
    channels: channels of the convolutions that reduce the number of frames by 4; None means `model_dims`.
    window: `sliding_window` of the attention, in frames of the encoder; None means global attention.
    dropout: rate of dropout on the outputs of sublayers, in feed-forward layers, and on attention probabilities.
    remat: see `layers/remat.py`.
  """
  drop = Config(Dropout, rate=dropout)
  block = Config(ConformerBlock, dropout_tpl=drop.clone(), conv_tpl=Config(ConvolutionModule, dropout_tpl=drop.clone()))
  block.ff_tpl.dropout_tpl = drop.clone()
  block.attention_tpl.set(dropout_rate=dropout, sliding_window=window)
  sizes: dict[str, Any] = {'model_dims': model_dims, 'num_layers': num_layers, 'num_heads': num_heads}
  encoder = Config(ConformerEncoder, hidden_dims=hidden_dims, kernel_size=kernel_size, causal=causal, **sizes)
  encoder.set(dropout_tpl=drop.clone(), stack_tpl=Config(Repeat, layers_tpl=block, remat=remat))
  encoder.subsampling_tpl.channels = (model_dims if channels is None else channels,) * 2
  return encoder


def conformer_ctc(
  *,
  vocab_size: int,
  blank_id: int = 0,
  space_id: int | None = None,
  frontend: Config[LogMel] | None = None,
  fprop_dtype: DTypeLike | None = None,
  **encoder: Any,
) -> Config[CtcModel]:
  """Returns the config of a Conformer that is trained by CTC.

  Args:
    vocab_size, blank_id, space_id: see `CtcModel`.
    frontend: config of the front end; None means 80 mel bands of audio at 16 kHz, normalized.
    fprop_dtype: dtype of the computation; None means the dtype of the weights.
    **encoder: the arguments of `conformer_encoder`.
  """
  model = Config(CtcModel, vocab_size=vocab_size, blank_id=blank_id, space_id=space_id, fprop_dtype=fprop_dtype)
  model.encoder_tpl = conformer_encoder(**encoder)
  return model if frontend is None else model.set(frontend_tpl=frontend)


def conformer_transducer(
  *,
  vocab_size: int,
  label_dims: int,
  joint_dims: int,
  blank_id: int = 0,
  space_id: int | None = None,
  max_labels: int | None = None,
  frontend: Config[LogMel] | None = None,
  fprop_dtype: DTypeLike | None = None,
  **encoder: Any,
) -> Config[TransducerModel]:
  """Returns the config of a transducer: a Conformer, an LSTM that reads labels, and a network that joins them.

  Args:
    vocab_size, blank_id, space_id, max_labels: see `TransducerModel`.
    label_dims: dims of the network that reads labels.
    joint_dims: dims of the inputs of the softmax.
    frontend: config of the front end; None means 80 mel bands of audio at 16 kHz, normalized.
    fprop_dtype: dtype of the computation; None means the dtype of the weights.
    **encoder: the arguments of `conformer_encoder`.
  """
  model = Config(TransducerModel, vocab_size=vocab_size, blank_id=blank_id, space_id=space_id, max_labels=max_labels)
  model.set(encoder_tpl=conformer_encoder(**encoder), fprop_dtype=fprop_dtype)
  model.label_tpl = Config(LabelNetwork, model_dims=label_dims)
  model.joint_tpl = Config(TransducerJoint, joint_dims=joint_dims)
  return model if frontend is None else model.set(frontend_tpl=frontend)


def whisper(
  *,
  vocab_size: int,
  model_dims: int,
  num_layers: int,
  num_encoder_layers: int | None = None,
  num_heads: int,
  hidden_dims: int | None = None,
  num_mels: int = 80,
  max_len: int = 448,
  max_source_len: int = 1500,
  activation: str = 'gelu',
  start_id: int = 0,
  dropout: float = 0.0,
  remat: str = 'auto',
  fprop_dtype: DTypeLike | None = None,
) -> Config[SpeechToTextModel]:
  """Returns the config of a model in the style of Whisper (Radford et al., 2022).

  Args:
    vocab_size, model_dims, num_layers, num_encoder_layers, num_heads: see `TransformerEncoderDecoder`.
    hidden_dims: hidden dims of the feed-forward layers; None means 4 D.
    num_mels: mel bands of the features.
    max_len: number of positions of a transcript, including the tokens before it.
    max_source_len: number of positions of a window. A position is two frames of features, so 30 s need 1,500.
    activation: activation of feed-forward layers and convolutions.
    start_id: see `EncoderDecoderModel`.
    dropout: rate of dropout on embeddings, on the outputs of sublayers, and in feed-forward layers.
    remat: see `layers/remat.py`.
    fprop_dtype: dtype of the computation; None means the dtype of the weights.
  """
  lm = Config(AudioEncoderDecoder, num_mels=num_mels, num_encoder_layers=num_encoder_layers, relative_bias_tpl=None)
  lm.set(params_init=WeightInit.Gaussian(0.02), final_norm_tpl=Config(LayerNorm, epsilon=1e-5))
  lm.position_tpl = Config(LearnedPositions, max_len=max_len)
  lm.encoder_position_tpl = Config(LearnedPositions, max_len=max_source_len)
  lm.encoder_tpl = Config(RepeatedTransformer, layers_tpl=Config(TransformerBlock), remat=remat)
  lm.decoder_tpl = Config(RepeatedTransformer, layers_tpl=Config(DecoderBlock), remat=remat)
  drop = Config(Dropout, rate=dropout)
  for block in (lm.encoder_tpl.layers_tpl, lm.decoder_tpl.layers_tpl):
    block.set(norm_policy='pre', norm_tpl=Config(LayerNorm, epsilon=1e-5), dropout_tpl=drop.clone())
    block.ff_tpl = Config(FeedForward, activation=activation, use_bias=True, dropout_tpl=drop.clone())
    block.attention_tpl.set(use_bias=True, use_key_bias=False)
  lm.decoder_tpl.layers_tpl.cross_attention_tpl.set(use_bias=True, use_key_bias=False)
  lm.set(softmax_tpl=Config(SharedEmbeddingSoftmax), dropout_tpl=drop)
  lm.stem_tpl.activation = activation
  sizes = {'model_dims': model_dims, 'num_layers': num_layers, 'num_heads': num_heads, 'hidden_dims': hidden_dims}
  model = Config(SpeechToTextModel, vocab_size=vocab_size, lm_tpl=lm, start_id=start_id, **sizes)
  model.frontend_tpl.set(num_mels=num_mels)
  model.frontend_tpl.window_length = 2 * max_source_len * model.frontend_tpl.frame_step
  return model.set(fprop_dtype=fprop_dtype)
