"""verify: checks that an experiment computes the same on its mesh, with its mappings, as on one device.

A small version of the task (`shrink.py`) runs each of its steps (`steps.py`) on simulated devices and on one device,
from the same values. A wrong sharding shows first in gradients and small batches, and hardly ever in the loss.

To measure how much rounding may change a result, one device runs the step again, from variables that differ by about a
float32 rounding error. If this noise changes a result much, such as Adam's update where the gradient is zero, the mesh
may change it as much.

If the mesh and one device differ, one device also runs the step in float64, to decide which of the two is wrong.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from praxis_lite.common.config import Config
from praxis_lite.common.devices import machine_memory
from praxis_lite.common.errors import ConfigError, DataError, UserError, error_summary, first_line
from praxis_lite.common.figures import format_bytes, number_of
from praxis_lite.common.trees import NestedDict, leaves, leaves_by_path, nest, to_path
from praxis_lite.instruments.explain.explanation import format_mesh
from praxis_lite.instruments.explain.report import subject_of
from praxis_lite.instruments.verification import remedies
from praxis_lite.instruments.verification.differences import find_differences, is_unsteady
from praxis_lite.instruments.verification.shrink import SmallTask, small_task
from praxis_lite.instruments.verification.small_mesh import MOST_DEVICES
from praxis_lite.instruments.verification.steps import (
  Case,
  Name,
  Runner,
  StepKind,
  StepResults,
  decode_inputs,
  disable_dropout,
  keep_gradients,
  results_in_float64,
  task_of,
  values_of_batch,
  values_of_state,
  values_of_variables,
)
from praxis_lite.models.adapters import merge_adapters, names_of_adapters, remove_adapters
from praxis_lite.models.base import BaseModel
from praxis_lite.models.referenced_model import ReferencedModel
from praxis_lite.sharding.batch import batch_size
from praxis_lite.sharding.mesh import create_device_mesh
from praxis_lite.sharding.placement import placed_specs
from praxis_lite.sharding.slots import owner_of
from praxis_lite.sharding.specs import Placement
from praxis_lite.training.execution import ShardMapped
from praxis_lite.training.experiment import BaseExperiment, ExperimentConfig
from praxis_lite.training.learning import Learner
from praxis_lite.training.state import state_layout, train_state_shapes
from praxis_lite.training.task import SingleTask

_NOISE_SEEDS = (1, 2)
# A step that fails on the mesh has no results to compare, and is reported as a `Difference` of this name.
_STEP = 'step'
_NOT_JUDGED = 'not compared with float64'
_MOST_GUARDED = 6  # The largest number of guarded operations that the text names.


@dataclasses.dataclass(frozen=True)
class Difference:
  """A result that differs on the mesh.

  Attributes:
    name: name of the result.
    kind, rows: the kind of step, and the number of rows of its batch.
    error: largest difference of an entry, as a share of the largest entry on one device; infinite if shapes differ or
      an entry is finite in only one of the two.
    placement: how the variable of the result is split, and why; None if the result belongs to no variable.
    remark: what float64 on one device shows, or the error that ended the step on the mesh; '' if there is none.
  """

  name: Name
  kind: StepKind
  rows: int
  error: float
  placement: Placement | None = None
  remark: str = ''

  def __str__(self) -> str:
    if self.name.what == _STEP:
      return f'{self.kind} of {number_of(self.rows, "row")}: {self.remark}'
    if np.isfinite(self.error):
      size = f'off by {self.error:.2g} times its largest entry'
    else:
      size = 'not finite, or of another shape, on only one of the two'
    text = f'{self.name}: {size}, in {self.kind} of {number_of(self.rows, "row")}{self.remark and f"; {self.remark}"}'
    if self.placement is None:
      return text
    return f'{text}\n    split as {tuple(self.placement.spec)!r}: {", ".join(dict.fromkeys(self.placement.why))}'


@dataclasses.dataclass(frozen=True)
class Verification:
  """The findings of `verify`.

  Attributes:
    mesh_sizes: sizes of the mesh axes in the verification.
    real_mesh_sizes: sizes of the mesh axes of the experiment.
    sizes: maps real sizes to the sizes in the verification where they differ.
    compared: the compared steps, with their numbers of rows.
    not_compared: what was not compared, and why.
    guarded: operations, with their layers, that XLA would compute wrongly on the mesh without a guard.
    differences: results that differ from one device and are wrong on the mesh; empty if everything is right.
    not_of_the_mesh: results that differ although the mesh agrees with float64, with the reason for the difference.
    remedy: the smallest change of mappings that makes the results right; '' if nothing differs or none was found.
    seconds: duration of the verification.
  """

  mesh_sizes: dict[str, int]
  real_mesh_sizes: dict[str, int]
  sizes: dict[int, int]
  compared: tuple[str, ...]
  not_compared: tuple[str, ...]
  guarded: tuple[str, ...]
  differences: tuple[Difference, ...]
  not_of_the_mesh: tuple[str, ...]
  remedy: str
  seconds: float

  @property
  def is_right(self) -> bool:
    """Whether all compared results are right."""
    return not self.differences

  def variables(self) -> list[str]:
    """Returns the paths of the variables with wrong gradients, updates or new values."""
    return list(dict.fromkeys(d.name.of for d in self.differences if d.placement is not None and d.name.what != 'slot'))


def verify(
  experiment: Config[SingleTask] | type[BaseExperiment] | ExperimentConfig,
  inputs_struct: Mapping[str, object] | None = None,
  *,
  most_devices: int = MOST_DEVICES,
  full: bool = False,
  quick: bool = False,
  search_seconds: float = 60.0,
  progress: Callable[[str], None] | None = None,
) -> Verification:
  """Compares the steps of a task on its mesh with the same steps on one device, all on simulated CPU devices.

  Args:
    experiment: the config of a task, an experiment class, or the result of `configure` for one.
    inputs_struct: shapes and dtypes of a training batch; by default those of the experiment's data.
    most_devices: a mesh of more devices is reduced; see `small_mesh`. A mesh of one device is verified on several.
    full: keeps the real sizes of the model and its inputs.
    quick: compares only the gradients of one small batch.
    search_seconds: time limit of the search for right mappings if something differs.
    progress: called with a line that says what is verified, and with a line after each compared step.

  Raises:
    UserError: the task or one of its mappings is not valid, the process has too few CPU devices, the machine has too
      little memory, or nothing can be compared.
  """
  start = time.perf_counter()
  config, inputs, prompts = _configure(experiment, inputs_struct)
  small = small_task(config, inputs, prompts, most_devices=most_devices, real_sizes=full)
  if full or not small.sizes:
    _check_memory(small)
  comparison = _Comparison(small, progress or (lambda line: None))
  devices, microbatches = comparison.mesh.size, comparison.task.learner.num_microbatches
  few, many = max(1, devices - 1), 2 * devices * microbatches - bool(batch_size(inputs) % (devices * microbatches))
  comparison.compare_training(few, () if quick else (many,))
  if not quick:
    comparison.compare_inference(few)
    comparison.compare_merged(few)
  if not comparison.compared:
    raise ConfigError(f'task.model: nothing can be compared: {"; ".join(comparison.not_compared)}')
  remedy = ''
  if comparison.failed is not None and search_seconds > 0:
    case, right = comparison.failed
    remedy = remedies.nearest(
      small, case, comparison.mesh, right, [d.name for d in comparison.differences], search_seconds
    )
  texts = tuple(comparison.compared), tuple(comparison.not_compared), tuple(dict.fromkeys(comparison.guarded))
  differences, others = tuple(comparison.differences), tuple(comparison.not_of_the_mesh)
  meshes, seconds = (small.mesh_sizes, small.real_mesh_sizes), time.perf_counter() - start
  return Verification(*meshes, small.sizes, *texts, differences, others, remedy, seconds)


def format_verification(found: Verification) -> str:
  """Returns the findings as text: what was compared, what differs, and the smallest change that makes it right."""
  lines = [_format_sizes(found.real_mesh_sizes, found.mesh_sizes, found.sizes)]
  lines += [f'not compared: {text}' for text in found.not_compared]
  if found.guarded:
    first, more = found.guarded[:_MOST_GUARDED], len(found.guarded) - _MOST_GUARDED
    rest = f'; and {more} more' if more > 0 else ''
    lines.append(f'faults of XLA that praxis_lite works around: {"; ".join(first)}{rest}')
  lines += [f'not of the mesh: {text}' for text in found.not_of_the_mesh]
  lines += [f'wrong: {difference}' for difference in found.differences]
  what = ', '.join(found.compared)
  if found.is_right:
    lines.append(f'equal to one device: {what} ({found.seconds:.1f} s)')
  else:
    lines += [found.remedy] if found.remedy else []
    judged = '' if any(d.remark for d in found.differences) else ', which agrees with float64'
    lines.append(f'{len(found.differences)} results differ from one device{judged}, of: {what} ({found.seconds:.1f} s)')
  return '\n'.join(lines)


def _describe_guarded(op: str, layer: str) -> str:
  """Returns an operation and its layer, such as 'dot_general in lm.softmax', or 'results of the step'."""
  return f'{"results of" if op == "return" else f"{op} in"} {layer or "the step"}'


def _format_sizes(real: Mapping[str, int], mesh: Mapping[str, int], sizes: Mapping[int, int]) -> str:
  """Returns 'mesh data 64 x mdl 4 = 256 devices, replaced by data 4 x mdl 2 = 8 devices; sizes replaced: 128 by 8'."""
  smaller_mesh = '' if mesh == real else f', replaced by {format_mesh(mesh)}'
  smaller = ', '.join(f'{n} by {k}' for n, k in sizes.items())
  return f'mesh {format_mesh(real)}{smaller_mesh}; sizes replaced: {smaller or "none"}'


class _Comparison:
  """Compares steps of a small task on its mesh and on one device, and collects the differences."""

  def __init__(self, small: SmallTask, progress: Callable[[str], None]):
    self.small = small
    self._progress = progress
    progress(_format_sizes(small.real_mesh_sizes, small.mesh_sizes, small.sizes))
    self.mesh = _mesh(small.mesh_sizes)
    self.task = task_of(small.config, StepKind.GRADIENT)
    self.compared: list[str] = []
    self.not_compared: list[str] = []
    self.guarded: list[str] = []
    self.differences: list[Difference] = []
    self.not_of_the_mesh: list[str] = []
    self.failed: tuple[Case, remedies.IsRight] | None = None
    self._one = _mesh(dict.fromkeys(small.mesh_sizes, 1))
    self._variables = values_of_variables(self.task)

  def compare_training(self, few: int, many: Sequence[int]) -> None:
    """Compares gradients for a batch of `few` rows, and for a batch of each number of rows in `many`.

    If they agree, also compares an update for `few` rows. An empty `many` skips the update.
    """
    config = self.small.config
    if self.task.partitioning == 'shard_map' and self._draws(self._case(config, StepKind.GRADIENT, 1)):
      self._compare_equal_draws(few)
      config = disable_dropout(config)
      self.not_compared.append("random draws, which under partitioning='shard_map' differ by device: without dropout")
      if self._draws(self._case(config, StepKind.GRADIENT, 1)):
        self.not_compared.append('training: a layer draws random numbers by other means than Dropout')
        return
    for rows in (few, *many):
      self._compare(self._case(config, StepKind.GRADIENT, rows))
    if many and not any(d.name.what in ('loss', 'gradient') for d in self.differences):  # Or updates differ too.
      self._compare(self._case(config, StepKind.UPDATE, few))

  def compare_inference(self, rows: int) -> None:
    """Compares evaluation, and decoding if the model decodes."""
    self._compare(self._case(self.small.config, StepKind.EVALUATION, rows))
    if type(self.task.model).decode is BaseModel.decode:
      return
    case = self._case(self.small.config, StepKind.DECODING, rows)
    try:
      Runner(case, self._one).trace()
    except Exception as error:  # A model of the user's may reject made-up prompts.
      self.not_compared.append(f'decoding, which made-up inputs do not fit: {first_line(error)}')
      return
    self._compare(case)

  def compare_merged(self, rows: int) -> None:
    """Compares an evaluation with merged adapters, on the mesh, to one with separate adapters, on one device.

    Does nothing if the model has no adapters that can be merged.
    """
    model = self.task.model
    if not model.adapters or names_of_adapters(model):
      return
    if isinstance(model, ReferencedModel):
      self.not_compared.append('merged adapters: without adapters, this model has another reference')
      return
    if any(getattr(layer, 'matmul', 'fprop') != 'fprop' for layer in model.descendants()):
      self.not_compared.append('merged adapters: products round them with the weights')
      return
    config = self.small.config.clone()
    config.model = remove_adapters(config.model)
    config.train.learner = Config(Learner, optimizer=Config(keep_gradients))
    plain = config.instantiate()
    case = self._case(self.small.config, StepKind.EVALUATION, rows)
    state = values_of_state(plain, merge_adapters(model, case.state.mdl_vars))
    merged = case._replace(config=config, task=plain, state=state)
    self._compare(case, note=' with merged adapters', on_mesh=merged)

  def _case(self, config: Config[SingleTask], kind: StepKind, rows: int) -> Case:
    task, inputs = task_of(config, kind), self.small.inputs
    if kind is StepKind.DECODING:
      inputs = self.small.prompts or decode_inputs(inputs)
    return Case(kind, rows, config, task, values_of_state(task, self._variables), values_of_batch(task, inputs, rows))

  def _draws(self, case: Case) -> bool:
    """Whether results differ for another random key, and are equal for the same key."""
    runner = Runner(case, self._one)
    first, again, other = (runner.results(seed=seed) for seed in (0, 0, 1))

    def are_equal(results: StepResults) -> bool:
      return all(np.array_equal(x, results[name], equal_nan=x.dtype.kind == 'f') for name, x in first.items())

    return are_equal(again) and not are_equal(other)

  def _compare_equal_draws(self, rows: int) -> None:
    """Compares a step under `shard_map` with dropout, on a mesh of only the axes that do not split rows.

    Along these axes, all devices must draw the same random numbers.
    """
    case = self._case(self.small.config, StepKind.GRADIENT, rows)
    layout = state_layout(case.task, self.mesh, placed_specs(self.small.placements))
    rows_over = ShardMapped(case.task, layout).batch_axes
    sizes = {axis: 1 if axis in rows_over else size for axis, size in self.small.mesh_sizes.items()}
    if math.prod(sizes.values()) > 1:
      self._compare(case, _mesh(sizes), ' with dropout')

  def _compare(self, case: Case, mesh: Mesh | None = None, note: str = '', on_mesh: Case | None = None) -> None:
    """Compares a step on the mesh with one device. The case `on_mesh`, if given, replaces `case` on the mesh."""
    start = time.perf_counter()
    specs = placed_specs(self.small.placements)
    if on_mesh is not None:  # The task of `on_mesh` has fewer variables, at the same paths.
      by_path = leaves(specs)
      specs = nest({path: by_path[path] for path in leaves(on_mesh.task.model.abstract_init())})
    runner = Runner(on_mesh or case, mesh or self.mesh, specs)
    with ThreadPoolExecutor(2) as pool:  # Compiles both at the same time, because each takes seconds.
      mesh_results = pool.submit(runner.results)
      expected, noise = pool.submit(self._run_on_one_device, case).result()
      failure = mesh_results.exception()
    if not np.isfinite(expected.get(Name('loss', ''), 0.0)).all():
      raise ConfigError(
        f'task.model: on one device too, the loss of {case.rows} made-up rows is not finite, so nothing can be compared'
      )
    self.compared.append(f'{case.kind} of {number_of(case.rows, "row")}{note}')
    gradients = [x for name, x in expected.items() if name.what == 'gradient']
    if gradients and not any(map(np.any, gradients)):
      self.not_compared.append(f'{self.compared[-1]} of made-up inputs: all of them are 0')
    if isinstance(failure, UserError):
      raise failure
    if failure is not None:
      text = f'it runs on one device, and ends on the mesh in {error_summary(failure)}'
      self.differences.append(Difference(Name(_STEP, ''), case.kind, case.rows, math.inf, remark=text))
      return
    found = mesh_results.result()
    self.guarded += [_describe_guarded(guarded.op, guarded.layer) for guarded in runner.guarded]
    different = find_differences(found, expected, noise)
    if different or (case.kind is not StepKind.UPDATE and is_unsteady(expected, noise)):
      verdict = self._judge(case, found, expected, noise, different)
      different = verdict.wrong
      self.differences += [
        Difference(name, case.kind, case.rows, error, self._find_placement(name), verdict.remarks.get(name, ''))
        for name, error in different.items()
      ]
      expected, noise = verdict.expected, verdict.noise
    self._progress(
      f'compared {self.compared[-1]}: {f"{len(different)} results differ" if different else "equal"} '
      f'({time.perf_counter() - start:.1f} s)'
    )
    if different and self.failed is None and mesh is None and on_mesh is None:
      self.failed = case, lambda results: not find_differences(results, expected, noise)

  def _run_on_one_device(self, case: Case) -> tuple[StepResults, list[StepResults]]:
    """Returns the results of one device, and its results from variables with rounding noise.

    Raises:
      UserError: the step fails on one device.
    """
    try:
      runner = Runner(case, self._one)
      return runner.results(), [runner.results(seed) for seed in _NOISE_SEEDS]
    except UserError:
      raise
    except Exception as error:  # A layer or XLA may raise any error.
      raise ConfigError(
        f'task.model: on one device too, {case.kind} of {case.rows} made-up rows end in {error_summary(error)}, so '
        'nothing can be compared'
      ) from error

  def _judge(
    self, case: Case, found: StepResults, expected: StepResults, noise: list[StepResults], different: dict[Name, float]
  ) -> _Verdict:
    """Decides which results of the mesh are wrong: those that differ from the results of one device in float64."""
    undecided = _Verdict(different, dict.fromkeys(different, _NOT_JUDGED), expected, noise)
    if self._draws(case):
      return undecided  # In float64, the step would draw other random numbers, so its results could not be compared.
    try:
      exact, exact_noise = results_in_float64(case, self._one, _NOISE_SEEDS)
    except Exception as error:  # Some layers do not support float64, which says nothing about the mesh.
      self.not_compared.append(
        f'float64 on one device, in {case.kind} of {number_of(case.rows, "row")}: {error_summary(error)}'
      )
      return undecided
    of_mesh, of_one = (find_differences(results, exact, exact_noise) for results in (found, expected))
    for name in different | of_one:
      if name not in of_mesh:
        size = different[name] if name in different else of_one[name]
        reason = f'{"one device is wrong in float32" if name in of_one else "rounding differs"}, by {size:.2g} times'
        text = f'{name} in {case.kind} of {number_of(case.rows, "row")}: {reason} its largest entry'
        self.not_of_the_mesh.append(f'{text}; the mesh agrees with float64')
    remarks = {name: 'float64 on one device agrees with neither' for name in of_mesh if name in of_one}
    return _Verdict(of_mesh, remarks, exact, exact_noise)

  def _find_placement(self, name: Name) -> Placement | None:
    """Returns the placement of the variable that a result belongs to; None if it belongs to no variable."""
    placements = leaves_by_path(self.small.placements)
    owner = None if name.what in _OF_NO_VARIABLE else owner_of(to_path(name.of), placements)
    return None if owner is None else placements[owner]


class _Verdict(NamedTuple):
  """Which results are wrong on the mesh, with their errors, and remarks on them.

  `expected` and `noise` are the results of one device with which the mesh was compared, and those with rounding noise.
  """

  wrong: dict[Name, float]
  remarks: dict[Name, str]
  expected: StepResults
  noise: list[StepResults]


_OF_NO_VARIABLE = ('loss', 'metric', 'output')


# ---------------------------------------------------------------- what is verified


def _configure(
  experiment: Config[SingleTask] | type[BaseExperiment] | ExperimentConfig, inputs: Mapping[str, object] | None
) -> tuple[Config[SingleTask], NestedDict, NestedDict | None]:
  """Returns the config of the task, and the shapes of a training batch and of a batch to decode, if known."""
  named, inputs, prompts = subject_of(experiment, inputs)
  if not isinstance(named, Config):
    raise ConfigError(
      f'verify takes the config of a task, or an experiment, not {type(named).__name__}: sizes are changed in a config'
    )
  if inputs is None:
    raise DataError('the shapes of a training batch are not known without reading the data; pass them to verify')
  weights = jax.ShapeDtypeStruct((batch_size(inputs),), np.float32)
  return named, {'weights': weights, **inputs}, None if prompts is None else dict(prompts)


def _mesh(sizes: Mapping[str, int]) -> Mesh:
  """Returns a mesh of CPU devices, even if the machine has other devices."""
  devices, needed = jax.devices('cpu'), math.prod(sizes.values())
  if needed > len(devices):
    raise ConfigError(
      f'verify needs {needed} CPU devices, and there are {len(devices)}; call '
      f'praxis_lite.simulate_cpu_devices({needed}) before anything that uses a device'
    )
  return create_device_mesh(tuple(sizes.values()), None, tuple(sizes), devices[:needed])


def _check_memory(small: SmallTask) -> None:
  """Raises ConfigError if the machine's memory is too small for the copies of the state that a comparison needs."""
  shapes = jax.tree.leaves(train_state_shapes(small.config.instantiate()))
  state = sum(x.size * x.dtype.itemsize for x in shapes if not jax.numpy.issubdtype(x.dtype, jax.dtypes.extended))
  needed, there = 10 * state, machine_memory()
  if needed > there:
    raise ConfigError(
      f'task.model: verifying {format_bytes(state)} of state takes about {format_bytes(needed)} of memory, and this '
      f'machine has {format_bytes(there)}; leave out --full, or set smaller sizes with --set'
    )
