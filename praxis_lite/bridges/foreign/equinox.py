"""EquinoxLayer: a module of Equinox as a layer.

layer = Config(EquinoxLayer, module_tpl=Config(eqx.nn.Linear, in_features=6, out_features=4))
# Variables: {'params': {'weight': (4, 6), 'bias': (4,)}}
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.bridges.foreign.layer import ForeignLayer, ForeignVariable, RunResult, VariableValues
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import Path, path_name

_TRAINED, _STATE = 'params', 'state'


class EquinoxLayer(ForeignLayer):
  """An Equinox module. Needs `pip install praxis_lite[equinox]`.

  `module_tpl` omits `key`, because this layer passes it. Arrays of floats in the module are at `params`, and trained.
  Its other arrays, and the arrays of `eqx.nn.State`, are at `state`; in training, the module updates the arrays of
  `eqx.nn.State`. A module with state is called with the state as the last positional argument, and returns the new
  state last. The module gets `key` if it takes that argument, and is under `eqx.nn.inference_mode` in evaluation.

  Attributes: those of `ForeignLayer`, and
    over_rows: whether the module takes one example, as Equinox's own modules do; `jax.vmap` then maps it over
      dimension 0 of all positional arguments, with a different key for each row.
    row_axis_name: the axis name of that `jax.vmap`, to be given to `eqx.nn.BatchNorm` as its `axis_name`.
  """

  package = 'equinox'
  library = 'Equinox'
  extra = 'equinox'

  over_rows: bool = True
  row_axis_name: str = 'batch'

  def setup(self) -> None:
    eqx = self.import_library()
    with self._named_errors('cannot be built'):
      module, state = eqx.filter_eval_shape(lambda: self._build(jax.random.key(0)))
      self.check_module(module)
      arrays, self._static = eqx.partition(module, lambda x: isinstance(x, jax.ShapeDtypeStruct | jax.Array))
    # A layer holds no arrays, so it keeps only structures and shapes.
    self._of_module: Any = jax.tree.structure(arrays)
    self._of_state: Any = jax.tree.structure(state)
    self._shapes = [*jax.tree.leaves(arrays), *jax.tree.leaves(state)]
    self._array_paths = [*_paths_of_arrays(arrays), *_paths_of_state(eqx, module, self._of_state)]
    takes = inspect.signature(type(module).__call__).parameters if callable(module) else {}
    self._takes_key = 'key' in takes
    super().setup()

  def declare(self) -> dict[Path, ForeignVariable]:
    found: dict[Path, ForeignVariable] = {}
    for path, x in zip(self._array_paths, self._shapes):
      if path in found:
        raise ConfigError(f'{self.path_name}: two arrays of the module have the path {path_name(path)}')
      found[path] = ForeignVariable(x.shape, x.dtype, path[0] == _TRAINED)
    return found

  def draw(self, key: jax.Array) -> VariableValues:
    eqx = self.import_library()
    module, state = self._build(key)
    arrays, _ = eqx.partition(module, eqx.is_array)
    return dict(zip(self._array_paths, map(jnp.asarray, [*jax.tree.leaves(arrays), *jax.tree.leaves(state)])))

  def run(self, values: VariableValues, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RunResult:
    eqx = self.import_library()
    leaves, own = [values[path] for path in self._array_paths], self._of_module.num_leaves
    module = eqx.combine(jax.tree.unflatten(self._of_module, leaves[:own]), self._static)
    module = eqx.nn.inference_mode(module, value=self.do_eval)
    state = jax.tree.unflatten(self._of_state, leaves[own:]) if leaves[own:] else None

    def call(args: Sequence[Any], key: jax.Array | None, state: Any) -> tuple[Any, Any]:
      keyword = {} if key is None else {'key': key}
      if state is None:
        return module(*args, **kwargs, **keyword), None
      *outputs, state = module(*args, state, **kwargs, **keyword)
      return outputs[0] if len(outputs) == 1 else tuple(outputs), state

    key = self.draw_key() if self._takes_key else None
    if self.over_rows:
      key = None if key is None else jax.random.split(key, len(args[0]))
      call = jax.vmap(call, in_axes=(0, 0, None), out_axes=(0, None), axis_name=self.row_axis_name)
    outputs, state = call(tuple(args), key, state)
    return RunResult(outputs, dict(zip(self._array_paths[own:], jax.tree.leaves(state))))

  def remedy_of(self, error: Exception) -> str:
    if not self.over_rows or not re.search('vmap|dot_general|shape|rank|ndim|dimension', str(error)):
      return ''
    return (
      '; over_rows is set, so the module gets one row at a time: pass arrays with rows in dimension 0, such as x[None] '
      'for a single one, or set over_rows=False'
    )

  def _build(self, key: jax.Array) -> tuple[Any, Any]:
    """Returns the module and its `eqx.nn.State`; a module without state gets an empty one."""
    eqx = self.import_library()
    return eqx.nn.make_with_state(self.build_module)(key=key)


def _paths_of_arrays(arrays: Any) -> list[Path]:
  """Returns the path of each array of a module: ('params', 'layers_0', 'weight')."""
  flat = jax.tree_util.tree_flatten_with_path(arrays)[0]
  return [(_TRAINED if jnp.issubdtype(x.dtype, jnp.floating) else _STATE, *_our_names(path)) for path, x in flat]


def _paths_of_state(eqx: Any, module: Any, structure: Any) -> list[Path]:
  """Returns the path of each array of a state: that of its `StateIndex` in the module, then the path below it."""
  numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
  found: dict[int, Path] = {}
  flat, _ = jax.tree_util.tree_flatten_with_path(module, is_leaf=lambda x: isinstance(x, eqx.nn.StateIndex))
  for path, index in flat:
    if isinstance(index, eqx.nn.StateIndex):
      for below, number in jax.tree_util.tree_flatten_with_path(numbered.get(index))[0]:
        found[number] = (_STATE, *_our_names((*path, *below)))
  return [found[number] for number in range(structure.num_leaves)]


def _our_names(path: Sequence[Any]) -> Path:
  names: list[str] = []
  for key in path:
    if isinstance(key, jax.tree_util.SequenceKey):
      names[-1:] = [f'{names[-1] if names else ""}_{key.idx}']
    else:
      names.append(jax.tree_util.keystr((key,), simple=True))
  return tuple(names)
