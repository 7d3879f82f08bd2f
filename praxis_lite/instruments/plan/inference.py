"""plan_inference: predicts memory and time of decoding on chips that this machine does not have.

    found = plan_inference(experiment.task, 'h100:1x8', Requests(rows=64, prompt_length=2048, max_tokens=256))
    found.fits, found.first_token_seconds, found.token_seconds, found.largest_rows
    print(format_inference(found))

The program reads all prompts at once, and then draws one token at a time for every row. It is planned like a train
step: the compiler of the target compiles it, or formulas replace the compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import format_bytes, format_seconds, number_of
from praxis_lite.instruments.explain.explanation import format_mesh
from praxis_lite.instruments.plan.analytic import UNCERTAIN, analytic_cost, analytic_memory, program_for
from praxis_lite.instruments.plan.compilers import (
  devices_of,
)
from praxis_lite.instruments.plan.cost import Cost
from praxis_lite.instruments.plan.memory import Memory, bytes_on_each, inference_bytes
from praxis_lite.instruments.plan.planning import Planner, ProgramPlan, bottleneck_of, doubts
from praxis_lite.instruments.plan.report import chips_text, format_head, format_range, mode_text, wrap_line
from praxis_lite.instruments.plan.topology import Topology, check_mesh, parse_topology
from praxis_lite.models.base import PromptLimits
from praxis_lite.models.decoding.decoder import continues_prompts
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import state_layout
from praxis_lite.training.task import SingleTask

_ROUNDS, _MOST_ROWS = 3, 1 << 20  # Limits of the search for the largest number of rows.


class Requests(NamedTuple):
  """A batch of prompts of one length, in tokens, which are decoded together."""

  rows: int
  prompt_length: int
  max_tokens: int  # The number of tokens to draw after each prompt.


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferencePlan(ProgramPlan):
  """Memory and time of decoding.

  Attributes:
    name, topology, mesh, mode, memory, cost, compile_seconds, is_cached, is_refused, notes, failure: see `ProgramPlan`.
    requests: the batch of prompts.
    cache_bytes: bytes of the caches of all rows, on all devices together.
    read_bytes: bytes of the weights on a device, in the dtypes in which layers read them.
    largest_rows: about how many rows fit, a multiple of the number of devices; at most 1,048,576.
  """

  requests: Requests
  cache_bytes: int
  read_bytes: int
  largest_rows: int

  @property
  def first_token_seconds(self) -> float:
    """Seconds from the prompts to the first token of every row."""
    return self.cost.seconds - self._seconds_of_later_tokens

  @property
  def token_seconds(self) -> float | None:
    """Seconds for one more token of every row, with nearly full caches; None if each row gets only one token."""
    later = self.requests.max_tokens - 1
    return self._seconds_of_later_tokens / later if later else None

  @property
  def least_token_seconds(self) -> float:
    """Seconds to read weights and caches once, if each device reads its share at the chip's bandwidth."""
    moved = self.read_bytes + self.cache_bytes / self.topology.num_devices
    return moved / self.topology.target.device_bandwidth

  @property
  def tokens_per_second(self) -> float:
    """Drawn tokens per second; the time includes reading the prompts."""
    return self.requests.rows * self.requests.max_tokens / self.cost.seconds

  @property
  def _seconds_of_later_tokens(self) -> float:
    spent = sum(op.count * op.seconds for op in self.cost.operations if op.phase == 'tokens')
    waited = sum(c.count * c.exposed for c in self.cost.collectives if c.phase == 'tokens')
    return spent + waited


def plan_inference(
  task: Config,
  topology: str | Topology,
  requests: Requests,
  *,
  compile: bool = True,
  cache: Path | None = None,
  elsewhere: Callable[[], None] | None = None,
  report: Callable[[str], object] = lambda stage: None,
) -> InferencePlan:
  """Returns the memory and time of decoding on a topology.

  Args:
    task: the config of the task of a language model, whose `decoder_tpl` says how to draw tokens.
    topology, compile, cache, elsewhere, report: see `plan`.
    requests: the batch of prompts.

  Raises:
    ConfigError: the model is not a language model with caches, or `requests` have more tokens than its context.
    ShardingError: the mesh of the task has another number of devices than the topology, or a mapping does not fit it.
  """
  topology = parse_topology(topology) if isinstance(topology, str) else topology
  jax_task, limits = _task_for(task, requests)
  check_mesh(jax_task.mesh_sizes(topology.num_devices), topology)
  return _InferencePlanner(jax_task, topology, report, requests, limits).plan(compile, cache, elsewhere)


def _task_for(task: Config, requests: Requests) -> tuple[SingleTask, PromptLimits]:
  """Returns the task, set to decode these requests, and its limits; raises ConfigError if it cannot decode them."""
  task = task.clone()
  if not continues_prompts(task.model):
    raise ConfigError('task.model: plans of inference are for language models, and this model is not one')
  task.model.decoder_tpl.max_decode_steps = requests.max_tokens
  jax_task = task.instantiate()
  limits = jax_task.model.prompt_limits()
  if limits is None:
    raise ConfigError('task.model: plans of inference are for models with caches, and this one has its own `decode`')
  needed = requests.prompt_length + requests.max_tokens - 1
  if limits.context is not None and needed > limits.context:
    raise ConfigError(
      f'the model sees {number_of(limits.context, "token")} at once, and prompts of '
      f'{number_of(requests.prompt_length, "token")} with {requests.max_tokens:,} after them need {needed:,}; use '
      'shorter ones, or a larger max_seq_len of the model'
    )
  return jax_task, limits


@dataclasses.dataclass(eq=False)
class _InferencePlanner(Planner[InferencePlan]):
  """Plans decoding of `requests`, which `_task_for` has checked."""

  requests: Requests
  limits: PromptLimits

  def _plan_compiled(self, cache: Path | None, elsewhere: Callable[[], None] | None) -> InferencePlan:
    step = self._step(self.task.create_mesh(devices_of(self.topology)), self.requests.rows)
    _, _, found = self._compile(step, inference_bytes(step), cache, elsewhere)
    return self._make([], **found)

  def _plan_lowered(self, notes: Sequence[str], needs: int | None) -> InferencePlan:
    self.report('tracing')
    memory, cost = self._estimate(self.requests.rows, needs)
    return self._make([*notes, UNCERTAIN], mode='analytic', memory=memory, cost=cost)

  def _make(self, notes: Sequence[str], **found: Any) -> InferencePlan:
    rows, length, tokens = self.requests
    return InferencePlan(
      name=self.task.name,
      topology=self.topology,
      mesh=self._mesh,
      requests=self.requests,
      cache_bytes=self.limits.state_bytes(rows, length + tokens - 1),
      read_bytes=self._read_bytes(),
      largest_rows=self._largest_rows(found['memory']),
      notes=(*notes, *doubts(found['cost'])),
      **found,
    )

  def _read_bytes(self) -> int:
    variables = self._step(abstract_mesh(self._mesh, self.topology.target.kind), self.requests.rows).arguments[0]
    read = jax.eval_shape(self.task.model.cast_variables, variables)
    return bytes_on_each(jax.tree.map(lambda x, y: x.update(dtype=y.dtype), variables, read))

  def _largest_rows(self, memory: Memory) -> int:
    """Returns about how many rows fit into memory.

    Estimates for several numbers of rows are corrected by the difference between `memory`, the memory of the plan, and
    the estimate for its number of rows.
    """
    requested, at_once = self.requests.rows, math.prod(self._mesh.values())  # Rows are padded to a multiple of this.
    missing = memory.peak - self._estimate(requested, None)[0].peak
    few = -(-requested // at_once) * at_once
    rows = 2 * few
    for _ in range(_ROUNDS):  # Memory is nearly linear in rows, except for few rows.
      sizes = [self._estimate(number, None)[0].peak + missing for number in (few, rows)]
      each = max((sizes[1] - sizes[0]) / (rows - few), 1)
      largest = int(rows + (memory.capacity - sizes[1]) / each) // at_once * at_once
      few, rows = rows, min(max(largest, 0), _MOST_ROWS)
      if rows in (0, few, _MOST_ROWS):
        break
    return rows

  @functools.cached_property
  def _estimate(self) -> Callable[[int, int | None], tuple[Memory, Cost]]:
    return functools.cache(self._make_estimate)  # The search needs some estimates twice.

  def _make_estimate(self, rows: int, needs: int | None) -> tuple[Memory, Cost]:
    target = self.topology.target
    step = self._step(abstract_mesh(self._mesh, target.kind), rows)
    lowered = program_for(step, self.topology, self._hidden)
    memory = analytic_memory(lowered, needs, inference_bytes(step), target, self._names)
    return memory, analytic_cost(lowered, self._mesh, self.topology, self._names)

  def _step(self, mesh: Mesh | AbstractMesh, rows: int) -> PartitionedStep:
    inputs = {
      'ids': jax.ShapeDtypeStruct((rows, self.requests.prompt_length), jnp.int32),
      'prompt_lengths': jax.ShapeDtypeStruct((rows,), jnp.int32),
    }
    layout = state_layout(self.task, mesh, optimizer=False)
    return PartitionedTask(self.task, inputs, layout=layout).decode_step


def format_inference(plan: InferencePlan, price_per_chip_hour: float | None = None) -> str:
  """Returns a plan as text; with the price of a chip-hour, also the price of a million tokens."""
  (rows, length, tokens), memory, topology = plan.requests, plan.memory, plan.topology
  weights, caches, after = memory.state.parameters, plan.cache_bytes, number_of(tokens, 'token')
  parts = f'{format_bytes(memory.capacity)} on each device: {format_bytes(weights)} of weights, '
  parts += f'{format_bytes(memory.peak - weights)} of caches and temporaries'
  lines = [
    ('model', f'{plan.name}, decoding'),
    ('requests', f'{number_of(rows, "row")}, prompts of {number_of(length, "token")}, {after} after each'),
    ('topology', f'{topology.name}: {chips_text(topology)}'),
    ('mesh', format_mesh(plan.mesh)),
    ('mode', mode_text(plan)),
    ('fits' if plan.fits else 'does not fit', f'{format_bytes(memory.peak)} of {parts}'),
    ('caches', f'{format_bytes(caches)} on all devices together, {format_bytes(caches / rows)} for each row'),
    ('batch', f'about {number_of(plan.largest_rows, "row")} of these lengths fit'),
  ]
  lines += _times(plan) if plan.is_time_known else [('time', 'not known: how often some loops run depends on data')]
  if price_per_chip_hour is not None and plan.is_time_known:
    money = price_per_chip_hour / 3600 * topology.num_chips / plan.tokens_per_second * 1e6
    lines.append(('price', f'{money:,.3g} in money for a million tokens after prompts, with the time for the prompts'))
  notes = '\n'.join(wrap_line(f'note: {note}', 6) for note in plan.notes)
  return '\n\n'.join(filter(None, [format_head(lines), notes]))


def _times(plan: InferencePlan) -> list[tuple[str, str]]:
  first, later, (rows, length, _) = plan.first_token_seconds, plan.token_seconds, plan.requests
  factors = plan.factors

  def range_of(seconds: float) -> str:
    return f', {format_range((factors.least * seconds, factors.largest * seconds))}' if factors else ''

  found = [('first token', f'{format_seconds(first)}{range_of(first)}; it reads {rows * length / first:,.0f} tokens/s')]
  if later is not None:
    each, least = format_seconds(later), format_seconds(plan.least_token_seconds)
    speed = f'{rows / later:,.0f} tokens/s'
    found.append(('next tokens', f'{each} each{range_of(later)}; {speed}. Weights and full caches are read in {least}'))
  return [*found, ('bottleneck', bottleneck_of(plan.cost, plan.topology, 'the time'))]
