"""A family of models, which is a `model_type` of transformers. It converts config.json to our configs, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, cast

from praxis_lite.bridges.hf.compressed_tensors import is_compressed
from praxis_lite.bridges.hf.files import StoredTensor
from praxis_lite.bridges.hf.fp8_blocks import block_of
from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers import Repeat, StackedTransformer, TransformerBlock, TransformerLm
from praxis_lite.layers.base import Layer
from praxis_lite.layers.lora import AdaptedLayer
from praxis_lite.models import BaseModel

Values = dict[str, object]


@dataclasses.dataclass(frozen=True)
class Family:
  """A kind of model of the library transformers: its `model_type`, and its `architecture` in config.json."""

  model_type: str
  architecture: str
  defaults: Mapping[str, Any]  # Values that transformers assumes for fields that config.json leaves out.
  prefix: str = 'model.'  # The prefix of the names of tensors outside the head; checkpoints without a head omit it.
  network: ClassVar[type[Layer] | tuple[type[Layer], ...]] = TransformerLm  # The classes of the networks.
  table_path: ClassVar[str] = 'softmax.w'  # The table that embedding and softmax share.
  stores_inputs_first: ClassVar[bool] = False  # Whether tensors of linear layers are [in, out].
  own_heads: ClassVar[frozenset[str]] = frozenset()  # Prefixes of tensors' names, for heads that only this family has.

  @property
  def head(self) -> str:
    """The name of the softmax's tensor. Not all checkpoints have it if the softmax shares the embedding's table."""
    return 'lm_head.weight'

  def prefix_in(self, hf: HfConfig) -> str:
    """Returns the prefix of the names of tensors outside the head, for a model with this config.json."""
    return self.prefix

  def to_stored(self, hf: HfConfig, names: Collection[str]) -> HfConfig:
    """Returns config.json without the parts of the model that have no tensor among `names`."""
    return hf

  def copies_in(self, hf: HfConfig) -> Mapping[str, str]:
    """Returns {copy: original}, the names of tensors that repeat another tensor in some checkpoints."""
    return {}

  def written_copies(self, hf: HfConfig) -> Mapping[str, str]:
    """Returns the part of `copies_in` that an export writes."""
    return {}

  def network_in(self, model: BaseModel) -> Layer | None:
    """Returns the layer of a model whose variables a checkpoint holds; None if the model has no such layer."""
    return getattr(model, 'lm', None)

  def part_of(self, variables: NestedDict) -> NestedDict:
    """Returns the network's part of a model's variables."""
    return variables['lm']

  def model_variables(self, part: NestedDict) -> NestedDict:
    """Returns the variables of a model, given those of its network."""
    return {'lm': part}

  def accepts(self, architecture: str) -> bool:
    """Whether a checkpoint of this architecture has this family's head, or no head."""
    return 'For' not in architecture or architecture.endswith('ForCausalLM') or architecture == self.architecture

  def takes(self, quantization: object) -> bool:
    """Whether weights may be stored as `quantization_config` of config.json says."""
    return quantization is None or is_compressed(quantization) or block_of(quantization) is not None

  def refusal(self) -> str:
    """Returns the end of the error message for an architecture that `accepts` rejects."""
    return (
      ': a head that does not predict the next token, such as a classification head, is not supported; only '
      f'{self.architecture} is'
    )

  def current_name(self, name: str) -> str:
    """Returns a tensor's name in current checkpoints, given its name in a file, which may be old."""
    return name

  def is_unused(self, name: str, hf: HfConfig) -> bool:
    """Whether a tensor belongs to a part of the model that the architecture in config.json lacks."""
    return False

  def model(self, hf: HfConfig) -> Config[Any]:
    """Returns the config of the model in config.json; raises ConfigError if our layers cannot compute it."""
    return self._model(hf.replace_defaults(self.defaults))

  def _model(self, hf: HfConfig) -> Config[Any]:
    """Does the work of `model`, given config.json with the defaults of the family."""
    raise NotImplementedError

  def is_buffer(self, name: str, tensor: StoredTensor, hf: HfConfig) -> bool:
    """Whether a tensor of an old checkpoint is not a weight, but a buffer whose values follow from config.json."""
    return False

  def values(self, lm: Any) -> Values:
    """Returns the content of config.json for a network; leaves out what this family cannot express."""
    raise NotImplementedError

  def more_values(self, model: BaseModel) -> Values:
    """Returns the values of config.json that do not come from the network."""
    return {}

  def table_of(self, weights: NestedDict) -> list[Pair]:
    """Returns the table that maps tensors of a checkpoint to variables, for a network with these variables."""
    return self.table('embedding' not in weights)

  def table(self, tied: bool) -> list[Pair]:
    """Returns the table that maps tensors to variables; `tied` says whether softmax and embedding share a tensor."""
    raise NotImplementedError


class WholeModelFamily(Family):
  """A family whose checkpoints hold all variables of a model, not only of its network."""

  other_architectures: ClassVar[tuple[str, ...]] = ()

  @property
  def architectures(self) -> tuple[str, ...]:
    """The supported architectures, as config.json names them."""
    return (self.architecture, *self.other_architectures)

  def part_of(self, variables: NestedDict) -> NestedDict:
    return variables

  def model_variables(self, part: NestedDict) -> NestedDict:
    return part

  def accepts(self, architecture: str) -> bool:
    return architecture in self.architectures

  def refusal(self) -> str:
    *others, last = self.architectures
    known = f'{", ".join(others)} and {last} are' if others else f'only {last} is'
    return f' is not supported; of {self.model_type}, {known}'


def class_without_adapter(layer: Layer) -> type[Layer]:
  """Returns the class of a layer; for a layer with an adapter, the class without it."""
  return layer.base_class() if isinstance(layer, AdaptedLayer) else type(layer)


def blocks_of(lm: TransformerLm) -> list[TransformerBlock]:
  """Returns the block of each layer; a repeated block occurs as often as it is repeated."""
  return blocks_of_stack(lm.transformer)


def blocks_of_stack(stack: Repeat | StackedTransformer) -> list[TransformerBlock]:
  """Returns the block of each layer of a stack, like `blocks_of`."""
  if isinstance(stack, Repeat):
    return cast(list[TransformerBlock], stack.layers_by_turn())
  return list(stack.layers)
