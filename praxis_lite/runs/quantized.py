"""quantize_run: makes a new run that has the weights of another run in few bits.

It needs little memory, because it reads and writes a part of a layer's weights at a time: those of some outputs, for
all inputs.

checkpoint -> such a part -> integers and scales -> checkpoint
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil

import jax
import numpy as np

from praxis_lite.checkpoints import Checkpointer, Step
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError, UserError, first_names
from praxis_lite.common.figures import format_bytes
from praxis_lite.common.files import user_path
from praxis_lite.common.processes import is_primary_process
from praxis_lite.common.trees import NestedDict, leaves, path_name, select
from praxis_lite.layers.base import Layer
from praxis_lite.layers.quantized_weights import RoundedWeight, scales_outputs
from praxis_lite.models import quantize_weights
from praxis_lite.models.quantization import stored_weights
from praxis_lite.runs.calibration import SCALES_INPUTS, Calibration, calibrate_weights, describe_uncalibrated
from praxis_lite.runs.quantized_arrays import apply_masks, quantize_streamed
from praxis_lite.runs.records.moved_files import FOLDER
from praxis_lite.runs.records.record import write_record
from praxis_lite.runs.records.run_config import job_directory
from praxis_lite.runs.records.run_inputs import use_kept_vocabulary
from praxis_lite.runs.restoring import restore_model
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.state import TrainState, place_task_variables
from praxis_lite.training.task import SingleTask


def quantize_run(
  config: ExperimentConfig,
  job_log_dir: str | os.PathLike[str],
  out: str | os.PathLike[str],
  *rules: Config,
  step: Step = None,
  calibration: Calibration | None = None,
) -> list[str]:
  """Makes a run directory with the variables of another run, with some weights in few bits; returns lines about it.

  The new run can be evaluated, decoded, exported, and fine-tuned with adapters; its optimizer starts afresh.

  Args:
    out: the directory of the new run, which has no checkpoint yet.
    *rules: configs that say which weights are stored and how, such as `Config(QuantizedWeights, format='int4',
      group_size=64)`. Without rules, weights are stored as they were rounded in training.
    step: the step of the checkpoint; None uses the newest.
    calibration: how the values are chosen by data; None rounds to nearest.

  Raises:
    UserError: a rule is not valid, rules are given although the model of the run has rules already, the checkpoint does
      not exist or has NaN, or `out` cannot be used.
  """
  quantized = dataclasses.replace(config, task=config.task.clone())
  given, rules = rules, rules or _rules_of_training(config.task.model)
  if calibration is not None:
    rules = tuple(_rule_of_method(rule, calibration) for rule in rules)
  elif any(rule.input_range for rule in rules):
    raise ConfigError('QuantizedWeights.input_range: data decides it; pass a Calibration with an input_percentile')
  quantize_weights(quantized.task.model.set(quantized=()), *rules)
  if given and config.task.model.quantized:
    raise ConfigError('task.model.quantized: the run has rules for its weights already; leave out the new ones')
  plain, task = config.task.instantiate(), quantized.task.instantiate()
  mesh = abstract_mesh(task.mesh_sizes())
  place_task_variables(task, mesh)  # Raises an error if the mesh cannot split the new variables.
  source = user_path(job_log_dir)
  plain_shapes = jax.tree.map(lambda weight: weight.as_struct(), plain.model.abstract_init())
  with contextlib.ExitStack() as to_close:
    reader = to_close.enter_context(contextlib.closing(Checkpointer(source, read_only=True)))
    step, calibrated, lines = reader.existing_step(step), None, []
    _check_masks_are_chosen(plain.model, step)
    if calibration is not None:
      calibrated = calibrate_weights(
        restore_model(use_kept_vocabulary(config, source), source, step=step), task.model, calibration
      )
      lines = [line for line in [describe_uncalibrated(task.model, calibrated)] if line]
    streamed = apply_masks(
      plain.model, reader.streamed_variables(plain_shapes, use_ema=plain.evaluate.use_ema, step=step)
    )
    variables = quantize_streamed(task.model, streamed, calibrated)
    directory = to_close.enter_context(job_directory(out))
    writer = to_close.enter_context(contextlib.closing(Checkpointer(directory)))
    if writer.latest_step() is not None:
      raise UserError(f'--out={directory} has checkpoints already; name another directory')
    try:
      state = TrainState(np.asarray(step, np.int32), variables, None, _averages(task, variables))
      writer.save(step, state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state), None)
      writer.wait()
    except CheckpointError as error:
      if isinstance(error.__cause__, UserError):
        raise error.__cause__ from None
      raise
    if is_primary_process():
      if (source / FOLDER).is_dir():
        shutil.copytree(source / FOLDER, directory / FOLDER, dirs_exist_ok=True)
      write_record(directory, quantized, mesh=mesh.shape)
  lines += describe_unquantized(task.model)
  before, after = (sum(x.nbytes for x in leaves(tree).values()) for tree in (streamed, variables))
  return [
    *lines,
    f'{format_bytes(before)} of variables became {format_bytes(after)}',
    f'step {step}: saved in {directory / "checkpoints"}',
  ]


def describe_unquantized(model: Layer) -> list[str]:
  """Returns one line about the matrices of a user's own layers, which no rule can quantize; [] if there are none."""
  own = {layer.path for layer in model.descendants() if not type(layer).__module__.startswith('praxis_lite.')}
  weights = leaves(model.abstract_init())
  scaled = {path for path in weights if (*path[:-1], f'{path[-1]}_quantized_scale') in weights}
  names = [
    path_name(path)
    for path, weight in weights.items()
    if path[:-1] in own and path not in scaled and '_quantized_' not in path[-1] and len(weight.full_shape) > 1
  ]
  if not names:
    return []
  return [
    f'not quantized: {first_names(names)}, which layers of your own declare; the weights of Linear, Projection and '
    'experts can be quantized, also as children of your layers'
  ]


def _rule_of_method(rule: Config, calibration: Calibration) -> Config:
  """Returns a rule adapted to a calibration; raises ConfigError if they do not fit together."""
  method = calibration.method
  if rule.format == 'float' or (method == 'gptq' and rule.kept is not None):
    raise ConfigError(f'method: {method} does not know which weights are kept; round to nearest, or keep all')
  if method == 'smooth' and not scales_outputs(rule):
    raise ConfigError(
      'method: smooth is for integers with one scale for each output, whose inputs may be rounded too; choose int8, '
      'int4 or int2 without a group size and zero points, or choose awq or gptq'
    )
  return rule.clone(input_scale=method in SCALES_INPUTS, input_range=calibration.input_percentile is not None)


def _rules_of_training(model: Config) -> tuple[Config, ...]:
  """Returns rules that store weights in the formats to which training rounded them.

  Raises ConfigError if training did not round weights.
  """
  rules = (model.quantized,) if isinstance(model.quantized, Config) else tuple(model.quantized)
  if not rules or not all(rule.trained for rule in rules):
    raise ConfigError(
      "name a format, as in --format=int4, or in Python a rule, as in Config(QuantizedWeights, format='int4'); it may "
      'be left out only if the rules of the model (task.model.quantized), with which it was '
      'trained, all say trained=True'
    )
  once = {'num_shots': None, 'mask_update_interval': 1, 'target_step': 0}
  return tuple(
    rule.clone(**once, mask_stays=rule.mask_stays or rule.num_shots is not None)
    if rule.format == 'float'
    else rule.clone(**once, trained=False, mask_stays=False)
    for rule in rules
  )


def _check_masks_are_chosen(model: Layer, step: int) -> None:
  """Raises ConfigError if training had not chosen the kept weights of a trained model before this step."""
  for path, layer, stored in stored_weights(model):
    if isinstance(stored, RoundedWeight) and stored.shots is not None and step <= stored.shots.first:
      raise ConfigError(
        f'step {step}: training chooses the kept weights of {layer.path_name}.{path[-1]} in step {stored.shots.first} '
        '(QuantizedWeights.target_step), so this checkpoint keeps all; name a later one'
      )


def _averages(task: SingleTask, variables: NestedDict) -> NestedDict | None:
  """Returns the initial moving averages of a task's learner for these variables; None if it keeps none."""
  shapes = jax.tree.map(lambda weight: weight.as_struct(), task.model.abstract_init())
  averages = jax.eval_shape(task.bind_learner().init_ema, shapes)
  return None if averages is None else select(variables, leaves(averages).__contains__)
