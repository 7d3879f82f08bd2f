"""LinenLayer: a module of Flax's linen as a layer.

layer = Config(LinenLayer, module_tpl=Config(nn.Dense, features=4), example_shapes=((1, 6),))
# Variables: {'params': {'kernel': (6, 4), 'bias': (4,)}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from praxis_lite.bridges.foreign.layer import ExampleInputs, ForeignVariable, RunResult, VariableValues
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import Path, is_named_box, leaves_by_path, nest, path_name

_TRAINED = 'params'


class LinenLayer(ExampleInputs):
  """A `flax.linen` module. Needs `pip install praxis_lite[flax]`.

  The first name in the path of a variable is its collection. `params` are trained; the module updates other
  collections, such as `batch_stats`, in training. Values that it sows are dropped. The axis names of
  `with_partitioning` and `with_logical_partitioning` say how a variable is split, unless a pattern matches it.

  Attributes: those of `ExampleInputs`, and
    rng_names: names of the random streams that the module uses, other than 'params' at initialization.
  """

  package = 'flax.linen'
  library = 'Flax'
  extra = 'flax'

  rng_names: tuple[str, ...] = ('dropout',)

  def setup(self) -> None:
    with self._named_errors('cannot be built'):
      self._module = self.build_module()
    self.check_module(self._module)
    super().setup()

  def declare(self) -> dict[Path, ForeignVariable]:
    boxed = leaves_by_path(jax.eval_shape(lambda: self._init(jax.random.key(0), *self.zeros())), is_leaf=is_named_box)
    found = {}
    for path, leaf in boxed.items():
      value = leaf.value if is_named_box(leaf) else leaf
      if not hasattr(value, 'shape'):
        raise ConfigError(f'{self.path_name}: {path_name(path)} is a {type(value).__name__}; a variable is an array')
      found[path] = ForeignVariable(value.shape, value.dtype, path[0] == _TRAINED, _find_own_split(leaf))
    return found

  def draw(self, key: jax.Array) -> VariableValues:
    drawn = leaves_by_path(self._init(key, *self.zeros()), is_leaf=is_named_box)
    return {path: leaf.value if is_named_box(leaf) else leaf for path, leaf in drawn.items()}

  def run(self, values: VariableValues, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RunResult:
    train = not self.do_eval
    rngs = {name: key for name in self.rng_names if (key := self.draw_key()) is not None}
    updated = sorted({path[0] for path in values} - {_TRAINED}) if train else []
    outputs, state = self._module.apply(nest(values), *args, rngs=rngs, mutable=updated, **self.mode(train), **kwargs)
    return RunResult(outputs, leaves_by_path(state))

  def _init(self, key: jax.Array, *examples: jax.Array) -> Any:
    rngs = {name: jax.random.fold_in(key, i) for i, name in enumerate(self.rng_names)}
    return dict(self._module.init({**rngs, _TRAINED: key}, *examples, **self.mode(train=True)))


def _find_own_split(leaf: Any) -> tuple[Any, ...] | None:
  """Returns the axis names in a Flax box, translated by the box's own rules; None if `leaf` is no such box."""
  if not is_named_box(leaf):
    return None
  rules = dict(getattr(leaf, 'rules', None) or ())
  return tuple(rules.get(name, name) for name in leaf.names)
