"""Partitioners: objects that know the mesh, the data layout and the logical axis rules, and apply `jax.jit` with them.

    partitioner = PjitPartitioner(num_partitions=2)
    state = TrainState(step=..., mdl_vars=model.abstract_init(), opt_states=...)     # declarations and shapes
    axes = partitioner.get_mesh_axes(state)                                          # the same tree of PartitionSpecs
    step = partitioner.partition(train_step, (axes, partitioner.data_partition_spec), (axes, None),
                                 arg_shapes=(partitioner.get_layout(state).unpadded_shapes, None))

The classes have the API of T5X's partitioners (Roberts et al., 2022), but meshes need not divide dimensions:

    train_step(true arrays) -> true arrays      what the user writes
    step(padded arrays) -> padded arrays        slice to true shapes, train_step, pad

An array of 8 rows does not show whether it has 8 true rows, or 5 padded to 8. So the true shapes of arguments that may
be uneven are given as `arg_shapes`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.bridges.t5x.axis_names import AxisNames, AxisNamesOverrides, KeptNames, remove_boxes, state_axis_names
from praxis_lite.bridges.t5x.chunks import DataLayout, LocalChunker, LocalChunkInfo, SpecLike, get_data_layout
from praxis_lite.bridges.t5x.meshes import Device, Submesh, default_mesh, num_model_partitions
from praxis_lite.common.errors import ShardingError
from praxis_lite.common.trees import Path, leaves_by_path, map_with_path, path_name, put_into_boxes
from praxis_lite.sharding.constraints import axis_rules
from praxis_lite.sharding.guards import GuardedJit
from praxis_lite.sharding.guards.guard import static_positions
from praxis_lite.sharding.layout import StateLayout, is_spec, layout_of
from praxis_lite.sharding.mesh import bind_mesh
from praxis_lite.sharding.padding import num_parts, pad_to, slice_to
from praxis_lite.sharding.rules import LogicalAxisRules, resolve, standard_logical_axis_rules
from praxis_lite.sharding.specs import axes_to_entry, spec_axes, stored_spec

if TYPE_CHECKING:
  from praxis_lite.training.state import TrainState

T = TypeVar('T')


def put_padded(tree: T, layout: StateLayout) -> T:
  """Pads arrays that have their true shapes, and puts all arrays on the mesh.

  Raises:
    ShardingError: the shape of an array is neither the true nor the padded one.
  """

  def put(path: Path, x: Any, true: jax.ShapeDtypeStruct, padded: jax.ShapeDtypeStruct) -> object:
    if tuple(x.shape) not in (true.shape, padded.shape):
      raise ShardingError(
        f'{path_name(path)} has shape {tuple(x.shape)}; expected {true.shape}'
        + (f', or {padded.shape} with its padding' if padded.shape != true.shape else '')
      )
    if isinstance(x, jax.ShapeDtypeStruct):
      return padded
    return jax.device_put(pad_to(x, padded), padded.sharding)

  return map_with_path(put, tree, layout.unpadded_shapes, layout.padded_shapes)


_NOT_GIVEN = object()  # The default of arguments for which None has a meaning.


class PjittedFnWithContext(Generic[T]):
  """A partitioned function, traced with its mesh as the ambient mesh and its logical axis rules as the current rules.

  As in T5X, the specs may be left out: `PjittedFnWithContext(fn, mesh)`, or with `logical_axis_rules` as the third
  argument. `fn` is then a function that is already jitted or needs no specs. Its arguments are passed on unchanged.

  Args:
    fn, mesh: a function of arrays with true shapes, and the mesh.
    in_axis_resources: for each non-static argument, a PartitionSpec, None for replicated, or a tree of those that is a
      prefix of the argument; or one PartitionSpec or None for all arguments.
    out_axis_resources: the same for the result.
    static_argnums, donate_argnums: as for `jax.jit`.
    logical_axis_rules: the rules that apply while `fn` is traced.
    arg_shapes: for each non-static argument, the tree of its true shapes, or None if it needs no padding.

  Raises:
    ShardingError: the numbers of specs and arguments differ, or an argument without true shapes is uneven.
  """

  def __init__(
    self,
    fn: Callable[..., T],
    mesh: Mesh,
    in_axis_resources: object = _NOT_GIVEN,
    out_axis_resources: object = _NOT_GIVEN,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    logical_axis_rules: LogicalAxisRules = (),
    arg_shapes: Sequence[object] | None = None,
  ):
    self.mesh = mesh
    self.is_placed = out_axis_resources is not _NOT_GIVEN
    if not self.is_placed:
      if in_axis_resources is not _NOT_GIVEN:  # In T5X, the third argument is the rules.
        logical_axis_rules = _to_rules(in_axis_resources)
      if arg_shapes is not None:
        raise ShardingError('PjittedFnWithContext: arg_shapes need in_axis_resources and out_axis_resources')
      self.logical_axis_rules = tuple(logical_axis_rules)
      self.jitted = GuardedJit(
        _trace_with_rules(fn, self.logical_axis_rules), static_argnums=static_argnums, donate_argnums=donate_argnums
      )
      return
    self.logical_axis_rules = tuple(logical_axis_rules)
    self._static = frozenset([static_argnums] if isinstance(static_argnums, int) else static_argnums)
    self._in_specs = tuple(in_axis_resources) if isinstance(in_axis_resources, tuple | list) else in_axis_resources
    if isinstance(self._in_specs, tuple) and arg_shapes is not None and len(arg_shapes) != len(self._in_specs):
      raise ShardingError(f'{len(self._in_specs)} in_axis_resources are given, and {len(arg_shapes)} arg_shapes')
    shapes = enumerate(arg_shapes or ())
    self._layouts = {i: layout_of(tree, self._spec(i), mesh) for i, tree in shapes if tree is not None}
    self._even: set[tuple[object, ...]] = set()

    @functools.wraps(fn)
    def call_padded(*args: object) -> T:
      with axis_rules(self.logical_axis_rules):
        true = self._map_arguments(lambda i, x: self._layouts[i].unpad(x) if i in self._layouts else x, args)
        out = jax.tree.map(jnp.asarray, fn(*true))
      return layout_of(out, out_axis_resources, mesh).pad(out)

    self.jitted = GuardedJit(
      bind_mesh(call_padded, mesh),
      in_shardings=self._shardings(self._in_specs),
      out_shardings=self._shardings(out_axis_resources),
      static_argnums=static_argnums,
      donate_argnums=donate_argnums,
    )

  def __call__(self, *args: object) -> T:
    """Calls the function with arrays of true or padded shapes, on the mesh or on the host; returns padded arrays."""
    if not self.is_placed:
      with jax.set_mesh(self.mesh):
        return self.jitted(*args)
    return self.jitted(*self._map_arguments(self._put, args))

  def lower(self, *args: object) -> jax.stages.Lowered:
    """Lowers the function for arguments like these, which may be `jax.ShapeDtypeStruct`s."""
    if not self.is_placed:
      with jax.set_mesh(self.mesh):
        return self.jitted.lower(*args)
    return self.jitted.lower(*self._map_arguments(self._put, args))

  def _spec(self, i: int) -> object:
    return self._in_specs[i] if isinstance(self._in_specs, tuple) else self._in_specs

  def _shardings(self, specs: object) -> object:
    return jax.tree.map(lambda s: NamedSharding(self.mesh, stored_spec(s or PartitionSpec())), specs, is_leaf=is_spec)

  def _map_arguments(self, fn: Callable[[int, object], object], args: Sequence[object]) -> list[object]:
    """Returns the arguments, each non-static one replaced by `fn(number, argument)`; numbers skip static arguments."""
    static = static_positions(self._static, len(args))
    dynamic = len(args) - len(static)
    if isinstance(self._in_specs, tuple) and dynamic != len(self._in_specs):
      raise ShardingError(f'{len(self._in_specs)} in_axis_resources are given for {dynamic} arguments')
    numbers = itertools.count()
    return [arg if i in static else fn(next(numbers), arg) for i, arg in enumerate(args)]

  def _put(self, i: int, arg: object) -> object:
    if i in self._layouts:
      return put_padded(arg, self._layouts[i])
    shapes = (i, *(jnp.shape(leaf) for leaf in jax.tree.leaves(arg)))
    if shapes not in self._even:
      self._check_even(i, arg)
      self._even.add(shapes)
    return arg

  def _check_even(self, i: int, arg: object) -> None:
    layout = layout_of(jax.eval_shape(lambda x: x, arg), self._spec(i), self.mesh)
    padded = leaves_by_path(layout.padded_shapes)
    for path, true in leaves_by_path(layout.unpadded_shapes).items():
      if true.shape != padded[path].shape:
        raise ShardingError(
          f'argument {i}{f", {path_name(path)}," if path else ""} of shape {true.shape} does not divide by '
          f'{padded[path].sharding.spec} on the mesh {dict(self.mesh.shape)}; pass its true shapes as arg_shapes[{i}], '
          'so that it is padded'
        )


def _trace_with_rules(fn: Callable[..., T], rules: LogicalAxisRules) -> Callable[..., T]:
  """Returns a function like `fn`, which is traced with `rules` as the current rules."""

  @functools.wraps(fn)
  def call_with_rules(*args: object) -> T:
    with axis_rules(rules):
      return fn(*args)

  return call_with_rules


def _to_rules(rules: Any) -> LogicalAxisRules:
  if isinstance(rules, tuple | list) and all(isinstance(r, tuple | list) and len(r) == 2 for r in rules):
    return tuple(rules)
  raise ShardingError(
    'PjittedFnWithContext(fn, mesh, in_axis_resources, out_axis_resources) needs both resources; '
    f'PjittedFnWithContext(fn, mesh, logical_axis_rules) a sequence of pairs (name, axes), and got {rules!r}'
  )


class BasePartitioner(abc.ABC):
  """A partitioner that knows the mesh, and which part of the data each host reads; it replicates states.

  Args:
    num_partitions, model_parallel_submesh, backend, ici_mesh_shape, dcn_mesh_shape, devices: as for `default_mesh`.
    params_on_devices: whether new states have their parameters on the devices; if False, in host memory.

  Raises:
    ShardingError: without ici_mesh_shape, neither or both of num_partitions and model_parallel_submesh are given.
  """

  def __init__(
    self,
    num_partitions: int | None = None,
    model_parallel_submesh: Submesh = None,
    params_on_devices: bool = True,
    backend: str | None = None,
    ici_mesh_shape: Sequence[int] | None = None,
    dcn_mesh_shape: Sequence[int] | None = None,
    *,
    devices: Sequence[Device] | None = None,
  ):
    if ici_mesh_shape is None:
      num_model_partitions(num_partitions, model_parallel_submesh)
    self.params_on_devices = params_on_devices
    self._mesh_args = num_partitions, model_parallel_submesh, backend, ici_mesh_shape, dcn_mesh_shape, devices

  @functools.cached_property
  def mesh(self) -> Mesh:
    return default_mesh(*self._mesh_args)

  @property
  def logical_axis_rules(self) -> LogicalAxisRules:
    """The rules that apply while a function is traced."""
    return ()

  # ---------------------------------------------------------------- data

  @property
  def data_axes(self) -> tuple[str, ...]:
    """The mesh axes that batches are split over."""
    return ('replica', 'data') if 'replica' in self.mesh.axis_names else ('data',)

  @property
  def data_partition_spec(self) -> PartitionSpec:
    """The spec of a batch; it holds for arrays of any rank."""
    return PartitionSpec(axes_to_entry(self.data_axes))

  @property
  def data_mesh_size(self) -> int:
    """The number of parts into which the devices split a batch."""
    return num_parts(self.data_axes, self.mesh)

  @property
  def data_shards(self) -> int:
    """The number of shares into which the hosts split a batch."""
    return self._local_chunker.get_num_shards(self.data_axes)

  @property
  def data_shard_id(self) -> int:
    """The share that this host reads."""
    return self._local_chunker.get_shard_id(self.data_axes)

  def get_data_layout(self, batch_size: int | None = None, host_index: int | None = None) -> DataLayout:
    """Returns a host's share, by default this one's, of each global batch; see `chunks.get_data_layout`."""
    chunker = self._local_chunker if host_index is None else LocalChunker(self.mesh, host_index)
    return get_data_layout(chunker, self.data_axes, batch_size)

  def get_local_chunk_info(self, global_shape: Sequence[int], mesh_axes: SpecLike) -> LocalChunkInfo:
    """Returns which part of an array this host holds."""
    return self._local_chunker.get_local_chunk_info(global_shape, mesh_axes)

  @functools.cached_property
  def _local_chunker(self) -> LocalChunker:
    return LocalChunker(self.mesh)

  # ---------------------------------------------------------------- state

  def get_logical_axes(self, train_state: TrainState) -> TrainState[AxisNames]:
    """Returns the tree of the train state with `AxisNames` in place of each array; None if its axes have no names."""
    return jax.tree.map(lambda _: None, train_state)

  def get_mesh_axes(self, train_state: TrainState) -> TrainState[PartitionSpec]:
    """Returns the tree of the train state with a PartitionSpec in place of each array.

    A spec has an entry for each dimension. Arrays whose axes have no names have None instead of a spec.
    """

    def resolve_names(path: Path, names: AxisNames) -> PartitionSpec:
      return resolve(names, self.mesh.axis_names, self.logical_axis_rules, path=path_name(path)).to_stored().spec

    return map_with_path(resolve_names, self.get_logical_axes(train_state))

  def get_layout(self, train_state: TrainState) -> StateLayout:
    """Returns specs, shardings, and padded and true shapes of a train state.

    The leaves of the given state are declarations and shapes.
    """
    shapes = jax.tree.map(lambda x: x.as_struct() if hasattr(x, 'as_struct') else x, train_state)
    return layout_of(shapes, self.get_mesh_axes(train_state), self.mesh)

  def initialize(
    self, init_fn: Callable[..., TrainState[jax.Array]], train_state: TrainState, *args: object
  ) -> TrainState[jax.Array]:
    """Calls `init_fn(*args)`, which makes a state in true shapes; returns it split and padded, see `place_params`.

    `train_state` has declarations and shapes for the same state; `args`, such as a PRNG key, are replicated.
    """
    layout = self.get_layout(train_state)
    return self.place_params(self.partition(init_fn, None, layout.specs)(*args), layout)

  def place_params(self, train_state: TrainState[jax.Array], layout: StateLayout) -> TrainState[jax.Array]:
    """Returns a state on the mesh; with params_on_devices=False, its `mdl_vars` are NumPy arrays of true shapes."""
    if self.params_on_devices:
      return train_state
    host = jax.tree.map(
      lambda x: np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)),
      train_state.mdl_vars,
    )
    return dataclasses.replace(train_state, mdl_vars=slice_to(host, layout.mdl_vars.unpadded_shapes))

  def move_params_to_devices(
    self, train_state: TrainState[jax.Array], train_state_axes: TrainState[PartitionSpec]
  ) -> TrainState[jax.Array]:
    """Returns the train state on the mesh, padded. The given arrays are padded on the mesh, or unpadded on the host."""
    return put_padded(train_state, layout_of(train_state, train_state_axes, self.mesh))

  # ---------------------------------------------------------------- functions

  @abc.abstractmethod
  def partition(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> PjittedFnWithContext[T]:
    """Returns `fn` jitted for the mesh; see `PjittedFnWithContext` for the arguments."""

  @abc.abstractmethod
  def compile(self, partitioned_fn: PjittedFnWithContext[T], *args: object) -> jax.stages.Compiled:
    """Compiles a partitioned function for arguments like `args`; the result takes padded arrays on the mesh."""


class BasePjitPartitioner(BasePartitioner):
  """A partitioner that compiles with `jax.jit` and named shardings."""

  def partition(
    self,
    fn: Callable[..., T],
    in_axis_resources: object,
    out_axis_resources: object,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    arg_shapes: Sequence[object] | None = None,
  ) -> PjittedFnWithContext[T]:
    in_specs, out_specs = self._override_specs(in_axis_resources), self._override_specs(out_axis_resources)
    rules = self.logical_axis_rules
    return PjittedFnWithContext(fn, self.mesh, in_specs, out_specs, static_argnums, donate_argnums, rules, arg_shapes)

  def compile(self, partitioned_fn: PjittedFnWithContext[T], *args: object) -> jax.stages.Compiled:
    return partitioned_fn.lower(*args).compile()

  def _override_specs(self, resources: object) -> object:
    """Returns the specs of arguments or results passed to `partition`, adapted to the axes of this mesh."""
    return resources


class PjitPartitioner(BasePjitPartitioner):
  """A partitioner that splits states by logical axis rules.

  A train state is a `TrainState`, or an object with a method `as_logical_axes()` that returns its AxisNames. The
  `mdl_vars` of a `TrainState` are weight declarations that name logical axes (or mesh axes), or arrays in Flax boxes
  that name such axes (`LogicallyPartitioned`). Its other arrays are given as shapes; a state for inference lacks them.
  Optimizer slots inherit the names of their variable if they have its shape, and are replicated otherwise.

  Args:
    *args, **mesh: as for `BasePartitioner`.
    logical_axis_rules: the rules; by default the standard ones, with 'batch' over ('replica', 'data') on a mesh of
      slices.
    params_axis_names_overrides: pairs (pattern on the path of a variable, names) that replace declared names.
    state_axis_names_overrides: the same for paths in `opt_states`, such as 'opt_states/0/v_row/.*'.
  """

  def __init__(
    self,
    *args: Any,
    logical_axis_rules: LogicalAxisRules | None = None,
    params_axis_names_overrides: AxisNamesOverrides = (),
    state_axis_names_overrides: AxisNamesOverrides = (),
    **mesh: Any,
  ):
    super().__init__(*args, **mesh)
    self._given_rules = logical_axis_rules
    self._params_overrides = params_axis_names_overrides
    self._state_overrides = state_axis_names_overrides

  @functools.cached_property
  def logical_axis_rules(self) -> LogicalAxisRules:
    rules = tuple(standard_logical_axis_rules() if self._given_rules is None else self._given_rules)
    if 'replica' not in self.mesh.axis_names:
      return rules
    return tuple((name, ('replica', 'data') if (name, axes) == ('batch', 'data') else axes) for name, axes in rules)

  @property
  def data_axes(self) -> tuple[str, ...]:
    """The mesh axes that the rules give to 'batch'; without such a rule, the mesh axes for data."""
    if all(name != 'batch' for name, _ in self.logical_axis_rules):
      return super().data_axes
    return spec_axes(resolve(('batch',), self.mesh.axis_names, self.logical_axis_rules).spec[0])

  def get_logical_axes(self, train_state: TrainState) -> TrainState[AxisNames]:
    if hasattr(train_state, 'as_logical_axes'):
      return train_state.as_logical_axes()
    bare = remove_boxes(train_state)
    kept = self._kept_names(getattr(bare, 'opt_states', None))
    return put_into_boxes(train_state, state_axis_names(bare, self._params_overrides, self._state_overrides, kept))

  def _kept_names(self, opt_states: object) -> KeptNames:
    """Returns a function that maps the path of a slot to names of axes.

    These are the names that the slot keeps if it does not have the shape of its parameter.
    """
    return lambda path: ()
