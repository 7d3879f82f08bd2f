"""Reads only the text part of checkpoints of models for texts and images, such as Gemma 3 from 4B on.

Their config.json has the fields of the text part in `text_config`. The names of its tensors begin in one of two ways:

    language_model.model.layers...    in published files
    model.language_model.layers...    in files that some releases of transformers write
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from praxis_lite.bridges.hf.files import StoredTensor
from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import number_of

# The model_type of a model of texts and images, and the model_type and architecture of its text part.
_TEXT_PARTS = {'gemma3': ('gemma3_text', 'Gemma3ForCausalLM')}
# Fields of the whole model's config.json that apply to the text part too.
_SHARED = {'bos_token_id', 'eos_token_id', 'pad_token_id', 'dtype', 'torch_dtype', 'quantization_config'}
_OF_IMAGES = re.compile(r'(model\.)?(vision_tower|multi_modal_projector)\.')
_OF_TEXTS = re.compile(r'language_model\.(?=model\.|lm_head\.)|(?<=^model\.)language_model\.')


def text_part(hf: HfConfig) -> HfConfig:
  """Returns the config.json of the text part of a model of texts and images; `hf` itself for any other model.

  Raises:
    ConfigError: there is no text part.
  """
  model_type = hf.values.get('model_type')
  if not isinstance(model_type, str) or model_type not in _TEXT_PARTS:
    return hf
  part = hf['text_config']
  if not isinstance(part, dict):
    raise ConfigError(f'{hf.where}: text_config = {part!r}; expected a JSON object')
  of_part, architecture = _TEXT_PARTS[model_type]
  shared = {name: value for name, value in hf.values.items() if name in _SHARED}
  return HfConfig({**part, **shared, 'model_type': of_part, 'architectures': [architecture]}, hf.where)


def text_tensors(tensors: Mapping[str, StoredTensor], folder: str) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
  """Returns the tensors of the text part, by their names in a text model, and a line about those that are left out."""
  of_images = [name for name in tensors if _OF_IMAGES.match(name)]
  kept = {_OF_TEXTS.sub('', name, count=1): tensors[name] for name in tensors if name not in {*of_images}}
  if not of_images:
    return kept, ()
  return kept, (f'{folder}: only the text part is imported; left out {number_of(len(of_images), "tensor")} for images',)
