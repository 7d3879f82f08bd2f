"""HaikuLayer: a module of Haiku, or a function that Haiku transforms, as a layer.

layer = Config(HaikuLayer, module_tpl=Config(hk.Linear, output_size=4), example_shapes=((1, 6),))
# Variables: {'params': {'linear': {'w': (6, 4), 'b': (4,)}}}
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from praxis_lite.bridges.foreign.layer import ExampleInputs, ForeignVariable, RunResult, VariableValues
from praxis_lite.common.config import Config, target
from praxis_lite.common.config.base import map_nested
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import Path, path_name


class HaikuLayer(ExampleInputs):
  """A Haiku module or function. Needs `pip install praxis_lite[haiku]`.

  `module_tpl` is the config of a module class, or of a function that uses modules; the function is called with the
  arguments of this layer and the arguments that are set in its config. The parameters of `mlp/~/linear_0` are at
  `params.mlp.linear_0`. Haiku's state is at `state`, and the module or function updates it in training.

  Attributes: those of `ExampleInputs`.
  """

  package = 'haiku'
  library = 'Haiku'
  extra = 'haiku'

  def setup(self) -> None:
    hk = self.import_library()
    self._transformed = hk.transform_with_state(self._forward)
    super().setup()

  def declare(self) -> dict[Path, ForeignVariable]:
    params, state = jax.eval_shape(lambda: self._init(jax.random.key(0), *self.zeros()))
    named: dict[Path, tuple[str, str, str]] = {}
    found = {}
    for group, tree in (('params', params), ('state', state)):
      for module, variables in tree.items():
        for name, x in variables.items():
          path = (group, *_our_names(module), *_our_names(name))
          if path in named:
            other = f'{named[path][1]}/{named[path][2]}'
            raise ConfigError(f'{self.path_name}: {other} and {module}/{name} have the same path, {path_name(path)}')
          named[path] = (group, module, name)
          found[path] = ForeignVariable(x.shape, x.dtype, group == 'params')
    self._named = named
    return found

  def draw(self, key: jax.Array) -> VariableValues:
    params, state = self._init(key, *self.zeros())
    return self._ours(params, state)

  def run(self, values: VariableValues, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RunResult:
    trees: dict[str, dict[str, dict[str, jax.Array]]] = {'params': {}, 'state': {}}
    for path, (group, module, name) in self._named.items():
      trees[group].setdefault(module, {})[name] = values[path]
    train = not self.do_eval
    outputs, state = self._transformed.apply(
      trees['params'], trees['state'], self.draw_key(), *args, **self.mode(train), **kwargs
    )
    return RunResult(outputs, self._ours({}, state))

  def _ours(self, params: Mapping[str, Any], state: Mapping[str, Any]) -> VariableValues:
    trees = {'params': params, 'state': state}
    return {
      path: trees[group][module][name]
      for path, (group, module, name) in self._named.items()
      if module in trees[group] and name in trees[group][module]
    }

  def _init(self, key: jax.Array, *examples: jax.Array) -> Any:
    return self._transformed.init(key, *examples, **self.mode(train=True))

  def _forward(self, *args: Any, **kwargs: Any) -> Any:
    """The function that Haiku transforms."""
    built = target(self.module_tpl)
    if isinstance(built, type):
      return self.build_module()(*args, **kwargs)
    fields = {name: map_nested(Config.instantiate, v) for name, v in self.module_tpl.__arguments__.items()}
    return functools.partial(built, **fields)(*args, **kwargs)


def _our_names(name: str) -> Path:
  """Returns ('mlp', 'linear_0') for 'mlp/~/linear_0'."""
  return tuple(re.sub(r'\W', '_', part) for part in name.split('/') if part.strip('~'))
