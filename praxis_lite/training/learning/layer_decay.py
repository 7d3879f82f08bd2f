"""Layer-wise learning rate decay: the further a layer is from the output, the smaller its updates.

With a factor d and L layers, an update is multiplied by

    embeddings      d^(L + 1)
    layer i of L    d^(L - i)        i = 0, ..., L - 1
    all others      1                such as the last norm and the head

(Clark et al., 2020; Bao et al., 2021). Layers may be separate in the tree of variables, with an index in the path;
stacked in one array [layers, ...]; or a stack of groups of layers, in which the stack index counts before the index in
the path.
"""

from __future__ import annotations

import math
import re

import numpy as np

from praxis_lite.common.config import REQUIRED, Configurable
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, Path, leaves, path_name
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training.learning.base_learner import matching_paths

Factor = float | np.ndarray


class LayerDecay(Configurable):
  r"""Multiplies the updates of each layer by `factor` to the power of 1 + the number of layers above it.

  Attributes:
    factor: above 0, at most 1; 0.65 to 0.9 is usual for fine-tuning.
    layers: regex that matches the whole paths of the variables of layers. If layers are separate in the tree, the
      regex's first group is the index of the layer, as in `encoder\.layers_(\d+)\..*`. Several regexes stand for
      several parts of the network, the lowest part first.
    embeddings: regexes that match the whole paths of the variables below the first layer.
  """

  factor: float = REQUIRED
  layers: tuple[str, ...] | str = REQUIRED
  embeddings: tuple[str, ...] | str = ()

  def __post_init__(self) -> None:
    if not 0 < self.factor <= 1:
      raise ConfigError(f'LayerDecay.factor: expected a number above 0 and at most 1, got {self.factor}')

  def factors(self, weights: NestedDict) -> dict[Path, Factor]:
    """Returns the factors of variables in or below the layers, by path: a number, or [layers, 1, ...] for a stack.

    Raises ConfigError if a regex is not valid or matches no variable, a group is not an integer, or two regexes match
    the same variable.
    """
    declared, depths, below = leaves(weights), dict[Path, np.ndarray](), 0
    patterns = (self.layers,) if isinstance(self.layers, str) else self.layers
    for pattern in patterns:
      matched = matching_paths('layer_decay.layers', pattern, declared)
      if twice := sorted(matched & depths.keys()):
        raise ConfigError(f'layer_decay.layers: {pattern!r} matches {path_name(twice[0])}, as another regex does')
      numbers = {path: _number_in_path(pattern, path) for path in matched}
      if len({declared[path].repeat_prefix for path in matched}) > 1:
        raise ConfigError(
          f'layer_decay.layers: {pattern!r} matches variables of different stacks, or of a stack and of none; give '
          'each part of the network a regex of its own, the lowest first'
        )
      in_path = 1 + max(numbers.values())
      for path, number in numbers.items():
        depths[path] = below + in_path * _numbers_in_stack(declared[path]) + number
      below = 1 + max(int(depths[path].max()) for path in matched)
    factors: dict[Path, Factor] = {path: self.factor ** (below - depth) for path, depth in depths.items()}
    for path in matching_paths('layer_decay.embeddings', self.embeddings, declared):
      if path in depths:
        raise ConfigError(f'layer_decay.embeddings: {path_name(path)} is one of the layers')
      factors[path] = self.factor ** (below + 1)
    return factors


def _number_in_path(pattern: str, path: Path) -> int:
  match = re.fullmatch(pattern, path_name(path))
  number = match[1] if match and match.re.groups else '0'
  if number is None or not number.isdigit():
    raise ConfigError(
      f'layer_decay.layers: the first group of {pattern!r} is {number!r} in {path_name(path)}, not the number of a '
      'layer; a group without a number is written (?:...)'
    )
  return int(number)


def _numbers_in_stack(weight: WeightHParams) -> np.ndarray:
  """Returns the index of each layer of a stack, [layers, 1, ...]; 0 for a variable that is in no stack."""
  numbers = np.arange(math.prod(weight.repeat_prefix))
  return numbers.reshape(weight.repeat_prefix + (1,) * len(weight.shape) if weight.repeat_prefix else ())
