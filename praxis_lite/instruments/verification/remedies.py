"""Finds mesh axes to remove from mapping fields so that results become right.

A choice is one mesh axis in one field. Choices are ordered by how near their fields are to the variables that differ. A
binary search finds the smallest number of leading choices to remove; the last of these is a cause. The search removes
this cause and repeats, until nothing differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from jax.sharding import Mesh, PartitionSpec

from praxis_lite.common.config import config_values
from praxis_lite.common.trees import leaves_by_path, map_with_path, nearness
from praxis_lite.instruments.verification.shrink import SmallTask
from praxis_lite.instruments.verification.steps import Case, Name, StepResults, task_of
from praxis_lite.layers.base import Layer
from praxis_lite.sharding.specs import UNCONSTRAINED, Placement, axes_to_entry, spec_axes
from praxis_lite.sharding.weights import DeclaredSplit
from praxis_lite.training.task import SingleTask

IsRight = Callable[[StepResults], bool]
_ACTIVATIONS = 'activation_split_dims_mapping'


class Choice(NamedTuple):
  """A mesh axis in a field, or in a rule or strategy."""

  field: str
  axis: str


def nearest(small: SmallTask, case: Case, mesh: Mesh, is_right: IsRight, wrong: Sequence[Name], seconds: float) -> str:
  """Returns lines that say which axes to remove from which fields to make the results of a case right on the mesh.

  `wrong` names the wrong results, and `seconds` limits the search. If there are no such axes, or the search does not
  find them in time, a line says so.
  """
  end = time.monotonic() + seconds
  mappings = _mappings(small, case.task)
  found = (Choice(field, axis) for field, entries in mappings.items() for e in entries for axis in spec_axes(e))
  used = dict.fromkeys(choice for choice in found if small.mesh_sizes[choice.axis] > 1)
  choices = sorted(used, key=lambda choice: -nearness(choice.field, [name.of for name in wrong]))

  def right_without(left_out: Collection[Choice]) -> bool:
    task = _leave_out_axes(task_of(case.config, case.kind), left_out)
    specs = map_with_path(lambda _, placement: _spec_without(placement, left_out), small.placements)
    try:
      return is_right(case._replace(task=task).run(mesh, specs))
    except Exception:  # A layer may need an axis that was removed, so removing it is no remedy.
      return False

  if not choices or not right_without(choices):
    return 'no mapping is the cause: results differ even if only rows are split; look at what layers do with the mesh'
  causes: list[Choice] = []
  while time.monotonic() < end:
    if causes and right_without(causes):
      return _text(causes, mappings)
    rest = [choice for choice in choices if choice not in causes]
    # Bisection: results are wrong without the causes and the first `low` of the rest, and right without the causes and
    # the first `high`.
    low, high = 0, len(rest)
    while high - low > 1 and time.monotonic() < end:
      middle = (low + high) // 2
      if right_without([*causes, *rest[:middle]]):
        high = middle
      else:
        low = middle
    if high - low > 1:
      break
    causes.append(rest[high - 1])
  return 'no right mapping was found in time'


def _text(causes: Sequence[Choice], mappings: dict[str, tuple[object, ...]]) -> str:
  lines = []
  for field in dict.fromkeys(choice.field for choice in causes):
    before = mappings[field]
    after = tuple(_entry_without(entry, field, causes) for entry in before)
    lines.append(f'right with {field} = {_show_entries(after)} instead of {_show_entries(before)}')
  return '\n'.join(lines)


def _show_entries(entries: tuple[object, ...]) -> str:
  return repr(tuple('UNCONSTRAINED' if e is UNCONSTRAINED else e for e in entries))


# ---------------------------------------------------------------- fields and their entries


def _mappings(small: SmallTask, task: SingleTask) -> dict[str, tuple[object, ...]]:
  """Returns the entries, which are mesh axes, of each field, rule or strategy that decides a split."""
  found: dict[str, tuple[object, ...]] = {}
  for placement in leaves_by_path(small.placements).values():
    for field in dict.fromkeys(placement.why):
      entries = tuple(e for e, why in zip(placement.spec, placement.why) if why == field)
      found.setdefault(field, entries)
  for layer in task.model.descendants():  # Use the field's order of entries; a transposed weight has another order.
    for field, placement in layer.placements('weight_split_dims_mapping').items():
      if field in found:
        found[field] = tuple(placement.spec)
  if task.partitioning == 'auto':
    for layer in task.model.descendants():
      for _, source, placement in _activations(layer):
        found.setdefault(source, tuple(placement.spec))
    for name, mapping in (task.train.inputs_split_mapping or {}).items():
      if mapping is not None:
        found[f'train.inputs_split_mapping.{name}'] = tuple(mapping)
  return found


def _leave_out_axes(task: SingleTask, left_out: Collection[Choice]) -> SingleTask:
  """Removes axes from the mappings of a task's layers and inputs, in place."""
  for layer in task.model.descendants():
    for name, source, placement in _activations(layer):
      entries = tuple(_entry_without(e, source, left_out) for e in placement.spec)
      layer.change_split_mappings(_ACTIVATIONS, **{name: entries})
    for key, mapping in config_values(layer.weight_split_dims_mapping).items():  # Some calls constrain weights again.
      if isinstance(mapping, DeclaredSplit) and isinstance(key, str):
        split = (_entry_without(e, source, left_out) for e, source in zip(mapping, mapping.sources))
        layer.change_split_mappings('weight_split_dims_mapping', **{key: DeclaredSplit(split, mapping.sources)})
  mappings = task.train.inputs_split_mapping
  for name, mapping in (mappings or {}).items():
    if mapping is not None and mappings is not None:
      mappings[name] = tuple(_entry_without(e, f'train.inputs_split_mapping.{name}', left_out) for e in mapping)
  return task


def _spec_without(placement: Placement, left_out: Collection[Choice]) -> PartitionSpec:
  return PartitionSpec(*(_entry_without(e, why, left_out) for e, why in zip(placement.spec, placement.why)))


def _entry_without(entry: object, field: str, left_out: Collection[Choice]) -> object:
  if entry is None or entry is UNCONSTRAINED:
    return entry
  return axes_to_entry([axis for axis in spec_axes(entry) if Choice(field, axis) not in left_out])


def _activations(layer: Layer) -> list[tuple[str, str, Placement]]:
  """Returns for each activation mapping its name, the path of a config field, and its placement.

  The first entry of the mapping comes from this field.
  """
  mappings, found = layer.split_mappings(_ACTIVATIONS), []
  for field, placement in layer.placements(_ACTIVATIONS).items():
    mapping = mappings[field]
    source = mapping.sources[0] if isinstance(mapping, DeclaredSplit) and mapping else field
    found.append((field.rpartition('.')[2], source, placement))
  return found
