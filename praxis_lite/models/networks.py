"""Functions that find the network in a model's config, and the stacks of blocks in a network's config."""

from __future__ import annotations

from typing import TypeVar

from praxis_lite.common.config import Config, target
from praxis_lite.layers.base import Layer
from praxis_lite.layers.conformer import ConformerEncoder
from praxis_lite.layers.convnext import ConvNeXt
from praxis_lite.layers.diffusion_transformer import DiffusionTransformer
from praxis_lite.layers.encoder import TransformerEncoder
from praxis_lite.layers.resnet import ResNet
from praxis_lite.layers.vision_transformer import VisionTransformer

LmT = TypeVar('LmT', bound=Layer)

_STACKS = ('transformer_tpl', 'encoder_tpl', 'decoder_tpl', 'stack_tpl', 'blocks_tpl')
_NETWORKS: dict[str, tuple[type, ...]] = {
  'encoder_tpl': (TransformerEncoder, ConformerEncoder),
  'network_tpl': (VisionTransformer, DiffusionTransformer, ResNet, ConvNeXt),
}


def find_network(config: Config) -> Config:
  """Returns the config of the network of a model; for the config of a network, the config itself."""
  if hasattr(config, 'lm_tpl'):
    return config.lm_tpl
  for name, kinds in _NETWORKS.items():
    network = getattr(config, name, None)
    if network is not None and is_a(network, kinds):
      return network
  return config


def stack_fields(network: Config) -> list[str]:
  """Returns the fields of a network that hold the configs of its stacks of blocks."""
  return [name for name in _STACKS if hasattr(network, name)]


def is_a(config: Config, kinds: type | tuple[type, ...]) -> bool:
  """Whether a config builds an instance of a class, or of one of several."""
  return isinstance(built := target(config), type) and issubclass(built, kinds)
