"""Residual networks in NumPy and float64, from the tensors of a checkpoint by name: what the package must compute.

They are written from the papers and the names of the tensors, and share no code with the package.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def outputs(config: dict[str, Any], tensors: Tensors, image: np.ndarray) -> np.ndarray:
  """Logits of classes [B, V] for images [B, height, width, C]."""
  of = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
  x = np.asarray(image, np.float64)
  if config['model_type'] == 'convnext':
    return convnext(config, of, x) @ of['classifier.weight'].T + of['classifier.bias']
  x = resnet(config, of, x) if config['model_type'] == 'resnet' else bit(config, of, x)
  return x.mean((1, 2)) @ of['classifier.1.weight'].T + of['classifier.1.bias']


def resnet(config: dict[str, Any], of: Tensors, x: np.ndarray) -> np.ndarray:
  """The last images of ResNet v1.5, with the averages of its batch norms."""

  def layer(name, x, stride=1):
    y, norm = conv(x, of[f'{name}convolution.weight'], stride), f'{name}normalization.'
    y = (y - of[f'{norm}running_mean']) / np.sqrt(of[f'{norm}running_var'] + 1e-5)
    return y * of[f'{norm}weight'] + of[f'{norm}bias']

  x = maximum(relu(layer('resnet.embedder.embedder.', x, 2)), -np.inf)
  for stage, depth in enumerate(config['depths']):
    for i in range(depth):
      name, stride = f'resnet.encoder.stages.{stage}.layers.{i}.', 2 if stage and not i else 1
      if config.get('layer_type') == 'basic':
        y = layer(f'{name}layer.1.', relu(layer(f'{name}layer.0.', x, stride)))
      else:
        y = relu(layer(f'{name}layer.1.', relu(layer(f'{name}layer.0.', x)), stride))
        y = layer(f'{name}layer.2.', y)
      short = layer(f'{name}shortcut.', x, stride) if f'{name}shortcut.convolution.weight' in of else x
      x = relu(y + short)
  return x


def bit(config: dict[str, Any], of: Tensors, x: np.ndarray) -> np.ndarray:
  """The last images of ResNet v2 with group norms and standardized filters, after a norm."""

  def layer(name, x, stride=1):
    w = of[f'{name}.weight']
    w = w - w.mean((1, 2, 3), keepdims=True)
    return conv(x, w / np.sqrt((w**2).mean((1, 2, 3), keepdims=True) + 1e-8), stride)

  def norm(name, x):
    y = x.reshape(*x.shape[:3], config['num_groups'], -1)
    y = y - y.mean((1, 2, 4), keepdims=True)
    y = (y / np.sqrt((y**2).mean((1, 2, 4), keepdims=True) + 1e-5)).reshape(x.shape)
    return relu(y * of[f'{name}.weight'] + of[f'{name}.bias'])

  x = maximum(layer('bit.embedder.convolution', x, 2), 0)
  for stage, depth in enumerate(config['depths']):
    for i in range(depth):
      name, stride = f'bit.encoder.stages.{stage}.layers.{i}.', 2 if stage and not i else 1
      y = norm(f'{name}norm1', x)
      if f'{name}downsample.conv.weight' in of:
        x = layer(f'{name}downsample.conv', y, stride)
      y = norm(f'{name}norm2', layer(f'{name}conv1', y))
      y = norm(f'{name}norm3', layer(f'{name}conv2', y, stride))
      x = x + layer(f'{name}conv3', y)
  return norm('bit.norm', x)


def convnext(config: dict[str, Any], of: Tensors, x: np.ndarray) -> np.ndarray:
  """The features of a ConvNeXt."""

  def norm(name, x, eps=1e-6):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * of[f'{name}.weight'] + of[f'{name}.bias']

  def cut(name, x):
    w = of[f'{name}.weight']
    size = w.shape[2]
    return np.einsum('bhwcij,ocij->bhwo', pieces_of(x, size)[:, ::size, ::size], w) + of[f'{name}.bias']

  def linear(name, x):
    return x @ of[f'{name}.weight'].T + of[f'{name}.bias']

  x = norm('convnext.embeddings.layernorm', cut('convnext.embeddings.patch_embeddings', x))
  for stage, depth in enumerate(config['depths']):
    if stage:
      name = f'convnext.encoder.stages.{stage}.downsampling_layer.'
      x = cut(f'{name}1', norm(f'{name}0', x))
    for i in range(depth):
      name = f'convnext.encoder.stages.{stage}.layers.{i}.'
      y = np.einsum('bhwcij,cij->bhwc', windows_of(x, 7, 1, 0.0), of[f'{name}dwconv.weight'][:, 0])
      y = linear(f'{name}pwconv1', norm(f'{name}layernorm', y + of[f'{name}dwconv.bias']))
      y = linear(f'{name}pwconv2', y * 0.5 * (1 + np.vectorize(math.erf)(y / math.sqrt(2))))
      x = x + y * of.get(f'{name}layer_scale_parameter', 1.0)
  return norm('convnext.layernorm', x.mean((1, 2)), config['layer_norm_eps'])


def relu(x: np.ndarray) -> np.ndarray:
  return np.maximum(x, 0)


def conv(x: np.ndarray, w: np.ndarray, stride: int) -> np.ndarray:
  """A convolution of images with filters [O, C, size, size], with as many zeros on each side."""
  size = w.shape[2]
  windows = windows_of(x, size, stride, 0.0)
  return np.einsum('bhwcij,ocij->bhwo', windows, w)


def maximum(x: np.ndarray, around: float) -> np.ndarray:
  """The maximum over 3 x 3 pixels, every second one, with a number around the image."""
  return windows_of(x, 3, 2, around).max((-1, -2))


def windows_of(x: np.ndarray, size: int, stride: int, around: float) -> np.ndarray:
  edge = (size - 1) // 2
  x = np.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)), constant_values=around)
  return pieces_of(x, size)[:, ::stride, ::stride]


def pieces_of(x: np.ndarray, size: int) -> np.ndarray:
  return np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))
