"""What a family of models is: a `model_type` of transformers, which a config of ours is read from and written as."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.layers import Repeat, TransformerBlock, TransformerLm
from praxis_lite.models import LanguageModel

Values = dict[str, object]


@dataclasses.dataclass(frozen=True)
class Family:
  """A `model_type` of transformers.

  Attributes:
    model_type, architecture: as config.json has them.
    defaults: what transformers assumes where config.json has no such value.
    prefix: of the names of tensors below the head, left out where a checkpoint is of the model without its head.
  """

  model_type: str
  architecture: str
  defaults: Mapping[str, Any]
  prefix: str = 'model.'

  def model(self, hf: HfConfig) -> Config[LanguageModel]:
    """Returns the config of the model that config.json describes; raises ConfigError if the layers cannot be it."""
    raise NotImplementedError

  def values(self, lm: TransformerLm) -> Values:
    """Returns what config.json says of a model, as far as this family can say it."""
    raise NotImplementedError

  def table(self, tied: bool) -> list[Pair]:
    """Returns the tensors; `tied` is whether softmax and embedding share a table."""
    raise NotImplementedError


def is_tied(lm: TransformerLm) -> bool:
  """Whether softmax and embedding share a table."""
  return lm.embedding_tpl is None


def blocks_of(lm: TransformerLm) -> list[TransformerBlock]:
  """Returns the block of each layer; that of a repeated layer as often as it is repeated."""
  transformer = lm.transformer
  if isinstance(transformer, Repeat):
    return cast(list[TransformerBlock], transformer.layers_by_turn())
  return list(transformer.layers)
