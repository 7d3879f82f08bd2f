"""Masked autoencoders of images, model_type vit_mae."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from praxis_lite.bridges.hf.family import Values, blocks_of_stack
from praxis_lite.bridges.hf.hf_config import MOST_LAYERS, HfConfig
from praxis_lite.bridges.hf.layer_pairs import linear_pairs, norm_pairs
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.bridges.hf.vit import VIT, VisionFamily, vision_block_pairs, vision_sizes, vision_values
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers import FeedForward, LearnedPositions
from praxis_lite.models import MaskedAutoencoder, masked_autoencoder


class MaskedImageFamily(VisionFamily):
  """A masked autoencoder. Its positions are sinusoids, stored as tables."""

  network = MaskedAutoencoder
  own_heads = frozenset({'decoder'})
  other_architectures = ()

  def _model(self, hf: HfConfig) -> Config[Any]:
    hf.must_be('qkv_bias', True)
    hf.must_be('norm_pix_loss', False, True)
    sizes = vision_sizes(hf)
    _check_squares(f'{hf.where}: ', sizes['image_size'], sizes['patch_size'])
    model = masked_autoencoder(
      decoder_dims=hf.size('decoder_hidden_size'),
      decoder_layers=hf.size('decoder_num_hidden_layers', most=MOST_LAYERS),
      decoder_heads=hf.size('decoder_num_attention_heads'),
      mask_ratio=hf.number('mask_ratio'),
      normalizes_targets=hf['norm_pix_loss'],
      positions='learned',
      **sizes,
    )
    model.patch_decoder_tpl.hidden_dims = hf.size('decoder_intermediate_size')
    return model

  def current_name(self, name: str) -> str:
    # transformers 5.24 writes blocks of the decoder under a new name; it reads both names.
    return super().current_name(name.replace('decoder.decoder_encoder.layer.', 'decoder.decoder_layers.'))

  def is_unused(self, name: str, hf: HfConfig) -> bool:
    return False

  def values(self, model: Any) -> Values:
    assert isinstance(model, MaskedAutoencoder)
    decoder = model.patch_decoder
    blocks = blocks_of_stack(decoder.transformer)
    ff = blocks[0].ff
    if not isinstance(ff, FeedForward) or not isinstance(decoder.position, LearnedPositions):
      raise ConfigError(
        f"{decoder.path_name}: a masked autoencoder of transformers has tables of positions, positions='learned', and "
        'dense feed-forward layers'
      )
    _check_squares(f'{model.network.path_name}.', model.network.image_size, model.network.patch_size)
    return vision_values(model.network) | {
      'decoder_hidden_size': decoder.model_dims,
      'decoder_num_hidden_layers': len(blocks),
      'decoder_num_attention_heads': decoder.num_heads,
      'decoder_intermediate_size': ff.hidden_dims,
      'mask_ratio': model.mask_ratio,
      'norm_pix_loss': model.normalizes_targets,
    }

  def table_of(self, weights: NestedDict) -> list[Pair]:
    return [*self._network_pairs(self.prefix), *self._decoder_pairs()]

  def _decoder_pairs(self) -> Iterator[Pair]:
    theirs, ours = 'decoder.', 'patch_decoder.'
    yield from linear_pairs(f'{theirs}decoder_embed', f'{ours}embed')
    yield Pair(f'{theirs}mask_token', f'{ours}mask_token', 'D -> . . D')
    yield Pair(f'{theirs}decoder_pos_embed', f'{ours}position.w', 'T D -> . T D')
    yield from vision_block_pairs(f'{theirs}decoder_layers.{{layer}}.', f'{ours}transformer.layers.')
    yield from norm_pairs(f'{theirs}decoder_norm', f'{ours}final_norm')
    yield from linear_pairs(f'{theirs}decoder_pred', f'{ours}pixels')


def _check_squares(where: str, image_size: tuple[int, int], patch_size: tuple[int, int]) -> None:
  for name, (height, width) in {'image_size': image_size, 'patch_size': patch_size}.items():
    if height != width:
      raise ConfigError(
        f'{where}{name} is {height} x {width}; a masked autoencoder of transformers has square images and patches'
      )


_VIT_MAE = {
  **VIT.defaults,
  'decoder_hidden_size': 512,
  'decoder_num_hidden_layers': 8,
  'decoder_num_attention_heads': 16,
  'decoder_intermediate_size': 2048,
  'mask_ratio': 0.75,
  'norm_pix_loss': False,
}
VIT_MAE = MaskedImageFamily('vit_mae', 'ViTMAEForPreTraining', _VIT_MAE, 'vit.')
