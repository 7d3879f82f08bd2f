"""A family of models, which is a `model_type` of transformers: converts config.json to our configs, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from praxis_lite.bridges.hf.files import StoredTensor
from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.layers import MultiHeadAttention, Repeat, TransformerBlock, TransformerLm
from praxis_lite.models import LanguageModel

Values = dict[str, object]


@dataclasses.dataclass(frozen=True)
class Family:
  """A `model_type` of transformers.

  Attributes:
    model_type, architecture: as in config.json.
    defaults: values that transformers assumes if config.json does not have them.
    prefix: the prefix of the names of tensors below the head; checkpoints of a model without its head omit it.
  """

  model_type: str
  architecture: str
  defaults: Mapping[str, Any]
  prefix: str = 'model.'

  def model(self, hf: HfConfig) -> Config[LanguageModel]:
    """Returns the config of the model in config.json; raises ConfigError if our layers cannot compute it."""
    raise NotImplementedError

  def is_buffer(self, name: str, tensor: StoredTensor, hf: HfConfig) -> bool:
    """Whether a tensor of an old checkpoint is no weight: a buffer with the values that follow from config.json."""
    return False

  def values(self, lm: TransformerLm) -> Values:
    """Returns the content of config.json for a model; leaves out what this family cannot express."""
    raise NotImplementedError

  def table(self, tied: bool) -> list[Pair]:
    """Returns the pairs of tensors and variables; `tied` says whether softmax and embedding share a table."""
    raise NotImplementedError


def is_tied(lm: TransformerLm) -> bool:
  """Whether softmax and embedding share a table."""
  return lm.embedding_tpl is None


def logit_scale(attention: MultiHeadAttention) -> float:
  """Returns the factor of the attention logits of a layer."""
  assert attention.dims_per_head is not None  # Set once the layer is built.
  return attention.dims_per_head**-0.5 if attention.scale is None else attention.scale


def blocks_of(lm: TransformerLm) -> list[TransformerBlock]:
  """Returns the block of each layer; a repeated block occurs as often as it is repeated."""
  transformer = lm.transformer
  if isinstance(transformer, Repeat):
    return cast(list[TransformerBlock], transformer.layers_by_turn())
  return list(transformer.layers)
