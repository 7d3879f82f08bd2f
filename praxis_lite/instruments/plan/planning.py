"""plan: predicts memory, time and communication of a task's train step on chips that this machine does not have.

    found = plan(experiment, None, 'h100:8x8')
    found.fits, found.memory.peak, found.step_seconds, found.bottleneck
    print(format_plan(found))

The compiler of the target compiles the step and reports its memory. A cost model reads the compiled program to predict
the time. If the compiler is missing or refuses the step, formulas replace it, and `Plan.mode` and `Plan.notes` say so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jax.sharding import AbstractMesh

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import path_name
from praxis_lite.instruments.explain.explanation import Explanation
from praxis_lite.instruments.explain.report import Explained, parameter_table, task_and_inputs, trace_task
from praxis_lite.instruments.plan.activations import explain_compiled
from praxis_lite.instruments.plan.analytic import UNCERTAIN, analytic_cost, analytic_memory, program_for
from praxis_lite.instruments.plan.cause import Cause
from praxis_lite.instruments.plan.compilers import (
  CompileError,
  compile_step,
  devices_of,
  flags_of_plan,
  missing_compiler,
  places_of,
  pretend_cudnn_for_plans,
)
from praxis_lite.instruments.plan.cost import Communication, Cost, cost_of
from praxis_lite.instruments.plan.hlo import parse
from praxis_lite.instruments.plan.layer_names import HiddenWork, LayerNames
from praxis_lite.instruments.plan.links import Links
from praxis_lite.instruments.plan.lowered_steps import LoweredStep, LoweredSteps, StepFacts, StepKey
from praxis_lite.instruments.plan.memory import Memory, live_memory, state_bytes
from praxis_lite.instruments.plan.model_work import ModelWork, model_work
from praxis_lite.instruments.plan.slow_operations import find_slow_operations
from praxis_lite.instruments.plan.targets import MEASURED
from praxis_lite.instruments.plan.topology import Topology, check_mesh, parse_topology
from praxis_lite.instruments.plan.uncertainty import time_factors
from praxis_lite.instruments.plan.why import Why
from praxis_lite.layers.pipeline import describe_pipelines
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.training.execution import splits_of
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.slow_paths import SlowPath, find_slow_paths
from praxis_lite.training.state import state_layout
from praxis_lite.training.task import SingleTask

_LEAST_SLOW = 0.01  # Slow paths that take less than this share of a step are left out.
_DEFAULT_GPU_FRACTION = 0.75  # The share of a GPU's memory that JAX takes by default.


@dataclasses.dataclass(frozen=True)
class Plan:
  """Memory, time and communication of a train step.

  Attributes:
    name: name of the task.
    topology, mesh: the chips, and the size of each mesh axis.
    mode: 'compiled' or 'analytic'.
    memory, cost: memory and cost on each device.
    work: the work that the model requires.
    compile_seconds: time of the compiler; 0 if mode is 'analytic'.
    is_cached: whether an earlier plan compiled the step.
    is_refused: whether the compiler refused the step because it needs more memory than a device has.
    notes: what is uncertain, and why.
    failure: why the compiler did not compile the step; '' if it did, or was not asked to.
    findings: surprises that are not collectives, such as work that several devices repeat.
    slow_paths: operations that take a slow path on the chip, most costly first.
    pipelines: a line about each pipeline, with its bubble.
    weights, activations: the splits of arrays, as in `explain`; for activations also the compiler's split.
  """

  name: str
  topology: Topology
  mesh: Mapping[str, int]
  mode: str
  memory: Memory
  cost: Cost
  work: ModelWork
  compile_seconds: float = 0.0
  is_cached: bool = False
  is_refused: bool = False
  notes: tuple[str, ...] = ()
  failure: str = ''
  findings: tuple[Cause, ...] = ()
  slow_paths: tuple[SlowPath, ...] = ()
  pipelines: tuple[str, ...] = ()
  weights: tuple[Explanation, ...] = ()
  activations: tuple[Explanation, ...] = ()

  @property
  def collectives(self) -> tuple[Communication, ...]:
    """The collectives of a step. Each has a `cause`, and says whether it is `expected`."""
    return self.cost.collectives

  @property
  def fits(self) -> bool:
    return self.memory.room >= 0 and not self.is_refused

  @property
  def step_seconds(self) -> float:
    """Seconds of a step. If not `is_time_known`, loops of unknown length count once, so the real step takes longer."""
    return self.cost.seconds

  @property
  def is_time_known(self) -> bool:
    return not self.cost.unknown_loops

  @property
  def seconds_range(self) -> tuple[float, float] | None:
    """The shortest and longest time of a step, by the errors of earlier plans; None if they are not known."""
    factors = time_factors(self.topology, self.mode == 'compiled')
    if factors is None or not self.is_time_known:
      return None
    return factors.least * self.step_seconds, factors.largest * self.step_seconds

  @property
  def tokens_per_second(self) -> float | None:
    return None if self.work.tokens is None else self.work.tokens / self.cost.seconds

  @property
  def mfu(self) -> float:
    """Model FLOPs utilization: `ModelWork.flops` as a share of what the bfloat16 peak allows in this time."""
    return self._share_of_peak(self.work.flops)

  @property
  def causal_mfu(self) -> float:
    """Model FLOPs utilization with `ModelWork.causal_flops`."""
    return self._share_of_peak(self.work.causal_flops)

  def _share_of_peak(self, flops: float) -> float:
    return flops / (self.cost.seconds * self.topology.target.peak('bf16') * self.topology.num_devices)

  @property
  def bottleneck(self) -> str:
    """What takes most of the time of a step, and in which layer, as text."""
    return bottleneck_of(self.cost, self.topology, 'a step')


def plan(
  task: Explained,
  inputs: Mapping[str, object] | None,
  topology: str | Topology,
  *,
  compile: bool = True,
  cache: Path | None = None,
  elsewhere: Callable[[], None] | None = None,
  report: Callable[[str], object] = lambda stage: None,
  lowered: LoweredSteps | None = None,
) -> Plan:
  """Returns the memory, time and communication of a task's train step on a topology.

  Args:
    task: a task or its config, an experiment class, or the result of `configure` for one.
    inputs: shapes and dtypes of a global batch; None takes those of the experiment's data.
    topology: the chips, such as 'v5p:4x4x4'; see `instruments/plan/topology.py`.
    compile: False uses only formulas, which takes about a second.
    cache: a directory for compiled programs.
    elsewhere: makes another process compile the step into the cache; see `child.py`. None compiles in this process.
    report: called with the name of each stage as it begins: 'tracing', 'compiling'.
    lowered: keeps lowered steps for further plans without a compiler; None keeps none.

  Raises:
    ConfigError: the topology does not exist, or the shapes of a batch are not known.
    ShardingError: the mesh of the task has another number of devices than the topology, or a mapping does not fit it.
  """
  topology = parse_topology(topology) if isinstance(topology, str) else topology
  jax_task, struct = task_and_inputs(task, inputs)
  if struct is None:
    raise ConfigError(
      'plan: the shapes of a batch are known only from its data; pass them as inputs, or set datasets[*].path'
    )
  mesh = jax_task.mesh_sizes(topology.num_devices)
  check_mesh(mesh, topology)
  config: object = task.task if isinstance(task, ExperimentConfig) else task
  planner = _Planner(jax_task, dict(struct), topology, report, config if isinstance(config, Config) else None, lowered)
  missing = missing_compiler(topology) if compile else ''
  if not compile or missing:
    return planner.plan_lowered(missing, [missing] if missing else [])
  try:
    return planner.plan_compiled(cache, elsewhere)
  except CompileError as error:
    return planner.plan_lowered(str(error), [f'{error}; the numbers are analytic'], error)


class _Planner:
  """Plans a task on a topology, with the compiler or without it; see `plan`."""

  def __init__(
    self,
    jax_task: SingleTask,
    inputs: dict[str, object],
    topology: Topology,
    report: Callable[[str], object],
    config: Config | None,
    lowered: LoweredSteps | None,
  ):
    self._task, self._inputs, self._topology, self._report = jax_task, inputs, topology, report
    self._config, self._lowered = config, lowered or LoweredSteps()
    self._mesh = jax_task.mesh_sizes(topology.num_devices)
    self._layers = list(jax_task.model.descendants())
    self._names, self._hidden = LayerNames(layer.path for layer in self._layers), HiddenWork(self._layers)

  def plan_compiled(self, cache: Path | None, elsewhere: Callable[[], None] | None) -> Plan:
    """Returns the plan of the compiled step. Raises CompileError if the compiler refuses the step."""
    topology, names = self._topology, self._names
    mesh = self._task.create_mesh(devices_of(topology))
    partitioned = PartitionedTask(self._task, self._inputs, mesh=mesh)
    padding = [*_padding(partitioned), *_exchanges(partitioned)]
    links = Links(topology, places_of(topology, list(partitioned.mesh.devices.flat)))
    paths = [path_name(layer.path) for layer in self._layers]
    train_step = partitioned.train_step
    flags = flags_of_plan(train_step, topology)
    step = compile_step(
      train_step, topology, layers=paths, flags=flags, cache=cache, elsewhere=elsewhere, report=self._report
    )
    program = parse(step.text)
    cost = cost_of(program, topology.target, links, mesh=self._mesh, layers=names, hidden=self._hidden)
    sizes = step.arguments, step.outputs, step.aliased, step.temporaries, step.code
    capacity, state = int(topology.target.device_memory), state_bytes(partitioned)
    memory = Memory(capacity, state, *sizes, *live_memory(program, names))
    with pretend_cudnn_for_plans():
      layout = state_layout(self._task, self._mesh_alone())
      why = Why(trace_task(self._task, layout, self._inputs), names)
    notes = [*padding, *_notes_of_flags(step.added_flags)]
    found = self._make(self._facts(partitioned), 'compiled', memory, why.add_causes(cost, program), notes)
    findings = why.find_rematerialized(step.messages)
    findings += why.find_replicated(cost.operations, topology.num_devices, self._hidden.paths)
    slow_paths = [*found.slow_paths, *find_slow_operations(program, cost, names, topology.target.kind)]
    return dataclasses.replace(
      found,
      slow_paths=tuple(sorted(slow_paths, key=lambda slow: -slow.seconds)),
      compile_seconds=step.seconds,
      is_cached=step.is_cached,
      findings=tuple(findings),
      activations=tuple(explain_compiled(why.report.activations, program, names)),
    )

  def plan_lowered(self, failure: str, notes: Sequence[str], refused: CompileError | None = None) -> Plan:
    """Returns the plan of the lowered step.

    Args:
      failure, notes: as in `Plan`; why the step was not compiled, and what is uncertain.
      refused: the error of the compiler, which may say how much memory the step needs; None if it did not run.
    """
    topology = self._topology
    self._report('tracing')
    step = self._lowered.find(self._key(), self._lower)
    needs = refused.needs if refused else None
    memory = analytic_memory(step.program, needs, step.state, topology.target, self._names)
    cost = analytic_cost(step.program, self._mesh, topology, self._names)
    found = self._make(step.facts, 'analytic', memory, cost, [*notes, UNCERTAIN, *step.padding])
    return dataclasses.replace(found, failure=failure, is_refused=refused is not None and refused.does_not_fit)

  def _key(self) -> StepKey | None:
    if self._config is None:
      return None
    platform, kind = self._devices()
    return StepKey(self._config, self._inputs, self._mesh, platform, kind or platform)

  def _lower(self) -> LoweredStep:
    partitioned = PartitionedTask(self._task, self._inputs, mesh=self._mesh_alone())
    padding = [*_padding(partitioned), *_exchanges(partitioned)]
    program = program_for(partitioned.train_step, self._topology, self._hidden)
    return LoweredStep(program, state_bytes(partitioned), tuple(padding), self._facts(partitioned))

  def _facts(self, partitioned: PartitionedTask) -> StepFacts:
    mesh = dict(partitioned.mesh.shape)
    with pretend_cudnn_for_plans():
      jaxpr = partitioned.train_step.trace().jaxpr
    return StepFacts(
      mesh,
      jaxpr,
      model_work(partitioned),
      tuple(describe_pipelines(self._task.model, partitioned.batch_size)),
      tuple(parameter_table(self._task, mesh)),
    )

  def _mesh_alone(self) -> AbstractMesh:
    """Returns the mesh without devices. Its kind of device decides which kernels a step uses."""
    return abstract_mesh(self._mesh, *self._devices())

  def _devices(self) -> tuple[str, str | None]:
    """Returns the devices' platform, and JAX's name of their kind for GPUs; None for others."""
    target = self._topology.target
    return target.kind, target.cuda.name if target.cuda else None

  def _make(self, facts: StepFacts, mode: str, memory: Memory, cost: Cost, notes: Sequence[str]) -> Plan:
    target = self._topology.target
    notes = [*notes, *doubts(cost)]
    if runs := self._topology.experience:
      between = f' ({runs.least:.2f} to {runs.largest:.2f})' if runs.runs > 1 else ''
      number = f'{runs.runs} measured runs' if runs.runs > 1 else 'a measured run'
      took = f'steps took {runs.typical:.2f} times as long as planned{between}'
      notes.append(f'times are corrected by {number} on {target.name}: {took}')
    elif target.kind == 'cpu':
      notes.append('times on cpu are of an imagined machine, and only orders of magnitude')
    elif target.efficiency.calibrated:
      notes.append(f'times take shares of the published figures that were measured: {target.efficiency.calibrated}')
    elif target.name in MEASURED:
      rest = '; those of links and network are assumed' if self._topology.num_devices > 1 else ''
      notes.append(f'times take shares of the published figures of {target.name} that were measured on one H100{rest}')
    else:
      notes.append(f'times take shares of the published figures of {target.name} that are assumed, not measured')
    if target.kind == 'gpu' and memory.capacity >= memory.peak > _DEFAULT_GPU_FRACTION * memory.capacity:
      notes.append('JAX takes 75 % of a GPU by default; this step needs XLA_PYTHON_CLIENT_MEM_FRACTION=0.92')
    slow_paths = find_slow_paths(facts.jaxpr, self._task.model, target, math.prod(facts.mesh.values()))
    return Plan(
      self._task.name,
      self._topology,
      facts.mesh,
      mode,
      memory,
      cost,
      facts.work,
      notes=tuple(notes),
      slow_paths=tuple(slow for slow in slow_paths if slow.seconds > _LEAST_SLOW * cost.seconds),
      pipelines=facts.pipelines,
      weights=facts.weights,
    )


def _padding(partitioned: PartitionedTask) -> list[str]:
  """Returns a note if some rows only pad the batch; raises ConfigError if they are most of the work."""
  microbatches = partitioned.jax_task.learner.num_microbatches
  true, computed = partitioned.batch_size, partitioned.rows_of_microbatch * microbatches
  multiple, share = partitioned.row_parts * microbatches, f'{1 - true / computed:.0%} of the work'
  if true == computed:
    return []
  if computed > 2 * true:
    raise ConfigError(
      f'datasets[*].batch_size: {number_of(true, "row")} are split into {multiple:,} parts, so rows that only '
      'fill up the batch '
      f'would be {share}; use at least {number_of(multiple, "row")}, as in --set '
      f"'datasets[*].batch_size={multiple}', or a mesh "
      'whose batch axes are smaller'
    )
  return [
    f'a batch of {number_of(true, "row")} is filled up to {computed:,} with rows of weight zero, which take as '
    'long as real ones: '
    f'{share}; batch_size should be a multiple of {multiple:,}'
  ]


def _exchanges(partitioned: PartitionedTask) -> list[str]:
  """Returns notes about matrices that optimizers distribute over the devices."""
  inside = partitioned.jax_task.partitioning == 'shard_map'
  return partitioned.jax_task.bind_learner().describe_exchanges(splits_of(partitioned.layout, inside))


def _notes_of_flags(added: Sequence[str]) -> list[str]:
  """Returns notes about flags that only this plan needs, because this machine has no GPU."""
  if 'xla_gpu_enable_triton_gemm' not in added:
    return []
  return [
    'without a GPU, the compiler refuses the products of this step by Triton, so cuBLAS computes all of them here; the '
    'step of a run may take less time and memory'
  ]


def doubts(cost: Cost) -> list[str]:
  """Returns notes about known errors of the predicted time."""
  where = ', '.join(dict.fromkeys(cost.unknown_loops))
  if not where:
    return []
  return [
    f'neither the program nor a layer says how often the loops of {where} run; each counts once in the times below the '
    'headlines, and a step takes longer; give the numbers with `expected_trips`'
  ]


def bottleneck_of(cost: Cost, topology: Topology, work: str) -> str:
  """Returns what takes most of the time, and in which layer, as text; `work` is a name such as 'a step'."""
  limits = cost.seconds_by_limit(topology.target)
  limit = max(limits, key=lambda name: limits[name])
  share = limits[limit] / max(cost.seconds, 1e-30)
  if limit == 'communication':
    waits = max(cost.collectives, key=lambda c: c.count * c.exposed)
    over = f'over {"+".join(waits.axes)} ' if waits.axes else ''
    kind = 'the network between hosts' if waits.network_bytes > waits.fast_bytes else 'fast links'
    return (
      f'communication: {share:.0%} of {work} waits for it, most for {waits.kind} {over}in '
      f'{waits.layer or "the update"} ({waits.phase}), on {kind}'
    )
  seconds: dict[str, float] = {}
  for op in cost.operations:
    seconds[op.layer] = seconds.get(op.layer, 0.0) + op.count * op.seconds
  most = max(seconds, key=lambda layer: seconds[layer])
  where = f'; {most} takes {seconds[most] / max(cost.seconds, 1e-30):.0%}' if most else ''
  what = {
    'compute': 'products of matrices',
    'memory': 'reading and writing memory',
    'overhead': 'starting many small operations',
  }[limit]
  return f'{limit}: {share:.0%} of {work} goes to {what}{where}'
