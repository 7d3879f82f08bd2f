"""Networks from images to features: the part of a classifier before its softmax.

Each has `output_dims`, the size of its features, and takes the weights of the examples, which batch norms need.

B batch, H height, W width, C channels, F features.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp

from praxis_lite.config import REQUIRED, Config, template
from praxis_lite.errors import ConfigError
from praxis_lite.layer import Layer, SplitMapping
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.convolutions import Conv2D
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.normalizations import BatchNorm
from praxis_lite.layers.pooling import GlobalPooling, Pooling


class Mlp(Layer):
  """Linear layers with an activation and dropout after each, on the flattened input.

  Attributes:
    input_dims: dims of the flattened input, such as H * W * C.
    hidden_dims: output dims of each linear layer.
    activation: name of the activation.
    linear_tpl: of the children `linear_0`, `linear_1`, ...
    dropout_tpl: of the child `dropout`.
    activation_split_dims_mapping: `out`, the features, [B, F].
  """

  input_dims: int = REQUIRED
  hidden_dims: tuple[int, ...] = REQUIRED
  activation: str = 'relu'
  linear_tpl: Config = template(Linear, use_bias=True)
  dropout_tpl: Config = template(Dropout)
  weight_split_dims_mapping: Config = template(SplitMapping)

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    dims = (self.input_dims, *self.hidden_dims)
    linears = [self.linear_tpl.clone(input_dims=i, output_dims=o) for i, o in itertools.pairwise(dims)]
    self.create_children('linear', templates=linears)
    self.create_child('dropout', self.dropout_tpl)

  @property
  def output_dims(self) -> int:
    """F, the last of the hidden dims."""
    return (self.input_dims, *self.hidden_dims)[-1]

  def __call__(self, x: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns features [B, F].

    Args:
      x: [B, ...] with `input_dims` values in each example.
      weights: of no account here.
    """
    del weights
    x_BF = jnp.reshape(x, (x.shape[0], -1)).astype(self.fprop_dtype)
    if x_BF.shape[1] != self.input_dims:
      raise ConfigError(f'{self.path_name}.input_dims: {self.input_dims}, but an input of shape {x.shape} came')
    for linear in self.linear:
      x_BF = self.dropout(get_activation(self.activation)(linear(x_BF)))
    return self.shard(x_BF, self.activation_split_dims_mapping.out)


class ConvNet(Layer):
  """Convolution, norm, activation and pooling for each of `channels`; then the mean over the image, and dropout.

  Attributes:
    input_channels: C of the images.
    channels: output channels of each convolution.
    filter_size: height and width of the filters.
    activation: name of the activation.
    conv_tpl: of the children `conv_0`, `conv_1`, ...; they have biases only where there is no norm, which has its own.
    norm_tpl: of the children `norm_0`, `norm_1`, ...; None is no norm.
    pooling_tpl: of the child `pooling`, after each convolution; None is no pooling.
    global_pooling_tpl: of the child `global_pooling`.
    dropout_tpl: of the child `dropout`.
    activation_split_dims_mapping: `out`, the features, [B, F].
  """

  input_channels: int = REQUIRED
  channels: tuple[int, ...] = REQUIRED
  filter_size: tuple[int, int] = (3, 3)
  activation: str = 'relu'
  conv_tpl: Config = template(Conv2D)
  norm_tpl: Config | None = template(BatchNorm)
  pooling_tpl: Config | None = template(Pooling)
  global_pooling_tpl: Config = template(GlobalPooling)
  dropout_tpl: Config = template(Dropout)
  weight_split_dims_mapping: Config = template(SplitMapping)

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    counts = (self.input_channels, *self.channels)
    shapes = [(*self.filter_size, i, o) for i, o in itertools.pairwise(counts)]
    conv = self.conv_tpl.clone(use_bias=self.norm_tpl is None)
    self.create_children('conv', templates=[conv.clone(filter_shape=s) for s in shapes])
    if self.norm_tpl is not None:
      self.create_children('norm', templates=[self.norm_tpl.clone(dims=c) for c in self.channels])
    if self.pooling_tpl is not None:
      self.create_child('pooling', self.pooling_tpl)
    self.create_child('global_pooling', self.global_pooling_tpl)
    self.create_child('dropout', self.dropout_tpl)

  @property
  def output_dims(self) -> int:
    """F, the last of the channels."""
    return (self.input_channels, *self.channels)[-1]

  def __call__(self, x_BHWC: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns features [B, F].

    Args:
      x_BHWC: images.
      weights: [B] weights of the images, for norms over the batch; None is ones.
    """
    x_BHWC = x_BHWC.astype(self.fprop_dtype)
    for i, conv in enumerate(self.conv):
      x_BHWC = conv(x_BHWC)
      if self.norm_tpl is not None:
        norm = self.norm[i]
        x_BHWC = norm(x_BHWC, weights) if isinstance(norm, BatchNorm) else norm(x_BHWC)
      x_BHWC = get_activation(self.activation)(x_BHWC)
      if self.pooling_tpl is not None:
        x_BHWC = self.pooling(x_BHWC)
    return self.shard(self.dropout(self.global_pooling(x_BHWC)), self.activation_split_dims_mapping.out)
