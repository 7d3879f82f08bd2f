"""KeptValues: the values of rows, named by `--keep`, that are copied into results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from praxis_lite.common.errors import DataError, UserError

# Names of the values of results. A model may add more, which are known only when it has predicted.
_OF_ALL = ('row', 'error')
_OF_RESULTS = {
  'score': ('log_prob', 'num_tokens', 'is_greedy'),
  'generate': ('continuation', 'continuation_ids'),
  'predict': ('prediction',),
  'teach': ('ids', 'teacher_ids', 'teacher_log_probs'),
}


def check_keep(keep: Sequence[str], what: str) -> None:
  """Raises UserError if a value to keep has the same name as a value in the results of `what`."""
  own = (*_OF_ALL, *_OF_RESULTS.get(what, ()))
  if taken := next((name for name in keep if name in own), None):
    raise refuse_name(taken, what)


def refuse_name(name: str, what: str = '') -> UserError:
  """Returns the error for a value that `--keep` names if the results have a value of the same name."""
  return UserError(
    f'--keep={name}: results{what and f" of --what={what}"} have a value {name!r} themselves; give that of the rows '
    'another name'
  )


class KeptValues:
  """Selects the values to keep from the rows of one shard. In the format 'parquet', a column has values of one kind."""

  def __init__(self, keep: Sequence[str], format: str):
    self._keep, self._format = keep, format
    self._kinds: dict[str, str] = {}

  def select(self, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those `values` of a row that are to be kept, by name, as far as the row has them.

    Raises DataError if one of them cannot be written.
    """
    kept = {name: values[name] for name in self._keep if name in values}
    for name, value in kept.items():
      if self._format == 'jsonl':
        _check_json(name, value)
      elif value is not None and (kind := _kind(value)) != (known := self._kinds.setdefault(name, kind)):
        raise DataError(f'--keep={name}: the value is {kind}, and an earlier one {known}; a column has one kind')
    return kept


def _check_json(name: str, value: object) -> None:
  try:
    json.dumps(value)
  except (TypeError, ValueError):
    kind = type(value).__name__
    raise DataError(f'--keep={name}: {kind} cannot be written as JSON; --format=parquet can, or keep another') from None


def _kind(value: object) -> str:
  """Returns the kind of a value in words, with the kinds of a list's elements."""
  if isinstance(value, list):
    return f'list of {" and ".join(sorted({_kind(x) for x in value if x is not None}))}'.removesuffix(' of ')
  if isinstance(value, dict):
    return 'object'
  return 'number' if isinstance(value, float | int) and not isinstance(value, bool) else type(value).__name__
