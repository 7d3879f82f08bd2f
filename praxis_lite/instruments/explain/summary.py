"""A short summary of an experiment, from its config and shapes. It reads no data and needs no device."""

from __future__ import annotations

import math
from collections.abc import Sequence

from praxis_lite.common.config import Config, config_values, nested_configs
from praxis_lite.common.figures import format_bytes, number_of
from praxis_lite.common.trees import to_path
from praxis_lite.instruments.explain.explanation import Explanation, format_counts, format_mesh
from praxis_lite.instruments.explain.report import report_of
from praxis_lite.layers.implementations import describe_implementations
from praxis_lite.layers.pipeline import describe_pipelines
from praxis_lite.sharding.batch import padded_rows
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.sharding.xla_flags import describe_flags
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.state import state_layout
from praxis_lite.training.task import SingleTask


def summarize(config: ExperimentConfig) -> str:
  """Returns a summary of an experiment: its model, mesh, bytes on each device, batch, tokens and length of training.

  Raises:
    UserError: the config is not valid, or a mapping does not fit its variable or the mesh.
  """
  task: SingleTask = config.task.instantiate()
  sizes = task.mesh_sizes()
  report = report_of(task, state_layout(task, abstract_mesh(sizes)), None)
  model, num_devices = type(task.model).__name__, math.prod(sizes.values())
  training = next((c for c in config.datasets if config_values(c).get('is_training') is True), None)
  examples = None if training is None else _number(training, 'batch_size')
  tokens = None if training is None else _sequence_length(training)
  rows = [
    ('model', f'{task.name} ({model}): {format_counts(report.variables)}'),
    ('mesh', format_mesh(sizes)),
    ('on each device', _memory(report.variables, report.slots, task.train.offload_optimizer_state)),
    ('batch', _batch(examples, tokens, task.learner.num_microbatches)),
    ('training', _training(task, examples, tokens)),
    *(('', line) for line in _rules(task, report.variables)),
    *(('mup', line) for line in _multipliers(task)),
  ]
  if tokens is not None:
    lines = describe_implementations(task.model, tokens, bool(getattr(task.model, 'packed', False)))
    rows += [('computed by', line) for line in lines]
  parts = task.learner.num_microbatches
  microbatch = None if examples is None else padded_rows(examples, num_devices * parts) // parts
  rows += [('pipeline', line) for line in describe_pipelines(task.model, microbatch)]
  flags = describe_flags(num_devices, task.xla_flags, use_defaults=task.default_xla_flags)
  rows += [('XLA flags', line) for line in flags]
  width = max(len(name) for name, _ in rows)
  return '\n'.join(f'{name:<{width}}  {text}' for name, text in rows if text)


def _memory(variables: Sequence[Explanation], slots: Sequence[Explanation], offloaded: bool) -> str:
  on_each = [sum(e.bytes_per_device for e in rows) for rows in (variables, slots)]
  state = f'{format_bytes(sum(on_each))} of state'
  where = ', the slots in the memory of the host' if offloaded else ''
  return f'{state}: {format_bytes(on_each[0])} of parameters, {format_bytes(on_each[1])} of slots and averages{where}'


def _batch(examples: int | None, tokens: int | None, microbatches: int) -> str:
  if examples is None:
    return ''
  parts = f', in {microbatches} microbatches' if microbatches > 1 else ''
  count = number_of(examples, 'example')
  if tokens is not None:
    count += f' x {number_of(tokens, "token")} = {number_of(examples * tokens, "token")} a step'
  return f'{count}{parts}'


def _training(task: SingleTask, examples: int | None, tokens: int | None) -> str:
  steps, learner = task.train.num_train_steps, task.learner
  length = f' = {number_of(steps * examples * tokens, "token")}' if examples and tokens else ''
  return f'{number_of(steps, "step")}{length}; {learner.describe()}'


def _rules(task: SingleTask, variables: Sequence[Explanation]) -> list[str]:
  """Returns a line for each rule of a `MultiLearner` with the number of variables it trains; [] for other learners."""
  learner, of_rules = task.learner.bind(task.model.abstract_init()), dict[str, list[Explanation]]()
  for e in variables:
    if learner.is_trained(to_path(e.path)) and (how := learner.remark(to_path(e.path))):
      of_rules.setdefault(how, []).append(e)
  return [
    f'{how}: {number_of(len(found), "variable")}, {number_of(sum(math.prod(e.shape) for e in found), "parameter")}'
    for how, found in of_rules.items()
  ]


def _multipliers(task: SingleTask) -> list[str]:
  """Returns a line for each factor with which a `Mup` multiplies a computation.

  The factors with which it multiplies variables are in the parameter table.
  """
  return [
    f'{layer.path_name} multiplies {what} by {factor:.3g}'
    for layer in task.model.descendants()
    for what, factor in layer.growth_multipliers().items()
  ]


def _sequence_length(dataset: Config) -> int | None:
  """Returns the tokens in an example: the dataset's `seq_len`; None if it has none, or several that differ."""
  lengths = {n for c in nested_configs(dataset) if (n := _number(c, 'seq_len')) is not None}
  return lengths.pop() if len(lengths) == 1 else None


def _number(config: Config, field: str) -> int | None:
  value = config_values(config).get(field)
  return value if isinstance(value, int) else None
