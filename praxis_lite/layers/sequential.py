"""Sequential: different layers, one after the other. `Repeat` applies the same layers several times."""

from __future__ import annotations

import inspect
from typing import Any

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.base import Layer, SplitMapping


class Sequential(Layer):
  """Calls layers in turn, each with the result of the previous one.

      y = layers_1(layers_0(x))

  The first layer gets all positional arguments. If a layer returns a tuple, the next one gets its entries as arguments;
  if it returns a dict, as keyword arguments. Other keyword arguments, such as `paddings`, go to each layer that takes
  an argument of that name.

  Attributes:
    layers_tpl: configs of the children `layers_0`, `layers_1`, ...
  """

  layers_tpl: tuple[Config, ...] = REQUIRED
  activation_split_dims_mapping: Config = template(SplitMapping)

  layers: list[Layer] = child()

  def setup(self) -> None:
    if not self.layers_tpl:
      raise ConfigError(
        f'{self.path_name}.layers_tpl: expected the config of at least one layer, got {self.layers_tpl}'
      )
    self.create_children('layers', templates=self.layers_tpl)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of the last layer.

    Raises:
      ConfigError: no layer takes one of the keyword arguments.
    """
    taken = [_taken_by(layer, kwargs) for layer in self.layers]
    if unused := kwargs.keys() - {name for names in taken for name in names}:
      raise ConfigError(f'{self.path_name}: none of its layers takes an argument named {sorted(unused)[0]!r}')
    result: Any = args
    for layer, names in zip(self.layers, taken):
      named = {name: kwargs[name] for name in names}
      if isinstance(result, tuple):
        result = layer(*result, **named)
      elif isinstance(result, dict):
        result = layer(**result, **named)
      else:
        result = layer(result, **named)
    return result


def _taken_by(layer: Layer, names: dict[str, Any]) -> list[str]:
  """Returns which of `names` are arguments of a layer's `__call__`."""
  parameters = inspect.signature(type(layer).__call__).parameters
  takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
  return [name for name in names if takes_all or name in parameters]
