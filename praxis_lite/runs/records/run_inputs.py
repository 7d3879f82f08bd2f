"""Builds the inputs of a run from the configs of its datasets, with the vocabulary that its directory keeps.

    job_log_dir/vocabulary.json      {"vocabulary": the characters in the order of their ids}

A character tokenizer takes its vocabulary from a text. The run keeps it, so ids keep their meaning for the weights even
if the text changes. A config with another vocabulary is an error, unless the directory has no checkpoint; then the file
is overwritten.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from praxis_lite.checkpoints import saved_steps
from praxis_lite.common.config import REQUIRED, Config, config_values, nested_configs, target
from praxis_lite.common.config.editing import line_of_edit
from praxis_lite.common.config.fields_at_fault import name_config
from praxis_lite.common.devices import start_devices
from praxis_lite.common.errors import CheckpointError, ConfigError, DataError, UserError
from praxis_lite.common.files import parse_json, read_plain, replace_file, user_path
from praxis_lite.inputs import BaseInput, CharTokenizer, GrowingBatches
from praxis_lite.inputs.patient_thread import call_in_time
from praxis_lite.inputs.rewarded import RewardedInput
from praxis_lite.models.base import BaseModel
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.task import SingleTask

_VOCABULARY = 'vocabulary.json'


class RunInputs(NamedTuple):
  """The inputs of a training run, checked with its model.

  Attributes:
    config: the configs of the run, with the vocabulary that its directory keeps.
    decoded_in_training: `decoding` if the task decodes at intervals; otherwise ().
    vocabulary: the characters of the run's tokenizer in the order of their ids, as kept in the run's directory; None
      for other kinds of tokenizers, or without a directory.
  """

  config: ExperimentConfig
  training: BaseInput
  evaluation: Sequence[BaseInput]
  decoding: Sequence[BaseInput]
  decoded_in_training: Sequence[BaseInput]
  vocabulary: str | None


def build_run_inputs(
  config: ExperimentConfig, task: SingleTask, directory: Path | None, built: AllDatasets | None = None
) -> RunInputs:
  """Builds the inputs of a training run, and lets its model check a batch of each.

  Args:
    directory: the run's directory; None for a run without one.
    built: the inputs, if they have been built before; see `build_all`.

  Raises:
    UserError: an input cannot be used.
  """
  config = config if directory is None else use_kept_vocabulary(config, directory)
  datasets, decode_datasets = built or build_all(config)
  training = datasets.the_training_input()
  datasets.check([training, *datasets.evaluation], task.model)
  decodes = task.train.decode_interval_steps is not None
  decoding = decode_datasets.inputs
  tokenizers = [] if directory is None else _tokenizers(config)
  vocabulary = tokenizers[0].instantiate().characters if tokenizers else None
  return RunInputs(config, training, datasets.evaluation, decoding, decoding if decodes else (), vocabulary)


class Datasets(NamedTuple):
  """The inputs returned by the experiment's method `name`: `datasets()` or `decode_datasets()`."""

  name: str
  inputs: list[BaseInput]

  @property
  def evaluation(self) -> list[BaseInput]:
    return [i for i in self.inputs if not i.is_training]

  def the_training_input(self) -> BaseInput:
    """Returns the only training input; raises ConfigError if there is none, or more than one."""
    training = [i for i in self.inputs if i.is_training]
    if len(training) != 1:
      raise ConfigError(
        f'{self.name}(): exactly one input must have is_training=True, and {len(training)} of {len(self.inputs)} have '
        f'it; {"to train on several, mix them in a MixtureInput" if training else "set it for the one to train on"}'
      )
    return training[0]

  def check(self, inputs: Sequence[BaseInput], model: BaseModel) -> None:
    """Reads a batch of each of `inputs`, and lets the model check it; raises UserError if the check fails."""
    for i, data in enumerate(self.inputs):
      if not any(data is wanted for wanted in inputs):
        continue
      with _name_fields_by_path(f'{self.name}[{i}]', data.label):
        try:
          batch = call_in_time(data.get_next, data.label)
        except StopIteration:
          raise DataError(f'{data.label}: it has no batch') from None
        data.reset()
        model.check_input(data, data.rows_in_memory() or batch)
        for training in self.inputs:
          if training.is_training and data is not training:
            training.check_beside(data.source if isinstance(data, GrowingBatches) else data)


AllDatasets = tuple[Datasets, Datasets]  # The inputs of `datasets()`, and those of `decode_datasets()`.


def build_all(config: ExperimentConfig) -> AllDatasets:
  """Builds all inputs of an experiment; for errors see `build_datasets`."""
  return build_datasets(config.datasets), build_datasets(config.decode_datasets, 'decode_datasets')


def build_datasets(configs: Sequence[Config], name: str = 'datasets') -> Datasets:
  """Builds inputs that read this process's share of the data.

  Raises:
    ConfigError: two evaluation inputs have the same name, one of them has the name of the training input, or an input
      to decode is a `RewardedInput`.
  """
  start_devices()
  inputs: list[BaseInput] = []
  for i, config in enumerate(configs):
    check_required_fields(configs, i, name)
    path, called = f'{name}[{i}]', (target(config).__qualname__, getattr(config, 'name', ''))
    try:
      with _name_fields_by_path(path, *called):
        inputs.append(config.instantiate(num_hosts=jax.process_count(), host_index=jax.process_index()))
    except UserError as error:
      name_config(error, config, path)  # Adds the line of the user's code that has set the field.
      raise
  for i, data in enumerate(inputs):
    if name == 'decode_datasets' and isinstance(data, RewardedInput):
      raise ConfigError(
        f'{name}[{i}]: a RewardedInput is for training and evaluation, and decoding has no rewards; put it into '
        'datasets(), with is_training=False, or decode its prompts with an input of texts'
      )
  labels = [i.label for i in inputs if not i.is_training]
  if twice := [label for label in labels if labels.count(label) > 1]:
    raise ConfigError(f'{name}(): {len(twice)} inputs are called {twice[0]!r}; set the name of each')
  named = {data.name: i for i, data in enumerate(inputs) if data.name and data.is_training}
  for i, data in enumerate(inputs):
    if data.name in named and not data.is_training:
      raise ConfigError(
        f'{name}[{named[data.name]}].name and {name}[{i}].name, of training and evaluation data, are both '
        f'{data.name!r}, so their metrics could not be told apart; set another, as in --set {name}[{i}].name=validation'
      )
  return Datasets(name, inputs)


def check_required_fields(configs: Sequence[Config], i: int, name: str = 'datasets') -> None:
  """Raises ConfigError, with the path of the field and a remedy, if a required field of input `i` is not set."""
  missing = [next((field for field, x in config_values(c).items() if x is REQUIRED), None) for c in configs]
  if missing[i] is None:
    return
  every, kind = '*' if len(configs) > 1 and len(set(missing)) == 1 else i, target(configs[i]).__qualname__
  example = f"--set '{name}[{every}].{missing[i]}=...'"
  lines = (line_of_edit(configs[i], str(field)) for field in config_values(configs[i]))
  if line := next(filter(None, lines), ''):  # The user's code has made or edited this config.
    example = f'Config({kind}, {missing[i]}=...), or by {example} ({line})'
  raise ConfigError(f'{name}[{i}].{missing[i]}: a value is required but not set (a field of {kind}), as in {example}')


@contextlib.contextmanager
def _name_fields_by_path(path: str, *labels: str) -> Iterator[None]:
  """Puts the path of an input's config before the message of an error that is raised in the block.

  If the message begins with a field after one of `labels`, the path takes the place of the label.
  """
  try:
    yield
  except UserError as error:
    of_field = functools.reduce(lambda text, label: text.removeprefix(f'{label}.'), labels, str(error))
    error.args = (f'{path}: {error}' if of_field == str(error) else f'{path}.{of_field}',)
    raise


def use_kept_vocabulary(config: ExperimentConfig, job_log_dir: str | os.PathLike[str]) -> ExperimentConfig:
  """Returns the config; tokenizers without a vocabulary get the one that is kept in the directory of the run.

  Returns the config unchanged if there is no such tokenizer, or if the run has no checkpoint or keeps no vocabulary.

  Raises:
    CheckpointError: the file cannot be read, or the config sets another vocabulary.
  """
  directory = user_path(job_log_dir)
  if not _tokenizers(config) or not saved_steps(directory):
    return config
  try:
    vocabulary = parse_json(read_plain(directory / _VOCABULARY))['vocabulary']
    if not isinstance(vocabulary, str):
      raise ValueError('the vocabulary is not a text')
  except FileNotFoundError:
    return config
  except (OSError, ValueError, TypeError, KeyError) as error:
    raise CheckpointError(f'{directory / _VOCABULARY} cannot be read: {error}') from None
  for name, inputs in (('datasets', config.datasets), ('decode_datasets', config.decode_datasets)):
    for i, top in enumerate(inputs):
      if any(c.vocabulary not in (None, vocabulary) for c in _tokenizers_in(top)):
        raise CheckpointError(
          f'{name}[{i}]: the vocabulary of its CharTokenizer is not the one that the run was trained with, in '
          f'{directory / _VOCABULARY}, so its ids would mean other characters; leave vocabulary=None, or start a new '
          'run in another --job_log_dir'
        )
  if all(c.vocabulary is not None for c in _tokenizers(config)):
    return config
  copies = ([c.clone() for c in group] for group in (config.datasets, config.decode_datasets))
  config = ExperimentConfig(config.task, *copies)
  for tokenizer in _tokenizers(config):
    tokenizer.vocabulary = vocabulary
  return config


def keep_vocabulary(vocabulary: str | None, directory: Path) -> None:
  """Writes the vocabulary of the run to `directory`; does nothing if the vocabulary is None."""
  if vocabulary is not None:
    replace_file(directory / _VOCABULARY, json.dumps({'vocabulary': vocabulary}, ensure_ascii=False))


def _tokenizers(config: ExperimentConfig) -> list[Config]:
  """Returns the configs of all character tokenizers of the inputs."""
  return [c for top in (*config.datasets, *config.decode_datasets) for c in _tokenizers_in(top)]


def _tokenizers_in(config: Config) -> list[Config]:
  return [c for c in nested_configs(config) if target(c) is CharTokenizer]
