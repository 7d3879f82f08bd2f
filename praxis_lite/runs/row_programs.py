"""RowPrograms: the compiled programs of a batcher, for a language model on a mesh.

    start     the state of rows without tokens
    read      a chunk of a prompt into one row
    copy      one row to another, which then begins with the same tokens
    keep      a copy of a row in a slot of the store, where rows are never extended; fetch copies it back
    extend    a few tokens in all rows

Each is compiled once for all requests. The state stays on the devices.

Shapes: B rows, S cache slots in a row, C tokens of a prompt read at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.common.trees import NestedDict
from praxis_lite.models.decoding.beam_rows import NO_ROWS
from praxis_lite.models.decoding.row_loop import NewTokens, RowSettings, RowsState
from praxis_lite.models.decoding.sampling import NO_TOP_P
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.records.run_config import split_key
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.constraints import axis_rules
from praxis_lite.sharding.mesh import bind_mesh
from praxis_lite.sharding.padding import num_parts
from praxis_lite.sharding.specs import complete_spec
from praxis_lite.training.execution import CompilerPlaced

_State = RowsState[NestedDict]


class RowPrograms:
  """Programs over the rows of a batcher.

  Args:
    tasks: the task of a `LanguageModel` on its mesh.
    num_rows, num_slots: B and S.
    chunk: C.
    num_tokens: how many tokens `extend` adds to each row.
    num_kept: how many rows the store has; 0 for no store.
    num_top: how many of the most probable tokens `extend` reports for each new token.
  """

  def __init__(
    self,
    tasks: TaskOnMesh,
    stored_variables: NestedDict,
    global_step: jax.Array,
    *,
    num_rows: int,
    num_slots: int,
    chunk: int,
    num_tokens: int,
    num_kept: int = 0,
    num_top: int = 0,
  ):
    self._num_kept, self._num_top = num_kept, num_top
    self._tasks, self._variables, self._global_step = tasks, stored_variables, global_step
    self._surroundings = CompilerPlaced(tasks.jax_task, tasks.layout).surroundings
    self._num_rows, self._num_slots, self.chunk, self.num_tokens = num_rows, num_slots, chunk, num_tokens
    self._whole = NamedSharding(tasks.mesh, PartitionSpec())

  @functools.cached_property
  def state_shapes(self) -> _State:
    return jax.eval_shape(bind_mesh(self._start, self._tasks.mesh), self._variables)

  @property
  def state_bytes(self) -> int:
    """The bytes of the state, and of the store, on all devices together."""
    of_rows = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.state_shapes))
    return of_rows + of_rows * self._num_kept // self._num_rows

  def start(self) -> _State:
    """Returns the state of empty rows."""
    return self._make_program(self._start, ())(self._variables)

  def read(self, state: _State, row: int, ids: Sequence[int], start: int, length: int, adapter: int = -1) -> _State:
    """Reads up to C tokens of a prompt into a row.

    Args:
      state: the state, which is donated.
      start: the position of the first of these tokens.
      length: the number of tokens in the whole prompt.
      adapter: see `LanguageModel.read_rows`.
    """
    padded = np.zeros((1, self.chunk), np.int32)
    padded[0, : len(ids)] = ids
    return self._read(self._variables, state, padded, *map(np.int32, (row, start, length, adapter)))

  def copy(self, state: _State, source: int, row: int) -> _State:
    """Copies a row to another one."""
    return self._copy(state, np.int32(source), np.int32(row))

  def start_store(self) -> _State:
    """Returns an empty store."""

    def zeros(axis: int, x: jax.ShapeDtypeStruct) -> jax.Array:
      shape = x.shape if axis == NO_ROWS else (*x.shape[:axis], self._num_kept, *x.shape[axis + 1 :])
      return jnp.zeros(shape, x.dtype)

    def start() -> _State:
      return jax.tree.map(zeros, self._axes, self.state_shapes)

    return jax.jit(start, out_shardings=self._store_shardings)()

  def keep(self, state: _State, store: _State, row: int, place: int) -> _State:
    """Returns the store with a row of the state copied into a slot."""
    return self._keep(store, state, np.int32(row), np.int32(place))

  def fetch(self, state: _State, store: _State, place: int, row: int) -> _State:
    """Copies the row in a slot of the store into a row of the state; returns the state."""
    return self._fetch(state, store, np.int32(place), np.int32(row))

  def extend(self, state: _State, rows: RowSettings) -> tuple[_State, NewTokens]:
    """Adds up to `num_tokens` tokens to each row; the new tokens are NumPy arrays."""
    state, new = self._extend(self._variables, state, rows)
    return state, jax.tree.map(np.asarray, new)

  def draw_key(self, key: jax.Array) -> np.ndarray:
    """Returns the key data with which a row of a batcher draws the same numbers as `decode`, called with `key`."""
    return np.asarray(self._draw_key(key, self._global_step))

  def draw_key_of_seed(self, seed: int) -> np.ndarray:
    """Returns the key data with which `decode` draws for this seed, without a new compilation for each seed."""
    own = jax.device_put(jax.random.key(seed), self._whole)
    return self.draw_key(self._evaluation_key(own))

  @functools.cached_property
  def _draw_key(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def key_data(key: jax.Array, step: jax.Array) -> jax.Array:
      own, _ = self._tasks.jax_task.model.apply({}, key=jax.random.fold_in(key, step), method='draw_key')
      return jax.random.key_data(own)

    return jax.jit(key_data)

  @functools.cached_property
  def _evaluation_key(self) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda key: split_key(key).evaluate, out_shardings=self._whole)

  # ---------------------------------------------------------------- programs

  def _apply(self, variables: NestedDict, *arguments: Any, method: str) -> Any:
    unpadded = self._tasks.layout.mdl_vars.unpad(variables)
    with axis_rules(self._tasks.jax_task.logical_axis_rules or ()):
      model = self._tasks.jax_task.model
      return model.apply(unpadded, *arguments, do_eval=True, method=method, surroundings=self._surroundings)[0]

  def _start(self, variables: NestedDict) -> _State:
    return self._apply(variables, self._num_rows, self._num_slots, method='start_rows')

  @functools.cached_property
  def _axes(self) -> _State:
    """The dimension of rows in each array of the state."""

    def find(variables: NestedDict) -> _State:
      axes: _State = self._apply(variables, self._num_rows, self._num_slots, method='row_axes')
      found.append(axes)
      return axes

    found: list[_State] = []
    jax.eval_shape(bind_mesh(find, self._tasks.mesh), self._variables)
    return found[0]

  @functools.cached_property
  def _shardings(self) -> _State:
    """The shardings of the state between calls: XLA's choice, except along dimensions that would need padding."""
    compiled = jax.jit(bind_mesh(self._start, self._tasks.mesh)).lower(self._variables).compile()

    def to_even(x: jax.ShapeDtypeStruct, sharding: Any) -> NamedSharding:
      if not isinstance(sharding, NamedSharding):
        return self._whole
      mesh = self._tasks.mesh
      entries = zip(complete_spec(sharding.spec, x.ndim), x.shape)
      return NamedSharding(mesh, PartitionSpec(*(e if size % num_parts(e, mesh) == 0 else None for e, size in entries)))

    return jax.tree.map(to_even, self.state_shapes, compiled.output_shardings)

  def _make_program(self, fn: Callable[..., Any], donated: tuple[int, ...], *others: Any) -> Callable[..., Any]:
    """Returns `fn`, jitted. Its first result is the state; `others` are the shardings of its other results."""
    outputs = (self._shardings, *others) if others else self._shardings
    return GuardedJit(bind_mesh(fn, self._tasks.mesh), donate_argnums=donated, out_shardings=outputs)

  @functools.cached_property
  def _read(self) -> Callable[..., _State]:
    def read(variables: NestedDict, state: _State, ids: jax.Array, row: jax.Array, *numbers: jax.Array) -> _State:
      own = self._map_rows(lambda x, axis: jax.lax.dynamic_slice_in_dim(x, row, 1, axis), state)
      own = self._apply(variables, own, ids, *numbers, method='read_rows')
      return self._map_rows(lambda x, axis, new: jax.lax.dynamic_update_slice_in_dim(x, new, row, axis), state, own)

    return self._make_program(read, (1,))

  @functools.cached_property
  def _copy(self) -> Callable[..., _State]:
    def copy(state: _State, source: jax.Array, row: jax.Array) -> _State:  # Profiles show this name.
      return self._move_row(state, state, source, row)

    return self._make_program(copy, (0,))

  @functools.cached_property
  def _keep(self) -> Callable[..., _State]:
    return GuardedJit(
      bind_mesh(self._move_row, self._tasks.mesh), donate_argnums=(0,), out_shardings=self._store_shardings
    )

  @functools.cached_property
  def _fetch(self) -> Callable[..., _State]:
    return self._make_program(self._move_row, (0,))

  def _move_row(self, to: _State, source: _State, number: jax.Array, row: jax.Array) -> _State:
    """Returns `to` with its row `row` replaced by row `number` of `source`."""

    def move(x: jax.Array, axis: int, other: jax.Array) -> jax.Array:
      own = jax.lax.dynamic_slice_in_dim(other, number, 1, axis)
      return jax.lax.dynamic_update_slice_in_dim(x, own, row, axis)

    return self._map_rows(move, to, source)

  @property
  def _store_shardings(self) -> _State:
    """The shardings of the store: like the state's, but rows are not split, as their number may not divide evenly."""

    def leave_rows_whole(axis: int, x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
      entries = complete_spec(sharding.spec, x.ndim)
      return NamedSharding(self._tasks.mesh, PartitionSpec(*(None if i == axis else e for i, e in enumerate(entries))))

    return jax.tree.map(leave_rows_whole, self._axes, self.state_shapes, self._shardings)

  @functools.cached_property
  def _extend(self) -> Callable[..., tuple[_State, NewTokens]]:
    def extend(variables: NestedDict, state: _State, rows: RowSettings) -> tuple[_State, NewTokens]:
      rows = rows._replace(keys=jax.random.wrap_key_data(rows.keys))
      sizes = self.num_tokens, self._num_top
      return self._apply(variables, state, rows, *sizes, method='extend_rows')

    return self._make_program(extend, (1,), self._whole)

  def _map_rows(self, change: Callable[..., jax.Array], state: _State, *others: _State) -> _State:
    """Replaces each array that has rows by `change(array, dimension of its rows, *same array in each of others)`."""

    def change_rows(axis: int, x: jax.Array, *others: jax.Array) -> jax.Array:
      return x if axis == NO_ROWS else change(x, axis, *others)

    return jax.tree.map(change_rows, self._axes, state, *others)


def empty_settings(num_rows: int, key_data: np.ndarray) -> RowSettings:
  """Returns the settings of rows without requests, as NumPy arrays; `key_data` is the data of any key."""
  zeros = np.zeros(num_rows, np.int32)
  keys = np.zeros((num_rows, *key_data.shape), key_data.dtype)
  top_ps = np.full(num_rows, NO_TOP_P, np.float32)
  arrays: Any = zeros + 1, zeros + 1, zeros, zeros.astype(np.float32), keys, top_ps
  return RowSettings(*arrays)
