"""Reads stacks of layers that a checkpoint groups differently from the model: another `circular_repeat` of a pipeline.

    a scan, or circular_repeat = 1     mdl_vars.w [layers, ...]          opt_states.repeated_6.mu.w [layers, ...]
    circular_repeat = R                mdl_vars.w [R, layers / R, ...]   opt_states.repeated_2_3.mu.w

In the state of a `MultiLearner`, the name of a rule precedes the group: opt_states.encoder.repeated_6.mu.w.

The order of the layers is always the same, so each array is a reshape of the wanted one. Optimizers that update each
layer separately have the sizes of the stack in the names of their states; see `training/learning/optimizer.py`.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.checkpoints.contents import ArrayRecord
from praxis_lite.common.trees import NestedDict, Path, leaves, leaves_by_path, nest, path_name, to_path
from praxis_lite.sharding.guards import GuardedJit
from praxis_lite.sharding.host_memory import to_device_memory
from praxis_lite.sharding.padding import pad_to, padded_shape, slice_to
from praxis_lite.sharding.slots import owner_of
from praxis_lite.sharding.specs import all_axes, axes_to_entry, complete_spec

_GROUP = re.compile(r'^(opt_states\.(?:\w+\.)?)repeated(?:_\d+)+(?=\.)')


class _Source(NamedTuple):
  """Where the checkpoint has an array of the train state: its name and shape there.

  If the array is in a stack, its first dimensions index the layers: `stack_here` dimensions in the state, and
  `stack_there` in the checkpoint. Both are 0 if it is in no stack.
  """

  name: str
  shape: tuple[int, ...]
  stack_here: int
  stack_there: int


class Regrouping:
  """Decides what to read from a checkpoint for the arrays of a train state, and converts it.

  Args:
    saved, wanted: the arrays of the checkpoint, and those of the train state, by name, without padding.
    weights: the declarations of the model's variables, which show what is a stack of layers.

  Attributes:
    records: the arrays of the checkpoint, as if its stacks were grouped as in the train state.
  """

  def __init__(self, saved: dict[str, ArrayRecord], wanted: dict[str, ArrayRecord], weights: NestedDict):
    declared = leaves(weights)
    by_tail = {_tail(name): name for name in saved}
    self._sources: dict[str, _Source] = {}
    for name, record in wanted.items():
      there = name if name in saved else by_tail.get(_tail(name))
      if there is None or (there == name and saved[name]['shape'] == record['shape']):
        continue
      source = _source(there, tuple(saved[there]['shape']), _stack(name, declared), tuple(record['shape']))
      if source is not None and not record['dtype'].startswith('key<'):
        self._sources[name] = source
    groups = {match[0] for source in self._sources.values() if (match := _GROUP.match(source.name))}
    read = {source.name for source in self._sources.values()}
    tails = set(map(_tail, wanted))
    # Each group has its own copy of shared values, such as a count. One of the copies is read.
    read |= {n for n in saved if n not in wanted and _tail(n) in tails and (m := _GROUP.match(n)) and m[0] in groups}
    self.records: dict[str, ArrayRecord] = {name: record for name, record in saved.items() if name not in read}
    for name, source in self._sources.items():
      self.records[name] = saved[source.name] | {'shape': wanted[name]['shape']}

  def to_read(self, shapes: object) -> NestedDict:
    """Returns the padded shapes, with shardings, of the arrays in `shapes`, named and grouped as in the checkpoint."""
    there: dict[Path, Any] = {}
    for path, x in leaves_by_path(shapes).items():
      source = self._sources.get(path_name(path))
      there[to_path(source.name) if source else path] = _source_struct(x, source) if source else x
    return nest(there)

  def regroup(self, arrays: NestedDict, shapes: object, true_shapes: object) -> NestedDict:
    """Converts arrays that were read to the names and grouping of the train state.

    `shapes` and `true_shapes` are the shapes of the train state, padded and true.
    """
    read, true = leaves(arrays), leaves_by_path(true_shapes)
    here: dict[Path, Any] = {}
    for path, x in leaves_by_path(shapes).items():
      source = self._sources.get(path_name(path))
      value = read[to_path(source.name)] if source else read[path]
      if source and source.stack_here:
        # No other array needs this source. Popping it frees its memory right after the reshape.
        value = _reshape(read.pop(to_path(source.name)), source.shape, true[path].shape, x)
      here[path] = value
    return nest(here)


def _tail(name: str) -> str:
  """Returns the part of a name that is the same for all groupings of a stack."""
  return _GROUP.sub(r'\1repeated', name)


def _stack(name: str, declared: dict[Path, Any]) -> tuple[int, ...]:
  owner = owner_of(to_path(name), declared)
  return () if owner is None else declared[owner].repeat_prefix


def _source(name: str, shape: tuple[int, ...], stack: tuple[int, ...], wanted: tuple[int, ...]) -> _Source | None:
  if shape == wanted:
    return _Source(name, shape, 0, 0)
  one_layer = wanted[len(stack) :]
  there = len(shape) - len(one_layer)
  if not stack or wanted[: len(stack)] != stack or there < 1 or shape[there:] != one_layer:
    return None
  return _Source(name, shape, len(stack), there) if math.prod(shape[:there]) == math.prod(stack) else None


def _source_struct(x: jax.ShapeDtypeStruct, source: _Source) -> jax.ShapeDtypeStruct:
  """Returns the padded shape to read. Its last stack dimension is split over all axes that split the stack in `x`."""
  assert isinstance(x.sharding, NamedSharding)
  if not source.stack_here:
    return x
  spec = complete_spec(x.sharding.spec, len(x.shape))
  axes = axes_to_entry(tuple(all_axes(PartitionSpec(*spec[: source.stack_here]))))
  spec = PartitionSpec(*(None,) * (source.stack_there - 1), axes, *spec[source.stack_here :])
  sharding = NamedSharding(x.sharding.mesh, spec)
  return jax.ShapeDtypeStruct(padded_shape(source.shape, spec, sharding.mesh), x.dtype, sharding=sharding)


def _reshape(x: jax.Array, there: tuple[int, ...], here: tuple[int, ...], padded: jax.ShapeDtypeStruct) -> jax.Array:
  def reshape(x: jax.Array) -> jax.Array:
    return pad_to(slice_to(x, there).reshape(here), padded.shape)

  value = GuardedJit(reshape, out_shardings=to_device_memory(padded.sharding))(x)
  return jax.block_until_ready(jax.device_put(value, padded.sharding))
