"""Configs of vision transformers, and of image classifiers with a vision transformer."""

from __future__ import annotations

from typing import TypedDict, Unpack

from jax.typing import DTypeLike

from praxis_lite.common.config import Config
from praxis_lite.common.errors import check_choice
from praxis_lite.layers.dropout import Dropout, StochasticResidual
from praxis_lite.layers.encoder import HeadTransform
from praxis_lite.layers.feedforward import FeedForward
from praxis_lite.layers.image_tokens import AttentionPooling
from praxis_lite.layers.normalizations import LayerNorm
from praxis_lite.layers.positions import LearnedPositions, SinusoidalPositions2D
from praxis_lite.layers.transformer import RepeatedTransformer, StackedTransformer
from praxis_lite.layers.transformer_block import TransformerBlock
from praxis_lite.layers.vision_transformer import IMAGE_POOLINGS, VisionTransformer
from praxis_lite.models.classifier import ClassificationModel
from praxis_lite.sharding.weights import WeightInit

POSITION_KINDS = ('learned', 'sinusoidal')


class VisionSizes(TypedDict, total=False):
  """The arguments of `vision_transformer`."""

  image_size: int | tuple[int, int]
  patch_size: int | tuple[int, int]
  channels: int
  model_dims: int
  num_layers: int
  num_heads: int
  hidden_dims: int | None
  pooling: str
  class_token: bool | None
  positions: str
  representation: bool
  activation: str
  epsilon: float
  dropout: float
  stochastic_depth: float
  repeat: bool
  remat: str


def vision_transformer(
  *,
  image_size: int | tuple[int, int],
  patch_size: int | tuple[int, int],
  channels: int = 3,
  model_dims: int,
  num_layers: int,
  num_heads: int,
  hidden_dims: int | None = None,
  pooling: str = 'class_token',
  class_token: bool | None = None,
  positions: str = 'learned',
  representation: bool = False,
  activation: str = 'gelu',
  epsilon: float = 1e-6,
  dropout: float = 0.0,
  stochastic_depth: float = 0.0,
  repeat: bool = True,
  remat: str = 'auto',
) -> Config[VisionTransformer]:
  """Returns the config of a vision transformer: pre-norm blocks with LayerNorm and biases (Dosovitskiy et al., 2021).

  Args:
    image_size, patch_size: (height, width) in pixels; a number means a square.
    channels, model_dims, num_layers, num_heads, hidden_dims: see `VisionTransformer`.
    pooling: 'class_token', 'mean' or 'attention'.
    class_token: whether there is a class token; with None, there is one only if `pooling` needs it.
    positions: 'learned', or 'sinusoidal' for sinusoidal positions of rows and columns.
    representation: whether a linear layer and tanh follow the pooling.
    activation: activation of the feed-forward layers, see `activations.py`.
    epsilon: `epsilon` of all norms.
    dropout: rate of dropout on embeddings, and on values that blocks add to the residual stream.
    stochastic_depth: probability with which training leaves out the two branches of a block, for each image.
    repeat: whether the blocks are a scan; False makes each block a separate layer.
    remat: see `layers/remat.py`.
  """
  check_choice('vision_transformer: pooling', pooling, IMAGE_POOLINGS)
  check_choice('vision_transformer: positions', positions, POSITION_KINDS)
  norm, ff = Config(LayerNorm, epsilon=epsilon), Config(FeedForward, activation=activation)
  block = Config(TransformerBlock, norm_tpl=norm, ff_tpl=ff, dropout_tpl=Config(Dropout, rate=dropout))
  block.attention_tpl.use_bias = True
  if stochastic_depth:
    block.residual_tpl = Config(StochasticResidual, rate=stochastic_depth)
  learned = Config(LearnedPositions, skip_regularization=True)
  image_size, patch_size = ((size, size) if isinstance(size, int) else size for size in (image_size, patch_size))
  network = Config(
    VisionTransformer,
    image_size=image_size,
    patch_size=patch_size,
    channels=channels,
    model_dims=model_dims,
    num_layers=num_layers,
    num_heads=num_heads,
    hidden_dims=hidden_dims,
    pooling=pooling,
    class_token=pooling == 'class_token' if class_token is None else class_token,
    params_init=WeightInit.TruncatedGaussian(0.02),
    position_tpl=learned if positions == 'learned' else Config(SinusoidalPositions2D),
    dropout_tpl=Config(Dropout, rate=dropout),
    final_norm_tpl=norm.clone(),
    pooling_tpl=Config(AttentionPooling, norm_tpl=norm.clone(), ff_tpl=ff.clone()),
  )
  network.transformer_tpl = Config(RepeatedTransformer if repeat else StackedTransformer, layers_tpl=block, remat=remat)
  if representation:
    network.representation_tpl = Config(HeadTransform, activation='tanh', norm_tpl=None)
  return network


def image_classifier(
  *, num_classes: int, fprop_dtype: DTypeLike | None = None, **sizes: Unpack[VisionSizes]
) -> Config[ClassificationModel]:
  """Returns the config of a classifier of images.

  Args:
    num_classes: V.
    fprop_dtype: dtype of the computation, such as jnp.bfloat16; None means the dtype of the weights, float32.
    **sizes: arguments of `vision_transformer`.
  """
  network = vision_transformer(**sizes)
  model = Config(ClassificationModel, num_classes=num_classes, network_tpl=network, fprop_dtype=fprop_dtype)
  return model.set(params_init=network.params_init)
