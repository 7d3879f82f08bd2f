"""Finds the dataset of a run that can read single files, such as images and recordings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TypeVar, cast

from praxis_lite.common.config import Config, target
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs.base import BaseInput
from praxis_lite.runs.trained import TrainedModel

ReaderT = TypeVar('ReaderT', bound=BaseInput)


def make_reader(model: TrainedModel, kind: type[ReaderT], field: str, file: str, what: str) -> ReaderT:
  """Returns an input that reads a file like the run's first dataset of a kind; one for evaluation takes precedence.

  Args:
    field: the name of the dataset's field for files, which is set to `file`.

  Raises:
    ConfigError: no dataset of the run is of this kind.
  """
  if (config := next((config for config in datasets_by_use(model) if is_of(config, kind)), None)) is None:
    raise ConfigError(f'{file}: the datasets of the run read no {what}; pass .npz or .jsonl files')
  return cast(ReaderT, config.clone(**{field: file}).instantiate())


def datasets_by_use(model: TrainedModel) -> list[Config]:
  """Returns the configs of the run's datasets, with datasets for evaluation first."""
  return sorted(model.config.datasets, key=lambda config: bool(config.is_training))


def batches_of_names(files: Sequence[str], batch_size: int) -> Iterator[tuple[str, Sequence[str]]]:
  """Yields the files in groups of up to `batch_size`, in order; each as a name for messages, and its files."""
  for start in range(0, len(files), batch_size):
    several = files[start : start + batch_size]
    yield several[0] if len(several) == 1 else f'{several[0]} and {len(several) - 1} more', several


def check_exists(file: str) -> None:
  """Raises a `DataError` if there is no such file."""
  if not os.path.exists(file):
    raise DataError(f'there is no file {file}')


def is_of(config: Config, kind: type[BaseInput]) -> bool:
  """Whether the config of a dataset makes inputs of a kind."""
  built = target(config)
  return isinstance(built, type) and issubclass(built, kind)
