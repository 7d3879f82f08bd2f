"""A family of models, which is a `model_type` of transformers: converts config.json to our configs, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, cast

from praxis_lite.bridges.hf.compressed_tensors import is_compressed
from praxis_lite.bridges.hf.files import StoredTensor
from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers import Repeat, StackedTransformer, TransformerBlock, TransformerLm
from praxis_lite.layers.base import Layer
from praxis_lite.models import BaseModel

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
  network: ClassVar[type[Layer] | tuple[type[Layer], ...]] = TransformerLm  # The classes of the networks.
  table_path: ClassVar[str] = 'softmax.w'  # The table that embedding and softmax share.
  # First parts of names of tensors that belong to heads, which other families do not have.
  stores_inputs_first: ClassVar[bool] = False  # Whether tensors of linear layers are [in, out].
  own_heads: ClassVar[frozenset[str]] = frozenset()

  @property
  def head(self) -> str:
    """The name of the softmax's table if it is not shared; some checkpoints have it as a copy too."""
    return 'lm_head.weight'

  def prefix_in(self, hf: HfConfig) -> str:
    """Returns the prefix of the names of tensors below the head in a model of this config.json."""
    return self.prefix

  def to_stored(self, hf: HfConfig, names: Collection[str]) -> HfConfig:
    """Returns config.json without parts that it names and the tensors of these names lack."""
    return hf

  def copies_in(self, hf: HfConfig) -> Mapping[str, str]:
    """Returns the names of tensors that repeat another one in some checkpoints, and the name of that."""
    return {}

  def written_copies(self, hf: HfConfig) -> Mapping[str, str]:
    """Returns which of these copies are written too."""
    return {}

  def network_in(self, model: BaseModel) -> Layer | None:
    """Returns the network of a model, whose variables a checkpoint holds."""
    return getattr(model, 'lm', None)

  def part_of(self, variables: NestedDict) -> NestedDict:
    """Returns the variables of the network, of those of a model."""
    return variables['lm']

  def model_variables(self, part: NestedDict) -> NestedDict:
    """Returns the variables of a model, given those of its network."""
    return {'lm': part}

  def accepts(self, architecture: str) -> bool:
    """Whether a checkpoint of this architecture has the head of this family, or none."""
    return 'For' not in architecture or architecture.endswith('ForCausalLM') or architecture == self.architecture

  def takes(self, quantization: object) -> bool:
    """Whether weights may be stored as `quantization_config` of config.json says."""
    return quantization is None or is_compressed(quantization)

  def refusal(self) -> str:
    """Returns the end of the message about another architecture."""
    return (
      ': a head that does not predict the next token, such as a classification head, is not supported; only '
      f'{self.architecture} is'
    )

  def current_name(self, name: str) -> str:
    """Returns the name that a tensor has today; old checkpoints may call it otherwise."""
    return name

  def is_unused(self, name: str, hf: HfConfig) -> bool:
    """Whether a tensor belongs to a part that the architecture of config.json does not have."""
    return False

  def model(self, hf: HfConfig) -> Config[Any]:
    """Returns the config of the model in config.json; raises ConfigError if our layers cannot compute it."""
    raise NotImplementedError

  def is_buffer(self, name: str, tensor: StoredTensor, hf: HfConfig) -> bool:
    """Whether a tensor of an old checkpoint is no weight: a buffer with the values that follow from config.json."""
    return False

  def values(self, lm: Any) -> Values:
    """Returns the content of config.json for a network; leaves out what this family cannot express."""
    raise NotImplementedError

  def more_values(self, model: BaseModel) -> Values:
    """Returns what config.json says of a model besides its network."""
    return {}

  def table_of(self, weights: NestedDict) -> list[Pair]:
    """Returns which tensor of a checkpoint holds which variable, for a network with these variables."""
    return self.table('embedding' not in weights)

  def table(self, tied: bool) -> list[Pair]:
    """Returns which tensor holds which variable; `tied` says whether softmax and embedding share a table."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class WholeModelFamily(Family):
  """A family whose checkpoints hold all variables of a model; `architectures` names the models that it has."""

  @property
  def architectures(self) -> tuple[str, ...]:
    """The names in config.json of the models that there are."""
    raise NotImplementedError

  def part_of(self, variables: NestedDict) -> NestedDict:
    return variables

  def model_variables(self, part: NestedDict) -> NestedDict:
    return part

  def accepts(self, architecture: str) -> bool:
    return architecture in self.architectures

  def refusal(self) -> str:
    *others, last = self.architectures
    return f' is not supported; of {self.model_type}, {", ".join(others)} and {last} are'


def blocks_of(lm: TransformerLm) -> list[TransformerBlock]:
  """Returns the block of each layer; a repeated block occurs as often as it is repeated."""
  return blocks_of_stack(lm.transformer)


def blocks_of_stack(stack: Repeat | StackedTransformer) -> list[TransformerBlock]:
  """Returns the block of each layer of a stack, like `blocks_of`."""
  if isinstance(stack, Repeat):
    return cast(list[TransformerBlock], stack.layers_by_turn())
  return list(stack.layers)
