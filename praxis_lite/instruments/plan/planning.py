"""plan: predicts memory, time and communication of a task's train step on chips that this machine does not have.

    found = plan(experiment, None, 'h100:8x8')
    found.fits, found.memory.peak, found.step_seconds, found.bottleneck
    print(format_plan(found))

The compiler of the target compiles the step and reports its memory. A cost model reads the compiled program to predict
the time. If the compiler is missing or refuses the step, formulas replace it, and `Plan.mode` and `Plan.notes` say so.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from jax.sharding import AbstractMesh

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import path_name
from praxis_lite.instruments.explain.explanation import Explanation
from praxis_lite.instruments.explain.report import Explained, parameter_table, task_and_inputs, trace_task
from praxis_lite.instruments.plan.activations import explain_compiled
from praxis_lite.instruments.plan.analytic import UNCERTAIN, analytic_cost, analytic_memory, program_for
from praxis_lite.instruments.plan.compilers import (
  CompiledStep,
  CompileError,
  compile_step,
  devices_of,
  flags_of_plan,
  missing_compiler,
  places_of,
  pretend_cudnn_for_plans,
)
from praxis_lite.instruments.plan.cost import Cause, Communication, Cost, cost_of
from praxis_lite.instruments.plan.hlo import CompiledProgram, parse
from praxis_lite.instruments.plan.layer_names import HiddenWork, LayerNames
from praxis_lite.instruments.plan.links import Links
from praxis_lite.instruments.plan.lowered_steps import LoweredStep, LoweredSteps, StepFacts, StepKey
from praxis_lite.instruments.plan.memory import Memory, StateBytes, live_memory, state_bytes
from praxis_lite.instruments.plan.model_work import ModelWork, model_work
from praxis_lite.instruments.plan.slow_operations import find_slow_operations
from praxis_lite.instruments.plan.targets import MEASURED
from praxis_lite.instruments.plan.topology import TimeFactors, Topology, check_mesh, parse_topology, time_factors
from praxis_lite.instruments.plan.why import Why
from praxis_lite.layers.pipeline import describe_pipelines
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.sharding.xla_flags import XlaFlags
from praxis_lite.training.execution import splits_of
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.slow_paths import SlowPath, find_slow_paths
from praxis_lite.training.state import state_layout
from praxis_lite.training.task import SingleTask

_LEAST_SLOW = 0.01  # Slow paths that take less than this share of a step are left out.
_DEFAULT_GPU_FRACTION = 0.75  # The share of a GPU's memory that JAX takes by default.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramPlan:
  """What is planned for a train step as well as for decoding.

  Attributes:
    name: name of the task.
    topology, mesh: the chips, and the size of each mesh axis.
    mode: 'compiled' or 'analytic'.
    memory, cost: memory and cost on each device.
    compile_seconds: time of the compiler; 0 if mode is 'analytic'.
    is_cached: whether an earlier plan compiled the program.
    is_refused: whether the compiler refused the program because it needs more memory than a device has.
    notes: what is uncertain, and why.
    failure: why the compiler did not compile the program; '' if it did, or was not asked to.
  """

  name: str
  topology: Topology
  mesh: Mapping[str, int]
  mode: str
  memory: Memory
  cost: Cost
  compile_seconds: float = 0.0
  is_cached: bool = False
  is_refused: bool = False
  notes: tuple[str, ...] = ()
  failure: str = ''

  @property
  def fits(self) -> bool:
    return self.memory.room >= 0 and not self.is_refused

  @property
  def is_time_known(self) -> bool:
    return not self.cost.unknown_loops

  @property
  def factors(self) -> TimeFactors | None:
    """The range of the ratio of real to planned time, from the errors of earlier plans; None if these are not known."""
    return time_factors(self.topology, self.mode == 'compiled') if self.is_time_known else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(ProgramPlan):
  """Memory, time and communication of a train step.

  Attributes:
    name, topology, mesh, mode, memory, cost, compile_seconds, is_cached, is_refused, notes, failure: see `ProgramPlan`.
    work: the work that the model requires.
    findings: surprises that are not collectives, such as work that several devices repeat.
    slow_paths: operations that take a slow path on the chip, most costly first.
    pipelines: a line about each pipeline, with its bubble.
    weights, activations: the splits of arrays, as in `explain`; for activations also the compiler's split.
  """

  work: ModelWork
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
  def step_seconds(self) -> float:
    """Seconds of a step. If not `is_time_known`, loops of unknown length count once, so the real step takes longer."""
    return self.cost.seconds

  @property
  def seconds_range(self) -> tuple[float, float] | None:
    """The shortest and longest time of a step, by the errors of earlier plans; None if they are not known."""
    factors = self.factors
    return None if factors is None else (factors.least * self.step_seconds, factors.largest * self.step_seconds)

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
    lowered: keeps lowered steps, so that further plans without a compiler need not lower them again; None keeps none.

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
  about = dict(struct), config if isinstance(config, Config) else None, lowered or LoweredSteps()
  return _StepPlanner(jax_task, topology, report, *about).plan(compile, cache, elsewhere)


P = TypeVar('P', bound=ProgramPlan)


@dataclasses.dataclass(eq=False)
class Planner(abc.ABC, Generic[P]):
  """Plans a program of a task on a topology, with the compiler or without it; see `plan` for arguments."""

  task: SingleTask
  topology: Topology
  report: Callable[[str], object]

  def __post_init__(self) -> None:
    self._mesh = self.task.mesh_sizes(self.topology.num_devices)
    self._layers = list(self.task.model.descendants())
    self._names, self._hidden = LayerNames(layer.path for layer in self._layers), HiddenWork(self._layers)

  def plan(self, compile: bool, cache: Path | None, elsewhere: Callable[[], None] | None) -> P:
    """Returns the plan of the compiled program, or, if the compiler is missing or refuses it, of the lowered one."""
    failure, refused = missing_compiler(self.topology) if compile else '', None
    if compile and not failure:
      try:
        return self._plan_compiled(cache, elsewhere)
      except CompileError as error:
        failure, refused = str(error), error
    notes = [f'{failure}; the numbers are analytic' if refused else failure] if failure else []
    found = self._plan_lowered(notes, refused.needs if refused else None)
    return dataclasses.replace(found, failure=failure, is_refused=refused is not None and refused.does_not_fit)

  @abc.abstractmethod
  def _plan_compiled(self, cache: Path | None, elsewhere: Callable[[], None] | None) -> P:
    """Returns the plan of the compiled program. Raises CompileError if the compiler refuses it."""

  @abc.abstractmethod
  def _plan_lowered(self, notes: Sequence[str], needs: int | None) -> P:
    """Returns the plan of the lowered program. `needs` are the bytes that it needs, if a compiler has reported them."""

  def _compile(
    self,
    step: PartitionedStep,
    state: StateBytes,
    cache: Path | None,
    elsewhere: Callable[[], None] | None,
    flags: XlaFlags | None = None,
  ) -> tuple[CompiledStep, CompiledProgram, dict[str, Any]]:
    """Returns the result of `compile_step`, the program in it, and the fields of the plan that follow from them."""
    topology, paths = self.topology, [path_name(layer.path) for layer in self._layers]
    compiled = compile_step(
      step, topology, layers=paths, flags=flags, cache=cache, elsewhere=elsewhere, report=self.report
    )
    program, links = parse(compiled.text), Links(topology, places_of(topology, list(step.mesh.devices.flat)))
    cost = cost_of(program, topology.target, links, mesh=self._mesh, layers=self._names, hidden=self._hidden)
    sizes = compiled.arguments, compiled.outputs, compiled.aliased, compiled.temporaries, compiled.code
    memory = Memory(int(topology.target.device_memory), state, *sizes, *live_memory(program, self._names))
    how = {'mode': 'compiled', 'compile_seconds': compiled.seconds, 'is_cached': compiled.is_cached}
    return compiled, program, how | {'memory': memory, 'cost': cost}


@dataclasses.dataclass(eq=False)
class _StepPlanner(Planner[Plan]):
  """Plans a train step."""

  inputs: dict[str, object]
  config: Config | None
  lowered: LoweredSteps

  def _plan_compiled(self, cache: Path | None, elsewhere: Callable[[], None] | None) -> Plan:
    partitioned = PartitionedTask(self.task, self.inputs, mesh=self.task.create_mesh(devices_of(self.topology)))
    padding, flags = _padding(partitioned), flags_of_plan(partitioned.train_step, self.topology)
    step, program, found = self._compile(partitioned.train_step, state_bytes(partitioned), cache, elsewhere, flags)
    with pretend_cudnn_for_plans():
      layout = state_layout(self.task, self._mesh_alone())
      why = Why(trace_task(self.task, layout, self.inputs), self._names)
    found['cost'] = cost = why.add_causes(found['cost'], program)
    findings = why.find_rematerialized(step.messages)
    findings += why.find_replicated(cost.operations, self.topology.num_devices, self._hidden.paths)
    slow = find_slow_operations(program, cost, self._names, self.topology.target.kind)
    activations = explain_compiled(why.report.activations, program, self._names)
    notes = [*padding, *_notes_of_flags(step.added_flags)]
    return self._make(
      self._facts(partitioned), notes, slow, **found, findings=tuple(findings), activations=tuple(activations)
    )

  def _plan_lowered(self, notes: Sequence[str], needs: int | None) -> Plan:
    self.report('tracing')
    step, target = self.lowered.find(self._key(), self._lower), self.topology.target
    memory = analytic_memory(step.program, needs, step.state, target, self._names)
    cost = analytic_cost(step.program, self._mesh, self.topology, self._names)
    return self._make(step.facts, [*notes, UNCERTAIN, *step.padding], mode='analytic', memory=memory, cost=cost)

  def _key(self) -> StepKey | None:
    if self.config is None:
      return None
    platform, kind = self._devices()
    return StepKey(self.config, self.inputs, self._mesh, platform, kind or platform)

  def _lower(self) -> LoweredStep:
    partitioned = PartitionedTask(self.task, self.inputs, mesh=self._mesh_alone())
    padding = _padding(partitioned)
    program = program_for(partitioned.train_step, self.topology, self._hidden)
    return LoweredStep(program, state_bytes(partitioned), tuple(padding), self._facts(partitioned))

  def _facts(self, partitioned: PartitionedTask) -> StepFacts:
    mesh = dict(partitioned.mesh.shape)
    with pretend_cudnn_for_plans():
      jaxpr = partitioned.train_step.trace().jaxpr
    pipelines = describe_pipelines(self.task.model, partitioned.batch_size)
    weights = parameter_table(self.task, mesh)
    return StepFacts(mesh, jaxpr, model_work(partitioned), tuple(pipelines), tuple(weights))

  def _mesh_alone(self) -> AbstractMesh:
    """Returns the task's mesh as an abstract one, without devices. It names the kind of device, which decides which
    kernels a step uses.
    """
    return abstract_mesh(self._mesh, *self._devices())

  def _devices(self) -> tuple[str, str | None]:
    """Returns the platform of the devices, and, for GPUs, JAX's name of their kind; for others, None."""
    target = self.topology.target
    return target.kind, target.cuda.name if target.cuda else None

  def _make(self, facts: StepFacts, notes: Sequence[str], slow: Sequence[SlowPath] = (), **found: Any) -> Plan:
    """Returns a plan with these fields; `slow` are the slow operations of the compiled program."""
    target, memory, cost = self.topology.target, found['memory'], found['cost']
    notes = [*notes, *doubts(cost), _accuracy(self.topology)]
    if target.kind == 'gpu' and memory.capacity >= memory.peak > _DEFAULT_GPU_FRACTION * memory.capacity:
      notes.append('JAX takes 75 % of a GPU by default; this step needs XLA_PYTHON_CLIENT_MEM_FRACTION=0.92')
    traced = find_slow_paths(facts.jaxpr, self.task.model, target, math.prod(facts.mesh.values()))
    slow = [*(path for path in traced if path.seconds > _LEAST_SLOW * cost.seconds), *slow]
    return Plan(
      name=self.task.name,
      topology=self.topology,
      mesh=facts.mesh,
      work=facts.work,
      notes=tuple(notes),
      slow_paths=tuple(sorted(slow, key=lambda path: -path.seconds)),
      pipelines=facts.pipelines,
      weights=facts.weights,
      **found,
    )


def _accuracy(topology: Topology) -> str:
  """Returns a note that says what the times of a plan are based on: measured runs, measured shares or assumptions."""
  target, runs = topology.target, topology.experience
  if runs:
    number, between = 'a measured run', ''
    if runs.runs > 1:
      number, between = f'{runs.runs} measured runs', f' ({runs.least:.2f} to {runs.largest:.2f})'
    took = f'steps took {runs.typical:.2f} times as long as planned{between}'
    return f'times are corrected by {number} on {target.name}: {took}'
  if target.kind == 'cpu':
    return 'times on cpu are of an imagined machine, and only orders of magnitude'
  if target.efficiency.calibrated:
    return f'times take shares of the published figures that were measured: {target.efficiency.calibrated}'
  shares = f'times take shares of the published figures of {target.name} that'
  if target.name not in MEASURED:
    return f'{shares} are assumed, not measured'
  rest = '; those of links and network are assumed' if topology.num_devices > 1 else ''
  return f'{shares} were measured on one H100{rest}'


def _padding(partitioned: PartitionedTask) -> list[str]:
  """Returns notes about rows that only pad the batch, and about matrices that optimizers distribute over the devices.

  Raises ConfigError if such rows are most of the work.
  """
  jax_task, microbatches = partitioned.jax_task, partitioned.jax_task.learner.num_microbatches
  true, computed = partitioned.batch_size, partitioned.rows_of_microbatch * microbatches
  multiple, share = partitioned.row_parts * microbatches, f'{1 - true / computed:.0%} of the work'
  if computed > 2 * true:
    raise ConfigError(
      f'datasets[*].batch_size: {number_of(true, "row")} are split into {multiple:,} parts, so rows that only fill up '
      f'the batch would be {share}; use at least {number_of(multiple, "row")}, as in --set '
      f"'datasets[*].batch_size={multiple}', or a mesh whose batch axes are smaller"
    )
  filled = (
    f'a batch of {number_of(true, "row")} is filled up to {computed:,} with rows of weight zero, which take as long as '
    f'real ones: {share}; batch_size should be a multiple of {multiple:,}'
  )
  exchanges = jax_task.bind_learner().describe_exchanges(
    splits_of(partitioned.layout, jax_task.partitioning == 'shard_map')
  )
  return [*([filled] if computed > true else []), *exchanges]


def _notes_of_flags(added: Sequence[str]) -> list[str]:
  """Returns notes about `added`, the flags that a plan needs on a machine without a GPU, and a run does not."""
  note = (
    'without a GPU, the compiler refuses the products of this step by Triton, so cuBLAS computes all of them here; the '
    'step of a run may take less time and memory'
  )
  return [note] if 'xla_gpu_enable_triton_gemm' in added else []


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
