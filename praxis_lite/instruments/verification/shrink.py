"""Shrinks an experiment to sizes and a mesh that compile and run on a few simulated devices in seconds.

Equal sizes in the model and its inputs become the same small size, because fields with equal sizes may have to agree.
The properties that decide how an array is split do not change:

    order            a larger size stays larger
    divisors         a multiple of another size stays a multiple of it, and even quotients stay even
    evenness         whether the mesh axes that split a dimension divide it evenly; if they do not, whether they have a
                     common factor, and whether the dimension is smaller than their number of parts
    products         the size of a flattened input stays the product of its dimensions
    specs            variables keep the specs of their real sizes: a strategy with a threshold splits no small ones

A model whose sizes divide each other in a long chain stays large by these rules. Then order and divisors stay only
among sizes that meet: in the fields of a layer, in a variable, or in the inputs and what may divide these into windows.
Sizes that do not meet may become equal, and an uneven size may lose divisors that would make it even.

A mesh that is small enough stays the same; otherwise `small_mesh.py` chooses a similar one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.common.config import Config, config_values, target
from praxis_lite.common.trees import NestedDict, leaves_by_path
from praxis_lite.instruments.explain.report import trace_task
from praxis_lite.instruments.verification.small_mesh import MOST_DEVICES, small_mesh
from praxis_lite.layers.attention_spec import FUSED_ATTENTION
from praxis_lite.layers.base.facts import PipelineStages
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.sharding.placement import placed_specs
from praxis_lite.sharding.specs import UNCONSTRAINED, Placement, spec_axes
from praxis_lite.training.state import place_task_variables, state_layout
from praxis_lite.training.task import SingleTask

_SMALL = 12  # Sizes up to this one usually stay as they are.
# Fields that count layers. Two layers test as much as many layers do, unless the mesh splits the stack.
_LAYERS = ('num_layers', 'unroll')
# Fields of decoding that are not sizes of the model. A few steps, or a few slots of a page, are enough for a test.
_DECODING = ('max_decode_steps', 'cache_page_size')
_LONGEST_TURN = 12  # The most layers in a pattern of layers that is repeated.
_FEW = 8
_MOST_WEIGHTS = 3 * 10**7  # A model of more weights is compared in minutes, not in seconds.


class SmallTask(NamedTuple):
  """A small version of a task, for few devices.

  Attributes:
    config: config of the small task.
    inputs, prompts: shapes and dtypes of a batch to train on and of a batch to decode, with rows in dimension 0;
      prompts may be None.
    mesh_sizes: size of each axis of the small mesh.
    real_mesh_sizes: size of each axis of the real mesh.
    placements: for each variable of the model, its spec on the real mesh, and why.
    sizes: maps real sizes to small sizes where they differ.
  """

  config: Config[SingleTask]
  inputs: NestedDict
  prompts: NestedDict | None
  mesh_sizes: dict[str, int]
  real_mesh_sizes: dict[str, int]
  placements: NestedDict
  sizes: dict[int, int]


class _Split(NamedTuple):
  """A split dimension: the mesh axes that split it, and its number of parts on the real mesh and on the small one."""

  size: int
  axes: tuple[str, ...]
  real_parts: int
  small_parts: int


_Meet = Callable[[int, int], bool]  # Whether two sizes of the real model meet.


class _Stages(NamedTuple):
  """The stages of a pipeline: `real` describes the real ones, and `small` is their number in the small task."""

  real: PipelineStages
  small: int
  real_parts: int  # The number of parts into which the real mesh splits the stages.
  small_parts: int

  @property
  def least_layers(self) -> int:
    return self.small * self.real.rounds * self.real.period

  def fit(self, num_layers: int, small: int) -> bool:
    """Whether stages, and their parts, divide `small` layers evenly exactly where they divide `num_layers` evenly."""
    R, period = self.real.rounds, self.real.period  # Layers that are left over after whole patterns are in no stage.
    pairs = (self.real.number, self.small), (self.real_parts, self.small_parts)
    are_even = (((num_layers // period) % (R * n) == 0) == ((small // period) % (R * k) == 0) for n, k in pairs)
    return small % (R * period) == 0 and all(are_even)


def small_task(
  config: Config[SingleTask],
  inputs: NestedDict,
  prompts: NestedDict | None = None,
  *,
  most_devices: int = MOST_DEVICES,
  real_sizes: bool = False,
) -> SmallTask:
  """Returns a small version of a task that computes in float32.

  Args:
    config: config of the task.
    inputs, prompts: shapes and dtypes of a global batch to train on, and of one to decode.
    most_devices: see `small_mesh`.
    real_sizes: keeps the sizes of the model and its inputs, and reduces only the mesh.

  Raises:
    UserError: the task itself, or one of its mappings, is not valid.
  """
  config = to_float32(config)
  task = config.instantiate()
  of_task = task.mesh_sizes()
  mesh = small_mesh(of_task, most_devices)
  real = mesh if math.prod(of_task.values()) == 1 else of_task
  placements = place_task_variables(task, real)
  as_they_are = SmallTask(config, inputs, prompts, mesh, of_task, placements, {})
  splits = _splits(task, placements, inputs, real, mesh)
  if real_sizes:
    return as_they_are

  counts = {n for name, n in _integers(config.model) if name in _LAYERS}
  found = [layer.pipeline_stages() for layer in task.model.descendants()]
  pipelines = [_shrink_stages(stages, real, mesh) for stages in found if stages is not None]
  others = {*_LAYERS, *_DECODING, *(p.real.field for p in pipelines)}
  sizes = {n for name, n in _integers(config.model) if name not in others}
  shapes = [tuple(x.shape[1:]) for x in jax.tree.leaves((inputs, prompts))]
  sizes |= {n for shape in shapes for n in shape}
  stacks = [split for split in splits if split.size in counts]
  first = max((len(getattr(layer, 'first_tpl', ())) for layer in task.model.descendants()), default=0)

  def shrunk(kept: Iterable[int], more: int = 0, meet: _Meet | None = None) -> SmallTask:
    chosen = _small_sizes(sizes, splits, shapes, kept, meet)
    few = {n: first + more + _small_count(n, first, stacks, pipelines) for n in counts}
    layers = {n: n if n in kept else min(n, few[n]) for n in counts}
    by_field = dict.fromkeys(_LAYERS, layers)
    by_field |= {name: {n: min(n, _FEW)} for name, n in _integers(config.model) if name in _DECODING}
    for p in pipelines:
      by_field[p.real.field] = {**by_field.get(p.real.field, {}), p.real.number: p.small}
    model = _change_integers(config.model, lambda name, n: by_field.get(name, chosen).get(n, n))
    changed = {n: k for n, k in chosen.items() if n != k and n in sizes}
    batch, decoded = _replace_sizes(inputs, chosen), prompts and _replace_sizes(prompts, chosen)
    return SmallTask(config.clone(model=model), batch, decoded, mesh, of_task, placements, changed)

  # If layers repeat a pattern, the last repetition may be incomplete; then the small model must have the same rest.
  layers_of_all = _kinds_of_layers(as_they_are)
  more = next((k for k in range(_LONGEST_TURN) if _kinds_of_layers(shrunk((), k)) == layers_of_all), 0)
  tried: list[tuple] = [((), more), *(((n,), more) for n in sorted(sizes, reverse=True) if n > _SMALL)]
  if _num_weights(shrunk((), more)) > _MOST_WEIGHTS:
    tried.insert(0, ((), more, _sizes_that_meet(task, sizes, shapes)))
  return next((small for small in (shrunk(*each) for each in tried) if _is_valid(small)), as_they_are)


def _shrink_stages(stages: PipelineStages, real: Mapping[str, int], mesh: Mapping[str, int]) -> _Stages:
  """Returns the stages of the small task. `mesh` splits them evenly iff `real` splits the real stages evenly."""
  S = stages.number
  parts, few = (math.prod(sizes[axis] for axis in stages.axes) for sizes in (real, mesh))
  small = next((k for k in range(2, S) if (S % parts == 0) == (k % few == 0)), S)
  return _Stages(stages, small, parts, few)


def to_float32(config: Config[SingleTask]) -> Config[SingleTask]:
  """Returns a copy that stores and computes in float32 without fused kernels, because rounding could hide a fault."""

  def new_value(name: str, value: object) -> object:
    return 'dense' if name == 'implementation' and value in FUSED_ATTENTION else value

  return replace_dtypes(_change_fields(config, new_value), jnp.float32)


def replace_dtypes(config: Config[SingleTask], dtype: type) -> Config[SingleTask]:
  """Returns a copy in which `dtype` replaces every smaller float dtype that is set."""
  itemsize = jnp.dtype(dtype).itemsize

  def new_value(name: str, value: object) -> object:
    return dtype if name.endswith('dtype') and _is_smaller_float(value, itemsize) else value

  return _change_fields(config, new_value)


# ---------------------------------------------------------------- sizes


def _small_sizes(
  sizes: set[int], splits: Sequence[_Split], shapes: Sequence[tuple[int, ...]], kept: Iterable[int], meet: _Meet | None
) -> dict[int, int]:
  """Returns a small size for each of `sizes`, chosen in ascending order; without `meet`, all sizes meet."""
  chosen = {1: 1, 2: 2}
  free: set[int] = set()  # Sizes that lost a divisor, because it would make them even; they divide no other size.
  flat = {math.prod(shape): shape for shape in shapes if len(shape) > 1}
  for n in sorted(sizes - {0, 1, 2}):
    of_n = [split for split in splits if split.size == n]
    if n in kept or (n <= _SMALL and all(_fit(n, s.real_parts) == _fit(n, s.small_parts) for s in of_n)):
      chosen[n] = n
    elif n in flat and all(dim in chosen for dim in flat[n]):
      chosen[n] = math.prod(chosen[dim] for dim in flat[n])
    else:
      met = chosen if meet is None else {m: k for m, k in chosen.items() if m <= 2 or meet(m, n)}
      uneven = [s.small_parts for s in of_n if n % s.real_parts and meet]
      divisors = [m for m in met if n % m == 0 and m not in free]
      if any(met[m] % parts == 0 for m in divisors for parts in uneven):
        free.add(n)
        divisors = [m for m in divisors if all(met[m] % parts for parts in uneven)]
      chosen[n] = _small_size(n, met, divisors, of_n)
  return chosen


def _small_size(n: int, chosen: Mapping[int, int], divisors: Sequence[int], splits: Sequence[_Split]) -> int:
  step = math.lcm(*(chosen[m] for m in divisors))
  least = max(_SMALL * (n > _SMALL), *chosen.values()) + 1
  candidates = list(range(-(-least // step) * step, n + (n <= _SMALL), step))[:64]

  def misfits(k: int) -> tuple[int, int, int, int]:
    fits = [(_fit(n, s.real_parts), _fit(k, s.small_parts)) for s in splits]
    uneven = sum(one[0] != other[0] for one, other in fits)
    otherwise = sum(one != other for one, other in fits)
    odd = sum((n // m) % 2 != (k // chosen[m]) % 2 for m in divisors)
    divides = sum(k % small == 0 for m, small in chosen.items() if n % m)
    return uneven, otherwise, odd, divides

  return min(candidates, key=misfits, default=n)


def _sizes_that_meet(task: SingleTask, sizes: set[int], shapes: Sequence[tuple[int, ...]]) -> _Meet:
  """Returns whether two sizes meet: in the fields of a layer, in a variable, or in the inputs.

  Inputs may be divided into windows or chunks, so their sizes also meet those that no variable has.
  """
  fields = (
    [x if isinstance(x, list | tuple) else (x,) for x in vars(layer).values()] for layer in task.model.descendants()
  )
  layers = [{n for values in each for n in values if isinstance(n, int)} for each in fields]
  variables = [set(weight.full_shape) for weight in jax.tree.leaves(task.model.abstract_init())]
  of_inputs = set().union(*shapes) | sizes.difference(*variables)
  groups = [*layers, *variables, of_inputs]
  return lambda m, n: any(m in group and n in group for group in groups)


def _small_count(n: int, first: int, stacks: Sequence[_Split], pipelines: Sequence[_Stages]) -> int:
  """Returns a small number of layers that replaces the `n - first` layers after the first ones.

  Mesh axes and pipeline stages divide the small number evenly iff they divide the real one evenly.
  """
  fits = (
    k
    for k in range(max((2, *(p.least_layers for p in pipelines))), n - first)
    if all((n % s.real_parts == 0) == (k % s.small_parts == 0) for s in stacks if s.size == n)
    and all(p.fit(n - first, k) for p in pipelines)
  )
  return next(fits, n - first)


def _fit(n: int, parts: int) -> tuple[bool, bool, bool]:
  """Returns whether `parts` divides `n`; if not, whether they have a common factor; and whether `n` < `parts`."""
  return n % parts == 0, n % parts != 0 and math.gcd(n, parts) > 1, n < parts


def _splits(
  task: SingleTask, placements: NestedDict, inputs: NestedDict, real: Mapping[str, int], small: Mapping[str, int]
) -> list[_Split]:
  """Returns the splits of all split dimensions of variables, activations and inputs."""
  found: dict[_Split, None] = {}

  def add(shape: Sequence[int], placement: Placement | PartitionSpec | None) -> None:
    spec = placement.spec if isinstance(placement, Placement) else placement
    for size, entry in zip(shape, spec or ()):
      axes = () if entry is UNCONSTRAINED else spec_axes(entry)
      parts = [math.prod(sizes[axis] for axis in axes) for sizes in (real, small)]
      if parts[0] > 1:
        found[_Split(size, axes, *parts)] = None

  placed = leaves_by_path(placements)
  for path, weight in leaves_by_path(task.model.abstract_init()).items():
    add(weight.full_shape, placed[path])
  step = trace_task(task, state_layout(task, abstract_mesh(real), placed_specs(placements)), inputs)
  for constraint in step.constraints:
    if not constraint.manual_axes:
      add(constraint.shape, constraint.placement)
  for x in jax.tree.leaves(inputs):
    add(x.shape[1:], PartitionSpec(*step.task.execution.place_input(x).spec[1:]))
  return list(found)


def _kinds_of_layers(small: SmallTask) -> set[str] | None:
  """Returns the paths of the layers of a small task, with '0' for most numbers; None if it cannot be built.

  Layers of a stack without a scan differ only in their numbers, so they count as one kind. The layers of an incomplete
  last pattern, `rest_0`, `rest_1` and so on, count as different kinds.
  """
  try:
    return {
      re.sub(r'(?<!rest_)(?<!\d)\d+', '0', layer.path_name) for layer in small.config.instantiate().model.descendants()
    }
  except Exception:  # A model may raise any error; see `_is_valid`.
    return None


def _num_weights(small: SmallTask) -> int:
  """Returns the number of weights of a small task; 0 if it cannot be built."""
  try:
    weights = jax.tree.leaves(small.config.instantiate().model.abstract_init())
  except Exception:  # A model may raise any error; see `_is_valid`.
    return 0
  return sum(math.prod(weight.full_shape) for weight in weights)


def _is_valid(small: SmallTask) -> bool:
  """Whether the small task can be built and traced."""
  try:
    task = small.config.instantiate()
    rows = 2 * math.prod(small.mesh_sizes.values()) * task.learner.num_microbatches
    inputs = replace_rows(small.inputs, rows)
    trace_task(task, state_layout(task, abstract_mesh(small.mesh_sizes), placed_specs(small.placements)), inputs)
  except Exception:  # A model may raise any error for sizes that it does not support.
    return False
  return True


def _replace_sizes(batch: NestedDict, sizes: Mapping[int, int]) -> NestedDict:
  """Returns the shapes of a batch. Dimension 0 stays; `sizes` maps sizes of other dimensions to new ones."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((x.shape[0], *(sizes.get(n, n) for n in x.shape[1:])), x.dtype), batch
  )


def replace_rows(inputs: NestedDict, rows: int) -> NestedDict:
  """Returns the shapes of a batch of `rows` rows."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), inputs)


# ---------------------------------------------------------------- fields


def _integers(config: Config) -> list[tuple[str, int]]:
  """Returns (field, integer) for all integers of at least 1 in a config tree."""
  found: list[tuple[str, int]] = []

  def note(name: str, n: int) -> int:
    found.append((name, n))
    return n

  _change_integers(config, note)
  return found


def _change_integers(config: Config, change: Callable[[str, int], int]) -> Config:
  def new_value(name: str, value: object) -> object:
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and value > 0:
      return change(name, int(value))
    return value

  return _change_fields(config, new_value)


def _change_fields(config: Config, change: Callable[[str, object], object]) -> Config:
  """Returns a copy of a config tree with `change` applied to each value, even inside lists, tuples and dicts.

  Fields that layers declare as counts keep their values.
  """

  def new_value(name: str, value: object) -> object:
    if isinstance(value, Config):
      return _change_fields(value, change)
    if isinstance(value, list | tuple) and not hasattr(value, '_fields'):
      return type(value)(new_value(name, entry) for entry in value)
    if isinstance(value, dict):
      return {key: new_value(str(key), entry) for key, entry in value.items()}
    return change(name, value)

  copy, counts = config.clone(), getattr(target(config), 'count_fields', ())
  for name, value in config_values(config).items():
    if name in counts:  # A count does not shrink, because it is not a size.
      continue
    new = new_value(str(name), value) if isinstance(name, str) else value
    if isinstance(name, str) and new is not value:
      setattr(copy, name, new)
  return copy


def _is_smaller_float(value: object, itemsize: int) -> bool:
  if value is None or not isinstance(value, str | type | np.dtype | jnp.bfloat16.__class__):
    return False
  try:
    dtype = jnp.dtype(value)
  except TypeError:
    return False
  return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < itemsize
