"""TrainedModel: a model with the variables of a checkpoint, on any mesh, without an optimizer.

The commands `eval` and `decode` use it, and `open_run(...).load()` returns it. Another process may train in the same
directory at the same time.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast, get_type_hints, overload

import jax
import numpy as np

from praxis_lite.common.config import Config, fill_required
from praxis_lite.common.config.values import fit
from praxis_lite.common.errors import ConfigError, DataError, UserError, prefix_errors
from praxis_lite.common.figures import format_axes
from praxis_lite.common.keywords import check_keywords, name_unknown_keywords
from praxis_lite.common.trees import NestedDict, merge
from praxis_lite.inputs import BaseInput, BaseTokenizer
from praxis_lite.inputs.rows import Rows, canonical_rows
from praxis_lite.layers.base.taps import ARRAY
from praxis_lite.models import BaseModel, combine_adapters
from praxis_lite.models.adapters import names_of_adapters
from praxis_lite.models.labels import check_ids_in_tables
from praxis_lite.models.token_checks import check_positions
from praxis_lite.runs.batcher import Batcher, check_setting
from praxis_lite.runs.data_shapes import name_other_shapes
from praxis_lite.runs.decoding_memory import check_memory_of_batch
from praxis_lite.runs.draft_statistics import DraftStatistics
from praxis_lite.runs.evaluated_dataset import find_dataset
from praxis_lite.runs.export import ExportOptions, ExportSettings, export_model
from praxis_lite.runs.programs import EvalProgram, TaskOnMesh
from praxis_lite.runs.prompt_decoder import PromptDecoder
from praxis_lite.runs.prompts import Sampling, check_adapters, check_ids, drafted_task, tokenizer_of
from praxis_lite.runs.records.metrics import HostMetrics
from praxis_lite.runs.records.run_config import run_keys
from praxis_lite.runs.records.run_inputs import Datasets, build_datasets
from praxis_lite.runs.scoring import Score, score_rows
from praxis_lite.training.edits import Edit, Edits
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.taps import StepTaps, Tap, arrays_by_path, finish_summaries

PromptT = TypeVar('PromptT', str, Sequence[int])  # A text, or tokens.


class SamplerSettings(Sampling, total=False):
  """The settings of the sampler, which `TrainedModel.decode` describes."""

  regex: str | None
  json_schema: str | os.PathLike[str] | Mapping[str, Any] | None
  stop: Sequence[str]
  seed: int | None
  stream: Callable[[int, Any], object] | None
  batch_size: int | None
  adapters: str | Sequence[str | None] | None
  draft: TrainedModel | None
  statistics: DraftStatistics | None


@functools.cache
def _hints() -> dict[str, Any]:
  return get_type_hints(SamplerSettings)


@dataclasses.dataclass(eq=False, repr=False)
class TrainedModel:
  """A model ready to run.

  It takes batches of NumPy arrays, of any size, and returns NumPy arrays. A program is compiled for a new batch size,
  unless the batch can be padded to a size that is already compiled and not much larger.

  Attributes:
    config: the configs from which it was built.
    tasks: its task on its mesh.
    stored_variables: its variables as stored on the mesh, padded.
    global_step: the step of the checkpoint, on the mesh.
    seed: the seed for models that draw random numbers in predictions or evaluations.
    directory: the directory of its run; None without one.
  """

  config: ExperimentConfig
  tasks: TaskOnMesh
  stored_variables: NestedDict
  global_step: jax.Array
  seed: int = 0
  directory: str | os.PathLike[str] | None = None

  def __post_init__(self) -> None:
    self._tapped: dict[tuple[str, ...], TaskOnMesh] = {}
    # The last draft model, and this model combined with it.
    self._drafted: tuple[TrainedModel, TrainedModel] | None = None
    self._prompts = PromptDecoder(self.config.task, self.tasks, lambda: self.tokenizer, self._decode_rows)

  # ---------------------------------------------------------------- what it is

  @property
  def step(self) -> int:
    """The number of steps for which the model was trained."""
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
    """The tokenizer of the first dataset that has one, or else of an imported checkpoint; None without either."""
    return tokenizer_of(self.config, self.directory)

  @functools.cached_property
  def key(self) -> jax.Array:
    """The PRNG key that steps fold with the global step."""
    return run_keys(self.seed, self.tasks.mesh).evaluate

  def __repr__(self) -> str:
    mesh = format_axes(self.tasks.mesh.shape)
    return f'<{type(self.layer).__name__} after {self.step} steps, on mesh {mesh}>'

  def attach_adapters(self, adapters: Mapping[str, tuple[Config, NestedDict]]) -> TrainedModel:
    """Returns a model with the same variables and several adapters; each row chooses one of them, or none.

    Rows name their adapters in `decode`, `score` and `Batcher.submit`; for `predict` and `evaluate_examples`, a batch
    has `adapters`, [B] integers: the index of each row's adapter in the order given here, -1 for none.

    Args:
      adapters: adapters by name, such as results of `read_adapter`; see `praxis_lite.models.combine_adapters`.

    Raises:
      ConfigError: the model already has adapters, or these cannot be combined.
    """
    own = self.config.task.model
    if own.adapters:
      raise ConfigError('attach_adapters: the model has adapters already; merge them, or start from the model without')
    config = dataclasses.replace(self.config, task=self.config.task.clone())
    config.task.model, variables = combine_adapters(own, adapters)
    tasks = TaskOnMesh.make_for_inference(config.task.instantiate(), self.tasks.mesh)
    stored = merge(self.stored_variables, tasks.layout.mdl_vars.to_mesh(variables))
    return TrainedModel(config, tasks, stored, self.global_step, self.seed, self.directory)

  # ---------------------------------------------------------------- what it does

  def predict(self, batch: Mapping[str, Any]) -> Any:
    """Returns the model's predictions for a batch; see `BaseModel.predict`.

    Args:
      batch: arrays by name, with the batch as dimension 0; arrays that only the loss needs may be missing.

    Raises:
      DataError: the arrays do not form a batch, or have shapes that the model cannot compute; the model needs an array
        that is missing; or an id is not in its vocabulary.
    """
    with name_other_shapes(batch, self.batch_struct):
      return self._run_by_rows(self.tasks, batch, lambda task: task.predict_step).predictions

  def evaluate_examples(self, batch: Mapping[str, Any]) -> Any:
    """Returns the model's per-example outputs in evaluation, such as losses, for a batch with labels."""
    with name_other_shapes(batch, self.batch_struct):
      return self._run_by_rows(self.tasks, batch, lambda task: task.eval_step).per_example_out

  def evaluate(self, dataset: str | int | Config | BaseInput | Mapping[str, Any]) -> HostMetrics:
    """Returns the model's metrics, as weighted means over a dataset; `task.evaluate.max_batches` limits its batches.

    Args:
      dataset: the name or number of one of the run's datasets, an input, the config of an input, or the arrays of a
        batch of any size. Training data is read once, in order.

    Raises:
      UserError: there is no such dataset, or the model cannot evaluate it.
    """
    data = find_dataset(self.config.datasets, dataset)
    Datasets('evaluate', [data]).check([data], self.layer)
    result = EvalProgram(self.tasks, data, self.key).run(self.stored_variables, self.global_step)
    assert result is not None  # `run` returns None only if it is interrupted.
    return result.metrics

  @name_unknown_keywords
  def score(
    self,
    contexts: Sequence[PromptT],
    continuations: Sequence[PromptT],
    *,
    batch_size: int = 8,
    adapters: str | Sequence[str | None] | None = None,
  ) -> list[Score]:
    """Returns how probable a language model finds each continuation of its context.

    Args:
      contexts: texts, or lists of tokens. An empty context stands for the beginning of a document. If the model has a
        limited number of positions, a context that is too long is cut at its beginning.
      continuations: a text, or a list of tokens, for each context; it may be empty.
      batch_size: the largest number of rows computed at a time.
      adapters: the name of the adapter of each pair, None for none, or one name for all; see `attach_adapters`.

    Raises:
      UserError: the model is not a language model, there is no tokenizer for texts, a context is empty and there is no
        token that begins a document, a continuation is longer than the model's context, or an id is not in its
        vocabulary.
    """
    if (limits := self.layer.score_limits()) is None:
      raise ConfigError(f'score: needs a language model; this model is a {type(self.layer).__name__}')

    def run(batch: Rows) -> Any:
      return self._run_by_rows(self.tasks, batch, lambda task: task.score_step).predictions

    names = names_of_adapters(self.layer)
    return score_rows(limits, lambda: self.tokenizer, contexts, continuations, batch_size, run, adapters, names)

  @overload
  def decode(self, prompts: Sequence[str], **settings: Unpack[SamplerSettings]) -> list[str]: ...
  @overload
  def decode(self, prompts: Sequence[Sequence[int]], **settings: Unpack[SamplerSettings]) -> list[list[int]]: ...
  @overload
  def decode(self, prompts: Mapping[str, Any], **settings: Unpack[SamplerSettings]) -> NestedDict: ...

  @functools.partial(name_unknown_keywords, settings=dict.fromkeys(SamplerSettings.__annotations__) | {'stop': ()})
  def decode(
    self, prompts: Sequence[str] | Sequence[Sequence[int]] | Mapping[str, Any], **settings: Unpack[SamplerSettings]
  ) -> list[str] | list[list[int]] | NestedDict:
    """Continues prompts, or decodes a batch.

    Args:
      prompts: texts, or lists of tokens, for a language model; or a batch of arrays by name, for any model with a
        `decode`. A prompt that is given several times gets several samples.
      max_tokens, min_tokens: the largest and smallest number of tokens after a prompt; None keeps the config's values.
      temperature, top_k, top_p, min_p, typical_p, top_n_sigma: settings of a language model's `Sampler`; None keeps the
        config's values.
      repetition_penalty, no_repeat_ngram_size, presence_penalty, frequency_penalty: further settings of the `Sampler`.
      logit_processors: functions that change the logits, see `Sampler`.
      beam_size, num_best, length_penalty, early_stopping: settings of its `BeamSearch`. `beam_size` replaces a sampler
        by a beam search, without the settings that only matter for drawing tokens.
      lookup, draft_tokens: settings of its `SpeculativeSampler`; either of them replaces a sampler by one.
      draft: a smaller model with the same vocabulary, which guesses tokens instead of `lookup`.
      statistics: counts the guesses, and how many of them were right.
      regex: a regular expression that a continuation matches as a whole; see `regex_constraint`.
      json_schema: a JSON schema, or its path; a continuation is JSON of this schema, see `json_constraint`. If
        `max_tokens` ends a continuation, it is only the beginning of such JSON.
      stop: texts that also end a continuation, which then includes the stop text at its end. A stop text may consist of
        several tokens, or of a part of a token. If tokens are returned, the last one may contain text after the stop
        text.
      seed: the seed of the samples; None uses the seed of the model.
      stream: called with the number of a prompt and its new text, or new tokens, as soon as there are some. Joined, the
        pieces of a prompt equal its result.
      batch_size: continue this many prompts at a time; None continues all at once. The samples are the same.
      adapters: the name of the adapter of each prompt, None for none, or one name for all; see `attach_adapters`.

    Returns:
      For prompts, the text, or the tokens, that follow each prompt. With `num_best` = N, the first N entries continue
      the first prompt, the best first, the next N entries the second prompt, and so on. For a batch, the model's
      decoded outputs, which are arrays by name.

    Raises:
      UserError: there is no tokenizer or decoder, a setting is not valid, or a prompt is empty or has an id outside of
        the vocabulary of the model.
    """
    sampling: Any = {name: settings.get(name) for name in Sampling.__annotations__}
    for name in (*sampling, 'seed', 'stream', 'batch_size'):
      with prefix_errors(f'decode: {name}'):
        fit(settings.get(name), _hints()[name], None)
    if (constraint := self._prompts.find_constraint(settings.get('regex'), settings.get('json_schema'))) is not None:
      sampling['logit_processors'] = (*(sampling['logit_processors'] or ()), constraint)
    seed, draft, statistics = settings.get('seed'), settings.get('draft'), settings.get('statistics')
    key = self.key if seed is None else run_keys(seed, self.tasks.mesh).evaluate
    model = self if draft is None else self._add_draft(draft, settings)
    stop, others = settings.get('stop', ()), {name: settings.get(name) for name in ('stream', 'batch_size', 'adapters')}
    if not isinstance(prompts, Mapping):
      others = {**others, 'stop': stop, 'statistics': statistics}
      return model._prompts.decode(prompts, sampling, key, **cast(Any, others))
    if stop or any(value is not None for value in others.values()):
      raise ConfigError('decode: stop, stream, batch_size and adapters need prompts, but this is a batch of arrays')
    tasks = model._prompts.set_sampler(sampling)
    check_memory_of_batch(tasks.jax_task.model, tasks.mesh, prompts)
    decoded = model._decode_rows(tasks, prompts, key)
    if statistics is not None:
      statistics.add(decoded)
    return decoded

  def batcher(
    self,
    *,
    rows: int = 8,
    max_length: int | None = None,
    tokens_per_step: int = 8,
    chunk: int | None = None,
    chunks_per_step: int = 8,
    reuse_prefixes: bool = True,
    kept_prefixes: int = 0,
    top_log_probs: int = 0,
    **settings: Unpack[Sampling],
  ) -> Batcher:
    """Returns a batcher, which continues prompts that come and go; see `Batcher.submit`.

    Args:
      rows: how many requests run at the same time.
      max_length: the largest number of tokens in a prompt and its continuation, not counting the last token. Each row
        has caches for this many tokens. None means 1024, or fewer if the model sees fewer at once. For an
        encoder-decoder, it is the largest number of tokens in a source, and in its text.
      tokens_per_step: how many tokens a step adds to each row before the host reads them.
      chunk: how many tokens of a prompt are read at once; None chooses. A source is read as a whole.
      chunks_per_step: how many chunks a step reads at most, so that rows do not wait long for a long prompt.
      reuse_prefixes: whether a prompt copies the caches of a common prefix from another row.
      kept_prefixes: how many copies of rows are kept after other requests have taken the rows, for later prompts with
        the same prefix. Each needs as much memory as a row; the least recently used one is replaced.
      top_log_probs: how many of the most probable tokens `Request.top` has for each token.
      **settings: settings of the `Sampler` for all requests, see `decode`. Requests may override `max_tokens`,
        `temperature` and `top_p`.

    Raises:
      UserError: the model is neither a language model nor an encoder-decoder, it sees fewer than `max_length` tokens,
        the caches do not fit into memory, or a setting is not valid.
    """
    self._check_unedited('batcher')
    for name, value in settings.items():
      check_setting(name, of_decode=_hints())
      with prefix_errors(f'batcher: {name}'):
        fit(value, _hints()[name], None)
    tasks = self._prompts.set_sampler(settings)
    return Batcher(
      tasks,
      self.stored_variables,
      self.global_step,
      self.key,
      lambda: self.tokenizer,
      rows=rows,
      max_length=max_length,
      tokens_per_step=tokens_per_step,
      chunk=chunk,
      chunks_per_step=chunks_per_step,
      reuse_prefixes=reuse_prefixes,
      kept_prefixes=kept_prefixes,
      top_log_probs=top_log_probs,
    )

  def begin_to_compile_decode(
    self,
    prompts: Sequence[Sequence[int]],
    *,
    stop: Sequence[str] = (),
    in_segments: bool = False,
    batch_size: int | None,
  ) -> None:
    """Begins to compile, in another thread, the program that `decode` would run for lists of tokens like these.

    Args:
      prompts, stop, batch_size: the arguments of `decode`.
      in_segments: whether `decode` will stream.

    Raises:
      UserError: `decode` would raise this error for these prompts.
    """
    tasks, batch = self._prompts.first_batch(prompts, stop, in_segments, batch_size)
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
      directory: a directory that does not exist or is empty; its `README.md` and `signature.json` will say how to call
        the programs.
      what: 'forward' exports `predict`; 'decode' exports the prefill and the decode step of a language model.
      batch: for 'forward', the inputs of the program, as arrays by name, or their shapes and dtypes, with the batch as
        dimension 0. None uses the arrays of the run's first evaluation dataset on which the predictions depend.
      **settings: `formats`, `batch_size`, `prompt_length`, `max_tokens` and `platforms` of `ExportSettings`.

    Returns:
      The directory.

    Raises:
      UserError: the directory is not empty, a setting is not valid, or the model cannot be exported.
    """
    self._check_unedited('export')
    check_keywords('export', settings, [*inspect.signature(ExportSettings).parameters, 'directory', 'batch'])
    about = {'model': type(self.layer).__name__, 'task': self.config.task.name, 'step': self.step}

    def batch_struct() -> Mapping[str, Any]:
      return self.batch_struct() if batch is None else batch

    return export_model(self.layer, self.variables, directory, batch_struct, ExportSettings(what, **settings), about)

  def batch_struct(self) -> dict[str, Any]:
    """Returns the shapes and dtypes of a batch of the run's first evaluation dataset, or of its first dataset.

    If they do not depend on the data, the paths of the data may be missing, as in an imported run.

    Raises:
      UserError: the run has no dataset, or the dataset cannot be used.
    """
    if not self.config.datasets:
      raise ConfigError('datasets(): there is no dataset to take the shapes of a batch from; pass batch=')
    try:
      datasets = [fill_required(config).instantiate() for config in self.config.datasets]
      return next((data for data in datasets if not data.is_training), datasets[0]).batch_struct()
    except (UserError, OSError):
      build_datasets(self.config.datasets)  # Raises an error that names the missing field of the dataset.
      raise

  # ---------------------------------------------------------------- inside

  def tap(self, batch: Mapping[str, Any], *taps: str) -> dict[str, np.ndarray]:
    """Returns values between layers in a prediction, or statistics of them, by path.

    If a tap is a gradient, the loss of the batch is computed instead of a prediction, as in `evaluate`.

    Args:
      batch: see `predict`; if gradients are tapped, with labels, see `evaluate`.
      *taps: the paths of layers whose results are returned, such as 'lm.transformer.layers.attention'; '*' matches any
        text. With '.grad' after the path, the gradient of the loss with respect to the result is returned, in float32.
        A path with statistics, such as 'lm.*:rms,max', returns these instead, without padding tokens. See
        `training/taps.py`.

    Returns:
      Values by path: a dimension for each stack of layers, then the rows of the batch. Statistics by names such as
      `path/rms`, one for each layer.

    Raises:
      UserError: a path matches nothing, or a value cannot be tapped.
    """
    if taps not in self._tapped:
      parsed = [Tap.parse(text, default=(ARRAY,)) for text in taps]
      found = StepTaps(parsed, self.layer.abstract_init(), None, of_loss=True)
      self._tapped[taps] = TaskOnMesh(self.tasks.jax_task, self.tasks.mesh, self.tasks.layout, found, self.tasks.edits)
    step, rows, _ = self._step_for(self._tapped[taps], batch, lambda task: task.tap_step)
    out = step(self.stored_variables, self.key, self.global_step, rows)
    statistics = {name: np.asarray(s.value) for name, s in finish_summaries(out.summaries).items()}
    return arrays_by_path(jax.device_get(out.arrays), len(rows['weights'])) | statistics

  def edit(self, edits: Mapping[str, Edit | Sequence[Edit]]) -> TrainedModel:
    """Returns this model with changes of values between its layers, in evaluation, prediction and decoding.

    Args:
      edits: the changes of the results of layers, by path: `add`, `replace` or `zero` of `praxis_lite.training.edits`,
        or several, applied in order. They are applied after the edits that the model already has.

    Raises:
      UserError: there is no such layer, or an edit names a layer beyond the end of a stack.
    """
    made = Edits(self.layer, edits, self.tasks.edits)
    tasks = TaskOnMesh(self.tasks.jax_task, self.tasks.mesh, self.tasks.layout, edits=made)
    return dataclasses.replace(self, tasks=tasks)

  def _check_unedited(self, what: str) -> None:
    if self.tasks.edits is not None:
      raise ConfigError(f'{what}: the values of this model are edited, which {what} does not do; use decode or predict')

  # ---------------------------------------------------------------- how

  def _add_draft(self, draft: TrainedModel, settings: SamplerSettings) -> TrainedModel:
    """Returns this model combined with a smaller one that guesses its tokens; checks that the settings fit."""
    if not isinstance(draft, TrainedModel):
      raise ConfigError(f'decode: draft: expected a model, as open_run(...).load() returns, got {draft!r}')
    refused = {
      'lookup': 'the draft model guesses the tokens',
      'beam_size': 'beam search takes no draft',
      'adapters': 'a draft model guesses for a model without adapters',
    }
    for name, why in refused.items():
      if (value := settings.get(name)) is not None:
        raise ConfigError(f'decode: {name} = {value}: {why}; leave out one of them')
    self._check_unedited('draft')
    if self._drafted is None or self._drafted[0] is not draft:
      config = drafted_task(self.config.task, draft.config.task)
      tasks = TaskOnMesh.make_for_inference(config.instantiate(), self.tasks.mesh)
      both = {'model': self.stored_variables, 'draft': draft.variables}  # The draft model may be on another mesh.
      variables = tasks.layout.mdl_vars.to_mesh(both)
      run = ExperimentConfig(config, self.config.datasets, self.config.decode_datasets)
      self._drafted = draft, TrainedModel(run, tasks, variables, self.global_step, self.seed, self.directory)
    return self._drafted[1]

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
    """Returns the step for a batch, the rows of the batch, and the batch size of the step."""
    rows = canonical_rows(batch, 'batch')
    if not len(rows['weights']):
      raise DataError('batch: there are no examples')
    check_ids(rows, self.layer.num_ids)
    check_adapters(rows, names_of_adapters(self.layer))
    check_ids_in_tables(self.layer.id_limits(), rows)
    check_positions(self.layer.position_limits(), rows)
    task = tasks.taking_rows_like(rows)
    return step_of(task), rows, task.batch_size  # The step pads the rows with rows of zero weight.

  def _decode_rows(self, tasks: TaskOnMesh, batch: Mapping[str, Any], key: jax.Array) -> NestedDict:
    return self._run_by_rows(tasks, batch, lambda task: task.decode_step, key).decoded
