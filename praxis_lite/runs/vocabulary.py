"""Keeps the vocabulary of a run, the characters that its tokenizer finds in a text, in the run's directory.

    job_log_dir/vocabulary.json      {"vocabulary": the characters in the order of their ids}

So ids keep their meaning for the weights, even if the text changes. A config with another vocabulary is an error. If
the directory has no checkpoint, the file is overwritten.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from praxis_lite.checkpoints import saved_steps
from praxis_lite.common.config import Config, nested_configs, target
from praxis_lite.common.errors import CheckpointError
from praxis_lite.common.files import parse_json, read_plain, replace_file, user_path
from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs import CharTokenizer
from praxis_lite.training.experiment import ExperimentConfig

_FILE = 'vocabulary.json'


def use_kept_vocabulary(config: ExperimentConfig, job_log_dir: str | os.PathLike[str]) -> ExperimentConfig:
  """Returns the config with the vocabulary that the run in `job_log_dir` keeps, for each tokenizer that sets none.

  Returns the config itself if there is no such tokenizer, or no such run.

  Raises:
    CheckpointError: the file cannot be read, or the config sets another vocabulary.
  """
  directory = user_path(job_log_dir)
  if not _tokenizers(config) or not saved_steps(directory):
    return config
  try:
    vocabulary = parse_json(read_plain(directory / _FILE))['vocabulary']
    if not isinstance(vocabulary, str):
      raise ValueError('the vocabulary is not a text')
  except FileNotFoundError:
    return config
  except (OSError, ValueError, TypeError, KeyError) as error:
    raise CheckpointError(f'{directory / _FILE} cannot be read: {error}') from None
  for name, inputs in (('datasets', config.datasets), ('decode_datasets', config.decode_datasets)):
    for i, top in enumerate(inputs):
      if any(c.vocabulary not in (None, vocabulary) for c in _tokenizers_in(top)):
        raise CheckpointError(
          f'{name}[{i}]: the vocabulary of its CharTokenizer is not the one that the run was trained with, in '
          f'{directory / _FILE}, so its ids would mean other characters; leave vocabulary=None, or start a new run in '
          'another --job_log_dir'
        )
  if all(c.vocabulary is not None for c in _tokenizers(config)):
    return config
  copies = ([c.clone() for c in group] for group in (config.datasets, config.decode_datasets))
  config = ExperimentConfig(config.task, *copies)
  for tokenizer in _tokenizers(config):
    tokenizer.vocabulary = vocabulary
  return config


def keep_vocabulary(config: ExperimentConfig, directory: Path) -> None:
  """Writes the vocabulary of the run, if a tokenizer of its config has one."""
  tokenizers = _tokenizers(config)
  if tokenizers:
    content: NestedDict = {'vocabulary': tokenizers[0].instantiate().characters}
    replace_file(directory / _FILE, json.dumps(content, ensure_ascii=False))


def _tokenizers(config: ExperimentConfig) -> list[Config]:
  """Returns the configs of all character tokenizers of the inputs."""
  return [c for top in (*config.datasets, *config.decode_datasets) for c in _tokenizers_in(top)]


def _tokenizers_in(config: Config) -> list[Config]:
  return [c for c in nested_configs(config) if target(c) is CharTokenizer]
