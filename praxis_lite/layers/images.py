"""Layers of image classifiers: convolution, pooling, and networks from images to features.

A network has the attribute `output_dims`, the size of its features, and is called with the weights of the examples,
which batch norms need.

B batch, H height, W width, C (input) channels, O output channels, F features.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base import Layer, WeightSplit
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.linears import Linear, bias_weight
from praxis_lite.layers.normalizations import BatchNorm, Norm, normalize_rows
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.sharding.weights import WeightHParams

PADDINGS = ('SAME', 'VALID', 'SYMMETRIC')
POOLINGS = ('max', 'mean')


class Conv2D(Layer):
  """y[i, j] = sum_{h, w} x[i * stride + h * dilation, j * stride + w * dilation] . w[h, w] + b.

  Attributes:
    filter_shape: (height, width, C, O).
    strides: along the height and the width.
    dilations: distance in the image between neighbouring entries of the filter.
    padding: 'SAME' gives the size of the image divided by the stride; 'VALID' pads nothing; 'SYMMETRIC' pads the same
      number of zeros on both sides of the image, half of the reach of the filter, as networks of PyTorch do.
    groups: number of groups of channels that are convolved separately; C counts the channels of all groups.
    use_bias: whether there is a bias.
    weight_split_dims_mapping: `wt`, [height, width, C / groups, O], of `w`; the bias is split like its last dimension.
    activation_split_dims_mapping: `out`, [B, H, W, O]. Height and width are gathered before the convolution and split
      after it, because XLA computes convolutions of split images wrongly.
  """

  filter_shape: tuple[int, int, int, int] = REQUIRED
  strides: tuple[int, int] = (1, 1)
  dilations: tuple[int, int] = (1, 1)
  padding: str = 'SAME'
  groups: int = 1
  use_bias: bool = True
  weight_split_dims_mapping: Config = template(WeightSplit)

  def setup(self) -> None:
    check_choice(f'{self.path_name}.padding', self.padding, PADDINGS)
    self._check_range('strides', 'dilations', 'groups', least=1)
    height, width, inputs, outputs = self.filter_shape
    if inputs % self.groups or outputs % self.groups:
      raise ConfigError(f'{self.path_name}.groups: {self.groups} does not divide both {inputs} and {outputs} channels')
    wt = self.weight_split_dims_mapping.wt
    shape = (height, width, inputs // self.groups, outputs)
    self.create_variable('w', WeightHParams(shape, tensor_split_dims_mapping=wt))
    if self.use_bias:
      self.create_variable('b', bias_weight(outputs, None if wt is None else wt[-1:]))

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, H', W', O].

    Raises:
      ConfigError: the filter is larger than the image and its padding.
    """
    reach = [1 + (size - 1) * dilation for size, dilation in zip(self.filter_shape, self.dilations)]
    _check_window(self, 'filter_shape', reach, x_BHWC)
    y_BHWO = jax.lax.conv_general_dilated(
      x_BHWC.astype(self.fprop_dtype),
      self._filters(),
      self.strides,
      _to_lax(self.padding, reach),
      rhs_dilation=self.dilations,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
      feature_group_count=self.groups,
    )
    if self.use_bias:
      y_BHWO += self.theta.b
    return self.shard(y_BHWO)

  def _filters(self) -> jax.Array:
    """Returns the filters, [height, width, C / groups, O]."""
    return self.theta.w


class Pooling(Layer):
  """The maximum or the mean of each channel in each window; a mean does not count the padding of the image.

  Attributes:
    kind: 'max' or 'mean'.
    window: height and width of a window.
    strides: distance between windows; None means `window`.
    padding: 'SAME', 'VALID' or 'SYMMETRIC', as in `Conv2D`; padding is never a maximum.
    activation_split_dims_mapping: `out`, [B, H, W, C].
  """

  kind: str = 'max'
  window: tuple[int, int] = (2, 2)
  strides: tuple[int, int] | None = None
  padding: str = 'VALID'

  def setup(self) -> None:
    check_choice(f'{self.path_name}.kind', self.kind, POOLINGS)
    check_choice(f'{self.path_name}.padding', self.padding, PADDINGS)
    self._check_range('window', 'strides', least=1)

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, H', W', C].

    Raises:
      ConfigError: the window is larger than the image and its padding.
    """
    _check_window(self, 'window', self.window, x_BHWC)
    padding = _to_lax(self.padding, self.window)
    if not isinstance(padding, str):
      padding = [(0, 0), *padding, (0, 0)]
    windows = (1, *self.window, 1), (1, *(self.strides or self.window), 1), padding
    if self.kind == 'max':
      # JAX differentiates a reduce_window with max only if its initial value is -inf, the identity of max.
      return self.shard(jax.lax.reduce_window(x_BHWC, -jnp.inf, jax.lax.max, *windows))
    sums = jax.lax.reduce_window(to_sum_dtype(x_BHWC), 0.0, jax.lax.add, *windows)
    counts = jax.lax.reduce_window(jnp.ones((1, *x_BHWC.shape[1:3], 1)), 0.0, jax.lax.add, *windows)
    return self.shard((sums / counts).astype(x_BHWC.dtype))


def _check_window(layer: Conv2D | Pooling, field: str, window: Sequence[int], x_BHWC: jax.Array) -> None:
  height, width = x_BHWC.shape[1:3]
  padding = _to_lax(layer.padding, window)
  if padding == 'SAME':
    return
  added = (0, 0) if isinstance(padding, str) else [sum(ends) for ends in padding]
  if window[0] > height + added[0] or window[1] > width + added[1]:
    raise ConfigError(
      f'{layer.path_name}.{field}: a window of {window[0]} x {window[1]} is larger than the image, {height} x {width}; '
      "make it smaller, or set padding to 'SAME'"
    )


def _to_lax(padding: str, window: Sequence[int]) -> str | list[tuple[int, int]]:
  return [((size - 1) // 2,) * 2 for size in window] if padding == 'SYMMETRIC' else padding


class GlobalPooling(Layer):
  """The maximum or the mean of each channel.

  Attributes:
    kind: 'max' or 'mean'.
    activation_split_dims_mapping: `out`, [B, C].
  """

  kind: str = 'mean'

  def setup(self) -> None:
    check_choice(f'{self.path_name}.kind', self.kind, POOLINGS)

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, C]."""
    if self.kind == 'max':
      return self.shard(jnp.max(x_BHWC, axis=(1, 2)))
    return self.shard(jnp.mean(x_BHWC, axis=(1, 2), dtype=jnp.float32).astype(x_BHWC.dtype))


class Mlp(Layer):
  """Linear layers with an activation and dropout after each, on the flattened input.

  Attributes:
    input_dims: dims of the flattened input, such as H * W * C.
    hidden_dims: output dims of each linear layer.
    activation: name of the activation.
    linear_tpl: template of the children `linear_0`, `linear_1`, ...
    dropout_tpl: template of the child `dropout`.
    activation_split_dims_mapping: `out`, the features, [B, F].
  """

  input_dims: int = REQUIRED
  hidden_dims: tuple[int, ...] = REQUIRED
  activation: str = 'relu'
  linear_tpl: Config = template(Linear, use_bias=True)
  dropout_tpl: Config = template(Dropout)

  linear: list[Linear] = child()
  dropout: Dropout = child()

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    dims = (self.input_dims, *self.hidden_dims)
    linears = [self.linear_tpl.clone(input_dims=i, output_dims=o) for i, o in itertools.pairwise(dims)]
    self.create_children('linear', templates=linears)
    self.create_child('dropout', self.dropout_tpl)
    self.output_dims = dims[-1]

  def __call__(self, x: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns features [B, F] for x, [B, ...] with `input_dims` values in each example; `weights` are not used."""
    x_BF = jnp.reshape(x, (x.shape[0], -1)).astype(self.fprop_dtype)
    if x_BF.shape[1] != self.input_dims:
      raise ConfigError(
        f'{self.path_name}.input_dims: {self.input_dims}, but an input of shape {x.shape} has {x_BF.shape[1]}'
      )
    for linear in self.linear:
      x_BF = self.dropout(get_activation(self.activation)(linear(x_BF)))
    return self.shard(x_BF)


class ConvNet(Layer):
  """Convolution, norm, activation and pooling for each of `channels`; then the mean over the image, and dropout.

  Attributes:
    input_channels: C of the images.
    channels: output channels of each convolution.
    filter_size: height and width of the filters.
    activation: name of the activation.
    conv_tpl: template of the children `conv_0`, `conv_1`, ...; they have biases only if there are no norms.
    norm_tpl: template of the children `norm_0`, `norm_1`, ...; None disables normalization.
    pooling_tpl: template of the child `pooling`, after each convolution; None disables pooling.
    global_pooling_tpl: template of the child `global_pooling`.
    dropout_tpl: template of the child `dropout`.
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

  conv: list[Conv2D] = child()
  norm: list[Norm] = child()
  pooling: Pooling = child()
  global_pooling: GlobalPooling = child()
  dropout: Dropout = child()

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    conv = self.conv_tpl.clone(use_bias=self.norm_tpl is None)
    counts = (self.input_channels, *self.channels)
    shapes = [(*self.filter_size, i, o) for i, o in itertools.pairwise(counts)]
    self.create_children('conv', templates=[conv.clone(filter_shape=shape) for shape in shapes])
    if self.norm_tpl is not None:
      self.create_children('norm', templates=[self.norm_tpl.clone(dims=c) for c in self.channels])
    if self.pooling_tpl is not None:
      self.create_child('pooling', self.pooling_tpl)
    self.create_child('global_pooling', self.global_pooling_tpl)
    self.create_child('dropout', self.dropout_tpl)
    self.output_dims = counts[-1]

  def __call__(self, x_BHWC: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns features [B, F]; `weights`, [B], weight the images in norms over the batch, and None means all are 1."""
    x_BHWC = x_BHWC.astype(self.fprop_dtype)
    for i, conv in enumerate(self.conv):
      x_BHWC = conv(x_BHWC)
      if self.norm_tpl is not None:
        x_BHWC = normalize_rows(self.norm[i], x_BHWC, weights)
      x_BHWC = get_activation(self.activation)(x_BHWC)
      if self.pooling_tpl is not None:
        x_BHWC = self.pooling(x_BHWC)
    return self.shard(self.dropout(self.global_pooling(x_BHWC)))


def check_channels(layer: Layer, channels: int, x_BHWC: jax.Array) -> None:
  """Raises ConfigError unless images are [B, H, W, C], with C the `channels` of the layer."""
  if x_BHWC.ndim != 4 or x_BHWC.shape[-1] != channels:
    raise ConfigError(
      f'{layer.path_name}.channels: {channels}, so images are [B, height, width, {channels}]; these have shape '
      f'{list(x_BHWC.shape)}'
    )
