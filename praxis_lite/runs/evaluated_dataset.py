"""Finds the dataset to evaluate a trained model on: one of the run's, another input, or a batch of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from praxis_lite.common.config import Config, target
from praxis_lite.common.errors import ConfigError, did_you_mean
from praxis_lite.inputs import ArrayInput, BaseInput
from praxis_lite.inputs.rows import canonical_rows
from praxis_lite.runs.records.run_inputs import check_required_fields


def find_dataset(datasets: Sequence[Config], wanted: str | int | Config | BaseInput | Mapping[str, Any]) -> BaseInput:
  """Returns the input to evaluate.

  `wanted` is the name or the number of one of `datasets`; an input or its config; or the arrays of a batch.

  Raises:
    ConfigError: there is no such dataset, several have this name, it lacks a required field, or it is infinite.
  """
  if isinstance(wanted, Mapping):
    size = len(canonical_rows(wanted, 'evaluate')['weights'])
    return ArrayInput(name='batch', arrays=dict(wanted), batch_size=max(size, 1))
  if isinstance(wanted, str | int):
    number = _find_number(datasets, wanted)
    check_required_fields(datasets, number)
    wanted = datasets[number]
  if isinstance(wanted, Config):
    hosts = {'num_hosts': jax.process_count(), 'host_index': jax.process_index()}
    wanted = wanted.instantiate(is_training=False, **hosts)
  if not isinstance(wanted, BaseInput):
    raise ConfigError(f'evaluate: expected a dataset, got {type(wanted).__name__}')
  if wanted.num_epochs is None:
    raise ConfigError(f'evaluate: {wanted.label} is endless; set its num_epochs, or pass its config')
  return wanted


def _find_number(datasets: Sequence[Config], wanted: str | int) -> int:
  """Returns the number of the dataset with this name or number. A dataset without a name has the name of its class."""
  names = [str(getattr(data, 'name', None) or getattr(target(data), '__name__', '')) for data in datasets]
  if isinstance(wanted, str) and names.count(wanted) > 1:
    numbers = [i for i, name in enumerate(names) if name == wanted]
    raise ConfigError(f'evaluate: {len(numbers)} datasets are called {wanted!r}; pass one of their numbers, {numbers}')
  if isinstance(wanted, str) and wanted in names:
    return names.index(wanted)
  if isinstance(wanted, int) and -len(names) <= wanted < len(names):
    return wanted % len(names)
  close = did_you_mean(wanted, names) if isinstance(wanted, str) else ''
  raise ConfigError(f'evaluate: there is no dataset {wanted!r}.{close} There are: {", ".join(map(repr, names))}')
