"""NnxLayer: a module of Flax's nnx as a layer.

layer = Config(NnxLayer, module_tpl=Config(nnx.Linear, in_features=6, out_features=4))
# Variables: {'params': {'kernel': (6, 4), 'bias': (4,)}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from praxis_lite.bridges.foreign.layer import ForeignLayer, ForeignVariable, RunResult, VariableValues
from praxis_lite.common.trees import Path

_NnxPath = tuple[str | int, ...]  # The path of a variable in its module.


class NnxLayer(ForeignLayer):
  """A `flax.nnx` module. Needs `pip install praxis_lite[flax]`.

  `module_tpl` omits `rngs`, because this layer passes it. Variables of type `nnx.Param` are at `params`, and trained;
  all others, such as `nnx.BatchStat`, are at `state`, and the module updates them in training. Random streams are not
  variables: each call gives them new keys, drawn by this layer. The layer calls the module's `train()` or `eval()`
  before each call. `with_partitioning` and other sharding metadata say how a variable is split, unless a pattern
  matches it.

  Attributes: those of `ForeignLayer`.
  """

  package = 'flax.nnx'
  library = 'Flax'
  extra = 'flax'

  def setup(self) -> None:
    nnx = self.import_library()
    with self._named_errors('cannot be built'):
      abstract = nnx.eval_shape(lambda: self._build(jax.random.key(0)))
      self._graph, streams, variables = nnx.split(abstract, nnx.RngState, ...)
    self._streams: dict[_NnxPath, Any] = dict(nnx.to_flat_state(streams))
    flat = dict(nnx.to_flat_state(variables))
    self._paths: dict[Path, _NnxPath] = {_our_path(path, isinstance(v, nnx.Param)): path for path, v in flat.items()}
    self._kinds = flat
    super().setup()

  def declare(self) -> dict[Path, ForeignVariable]:
    nnx, found = self.import_library(), {}
    for path, theirs in self._paths.items():
      variable = self._kinds[theirs]
      value = variable.get_value()
      trainable = isinstance(variable, nnx.Param) and jnp.issubdtype(value.dtype, jnp.floating)
      found[path] = ForeignVariable(value.shape, value.dtype, trainable, _find_own_split(variable.get_metadata()))
    return found

  def draw(self, key: jax.Array) -> VariableValues:
    nnx = self.import_library()
    flat = dict(nnx.to_flat_state(nnx.state(self._build(key), nnx.Not(nnx.RngState))))
    return {path: flat[theirs].get_value() for path, theirs in self._paths.items()}

  def run(self, values: VariableValues, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RunResult:
    nnx = self.import_library()
    state = {self._paths[path]: self._kinds[self._paths[path]].replace(value) for path, value in values.items()}
    state |= {path: stream.replace(value) for (path, stream), value in zip(self._streams.items(), self._new_streams())}
    with nnx.use_eager_sharding(False):
      module = nnx.merge(self._graph, nnx.from_flat_state(state))
      (module.eval if self.do_eval else module.train)()
      outputs = module(*args, **kwargs)
      after = dict(nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.RngState))))
    return RunResult(outputs, {p: after[theirs].get_value() for p, theirs in self._paths.items() if theirs in after})

  def _new_streams(self) -> list[jax.Array]:
    """In a call: returns a new key for each random stream of the module, and 0 for each stream's counter."""
    new = []
    for stream in self._streams.values():
      value = stream.get_value()
      if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        key = self.draw_key()
        new.append(jax.random.key(0) if key is None else key)
      else:
        new.append(jnp.zeros(value.shape, value.dtype))
    return new

  def _build(self, key: jax.Array) -> Any:
    nnx = self.import_library()
    with nnx.use_eager_sharding(False):  # This layer, and not nnx, splits the variables.
      module = self.build_module(rngs=nnx.Rngs(key))
    self.check_module(module)
    return module


def _our_path(path: _NnxPath, trained: bool) -> Path:
  """Returns ('params', 'blocks_0', 'kernel') for ('blocks', 0, 'kernel')."""
  names: list[str] = ['params' if trained else 'state']
  for part in path:
    if isinstance(part, int) and len(names) > 1:
      names[-1] = f'{names[-1]}_{part}'
    else:
      names.append(str(part) if isinstance(part, str) else f'_{part}')
  return tuple(names)


def _find_own_split(metadata: Mapping[str, Any]) -> tuple[Any, ...] | None:
  """Returns the axis names in a variable's sharding metadata, translated by its own rules; None if it has no names."""
  names = next((metadata[key] for key in ('out_sharding', 'sharding_names', 'sharding') if metadata.get(key)), None)
  if names is None:
    return None
  rules = dict(metadata.get('sharding_rules') or ())
  return tuple(rules.get(name, name) for name in (names.spec if isinstance(names, NamedSharding) else names))
