"""preprocessor_config.json: how the images of a checkpoint are resized and normalized."""

from __future__ import annotations

import os
from typing import Any

from praxis_lite.bridges.hf.hf_config import HfConfig, read_json
from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import ImageRecordInput
from praxis_lite.models import ImageFeatureModel

PREPROCESSOR_FILE = 'preprocessor_config.json'


def image_datasets(model: Config, folder: str) -> list[Config]:
  """Returns the data of a run that fine-tunes a vision transformer: images as its checkpoint needs them.

  Args:
    model: the config of a model with a `network_tpl`.
    folder: the folder of the checkpoint; if it has no preprocessor_config.json, pixels become numbers in [-1, 1].
  """
  network = model.network_tpl
  fields: dict[str, Any] = {'image_size': network.image_size, 'channels': network.channels}
  path = os.path.join(folder, PREPROCESSOR_FILE)
  if folder and os.path.isfile(path):
    fields |= _normalization(HfConfig(read_json(path), path), network)
  if model.__fn_or_cls__ is ImageFeatureModel:
    fields['label_feature'] = None
  data = Config(ImageRecordInput, file_pattern=REQUIRED, batch_size=32, **fields)
  return [data.clone(name='train', is_training=True, crop_area=(0.5, 1.0)), data.clone(name='validation')]


def _normalization(hf: HfConfig, network: Config) -> dict[str, Any]:
  """Returns the fields of the input; raises ConfigError if the file says something else than lists of numbers."""
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
  is_usable = type(shortest) is int and shortest >= min(network.image_size)
  return found | {'resize_to': shortest if is_usable else min(network.image_size)}
