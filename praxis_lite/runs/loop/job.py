"""Builds and checks what a run trains, where, and on which data, before anything is compiled or saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import jax
from jax.sharding import Mesh

from praxis_lite.common.config.text import to_text
from praxis_lite.common.errors import ConfigError, UserError, did_you_mean, first_lines, prefix_errors
from praxis_lite.runs.answers import AnswerSampling
from praxis_lite.runs.corruption import CorruptionPolicy, check_has_replicas, process_seats
from praxis_lite.runs.determinism import rotate_devices
from praxis_lite.runs.elastic import fit_mesh
from praxis_lite.runs.improvement import Watched, watched_metrics
from praxis_lite.runs.loggers.base import Logger
from praxis_lite.runs.loggers.of_run import build_loggers
from praxis_lite.runs.loop.options import TrainOptions
from praxis_lite.runs.loop.run_description import describe_run
from praxis_lite.runs.programs import DecodeProgram, EvalProgram, InputProgram, TaskOnMesh
from praxis_lite.runs.records.faulty_devices import FAULTY_DEVICES, leave_out_quarantined
from praxis_lite.runs.records.record import recorded_seed
from praxis_lite.runs.records.run_config import RunKeys, check_all_take_part, run_keys
from praxis_lite.runs.records.run_inputs import AllDatasets, RunInputs, build_all, build_run_inputs
from praxis_lite.runs.sized_steps import SizedSteps
from praxis_lite.runs.task_files import task_file_programs
from praxis_lite.runs.throughput import StartupTimes
from praxis_lite.sharding.mesh import abstract_mesh, check_mesh_size
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.taps import StepTaps, step_taps
from praxis_lite.training.task import SingleTask


class RunPrograms(NamedTuple):
  """The programs of a training run, which have been traced without errors.

  Attributes:
    steps: the train steps for all sizes of the batches of the training input.
    answers: completes these batches with answers of the model; None if they have no prompts to answer.
    evaluation: the programs for the inputs and the task files to evaluate.
    metric_names: the names of the scalar metrics of each of these programs, by split.
    elsewhere: the train steps with each device doing the work of another, if asked for by `TrainOptions.other_devices`.
  """

  tasks: TaskOnMesh
  partitioned: PartitionedTask
  steps: SizedSteps
  answers: AnswerSampling | None
  evaluation: Sequence[InputProgram]
  metric_names: dict[str, list[str]]
  watched: Watched
  elsewhere: SizedSteps | None = None


class TrainJob(NamedTuple):
  """What a run trains, where, and on which data.

  Attributes:
    seed, keys: the source of all its random numbers.
    corruption: decides what the run does when devices disagree.
  """

  config: ExperimentConfig
  directory: Path
  options: TrainOptions
  startup: StartupTimes
  seed: int
  keys: RunKeys
  task: SingleTask
  programs: RunPrograms
  decoding: Sequence[DecodeProgram]
  inputs: RunInputs
  corruption: CorruptionPolicy
  loggers: Sequence[Logger]
  lines: Sequence[str]


def build_job(config: ExperimentConfig, directory: Path, options: TrainOptions, startup: StartupTimes) -> TrainJob:
  """Builds the task, its mesh and its inputs, and traces its steps.

  Raises:
    UserError: the config, the options or the data have a mistake. Nothing has been compiled or written.
  """
  # ---- the task, and where it runs
  seed = recorded_seed(directory) if options.seed is None else options.seed
  devices, out = _healthy_devices(directory, options)
  task_p, fit = config.task, ''
  if options.elastic:
    task_p, fit = fit_mesh(config.task, len(jax.devices() if devices is None else devices))
  task = task_p.instantiate()
  if options.debug_nans and task.learner.on_nonfinite == 'ignore':
    raise ConfigError("task.train.learner.on_nonfinite = 'ignore' changes the state that debug_nans looks at")
  loggers = build_loggers(task.train.loggers)
  mesh = task.create_mesh(devices)
  check_all_take_part(mesh)
  keys = run_keys(seed, mesh)
  startup.mark('build')

  # ---- the data
  inputs = build_run_inputs(config, task, directory)
  startup.mark('data')

  # ---- the programs
  taps = step_taps(task, options.tap) if options.tap else None
  programs = _trace_programs(task, mesh, inputs, keys.evaluate, directory, startup, taps)
  if options.other_devices:
    other = TaskOnMesh(task, rotate_devices(mesh), taps=taps)
    programs = programs._replace(elsewhere=other.taking_sizes_of(inputs.training))
  partitioned = programs.partitioned
  if options.check_replicas is not None and not options.elastic:
    check_has_replicas(partitioned.layout)
  most = task.train.max_rollbacks
  left_out = partitioned.taps.left_out if partitioned.taps is not None else ()
  return TrainJob(
    config,
    directory,
    options,
    startup,
    seed,
    keys,
    task,
    programs,
    decoding=[DecodeProgram(programs.tasks, data, keys.evaluate, directory) for data in inputs.decoding],
    inputs=inputs,
    corruption=CorruptionPolicy(directory, options.on_corruption, elastic=options.elastic, most=most),
    loggers=loggers,
    lines=[*describe_run(config, task, partitioned, fit, devices), *out, *left_out],
  )


def _trace_programs(
  jax_task: SingleTask,
  mesh: Mesh,
  inputs: RunInputs,
  key: jax.Array,
  directory: Path | None,
  startup: StartupTimes,
  taps: StepTaps | None = None,
) -> RunPrograms:
  """Traces the train step, and the steps that evaluate and decode inputs; `key` is the PRNG key of these steps.

  The mesh needs no devices. Raises UserError if a step, a task file, or the name of a metric in the config is wrong.
  """
  tasks = TaskOnMesh(jax_task, mesh, taps=taps)
  partitioned, steps = tasks.taking(inputs.training), tasks.taking_sizes_of(inputs.training)
  answers = tasks.answering(inputs.training, key, partitioned.train_step)
  startup.mark('build')
  partitioned.train_step.trace()
  if answers is not None:
    answers.step.trace()
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


def _healthy_devices(directory: Path, options: TrainOptions) -> tuple[Sequence[jax.Device] | None, list[str]]:
  """Returns the devices to train on (None for all), and lines about devices that are left out."""
  if not options.elastic:
    return options.devices, []
  given = jax.devices() if options.devices is None else options.devices
  devices, out = leave_out_quarantined(given, directory, process_seats())
  lines = [f'quarantined, and not used: {", ".join(first_lines(out))}; see {directory / FAULTY_DEVICES}'] if out else []
  return (devices if out else options.devices), lines


def check_configs(
  configs: Mapping[str, ExperimentConfig], num_devices: int | None = None, metric: str | None = None
) -> None:
  """Finds mistakes in the configs of several runs, as `build_job` does for one run, but on meshes without devices.

  Other exceptions from user code are ignored here, because they may depend on the machine of the run.

  Args:
    configs: the configs of each run, by the run's name. Inputs that several runs share are built once.
    num_devices: the number of devices that each run will have, if known.
    metric: the metric for comparing the runs, see `metric_to_compare`; None checks no metric.

  Raises:
    UserError: a run cannot be trained with its config, or none of its evaluations has the metric; the message names the
      run.
  """
  built: dict[str, AllDatasets] = {}
  for name, config in configs.items():
    with prefix_errors(name):
      try:
        task = config.task.instantiate()
        build_loggers(task.train.loggers)
        sizes = task.mesh_sizes(num_devices)
        if num_devices is not None:
          with prefix_errors('task'):
            check_mesh_size(sizes, task.dcn_mesh_shape, num_devices)
        mesh = cast(Mesh, abstract_mesh(sizes))  # The mesh has no devices, because tracing needs none.
        data = to_text({name: group for name, group in config.roots().items() if name != 'task'})
        built[data] = built.get(data) or build_all(config)
        inputs = build_run_inputs(config, task, None, built[data])
        programs = _trace_programs(task, mesh, inputs, jax.random.key(0), None, StartupTimes())
        if metric is not None:
          _check_metric(metric, programs.metric_names)
      except UserError:
        raise
      except Exception:
        continue


def _check_metric(metric: str, splits: Mapping[str, Sequence[str]]) -> None:
  """Raises UserError if no evaluation will report a metric, given by its name or the end of it.

  Names of training and decoding metrics are accepted, because these are known only when they are first computed.
  """
  known = [f'{split}/{name}' for split, names in splits.items() for name in names]
  if not metric.startswith(('train/', 'decode/')) and not any(f'/{name}'.endswith(f'/{metric}') for name in known):
    close = did_you_mean(metric, [*known, *(name for names in splits.values() for name in names)])
    raise UserError(f'--metric={metric}: no run has it.{close} They have {", ".join(known) or "no evaluation"}')
