"""Configs of diffusion transformers with split mappings for a mesh."""

from __future__ import annotations

from praxis_lite.common.config import Config
from praxis_lite.layers.diffusion_transformer import DiffusionTransformer, ModulatedBlock
from praxis_lite.layers.repeat import Repeat
from praxis_lite.models.split_configs import set_sharding


def diffusion_transformer(
  *,
  image_channels: int,
  model_dims: int,
  num_layers: int,
  num_heads: int,
  patch_size: int = 2,
  num_classes: int = 0,
  remat: str = 'auto',
  batch_axes: str | tuple[str, ...] | None = ('replica', 'data'),
  data_axis: str | None = 'data',
  mdl_axis: str | None = 'mdl',
) -> Config[DiffusionTransformer]:
  """Returns the config of a DiT that scans over its blocks, split over a mesh as `set_sharding` splits language models.

  Args:
    image_channels, model_dims, num_layers, num_heads, patch_size, num_classes: see `DiffusionTransformer`.
    remat: see `layers/remat.py`.
    batch_axes, data_axis, mdl_axis: mesh axes that split rows, model dims of weights, and heads and hidden dims; None
      does not split.
  """
  network = Config(
    DiffusionTransformer,
    image_channels=image_channels,
    patch_size=patch_size,
    model_dims=model_dims,
    num_layers=num_layers,
    num_heads=num_heads,
    num_classes=num_classes,
    blocks_tpl=Config(Repeat, layers_tpl=Config(ModulatedBlock), remat=remat),
  )
  return set_sharding(network, batch_axes=batch_axes, data_axis=data_axis, mdl_axis=mdl_axis)
