"""The programs of a training run, traced from shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from praxis_lite.common.errors import prefix_errors
from praxis_lite.runs.answers import AnswerSampling
from praxis_lite.runs.improvement import Watched, watched_metrics
from praxis_lite.runs.programs import EvalProgram, InputProgram, TaskOnMesh
from praxis_lite.runs.records.run_inputs import RunInputs
from praxis_lite.runs.sized_steps import SizedSteps
from praxis_lite.runs.task_files import task_file_programs
from praxis_lite.runs.throughput import StartupTimes
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.taps import StepTaps
from praxis_lite.training.task import SingleTask


class RunPrograms(NamedTuple):
  """The programs of a training run. They are free of mistakes that tracing finds.

  Attributes:
    tasks: the task on its mesh.
    partitioned: the task for the batches of the training input.
    steps: the train steps for all sizes of these batches.
    answers: completes these batches with answers of the model; None if they need none.
    evaluation: the programs of the inputs and the task files to evaluate.
    metric_names: the names of the metrics of each of these that are single numbers, by its split.
    watched: the metrics that decide which checkpoint is the best, and when to stop.
  """

  tasks: TaskOnMesh
  partitioned: PartitionedTask
  steps: SizedSteps
  answers: AnswerSampling | None
  evaluation: Sequence[InputProgram]
  metric_names: dict[str, list[str]]
  watched: Watched


def trace_programs(
  jax_task: SingleTask,
  mesh: Mesh,
  inputs: RunInputs,
  key: jax.Array,
  directory: Path | None,
  startup: StartupTimes,
  taps: StepTaps | None = None,
) -> RunPrograms:
  """Traces the train step, and the steps that evaluate and decode inputs.

  Args:
    jax_task, mesh, inputs: the task, its mesh, which needs no devices, and the inputs.
    key: PRNG key on the mesh for all but the train step.
    directory: the run's directory; None for a run without one.
    startup: gets the times of this.
    taps: statistics that the train step reports; None reports none.

  Raises:
    UserError: a step cannot be traced, a task file cannot be used, or the config names a metric that there is not.
  """
  tasks = TaskOnMesh(jax_task, mesh, taps=taps)
  partitioned, steps = tasks.taking(inputs.training), tasks.taking_sizes_of(inputs.training)
  answers = tasks.answering(inputs.training, key, partitioned.train_step)
  startup.mark('build')
  partitioned.train_step.trace()
  if answers is not None:
    answers.trace()
  evaluation: list[InputProgram] = [EvalProgram(tasks, data, key) for data in inputs.evaluation]
  names = {}
  for program in evaluation:
    with prefix_errors(program.split):
      names[program.split] = program.metric_names()
  for data in inputs.decoded_in_training:
    with prefix_errors(f'decode/{data.label}'):
      tasks.taking(data).decode_step.trace()
  startup.mark('trace')
  questions = list(task_file_programs(tasks, inputs.config, directory, list(names)))
  names |= {program.split: program.metric_names() for program in questions}
  watched = watched_metrics(jax_task.train, names)
  return RunPrograms(tasks, partitioned, steps, answers, [*evaluation, *questions], names, watched)
