"""Configs of encoders in the style of BERT: masked language models, classifiers of texts, and bare encoders."""

from __future__ import annotations

from typing import TypedDict, Unpack

from jax.typing import DTypeLike

from praxis_lite.common.config import Config
from praxis_lite.common.errors import check_choice
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.encoder import HeadTransform, TransformerEncoder
from praxis_lite.layers.feedforward import FeedForward
from praxis_lite.layers.normalizations import LayerNorm
from praxis_lite.layers.positions import LearnedPositions
from praxis_lite.layers.softmax import FullSoftmax, SharedEmbeddingSoftmax
from praxis_lite.layers.transformer import RepeatedTransformer, StackedTransformer
from praxis_lite.layers.transformer_block import TransformerBlock
from praxis_lite.models.masked_text_model import MaskedLanguageModel
from praxis_lite.models.text_classifier import SequenceClassifier
from praxis_lite.models.text_features import TextEncoder
from praxis_lite.sharding.weights import WeightInit

ENCODER_STYLES = ('bert', 'pre_norm')


class EncoderSizes(TypedDict, total=False):
  """The arguments of `transformer_encoder`."""

  vocab_size: int
  model_dims: int
  num_layers: int
  num_heads: int
  dims_per_head: int | None
  hidden_dims: int | None
  style: str
  activation: str
  max_len: int
  num_token_types: int
  causal: bool
  epsilon: float
  dropout: float
  repeat: bool
  remat: str


def transformer_encoder(
  *,
  vocab_size: int,
  model_dims: int,
  num_layers: int,
  num_heads: int,
  dims_per_head: int | None = None,
  hidden_dims: int | None = None,
  style: str = 'bert',
  activation: str = 'gelu',
  max_len: int = 512,
  num_token_types: int = 2,
  causal: bool = False,
  epsilon: float = 1e-12,
  dropout: float = 0.0,
  repeat: bool = True,
  remat: str = 'auto',
) -> Config[TransformerEncoder]:
  """Returns the config of an encoder with learned positions, LayerNorm, biases, and weights drawn from N(0, 0.02^2).

  Args:
    vocab_size, model_dims, num_layers, num_heads, dims_per_head, hidden_dims: see `TransformerEncoder`.
    style: 'bert' has post-norm blocks, and a norm after the embeddings (Devlin et al., 2019); 'pre_norm' has pre-norm
      blocks and a norm after the last one, which makes the training of many blocks more stable.
    activation: activation of the feed-forward layers, see `activations.py`.
    max_len: number of positions.
    num_token_types: number of token types; 0 for none.
    causal: see `TransformerEncoder`.
    epsilon: `epsilon` of all norms.
    dropout: rate of dropout on embeddings, on values that blocks add to the residual stream, and on attention
      probabilities.
    repeat: whether the blocks are a scan; False makes each block a separate layer.
    remat: see `layers/remat.py`.
  """
  check_choice('transformer_encoder: style', style, ENCODER_STYLES)
  is_post = style == 'bert'
  norm = Config(LayerNorm, epsilon=epsilon)
  block = Config(TransformerBlock, norm_policy='post' if is_post else 'pre', norm_tpl=norm)
  block.set(ff_tpl=Config(FeedForward, activation=activation), dropout_tpl=Config(Dropout, rate=dropout))
  block.attention_tpl.set(use_bias=True, dropout_rate=dropout)
  encoder = Config(
    TransformerEncoder,
    vocab_size=vocab_size,
    model_dims=model_dims,
    num_layers=num_layers,
    num_heads=num_heads,
    dims_per_head=dims_per_head,
    hidden_dims=hidden_dims,
    causal=causal,
    params_init=WeightInit.Gaussian(0.02),
    position_tpl=Config(LearnedPositions, max_len=max_len),
    embedding_norm_tpl=norm.clone() if is_post else None,
    dropout_tpl=Config(Dropout, rate=dropout),
    final_norm_tpl=None if is_post else norm.clone(),
  )
  encoder.transformer_tpl = Config(RepeatedTransformer if repeat else StackedTransformer, layers_tpl=block, remat=remat)
  if num_token_types:
    encoder.token_type_tpl = Config(Embedding, num_classes=num_token_types)
  return encoder


def masked_language_model(
  *, tie_embeddings: bool = True, fprop_dtype: DTypeLike | None = None, **sizes: Unpack[EncoderSizes]
) -> Config[MaskedLanguageModel]:
  """Returns the config of a model that predicts masked tokens.

  Args:
    tie_embeddings: whether softmax and embedding share a table.
    fprop_dtype: dtype of the computation, such as jnp.bfloat16; None means the dtype of the weights, float32.
    **sizes: arguments of `transformer_encoder`.
  """
  encoder = transformer_encoder(**sizes)
  model = Config(MaskedLanguageModel, encoder_tpl=encoder, fprop_dtype=fprop_dtype, params_init=encoder.params_init)
  norm = Config(LayerNorm, epsilon=sizes.get('epsilon', 1e-12))
  model.transform_tpl = Config(HeadTransform, activation=sizes.get('activation', 'gelu'), norm_tpl=norm)
  if tie_embeddings:
    encoder.embedding_tpl = Config(SharedEmbeddingSoftmax, use_bias=True)
  else:
    model.softmax_tpl = Config(FullSoftmax, use_bias=True)
  return model


def sequence_classifier(
  *, num_classes: int, pooling: str = 'first', fprop_dtype: DTypeLike | None = None, **sizes: Unpack[EncoderSizes]
) -> Config[SequenceClassifier]:
  """Returns the config of a text classifier; it can be initialized with the encoder of a `masked_language_model`.

  Args:
    num_classes: V.
    pooling: see `SequenceClassifier`.
    fprop_dtype: dtype of the computation; None means the dtype of the weights.
    **sizes: arguments of `transformer_encoder`; its `dropout` is also applied before the softmax.
  """
  encoder = transformer_encoder(**sizes)
  model = Config(SequenceClassifier, num_classes=num_classes, pooling=pooling, encoder_tpl=encoder)
  model.dropout_tpl = Config(Dropout, rate=sizes.get('dropout', 0.0))
  return model.set(fprop_dtype=fprop_dtype, params_init=encoder.params_init)


def text_encoder(
  *, pooler: bool = True, fprop_dtype: DTypeLike | None = None, **sizes: Unpack[EncoderSizes]
) -> Config[TextEncoder]:
  """Returns the config of an encoder without a head, whose predictions are features of texts.

  Args:
    pooler: whether a pooler also computes one vector for each text.
    fprop_dtype: dtype of the computation; None means the dtype of the weights.
    **sizes: arguments of `transformer_encoder`.
  """
  encoder = transformer_encoder(**sizes)
  model = Config(TextEncoder, encoder_tpl=encoder, fprop_dtype=fprop_dtype, params_init=encoder.params_init)
  if not pooler:
    model.pooler_tpl = None
  return model
