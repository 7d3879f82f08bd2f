"""Configs of ConvNeXts, and of image classifiers with a ConvNeXt."""

from __future__ import annotations

from typing import TypedDict, Unpack

from jax.typing import DTypeLike

from praxis_lite.common.config import Config
from praxis_lite.layers.convnext import ConvNeXt, ConvNeXtBlock
from praxis_lite.layers.normalizations import LayerNorm
from praxis_lite.models.classifier import ClassificationModel
from praxis_lite.sharding.weights import WeightInit


class ConvNeXtSizes(TypedDict, total=False):
  """The arguments of `convnext`."""

  channels: int
  patch_size: int
  stage_dims: tuple[int, ...]
  stage_depths: tuple[int, ...]
  kernel_size: int
  initial_scale: float | None
  stochastic_depth: float
  activation: str
  epsilon: float
  final_epsilon: float


def convnext(
  *,
  channels: int = 3,
  patch_size: int = 4,
  stage_dims: tuple[int, ...] = (96, 192, 384, 768),
  stage_depths: tuple[int, ...] = (3, 3, 9, 3),
  kernel_size: int = 7,
  initial_scale: float | None = 1e-6,
  stochastic_depth: float = 0.0,
  activation: str = 'gelu',
  epsilon: float = 1e-6,
  final_epsilon: float = 1e-6,
) -> Config[ConvNeXt]:
  """Returns the config of a ConvNeXt; the defaults are the sizes of ConvNeXt-T (Liu et al., 2022).

  Args:
    channels, patch_size, stage_dims, stage_depths, stochastic_depth, activation: see `ConvNeXt`.
    kernel_size, initial_scale: see `ConvNeXtBlock`.
    epsilon: `epsilon` of all norms but the last.
    final_epsilon: `epsilon` of the last norm, which is applied to the features.
  """
  norm = Config(LayerNorm, epsilon=epsilon)
  return Config(
    ConvNeXt,
    channels=channels,
    patch_size=patch_size,
    stage_dims=stage_dims,
    stage_depths=stage_depths,
    activation=activation,
    stochastic_depth=stochastic_depth,
    norm_tpl=norm,
    block_tpl=Config(ConvNeXtBlock, kernel_size=kernel_size, initial_scale=initial_scale, norm_tpl=norm.clone()),
    final_norm_tpl=Config(LayerNorm, epsilon=final_epsilon),
    params_init=WeightInit.TruncatedGaussian(0.02),
  )


def convnext_classifier(
  *, num_classes: int, fprop_dtype: DTypeLike | None = None, **sizes: Unpack[ConvNeXtSizes]
) -> Config[ClassificationModel]:
  """Returns the config of a classifier of images with a ConvNeXt.

  Args:
    num_classes: V.
    fprop_dtype: dtype of the computation, such as jnp.bfloat16; None means the dtype of the weights, float32.
    **sizes: arguments of `convnext`.
  """
  network = convnext(**sizes)
  model = Config(ClassificationModel, num_classes=num_classes, network_tpl=network, fprop_dtype=fprop_dtype)
  return model.set(params_init=network.params_init)
