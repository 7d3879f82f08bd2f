"""TrainedModel: a model with the variables of a checkpoint, on any mesh, without the optimizer.

The commands `eval` and `decode` use it, and `open_run(...).load()` returns it. Another process may train in the same
directory at the same time.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import numpy as np
from jax.sharding import Mesh

from praxis_lite.checkpoints import Checkpointer, OnDamage, Step, restore_variables
from praxis_lite.common.config import Config, target
from praxis_lite.common.errors import ConfigError, DataError, UserError, did_you_mean
from praxis_lite.common.foreign_text import printable
from praxis_lite.common.processes import is_primary_process
from praxis_lite.common.trees import NestedDict, map_with_path, path_name
from praxis_lite.inputs import ArrayInput, BaseInput, BaseTokenizer
from praxis_lite.inputs.rows import Rows, canonical_rows
from praxis_lite.models import BaseModel, LanguageModel
from praxis_lite.models.decoding import Bucket
from praxis_lite.runs.export import ExportSettings, export_model
from praxis_lite.runs.programs import EvalProgram, TaskOnMesh
from praxis_lite.runs.prompts import (
  check_ids,
  continued_text,
  encode_prompt,
  fit_to_bucket,
  prompt_batch,
  task_with_sampler,
  tokenizer_of,
)
from praxis_lite.runs.records.metrics import HostMetrics
from praxis_lite.runs.records.record import changes_named
from praxis_lite.runs.records.run_config import Datasets, run_keys
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import state_layout
from praxis_lite.training.task import SingleTask

# A batch may be padded to a size that was compiled before if that size is at most this many times larger.
_MOST_PADDING = 8


class RestoreOptions(TypedDict, total=False):
  """Which checkpoint is restored, and where.

  Attributes:
    step: step of the checkpoint, or 'best'; None uses the newest.
    devices: the devices to build the mesh of the task from; None means all devices.
    seed: for models that draw random numbers while they predict or evaluate.
    on_damage: 'previous' uses the checkpoint before if the newest is damaged, and says so on stderr; 'fail' raises.
  """

  step: Step
  devices: Sequence[jax.Device] | None
  seed: int
  on_damage: OnDamage


class SamplerSettings(TypedDict, total=False):
  """The settings of `TrainedModel.decode`; see `task_with_sampler`."""

  max_tokens: int | None
  temperature: float | None
  top_k: int | None
  top_p: float | None
  stop: Sequence[str]
  seed: int | None


class ExportOptions(TypedDict, total=False):
  """The settings of `TrainedModel.export`; see `ExportSettings`."""

  formats: tuple[str, ...]
  batch_size: int | None
  prompt_length: int
  max_tokens: int | None
  platforms: tuple[str, ...]


@dataclasses.dataclass(eq=False, repr=False)
class TrainedModel:
  """A model ready to run.

  It takes batches of any size, of NumPy arrays, and returns NumPy arrays. A program is compiled for the first batch of
  a size; smaller batches are padded to a size that was compiled before.

  Attributes:
    config: the configs that it was built from.
    tasks: its task on its mesh.
    stored_variables: its variables as they are stored on the mesh, padded.
    global_step: step of the checkpoint, on the mesh.
    seed: seed of models that draw random numbers in prediction or evaluation.
  """

  config: ExperimentConfig
  tasks: TaskOnMesh
  stored_variables: NestedDict
  global_step: jax.Array
  seed: int = 0

  def __post_init__(self) -> None:
    self._sizes: dict[str, list[int]] = {}  # The batch sizes that were compiled, by the task and the other dimensions.
    self._tasks_by_sampler: dict[str, TaskOnMesh] = {}
    self._has_noted = False

  # ---------------------------------------------------------------- what it is

  @property
  def step(self) -> int:
    """Number of steps it was trained for."""
    return int(self.global_step)

  @property
  def layer(self) -> BaseModel:
    """The model's layer: `model.layer.apply(model.variables, batch)` is the pure call on one device."""
    return self.tasks.jax_task.model

  @functools.cached_property
  def variables(self) -> NestedDict:
    """The model's variables by path, as NumPy arrays in their true shapes, whatever the mesh."""
    return self.tasks.layout.mdl_vars.to_host(self.stored_variables)

  @functools.cached_property
  def tokenizer(self) -> BaseTokenizer | None:
    """The tokenizer of the first dataset that has one; None if there is none."""
    return tokenizer_of(self.config)

  @functools.cached_property
  def key(self) -> jax.Array:
    """The PRNG key that steps fold with the global step."""
    return run_keys(self.seed, self.tasks.mesh).evaluate

  def __repr__(self) -> str:
    mesh = ' x '.join(f'{name} {size}' for name, size in self.tasks.mesh.shape.items())
    return f'<{type(self.layer).__name__} after {self.step} steps, on mesh {mesh}>'

  # ---------------------------------------------------------------- what it does

  def predict(self, batch: Mapping[str, Any]) -> Any:
    """Returns the model's predictions, `BaseModel.predict`, for a batch.

    Args:
      batch: arrays by name, the batch as dimension 0; arrays that only the loss needs may be missing.

    Raises:
      DataError: the arrays do not form a batch, the model needs an array that is missing, or an id is not in its
        vocabulary.
    """
    return self._run_by_rows(self.tasks, batch, lambda task: task.predict_step).predictions

  def evaluate_examples(self, batch: Mapping[str, Any]) -> Any:
    """Returns the model's per-example outputs in evaluation, such as losses, for a batch with labels."""
    return self._run_by_rows(self.tasks, batch, lambda task: task.eval_step).per_example_out

  def evaluate(self, dataset: str | int | Config | BaseInput | Mapping[str, Any]) -> HostMetrics:
    """Returns the model's metrics, weighted means over a dataset; `task.evaluate.max_batches` limits it.

    Args:
      dataset: the name or number of one of the run's datasets, an input, the config of an input, or the arrays of a
        batch of any size. Training data is read once, in order.

    Raises:
      UserError: there is no such dataset, or the model cannot evaluate it.
    """
    data = self._dataset(dataset)
    Datasets('evaluate', [data]).check([data], self.layer)
    result = EvalProgram(self.tasks, data, self.key).run(self.stored_variables, self.global_step)
    assert result is not None  # Nothing interrupts it.
    return result.metrics

  @overload
  def decode(self, prompts: Sequence[str], **settings: Unpack[SamplerSettings]) -> list[str]: ...
  @overload
  def decode(self, prompts: Sequence[Sequence[int]], **settings: Unpack[SamplerSettings]) -> list[list[int]]: ...
  @overload
  def decode(self, prompts: Mapping[str, Any], **settings: Unpack[SamplerSettings]) -> NestedDict: ...

  def decode(
    self,
    prompts: Sequence[str] | Sequence[Sequence[int]] | Mapping[str, Any],
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[str] = (),
    seed: int | None = None,
  ) -> list[str] | list[list[int]] | NestedDict:
    """Continues prompts, or decodes a batch.

    Args:
      prompts: texts, or lists of tokens, for a language model; or a batch of arrays by name, for any model with a
        `decode`. The same prompt several times gives several samples.
      max_tokens, temperature, top_k, top_p: settings of a language model's `Sampler`; None keeps those of its config.
      stop: texts of one token each that also end a continuation.
      seed: seed of the samples; None uses that of the model.

    Returns:
      The text, or the tokens, that follow each prompt; or the model's decoded outputs, arrays by name.

    Raises:
      UserError: there is no tokenizer or decoder, a setting is not valid, or a prompt is empty or has an id outside of
        the vocabulary of the model.
    """
    key = self.key if seed is None else run_keys(seed, self.tasks.mesh).evaluate
    given = {'max_tokens': max_tokens, 'temperature': temperature, 'top_k': top_k, 'top_p': top_p}
    settings = {name: x for name, x in given.items() if x is not None}
    if isinstance(prompts, Mapping):
      tasks = self._set_sampler(settings, tuple(stop))
      return self._run_by_rows(tasks, prompts, lambda task: task.decode_step, key).decoded
    if isinstance(prompts, str):
      raise UserError(f'decode: expected a list of prompts, got one text; pass [{prompts!r}]')
    tokens = [encode_prompt(self._tokenizer(), p) if isinstance(p, str) else p for p in prompts]
    tasks, batch = self._fit_to_bucket(prompt_batch(tokens), settings, tuple(stop))
    decoded = self._run_by_rows(tasks, batch, lambda task: task.decode_step, key).decoded
    ids = [row[:length].tolist() for row, length in zip(decoded['ids'], decoded['lengths'])]
    if all(isinstance(prompt, str) for prompt in prompts):
      return [continued_text(self._tokenizer(), prompt, row) for prompt, row in zip(tokens, ids)]
    return ids

  def begin_to_compile_decode(self, prompts: Sequence[Sequence[int]]) -> None:
    """Begins to compile, in another thread, what `decode` runs for lists of tokens like these.

    Raises:
      UserError: `decode` would raise it for these prompts.
    """
    tasks, batch = self._fit_to_bucket(prompt_batch(prompts), {}, ())
    self._step_for(tasks, batch, lambda task: task.decode_step)[0].begin_to_compile()

  def export(
    self,
    directory: str | os.PathLike[str],
    what: str = 'forward',
    *,
    batch: Mapping[str, Any] | None = None,
    **settings: Unpack[ExportOptions],
  ) -> Path:
    """Writes the model as programs that run without praxis_lite: serialized StableHLO, and a TensorFlow SavedModel.

    Args:
      directory: does not exist, or is empty; `README.md` and `signature.json` in it say how the programs are called.
      what: 'forward' exports what `predict` returns for a batch; 'decode' exports the prefill and the decode step of a
        language model.
      batch: for 'forward': the inputs of the program, as arrays by name, or their shapes and dtypes, the batch as
        dimension 0. None uses the run's first evaluation dataset, without arrays that the predictions do not depend on.
      **settings: `formats`, `batch_size`, `prompt_length`, `max_tokens` and `platforms` of `ExportSettings`.

    Returns:
      The directory.

    Raises:
      UserError: the directory is not empty, a setting is not valid, or the model cannot be exported.
    """
    about = {'model': type(self.layer).__name__, 'task': self.config.task.name, 'step': self.step}

    def batch_struct() -> Mapping[str, Any]:
      return self.batch_struct() if batch is None else batch

    return export_model(self.layer, self.variables, directory, batch_struct, ExportSettings(what, **settings), about)

  def batch_struct(self) -> dict[str, Any]:
    """Returns the shapes and dtypes of a batch of the run's first evaluation dataset, or of its first dataset.

    Raises:
      UserError: the run has no dataset, or it is not usable.
    """
    datasets = [config.instantiate() for config in self.config.datasets]
    if not datasets:
      raise ConfigError('datasets(): there is no dataset to take the shapes of a batch from; pass batch=')
    return next((data for data in datasets if not data.is_training), datasets[0]).batch_struct()

  # ---------------------------------------------------------------- how

  def _run_by_rows(
    self,
    tasks: TaskOnMesh,
    batch: Mapping[str, Any],
    step_of: Callable[[PartitionedTask], PartitionedStep[Any]],
    key: jax.Array | None = None,
  ) -> Any:
    """Runs a step on a batch of any size; returns the outputs without the rows that pad the batch."""
    step, rows, size = self._step_for(tasks, batch, step_of)
    count = len(rows['weights'])
    out = step(self.stored_variables, self.key if key is None else key, self.global_step, rows)
    return jax.tree.map(lambda x: np.asarray(x)[:count] if x.shape[:1] == (size,) else x, out)

  def _step_for(
    self, tasks: TaskOnMesh, batch: Mapping[str, Any], step_of: Callable[[PartitionedTask], PartitionedStep[Any]]
  ) -> tuple[PartitionedStep[Any], Rows, int]:
    """Returns the step for a batch, the rows of the batch, and the size that the step was compiled for."""
    rows = canonical_rows(batch, 'batch')
    count = len(rows['weights'])
    if not count:
      raise DataError('batch: there are no examples')
    if isinstance(self.layer, LanguageModel):
      check_ids(rows, getattr(self.layer.lm, 'vocab_size', self.layer.vocab_size))
    size = self._compiled_size(tasks, rows, count)
    struct = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), rows)
    return step_of(tasks.taking_batches_of(struct)), rows, size  # The step adds rows of zero weight.

  def _compiled_size(self, tasks: TaskOnMesh, rows: Rows, count: int) -> int:
    """Returns the smallest batch size that was compiled for rows like these and is not much too large, or `count`."""
    kind = map_with_path(lambda path, x: (path_name(path), x.shape[1:], str(x.dtype)), rows)
    sizes = self._sizes.setdefault(f'{id(tasks)} {kind}', [])
    fitting = [size for size in sizes if count <= size <= _MOST_PADDING * count]
    if not fitting:
      sizes.append(count)
    return min(fitting, default=count)

  def _fit_to_bucket(self, batch: Rows, settings: dict[str, Any], stop: tuple[str, ...]) -> tuple[TaskOnMesh, Rows]:
    """Returns the task and the batch for prompts.

    A language model has the same task and shapes for prompts of similar lengths, so that they share compiled programs.
    """
    if not isinstance(self.layer, LanguageModel) or type(self.layer).decode is not LanguageModel.decode:
      return self._set_sampler(settings, stop), batch
    max_tokens: int = settings.get('max_tokens', self.layer.decoder.max_decode_steps)
    if max_tokens < 1:
      raise ConfigError(f'max_tokens: expected at least 1, got {max_tokens}')
    length = int(batch['prompt_lengths'].max())
    self.layer.check_fits(length, max_tokens)
    self._note_short_context(self.layer, length + max_tokens - 1)
    bucket = Bucket.choose(length, max_tokens, self.layer.context)
    sizes = {'max_tokens': bucket.width, 'max_context': bucket.slots}
    return self._set_sampler(settings | sizes, stop), fit_to_bucket(batch, bucket, max_tokens)

  def _set_sampler(self, settings: dict[str, Any], stop: tuple[str, ...]) -> TaskOnMesh:
    """Returns the task with other settings of the sampler, which are part of the compiled program."""
    if not (settings or stop):
      return self.tasks
    name = repr((settings, stop))
    if name not in self._tasks_by_sampler:
      tokenizer = self._tokenizer() if stop else None
      task: SingleTask = task_with_sampler(self.config.task, tokenizer, **settings, stop=stop).instantiate()
      self._tasks_by_sampler[name] = TaskOnMesh(task, self.tasks.mesh, self.tasks.layout)
    return self._tasks_by_sampler[name]

  def _note_short_context(self, model: LanguageModel, most: int) -> None:
    """Prints once that a language model's context is shorter than a prompt and its continuation of `most` tokens."""
    seen = model.context
    if seen is not None and most > seen and not self._has_noted and is_primary_process():
      self._has_noted = True
      print(f'note: the model sees only the last {seen} of up to {most} tokens', file=sys.stderr)

  def _tokenizer(self) -> BaseTokenizer:
    if self.tokenizer is None:
      raise UserError('decode: texts need a dataset with a tokenizer, but there is none; pass lists of tokens')
    return self.tokenizer

  def _dataset(self, dataset: str | int | Config | BaseInput | Mapping[str, Any]) -> BaseInput:
    if isinstance(dataset, Mapping):
      size = len(canonical_rows(dataset, 'evaluate')['weights'])
      return ArrayInput(name='batch', arrays=dict(dataset), batch_size=max(size, 1))
    if isinstance(dataset, str | int):
      dataset = _found(self.config.datasets, dataset)
    if isinstance(dataset, Config):
      hosts = {'num_hosts': jax.process_count(), 'host_index': jax.process_index()}
      dataset = dataset.instantiate(is_training=False, **hosts)
    if not isinstance(dataset, BaseInput):
      raise ConfigError(f'evaluate: expected a dataset, got {type(dataset).__name__}')
    if dataset.num_epochs is None:
      raise ConfigError(f'evaluate: {dataset.label} is endless; set its num_epochs, or pass its config')
    return dataset


def restore_model(
  config: ExperimentConfig,
  job_log_dir: str | os.PathLike[str],
  *,
  step: Step = None,
  devices: Sequence[jax.Device] | None = None,
  seed: int = 0,
  on_damage: OnDamage = 'previous',
  create_mesh: Callable[[SingleTask], Mesh] | None = None,
  use_ema: bool | Literal['evaluate', 'decode'] = 'evaluate',
  check: Callable[[BaseModel], None] = lambda model: None,
  meanwhile: Callable[[TrainedModel], None] = lambda model: None,
) -> TrainedModel:
  """Restores a checkpoint of a run on a mesh.

  Args:
    config: configs of the task and its datasets.
    job_log_dir: the directory of the run.
    step, devices, seed, on_damage: see `RestoreOptions`.
    create_mesh: returns the mesh for the task; None uses the task's own, of `devices`.
    use_ema: whether to use the moving averages, if the learner keeps them; or the section of the task that decides it.
    check: called with the model before anything is restored.
    meanwhile: called before restoring, for example to start compiling. Its argument is the model that is returned
      later, with shapes as variables.

  Raises:
    UserError: there is no checkpoint, or it does not fit the config, or the mesh does not fit the devices.
  """
  checkpointer = Checkpointer(job_log_dir, read_only=True, on_damage=on_damage)
  try:
    checkpointer.existing_step(step)  # Reports mistakes before slow work.
    task: SingleTask = config.task.instantiate()
    mesh = task.create_mesh(devices) if create_mesh is None else create_mesh(task)
    tasks = TaskOnMesh(task, mesh, state_layout(task, mesh, optimizer=False))
    check(task.model)
    shapes = tasks.layout.padded_shapes
    model = TrainedModel(config, tasks, shapes.mdl_vars, shapes.step, seed)
    meanwhile(model)
    ema: bool = getattr(task, use_ema).use_ema if isinstance(use_ema, str) else use_ema
    with changes_named(job_log_dir, config):
      model.stored_variables, model.global_step = restore_variables(
        checkpointer, tasks.layout, use_ema=ema, step=step, weights=task.model.abstract_init()
      )
    for line in checkpointer.notes if is_primary_process() else ():
      print(printable(line), file=sys.stderr)
  finally:
    checkpointer.close()
  return model


def _found(datasets: Sequence[Config], wanted: str | int) -> Config:
  """Returns the dataset with this name or number. The name of its class stands for a missing name."""
  names = [str(getattr(data, 'name', None) or getattr(target(data), '__name__', '')) for data in datasets]
  if isinstance(wanted, str) and names.count(wanted) > 1:
    numbers = [i for i, name in enumerate(names) if name == wanted]
    raise ConfigError(f'evaluate: {len(numbers)} datasets are called {wanted!r}; pass one of their numbers, {numbers}')
  if isinstance(wanted, str) and wanted in names:
    return datasets[names.index(wanted)]
  if isinstance(wanted, int) and -len(names) <= wanted < len(names):
    return datasets[wanted]
  close = did_you_mean(wanted, names) if isinstance(wanted, str) else ''
  raise ConfigError(f'evaluate: there is no dataset {wanted!r}.{close} There are: {", ".join(map(repr, names))}')
