"""Finds the cause of each collective of a compiled step, and the work that several devices repeat.

The answers to four questions give the cause of a collective:

what moves          an argument of the step, traced through casts, slices and loops (`dataflow.py`), or a computed value
over which axes     axes of the batch, axes of the layer's weights, or other axes
in which layer      the layer in the name that JAX gave the operation
what declares it    the fields of the layer's weights and activations; or the field that contradicts others, see
                    `declared.py`
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Sequence

from praxis_lite.common.trees import leaves_by_path, path_name
from praxis_lite.instruments.explain.report import TracedStep, report_of
from praxis_lite.instruments.plan.cost import Cause, Communication, Cost, Operation, Reason
from praxis_lite.instruments.plan.dataflow import Dataflow
from praxis_lite.instruments.plan.declared import Declaration, Declarations, is_below
from praxis_lite.instruments.plan.hlo import CompiledProgram, Computation, Instruction
from praxis_lite.instruments.plan.layer_names import LayerNames
from praxis_lite.training.flops import flops_by_scope

# The primitives of the collectives that the code of layers calls, inside `shard_map`.
_WRITTEN = {'ppermute', 'all_to_all', 'psum', 'psum_invariant', 'psum_scatter', 'reduce_scatter', 'all_gather'}
_WRITTEN |= {'pmax', 'pmin', 'all_gather_invariant', 'all_gather_reduced', 'unreduced_psum', 'pbroadcast'}
_SMALL = 1 << 16  # In bytes. A scalar, or an array with one number for each example, is smaller than this.
_REMATERIALIZED = re.compile(
  r'Involuntary full rematerialization\. The compiler cannot go from sharding \{(?P<before>[^}]*)\} to '
  r'\{(?P<after>[^}]*)\}.*?for HLO operation %?\S+ = (?P<array>\w+\[[\d,]*\]).*?(?:op_name="(?P<name>[^"]*)")?'
)


class Why:
  """Explains the collectives of a step from the task's declarations and the names of layers; `step` is its trace."""

  def __init__(self, step: TracedStep, names: LayerNames):
    task = step.task
    self._names, self._step = names, step
    self.report = report_of(task.jax_task, task.layout, step)
    weights = leaves_by_path(task.jax_task.model.abstract_init())
    stacks = {path_name(path): len(weight.repeat_prefix) for path, weight in weights.items()}
    self.declared = Declarations(self.report, stacks, manual=task.jax_task.partitioning != 'auto')

  # ---------------------------------------------------------------- collectives

  def add_causes(self, cost: Cost, program: CompiledProgram) -> Cost:
    """Returns the cost with a cause for each collective."""
    flow = Dataflow(program)
    parts: dict[str, list[tuple[Instruction, Computation]]] = {}
    for instruction, computation in flow.collectives():
      parts.setdefault(instruction.name, []).append((instruction, computation))
    collectives = []
    for c in cost.collectives:
      found = parts.get(c.name, [])
      arguments = {a for instruction, computation in found for a in flow.arguments(instruction, computation)}
      cause = self._cause(c, found[0][0], arguments) if found else None
      collectives.append(dataclasses.replace(c, cause=cause))
    return dataclasses.replace(cost, collectives=tuple(collectives))

  def _cause(self, c: Communication, instruction: Instruction, arguments: set[str]) -> Cause:
    name, axes = instruction.op_name, set(c.axes)
    layers = tuple(dict.fromkeys(filter(None, self._names.layers(name)))) or ((c.layer,) if c.layer else ())
    arrays = [array.dims for array in instruction.collective_result]
    of_weights = self.declared.declarations_of(a.removeprefix('mdl_vars.') for a in arguments)
    if arguments and all(a.startswith('inputs') for a in arguments):
      return Cause(Reason.INPUTS, layers, ('task.train.inputs_split_mapping',))
    if of_weights and instruction.collective not in ('all-reduce', 'reduce-scatter'):
      return self._moved_weight(of_weights, axes, layers)
    if of_weights:
      return self._summed_weight(of_weights, c, layers)
    if any(a.startswith(('opt_states', 'ema_vars')) for a in arguments):
      what = f'{", ".join(sorted(filter(None, arguments)))} is split unlike its variable'
      return Cause(Reason.STATE_MOVED, layers, ('task.train.learner',), 'give both the same spec', what)
    if written := self._layer_cause(name, layers, instruction, axes):
      return written
    if (c.result_bytes <= _SMALL and not layers) or all(_rank(dims) == 0 for dims in arrays):
      return Cause(Reason.SUMS, layers)
    if exchange := self._exchange(axes, layers, by_compiler=instruction.collective):
      return exchange
    if instruction.collective in ('all-reduce', 'reduce-scatter'):
      return self._sum(c, axes, layers, arrays)
    return self._activation_cause(c, axes, layers, arrays)

  def _moved_weight(self, weights: Sequence[Declaration], axes: set[str], layers: tuple[str, ...]) -> Cause:
    fields = self.declared.fields_of(weights, axes)
    own = tuple(dict.fromkeys(w.layer for w in weights)) or layers
    if axes <= self.declared.batch_axes:
      return Cause(Reason.WEIGHT, own, fields)
    if exchange := self._exchange(axes, own):
      return exchange
    odd, arrays = axes - self.declared.batch_axes, ', '.join(w.path for w in weights)
    if odd <= {axis for w in weights for axis in w.all_axes}:
      what = f'{arrays} is split over {_and(odd)}, and what it is multiplied with is not'
      return self._surprise(Reason.WEIGHT_MOVED, odd, own, what)
    what = f'{arrays} is moved over {_and(axes)}: its layer does not say what {_and(odd)} splits'
    return self._unsaid(Reason.WEIGHT_MOVED, odd, own, what)

  def _summed_weight(self, weights: Sequence[Declaration], c: Communication, layers: tuple[str, ...]) -> Cause:
    """Returns the cause of an all-reduce that moves a weight: where parts are uneven, XLA gathers them by a sum."""
    own, axes = tuple(dict.fromkeys(w.layer for w in weights)) or layers, _and(c.axes)
    parts = math.prod(self.declared.sizes[axis] for axis in c.axes)
    uneven = sorted({size for w in weights for size, on in zip(w.shape, w.axes) if {*on} & {*c.axes} and size % parts})
    sizes = ' and '.join(f'{size:,}' for size in uneven[:3])
    what = f'{", ".join(w.path for w in weights[:3])} is gathered over {axes} by a sum, which sends twice as much'
    remedy = f'split over fewer devices: {axes} has {parts:,}, which does not divide {sizes}' if uneven else ''
    return Cause(Reason.WEIGHT_SUMMED, own, self.declared.fields_of(weights, c.axes), remedy, what)

  def _layer_cause(self, name: str, layers: tuple[str, ...], instruction: Instruction, axes: set[str]) -> Cause | None:
    """Returns the cause of a collective that the code of a layer calls; None if XLA added the collective."""
    primitive = name.rpartition('/')[2].rstrip(')')
    if 'shard_map' not in name or primitive not in _WRITTEN:
      return None
    if instruction.collective in ('all-reduce', 'reduce-scatter'):
      backward = self._names.phase(name) == 'backward' and axes <= self.declared.batch_axes
      weights = self.declared.weights_near(layers)
      if backward:
        return Cause(Reason.GRADIENT, layers, ('task.train.inputs_split_mapping',))
      if fields := self.declared.fields_of(weights, axes - self.declared.batch_axes):
        return Cause(Reason.TENSOR, layers, fields)
      return self._exchange(axes, layers) or Cause(Reason.SUMS, layers)
    return self._exchange(axes, layers) or Cause(Reason.OTHER, layers, layers)

  def _exchange(self, axes: set[str], layers: tuple[str, ...], by_compiler: str = '') -> Cause | None:
    """Returns the communication over `axes` that the nearest layer declares; None if no layer declares any.

    `by_compiler` is the kind of the collective if XLA added it, and '' if a layer called it.
    """
    for path in (p for layer in layers for p in _upward(layer)):
      for field, exchange in self.report.exchanges.items() if axes else ():
        is_added = exchange.by_compiler and by_compiler in (exchange.kinds or (by_compiler,))
        if field == f'{path}.{exchange.field}' and axes <= set(exchange.axes) and (is_added or not by_compiler):
          return Cause(Reason.EXCHANGE, (path,), (field,), what=exchange.purpose)
    return None

  def _sum(self, c: Communication, axes: set[str], layers: tuple[str, ...], arrays: Sequence[Sequence[int]]) -> Cause:
    declared, batch = self.declared, self.declared.batch_axes
    weights, large = declared.weights_near(layers), [dims for dims in arrays if _rank(dims) > 1]
    # XLA combines gradients of several layers, and names them after some of these layers only. Parts of an embedding
    # table fit no declared shape.
    of_weights = all(declared.fitting(dims, declared.weights) for dims in large)
    of_activations = any(declared.fitting(dims, declared.activations) for dims in large)
    if axes <= batch:
      gathered = [w for dims in large for w in declared.fitting(dims, weights) if w.all_axes & axes]
      if gathered and c.phase in ('forward', 'recomputed'):
        return self._summed_weight(list(dict.fromkeys(gathered)), c, layers)
      if c.phase != 'forward' and (of_weights or not of_activations):
        return Cause(Reason.GRADIENT, layers, ('task.train.inputs_split_mapping',))
      if not of_activations or c.result_bytes <= _SMALL:
        return Cause(Reason.SUMS, layers)
      what = f'{_shapes(large)} is summed over {_and(axes)}, which splits the rows of the batch'
      return self._surprise(Reason.PARTIAL_SUMS, axes, layers, what)
    if fields := declared.fields_of(weights, axes - batch):
      return Cause(Reason.TENSOR, layers, fields)
    near = [a for a in declared.activations if any(is_below(a.layer, p) for p in layers)] or declared.activations
    fields = declared.fields_of(near, axes - batch)
    of_rows = axes <= batch | declared.row_axes(a for a in near if any(is_below(a.layer, p) for p in layers))
    if c.phase != 'forward' and (of_weights or (of_rows and not of_activations)):
      return Cause(Reason.GRADIENT, layers, fields or ('task.train.inputs_split_mapping',))
    if not large or c.result_bytes <= _SMALL:
      return Cause(Reason.SUMS, layers, fields)
    suspect, _ = declared.suspects(axes, layers)
    if suspect is None and fields:
      return Cause(Reason.TENSOR, layers, fields)
    what = f'parts of {_shapes(large)} are summed over {_and(axes)}'
    return self._surprise(Reason.ACTIVATION_MOVED, axes, layers, what)

  def _activation_cause(
    self, c: Communication, axes: set[str], layers: tuple[str, ...], arrays: Sequence[Sequence[int]]
  ) -> Cause:
    """Returns the cause of a collective that moves computed values."""
    declared = self.declared
    # XLA may gather a weight, or reduce its gradient, in pieces that overlap with the product.
    large = [dims for dims in arrays if _rank(dims) > 1]
    near = declared.weights_near(layers)
    weights = [w for dims in large for w in declared.fitting(dims, near)]
    activations = [a for dims in large for a in declared.fitting(dims, declared.activations)]
    fields = declared.fields_of(weights or near, axes)
    if axes <= declared.batch_axes and fields and large:
      if c.kind == 'collective-permute' and c.phase == 'backward' and (weights or not activations):
        return Cause(Reason.GRADIENT, layers, ('task.train.inputs_split_mapping',))
      if c.kind in ('collective-permute', 'all-gather') and (weights or not activations):
        return Cause(Reason.WEIGHT, layers, fields)
    along = [a for a in activations if any(role[0] != 'features' for role in a.roles_over(axes))]
    fields = declared.fields_of(near, axes)
    if along and fields and not axes & declared.batch_axes and declared.suspects(axes, layers)[0] is None:
      return Cause(Reason.SEQUENCE, layers, tuple(dict.fromkeys((*declared.fields_of(along, axes), *fields))))
    if c.result_bytes <= _SMALL and not any(_rank(dims) > 1 for dims in arrays):
      return Cause(Reason.SUMS, layers)
    done = {'all-gather': 'gathered', 'all-to-all': 'exchanged', 'collective-permute': 'moved'}.get(c.kind, 'moved')
    what = f'{_shapes(arrays)} is {done} over {_and(axes)}'
    return self._surprise(Reason.ACTIVATION_MOVED, axes, layers, what)

  def _surprise(self, reason: Reason, axes: Collection[str], layers: tuple[str, ...], what: str) -> Cause:
    """Returns a cause that names the field whose declaration contradicts others about `axes`.

    Without a contradiction, returns the result of `_unsaid`.
    """
    suspect, others = self.declared.suspects(axes, layers)
    if suspect is None:
      return self._unsaid(reason, axes, layers, what)
    split = suspect.fields_of(axes)
    field = split[0] if split else suspect.field
    others_say = [f for d in others for f in (d.fields_of(axes) or [d.field]) if f != field]
    fields = tuple(dict.fromkeys((field, *others_say)))
    does = 'splits' if split else 'does not split'
    over = set(axes) & suspect.all_axes if split else axes
    remedy = f'{field} {does} {suspect.path} over {_and(over)}, unlike {" and ".join(fields[1:3])}: make them agree'
    return Cause(reason, layers, fields, remedy, what)

  def _unsaid(self, reason: Reason, axes: Collection[str], layers: tuple[str, ...], what: str) -> Cause:
    """Returns a cause for which no declarations contradict each other. Its remedy names fields that could say more."""
    activations = [d for d in self.declared.activations if any(is_below(d.layer, p) for p in layers)]
    near = [*activations, *self.declared.weights_near(layers)]
    fields = self.declared.fields_of(near, axes) or tuple(dict.fromkeys(d.field for d in near))
    remedy = f'say what {_and(axes)} splits in {" or ".join(fields[:3])}' if fields else ''
    return Cause(reason, layers, fields, remedy, what)

  # ---------------------------------------------------------------- what is computed more than once

  def find_replicated(
    self, operations: Iterable[Operation], num_devices: int, uncounted: Collection[str] = ()
  ) -> list[Cause]:
    """Returns a cause for each group of idle mesh axes along which devices repeat the work of layers.

    To find them, it compares a layer's FLOPs on all devices in the compiled program with those in the traced step. It
    skips the layers `uncounted`, because the traced step does not show all of their work.
    """
    whole, done = collections.defaultdict[str, float](float), collections.defaultdict[str, float](float)
    for scope, flops in flops_by_scope(self._step.jaxpr):
      whole[self._names.layer(scope)] += flops
    for op in operations:
      done[op.layer] += op.count * op.flops
    total = sum(done.values())
    found: dict[tuple[str, ...], list[str]] = {}
    for layer, flops in done.items():
      ratio = flops * num_devices / whole[layer] if whole[layer] else 1.0
      axes = () if layer in uncounted else self._idle_axes(layer, ratio)
      if axes and flops > total / 200:
        found.setdefault(axes, []).append(layer)
    causes = []
    for axes, layers in found.items():
      times = math.prod(self.declared.sizes[axis] for axis in axes)
      share = sum(done[layer] for layer in layers) / total
      names = tuple(sorted(layers, key=lambda path: path.split('.')))
      what = f'the {times} devices of {_and(axes)} compute the same; {share:.0%} of the FLOPs'
      causes.append(self._surprise(Reason.REPLICATED, axes, names, what))
    return causes

  def _idle_axes(self, layer: str, ratio: float) -> tuple[str, ...]:
    """Returns the axes along which devices repeat a layer's work: no activation of the layer is split over them."""
    idle: list[str] = []
    for axis, size in sorted(self.declared.sizes.items(), key=lambda item: -item[1]):
      used = any(axis in d.all_axes for d in self.declared.activations if _are_near(d.layer, [layer]))
      if size > 1 and not used and axis not in self.declared.batch_axes and ratio >= 0.9 * size:
        idle.append(axis)
        ratio /= size
    return tuple(idle)

  def find_rematerialized(self, messages: Iterable[str]) -> list[Cause]:
    """Returns a cause for each array that XLA, as its messages say, replicates only to split it in another way."""
    causes = {}
    for message in messages:
      if found := _REMATERIALIZED.search(message):
        name = re.search(r'op_name="([^"]*)"', message)
        layers = tuple(filter(None, self._names.layers(name[1] if name else '')))
        before, after = (_parts(found[which]) for which in ('before', 'after'))
        what = (
          f'XLA goes from {before} to {after} only by building all of {found["array"]} on every device and slicing it'
        )
        axes = {axis for axis, size in self.declared.sizes.items() if size > 1}
        causes[layers, what] = self._surprise(Reason.REMATERIALIZED, axes, layers, what)
    return list(causes.values())


def _are_near(path: str, layers: Iterable[str]) -> bool:
  return any(is_below(path, layer) or is_below(layer, path) for layer in layers)


def _upward(path: str) -> list[str]:
  parts = path.split('.')
  return ['.'.join(parts[:i]) for i in range(len(parts), 0, -1)]


def _rank(dims: Sequence[int]) -> int:
  return sum(d != 1 for d in dims)


def _shapes(arrays: Sequence[Sequence[int]]) -> str:
  shapes = list(dict.fromkeys(str(list(dims)) for dims in arrays if _rank(dims)))
  return ' and '.join(shapes[:2]) or 'a number'


def _and(axes: Iterable[str]) -> str:
  return '+'.join(sorted(axes))


def _parts(sharding: str) -> str:
  """Returns '2x4x1 parts' for 'devices=[2,4,1]<=[2,2,2]T(0,2,1)', without a last dimension that counts copies.

  Returns other shardings, such as 'replicated', unchanged.
  """
  found = re.match(r'devices=\[([\d,]+)\]', sharding)
  if not found:
    return sharding
  sizes = found[1].split(',')
  return f'{"x".join(sizes[:-1] if "last_tile" in sharding else sizes)} parts'
