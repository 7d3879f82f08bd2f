"""set_sharding takes every model with stacks of blocks, and names what it does not take."""

import pytest
from jax.sharding import PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.models import (
  DiffusionModel,
  TwoTowerModel,
  VqVae,
  diffusion_transformer,
  set_sharding,
  transformer_encoder,
  vision_transformer,
)


def towers():
  sizes = {'model_dims': 8, 'num_layers': 1, 'num_heads': 2}
  image = vision_transformer(image_size=4, patch_size=2, **sizes)
  text = transformer_encoder(vocab_size=9, style='pre_norm', max_len=4, num_token_types=0, **sizes)
  return Config(TwoTowerModel, embedding_dims=4, image_tpl=image, text_tpl=text)


def test_both_towers_are_split_as_they_would_be_alone():
  axes = {'context_axis': 'length', 'mdl_axis': 'model'}
  both, alone = set_sharding(towers(), **axes), towers()
  assert both.image_tpl == set_sharding(alone.image_tpl, **axes)
  assert both.text_tpl == set_sharding(alone.text_tpl, **axes)
  assert both.text_tpl.transformer_tpl.layers_tpl.attention_tpl.context_axis == 'length'


def test_a_diffusion_model_is_split_as_its_network():
  sizes = {'image_channels': 1, 'model_dims': 8, 'num_layers': 1, 'num_heads': 2, 'num_classes': 3}
  whole = diffusion_transformer(**sizes, batch_axes=None, data_axis=None, mdl_axis=None)
  model = set_sharding(Config(DiffusionModel, network_tpl=whole, image_size=(4, 4)))
  assert model.network_tpl == diffusion_transformer(**sizes)
  wt = model.network_tpl.blocks_tpl.layers_tpl.ff_tpl.weight_split_dims_mapping.wt
  assert PartitionSpec(*wt) == PartitionSpec('data', 'mdl')


def test_another_model_is_named():
  with pytest.raises(ConfigError, match=r'set_sharding: does not know how to split a VqVae; set the mappings of its'):
    set_sharding(Config(VqVae))
