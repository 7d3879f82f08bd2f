"""Compares a layer with its counterpart in a smaller model, from which training hyperparameters are transferred.

A model with `Mup` builds the smaller model first. Then each layer finds its counterpart among the children of its
parent's counterpart: the child of the same name. If a stack has more layers than the smaller model's, a layer without
a namesake gets an earlier layer of the same class.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from praxis_lite.common.errors import ConfigError
from praxis_lite.sharding.growth import grow_weight
from praxis_lite.sharding.weights import WeightHParams


@dataclasses.dataclass(frozen=True)
class Counterpart:
  """The counterpart of a layer in the smaller model."""

  layer: GrownLayer
  depth: float = 1.0  # The number of layers in the stacks around the layer, divided by that in the smaller model.
  depth_exponent: float = 0.5  # Residual branches are multiplied by depth^-depth_exponent.


class GrownLayer:
  """The part of a `Layer` that compares it with its counterpart in a smaller model.

  Attributes:
    scales_branches: whether the layer multiplies its residual branches by `branch_factor`.
    counts_layers: whether the layer is a stack of `num_layers` layers.
  """

  scales_branches: ClassVar[bool] = False
  counts_layers: ClassVar[bool] = False
  _counterpart: Counterpart | None = None

  if TYPE_CHECKING:
    name: str
    _children: Mapping[str, GrownLayer]
    _weights: Mapping[str, WeightHParams]

    @property
    def path_name(self) -> str: ...

  def growth_of(self, field: str) -> float:
    """Returns the ratio of a hyperparameter to its value in the smaller model; 1 without a smaller model."""
    if self._counterpart is None:
      return 1.0
    return float(getattr(self, field) / getattr(self._counterpart.layer, field))

  @property
  def branch_factor(self) -> float:
    """The factor of residual branches. It is less than 1 only if a smaller model has fewer layers."""
    found = self._counterpart
    return 1.0 if found is None or found.depth == 1 else float(found.depth**-found.depth_exponent)

  def scale_branch(self, branch: Any) -> Any:
    """Returns a residual branch times `branch_factor`."""
    return branch if self.branch_factor == 1 else branch * self.branch_factor

  def growth_multipliers(self) -> dict[str, float]:
    """Returns factors that the layer applies because the smaller model has other sizes; keys say what they multiply."""
    return {'residual branches': self.branch_factor} if self.scales_branches and self.branch_factor != 1 else {}

  def _smaller_model(self) -> Counterpart | None:
    """Returns the counterpart of a layer whose field `mup` defines a smaller model; None for all other layers."""
    return None

  def _find_counterpart(self, parent: GrownLayer | None, name: str) -> Counterpart | None:
    own = self._smaller_model()
    if own is not None or parent is None or parent._counterpart is None:
      return own
    above, depth = parent._counterpart, parent._counterpart.depth
    if parent.counts_layers and (times := parent.growth_of('num_layers')) != 1:
      depth *= times
      if not self.scales_branches:
        raise ConfigError(
          f'{parent.path_name}.num_layers: mup.base has another number of layers, and {type(self).__name__} has no '
          'residual branches that it could multiply; leave num_layers out of mup.base'
        )
    return Counterpart(self._named_like(name, above.layer), depth, above.depth_exponent)

  def _named_like(self, name: str, above: GrownLayer) -> GrownLayer:
    found = above._children
    if name in found:
      return found[name]
    prefix = re.sub(r'\d+$', '', name)
    alike = [child for child in found.values() if type(child) is type(self)]
    of_list = [child for child in alike if re.sub(r'\d+$', '', child.name) == prefix]
    if prefix != name and alike:
      return (of_list or alike)[-1]
    raise ConfigError(
      f'{above.path_name}.{name}: mup.base has no such layer; it differs only in widths and the number of layers'
    )

  def _grow(self, name: str, weight: WeightHParams) -> WeightHParams:
    """Returns the declaration of a variable, adapted to its counterpart."""
    if self._counterpart is None:
      return weight
    base = self._counterpart.layer._weights.get(name)
    if base is None or len(base.shape) != len(weight.shape):
      what = 'no such variable' if base is None else f'a variable of shape {base.shape}, and not {weight.shape}'
      raise ConfigError(
        f'{self.path_name}.{name}: mup.base has {what}; it differs only in widths and the number of layers'
      )
    return grow_weight(weight, base, self._counterpart.depth, self._counterpart.depth_exponent)
