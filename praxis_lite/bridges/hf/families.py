"""The families of models by `model_type`, and the search for the family to which a model belongs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator

from praxis_lite.bridges.hf.bart import BART
from praxis_lite.bridges.hf.bert import ENCODERS
from praxis_lite.bridges.hf.convnext import CONVNEXT
from praxis_lite.bridges.hf.deepseek import DEEPSEEK_V3
from praxis_lite.bridges.hf.family import Family, Values, blocks_of_stack, class_without_adapter
from praxis_lite.bridges.hf.gpt2 import GPT2
from praxis_lite.bridges.hf.gpt_oss import GPT_OSS
from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.bridges.hf.llama_like import LLAMA_LIKE
from praxis_lite.bridges.hf.mamba2 import MAMBA2
from praxis_lite.bridges.hf.mixtures import MIXTURES
from praxis_lite.bridges.hf.phi3 import PHI3
from praxis_lite.bridges.hf.qwen3_next import QWEN3_NEXT
from praxis_lite.bridges.hf.recurrent_gemma import RECURRENT_GEMMA
from praxis_lite.bridges.hf.resnet import BIT, RESNET
from praxis_lite.bridges.hf.t5 import T5_LIKE
from praxis_lite.bridges.hf.two_towers import TWO_TOWERS
from praxis_lite.bridges.hf.vit import VIT
from praxis_lite.bridges.hf.vit_mae import VIT_MAE
from praxis_lite.bridges.hf.whisper import WHISPER
from praxis_lite.common.config import Config, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import (
  AudioEncoderDecoder,
  Dropout,
  MultiHeadAttention,
  PatchDecoder,
  Repeat,
  StackedTransformer,
  TransformerBlock,
  TransformerEncoder,
  TransformerEncoderDecoder,
  TransformerLm,
  VisionTransformer,
)
from praxis_lite.layers.base import Layer
from praxis_lite.models import BaseModel, RewardModel

_FAMILIES = (
  *LLAMA_LIKE,
  PHI3,
  *MIXTURES,
  QWEN3_NEXT,
  DEEPSEEK_V3,
  GPT_OSS,
  GPT2,
  MAMBA2,
  RECURRENT_GEMMA,
  *T5_LIKE,
  BART,
  WHISPER,
  *ENCODERS,
  VIT,
  VIT_MAE,
  RESNET,
  BIT,
  CONVNEXT,
  *TWO_TOWERS,
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}


def family_of(hf: HfConfig) -> Family:
  """Returns the family of a checkpoint; raises ConfigError if its type, head or quantization is not supported."""
  model_type = hf['model_type']
  if not isinstance(model_type, str) or model_type not in FAMILIES:
    # No family is proposed: models of similar names, such as gemma and gemma3, differ.
    raise ConfigError(f'{hf.where}: model_type {model_type!r} is not supported; supported: {", ".join(FAMILIES)}')
  family = FAMILIES[model_type]
  architectures = hf.values.get('architectures')
  for name in architectures if isinstance(architectures, list) else ():
    if isinstance(name, str) and not family.accepts(name):
      raise ConfigError(f'{hf.where}: architectures = {json.dumps(architectures)}{family.refusal()}')
  if not family.takes(hf.values.get('quantization_config')):
    hf.must_be('quantization_config', None)
  return family


def _check_multipliers(model: BaseModel) -> None:
  """Raises ConfigError if a `Mup` adds a factor that no config.json can express."""
  for layer in model.descendants():
    for what, factor in layer.growth_multipliers().items():
      if what != 'logits of attention':  # `_differences` compares this factor, as a part of the scale of attention.
        raise ConfigError(
          f'{layer.path_name} multiplies {what} by {factor:.3g} because of {model.path_name}.mup, which no family of '
          'transformers does; this model cannot be exported'
        )


def describe_model(model: BaseModel, preferred: str | None = None) -> tuple[Family, Values]:
  """Returns the family that a model belongs to, and its config.json.

  A model belongs to a family if the config.json that the family writes describes exactly this model.

  Args:
    model: the built model.
    preferred: the `model_type` to try first, such as that of the checkpoint that the model was imported from; None
      prefers none.

  Raises:
    ConfigError: the model belongs to no family; the message names the nearest one and the differences.
  """
  _check_multipliers(model)
  if isinstance(model, RewardModel):
    raise ConfigError('task.model: a RewardModel is not exported; its head has no counterpart in these families')
  names = [name for name, family in FAMILIES.items() if isinstance(family.network_in(model), family.network)]
  if not names:
    lm = getattr(model, 'lm', None)
    if lm is None:
      raise ConfigError(
        f'task.model: a {type(model).__name__} has no counterpart in transformers; a LanguageModel, a '
        'MaskedLanguageModel, a SequenceClassifier, a TextEncoder, a TwoTowerModel, a MaskedAutoencoder, or a '
        'ClassificationModel of a VisionTransformer, a ResNet or a ConvNeXt may have'
      )
    raise ConfigError(
      f'task.model.lm_tpl: a {type(lm).__name__} has no counterpart in transformers; TransformerLm, '
      'TransformerEncoderDecoder and AudioEncoderDecoder have one'
    )
  names.sort(key=lambda name: name != preferred)
  known = [name for name in FAMILIES if name in names]
  differences: dict[str, list[str]] = {}
  in_common: dict[str, int] = {}
  reasons: dict[str, None] = {}
  for name in names:
    family = FAMILIES[name]
    lm = family.network_in(model)
    assert lm is not None
    try:
      values: Values = {
        'model_type': name,
        'architectures': [family.architecture],
        **family.values(lm),
        **family.more_values(model),
      }
      there = family.network_in(family.model(HfConfig(values)).instantiate(name='model'))
      assert there is not None
    except AttributeError:  # The model lacks layers that the family describes.
      continue
    except ConfigError as error:
      reasons[str(error)] = None
      continue
    differences[name], in_common[name] = list(_differences(lm, there)), _layers_in_common(lm, there)
    if not differences[name]:
      return family, values
  if not differences:
    of_user = (layer for layer in model.descendants() if not type(layer).__module__.startswith('praxis_lite.'))
    named = [f'none of them has {layer.path_name}, a {type(layer).__name__}' for layer in of_user]
    why = f': {"; ".join([*reasons, *named[:_SHOWN]])}' if reasons or named else ''
    raise ConfigError(f'this model belongs to none of the families {", ".join(known)}{why}')
  nearest = max(differences, key=lambda name: (in_common[name], -len(differences[name])))
  shown = differences[nearest][:_SHOWN]
  more = len(differences[nearest]) - len(shown)
  raise ConfigError(
    f'this model belongs to none of the families {", ".join(known)}; it differs from {nearest}, the nearest, in '
    f'{"; ".join(shown)}{f"; and {more} more" if more else ""}'
  )


def _layers_in_common(ours: Layer, theirs: Layer) -> int:
  """Returns the number of layers that have the same position and class in both trees."""
  if class_without_adapter(ours) is not class_without_adapter(theirs):
    return 0
  return 1 + sum(_layers_in_common(*pair) for pair in _pairs(ours, theirs))


def _pairs(ours: Layer, theirs: Layer) -> Iterator[tuple[Layer, Layer]]:
  """Yields pairs of corresponding layers of two models, each pair once.

  Blocks correspond by number, whether or not they are repeated by a scan; other layers correspond by name.
  """
  children, of_theirs = dict(ours.named_children()), dict(theirs.named_children())
  for name in ('transformer', 'encoder', 'decoder'):
    one, other = children.get(name), of_theirs.get(name)
    if isinstance(one, _STACKS) and isinstance(other, _STACKS):
      del children[name]
      yield from dict.fromkeys(zip(blocks_of_stack(one), blocks_of_stack(other)))
  for name, child in children.items():
    if name in of_theirs:
      yield child, of_theirs[name]


_STACKS = Repeat, StackedTransformer
_SHOWN = 3
# Fields that do not change what a trained model computes, or that are compared in the layers below instead.
_NOT_COMPARED = {
  *('name', 'dtype', 'fprop_dtype', 'params_init', 'mesh_axis_names', 'logical_axis_rules', 'inputs_split_mapping'),
  *('weight_split_dims_mapping', 'activation_split_dims_mapping', 'implementation', 'lookup_style', 'out_init'),
  *('initial_scale', 'initial_bias', 'begins_as_identity', 'decay'),
  *('label_smoothing', 'z_loss_weight', 'load_balance_loss_weight', 'load_balance_scope', 'jitter'),
  *('expert_axis', 'capacity_factor', 'chunk_size', 'bias_update_rate', 'loss_weight', 'in_evaluation'),
  *('remat', 'remat_save_names', 'remat_offload_names'),
  *('context_axis', 'context_method', 'block_size', 'dropout_rate', 'cache_dtype', 'cache_page_size', 'packed'),
  *('max_places', 'skip_regularization'),
}
_COMPLETE_BELOW = (
  TransformerLm,
  TransformerEncoder,
  TransformerEncoderDecoder,
  AudioEncoderDecoder,
  TransformerBlock,
  VisionTransformer,
  PatchDecoder,
)  # These layers pass the fields `_COMPLETED_BELOW` on to layers below, so the fields are compared there.
_COMPLETED_BELOW = {'num_heads', 'num_kv_heads', 'dims_per_head', 'hidden_dims', 'use_bias'}


def _class_name(value: object) -> str:
  return getattr(target(value), '__name__', repr(value)) if isinstance(value, Config) else repr(value)


def _differences(ours: Layer, theirs: Layer) -> Iterator[str]:
  """Yields the differences between two layers, and between the layers below them, that change what is computed."""
  if isinstance(ours, Dropout):
    return
  if class_without_adapter(ours) is not class_without_adapter(theirs):
    yield f'{ours.path_name}, which is {type(ours).__name__} here and {type(theirs).__name__} there'
    return
  skipped = _NOT_COMPARED | (_COMPLETED_BELOW if isinstance(ours, _COMPLETE_BELOW) else set())
  for field in dataclasses.fields(theirs):
    if not field.init or field.name in skipped:
      continue
    here, there = getattr(ours, field.name), getattr(theirs, field.name)
    if isinstance(here, Config) and isinstance(there, Config) and field.name != 'scaling_tpl':
      continue
    if isinstance(ours, MultiHeadAttention) and isinstance(theirs, MultiHeadAttention) and field.name == 'scale':
      here, there = ours.logit_scale, theirs.logit_scale
    if here != there and not (isinstance(here, float) and isinstance(there, float) and math.isclose(here, there)):
      yield f'{ours.path_name}.{field.name}, which is {_class_name(here)} here and {_class_name(there)} there'
  for pair in _pairs(ours, theirs):  # A layer that only one model has is a difference in a field of its parent.
    yield from _differences(*pair)
