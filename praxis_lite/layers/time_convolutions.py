"""Convolutions along time: a depthwise one, the convolution module of a Conformer, and subsampling of features.

Frames of padding are set to 0 before each convolution, so that the results of other frames do not depend on padding.

B batch, T frames, D dims, W width of a filter, M frequencies, C channels, U frames after subsampling.
"""

from __future__ import annotations

import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base import Layer, WeightSplit
from praxis_lite.layers.causal_conv import sum_windows
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.images import Conv2D
from praxis_lite.layers.linears import Linear, bias_weight, draw_bias
from praxis_lite.layers.normalizations import BatchNorm, GroupNorm, LayerNorm, Norm
from praxis_lite.sharding.weights import WeightHParams


class DepthwiseConv1D(Layer):
  """y[t] = sum_i x[t + i - before] * w[i] + b, separately for each dim; x is 0 outside of the sequence.

  i goes from 0 to W - 1. `before` is W - 1 if the convolution is causal, so that no frame sees later ones; otherwise
  (W - 1) / 2, rounded down.

  Attributes:
    dims: D.
    kernel_size: W.
    causal: see above.
    use_bias: whether there is a bias.
    weight_split_dims_mapping: `wt`, [W, D], of `w`; the bias is split as its last dimension.
    activation_split_dims_mapping: `out`, [B, T, D].
  """

  takes_paddings: ClassVar[bool] = True

  dims: int = REQUIRED
  kernel_size: int = REQUIRED
  causal: bool = False
  use_bias: bool = False
  weight_split_dims_mapping: Config = template(WeightSplit)

  def setup(self) -> None:
    self._check_range('kernel_size', least=1)
    wt = self.weight_split_dims_mapping.wt
    self.create_variable('w', WeightHParams((self.kernel_size, self.dims), tensor_split_dims_mapping=wt))
    if self.use_bias:
      self.create_variable('b', bias_weight(self.dims, None if wt is None else wt[-1:]))

  def __call__(self, x_BTD: jax.Array, paddings: jax.Array | None = None) -> jax.Array:
    """Returns [B, T, D]; `paddings`, [B, T], are nonzero for padding, and None means no padding."""
    W = self.kernel_size
    before = W - 1 if self.causal else (W - 1) // 2
    x_BXD = jnp.pad(_clear(x_BTD.astype(self.fprop_dtype), paddings), ((0, 0), (before, W - 1 - before), (0, 0)))
    y_BTD = sum_windows(x_BXD, self.theta.w)
    if self.use_bias:
      y_BTD += self.theta.b
    return self.shard(y_BTD.astype(self.fprop_dtype))


class ConvolutionModule(Layer):
  """y = W_out f(norm(depthwise(glu(W_in input_norm(x))))), the convolution of a Conformer (Gulati et al., 2020).

  glu multiplies one half of its dims by the sigmoid of the other, a * sigmoid(b).

  Attributes:
    input_dims: D of the input and the result.
    kernel_size: W.
    causal: whether no frame sees later ones.
    activation: name of f.
    input_norm_tpl: template of the child `input_norm`.
    proj_tpl: template of the children `value`, `gate` and `down`, linear layers.
    depthwise_tpl: template of the child `depthwise`.
    norm_tpl: template of the child `norm`. A `BatchNorm` leaves out padding. A `GroupNorm` normalizes each frame
      separately, so the result depends neither on later frames nor on padding.
    dropout_tpl: template of the child `dropout`, on the result.
    weight_split_dims_mapping: `wt`, [D, D], of `value` and `gate`; the weight of `down` has the two entries swapped.
    activation_split_dims_mapping: `out`, [B, T, D].
  """

  takes_paddings: ClassVar[bool] = True

  input_dims: int = REQUIRED
  kernel_size: int = 31
  causal: bool = False
  activation: str = 'silu'
  input_norm_tpl: Config = template(LayerNorm)
  proj_tpl: Config = template(Linear, use_bias=True)
  depthwise_tpl: Config = template(DepthwiseConv1D)
  norm_tpl: Config = template(BatchNorm)
  dropout_tpl: Config = template(Dropout)
  weight_split_dims_mapping: Config = template(WeightSplit)

  input_norm: Norm = child()
  value: Linear = child()
  gate: Linear = child()
  depthwise: DepthwiseConv1D = child()
  norm: Norm = child()
  down: Linear = child()
  dropout: Dropout = child()

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    D, wt = self.input_dims, self.weight_split_dims_mapping.wt
    self._resolve(wt, f'{self.path_name}.weight_split_dims_mapping.wt', rank=2)
    into, out = (self.proj_tpl.clone(input_dims=D, output_dims=D) for _ in range(2))
    if wt is not None:
      into.weight_split_dims_mapping.wt, out.weight_split_dims_mapping.wt = wt, wt[::-1]
    self.create_child('input_norm', self.input_norm_tpl.clone(dims=D))
    self.create_children('value', 'gate', template=into)
    depthwise = self.depthwise_tpl.clone(dims=D, kernel_size=self.kernel_size, causal=self.causal)
    if wt is not None and depthwise.weight_split_dims_mapping.wt is None:
      depthwise.weight_split_dims_mapping.wt = (None, *wt[-1:])
    self.create_child('depthwise', depthwise)
    self.create_child('norm', self.norm_tpl.clone(dims=D))
    self.create_child('down', out)
    self.create_child('dropout', self.dropout_tpl)

  def __call__(self, x_BTD: jax.Array, paddings: jax.Array | None = None) -> jax.Array:
    """Returns [B, T, D], without the residual connection.

    `paddings`, [B, T], are nonzero for padding; None means no padding.
    """
    x_BTD = self.input_norm(x_BTD)
    x_BTD = self.value(x_BTD) * jax.nn.sigmoid(self.gate(x_BTD))
    x_BTD = get_activation(self.activation)(self._normalize(self.depthwise(x_BTD, paddings), paddings))
    return self.shard(self.dropout(self.down(x_BTD)))

  def _normalize(self, x_BTD: jax.Array, paddings: jax.Array | None) -> jax.Array:
    if isinstance(self.norm, BatchNorm):
      weights_BT = jnp.ones(x_BTD.shape[:2]) if paddings is None else (paddings == 0).astype(jnp.float32)
      return self.norm(x_BTD, weights_BT)
    if isinstance(self.norm, GroupNorm):
      return jax.vmap(self.norm, in_axes=1, out_axes=1)(x_BTD)
    return self.norm(x_BTD)


class ConvSubsampling(Layer):
  """3 x 3 convolutions of stride 2 over time and frequency, then a linear layer; two convolutions reduce T by 4.

  Biases are initially uniform in +-1 / sqrt(fan in), so that frames that SpecAugment sets to 0 do not reach later norms
  as zeros.

  Attributes:
    input_dims: M.
    output_dims: D.
    channels: C of each convolution; each convolution halves the number of frames.
    activation: name of the activation after each convolution.
    causal: whether no frame sees later ones, so that frame u depends on frames up to 4 u.
    conv_tpl: template of the children `conv_0`, `conv_1`, ...
    proj_tpl: template of the child `proj`, from the channels of all frequencies to D.
    activation_split_dims_mapping: `out`, [B, U, D].
  """

  takes_paddings: ClassVar[bool] = True

  input_dims: int = REQUIRED
  output_dims: int = REQUIRED
  channels: tuple[int, ...] = (256, 256)
  activation: str = 'relu'
  causal: bool = False
  conv_tpl: Config = template(Conv2D)
  proj_tpl: Config = template(Linear, use_bias=True)

  conv: list[Conv2D] = child()
  proj: Linear = child()

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    shapes = [(3, 3, i, o) for i, o in itertools.pairwise((1, *self.channels))]
    # With 'SAME' padding, the result would depend on whether the number of frames is even.
    convs = [self.conv_tpl.clone(filter_shape=shape, strides=(2, 2), padding='VALID') for shape in shapes]
    self.create_children('conv', templates=convs)
    frequencies = -(-self.input_dims // 2 ** len(self.channels))
    features = frequencies * (self.channels[-1] if self.channels else 1)
    self.create_child('proj', self.proj_tpl.clone(input_dims=features, output_dims=self.output_dims))
    for layer, fan_in in zip((*self.conv, self.proj), (*(9 * inputs for _, _, inputs, _ in shapes), features)):
      draw_bias(layer, fan_in)

  def __call__(self, x_BTM: jax.Array, paddings: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    """Returns frames, [B, U, D], and their paddings, [B, U], which are None if `paddings` is None.

    Args:
      x_BTM: features.
      paddings: [B, T], nonzero for padding after the frames; None means no padding.
    """
    x_BTMC = x_BTM.astype(self.fprop_dtype)[..., None]
    for conv in self.conv:
      around = ((0, 0), (2, 0) if self.causal else (1, 1), (1, 1), (0, 0))
      x_BTMC = get_activation(self.activation)(conv(jnp.pad(_clear(x_BTMC, paddings), around)))
      paddings = None if paddings is None else paddings[:, ::2]
    return self.shard(self.proj(x_BTMC.reshape(*x_BTMC.shape[:2], -1))), paddings


def _clear(x: jax.Array, paddings: jax.Array | None) -> jax.Array:
  """Returns x, [B, T, ...], with zeros in frames of padding."""
  return x if paddings is None else jnp.where((paddings != 0).reshape(*x.shape[:2], *(1,) * (x.ndim - 2)), 0, x)
