"""preprocessor_config.json: how a checkpoint expects images to be resized and normalized."""

from __future__ import annotations

import os
from typing import Any

from praxis_lite.bridges.hf.hf_config import HfConfig, read_json
from praxis_lite.common.config import REQUIRED, Config, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import ImageRecordInput, ImageTextRecordInput
from praxis_lite.models import ImageFeatureModel, MaskedAutoencoder

PREPROCESSOR_FILE = 'preprocessor_config.json'


def image_datasets(model: Config, folder: str) -> list[Config]:
  """Returns the datasets of a run that fine-tunes an image model, with images as the checkpoint expects them.

  If the folder of the checkpoint has no preprocessor_config.json, pixels are scaled to [-1, 1].
  """
  fields = _fields_of(model.network_tpl, folder)
  if target(model) in (ImageFeatureModel, MaskedAutoencoder):
    fields['label_feature'] = None
  data = Config(ImageRecordInput, file_pattern=REQUIRED, batch_size=32, **fields)
  return [data.clone(name='train', is_training=True, crop_area=(0.5, 1.0)), data.clone(name='validation')]


def image_text_datasets(model: Config, folder: str, tokenizer: Config) -> list[Config]:
  """Returns the datasets of a run that fine-tunes a `TwoTowerModel`: images as for `image_datasets`, and texts."""
  data = Config(ImageTextRecordInput, file_pattern=REQUIRED, batch_size=32, **_fields_of(model.image_tpl, folder))
  has_end_token = model.text_pooling in ('end', 'largest')  # As in CLIP. Texts of SigLIP end with padding only.
  data.set(tokenizer_tpl=tokenizer, text_len=model.text_tpl.position_tpl.max_len)
  data.set(has_begin=has_end_token, hides_padding=has_end_token)
  return [data.clone(name='train', is_training=True, crop_area=(0.9, 1.0), flip=False), data.clone(name='validation')]


def _fields_of(network: Config, folder: str) -> dict[str, Any]:
  """Returns the input's fields for image size and normalization."""
  fields: dict[str, Any] = {'image_size': _size_of(network), 'channels': network.channels}
  path = os.path.join(folder, PREPROCESSOR_FILE)
  if folder and os.path.isfile(path):
    fields |= _normalization(HfConfig(read_json(path), path), network)
  return fields


def _normalization(hf: HfConfig, network: Config) -> dict[str, Any]:
  """Returns the input's fields for resizing and normalization; raises ConfigError if a mean or std has wrong values."""
  found: dict[str, Any] = {}
  if hf.values.get('do_normalize', True):
    for name, ours in (('image_mean', 'mean'), ('image_std', 'std')):
      values = hf.values.get(name, 0.5)
      values = values if isinstance(values, list) else [values]
      if len(values) not in (1, network.channels) or not all(type(x) in (int, float) for x in values):
        raise ConfigError(f'{hf.where}: {name} = {values!r}; expected a number, or one for each of {network.channels}')
      found[ours] = tuple(map(float, values))
  else:
    found |= {'mean': (0.0,), 'std': (1.0,)}
  size = hf.values.get('size')
  shortest = size.get('shortest_edge') if isinstance(size, dict) else None
  is_usable = type(shortest) is int and shortest >= min(_size_of(network))
  return found | {'resize_to': shortest if is_usable else min(_size_of(network))}


def _size_of(network: Config) -> tuple[int, int]:
  """Returns the (height, width) of the images; a convolutional network takes any size, and gets 224 x 224."""
  return getattr(network, 'image_size', (224, 224))
