"""Compares the defaults of today's code with those of the code that recorded a run.

A record contains every value, so a run computes the same as it did then. Records of the first versions lack the
defaults, which are only in `config.txt`. Defaults that are numbers, strings, None or tuples of these are read from
`config.txt`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from praxis_lite.common.config import REQUIRED, Config, config_values
from praxis_lite.common.config.json import OtherFields
from praxis_lite.common.config.references import looks_like_reference
from praxis_lite.common.config.text import changed_fields, child_path, configs_by_path, fields_of, format_value, to_text
from praxis_lite.common.errors import first_lines
from praxis_lite.common.foreign_text import LEFT_OUT, printable


class OtherDefaults(NamedTuple):
  """The recorded and today's values of fields that were not set, by path.

  Attributes:
    used: the recorded value, which the config has, and today's default.
    unused: the recorded value, which could not be read, and today's default, which the config has instead.
    gone: recorded values of fields that no longer exist.
    new: today's defaults of fields that did not exist.
  """

  used: Mapping[str, tuple[str, str]]
  unused: Mapping[str, tuple[str, str]]
  gone: Mapping[str, str]
  new: Mapping[str, str]

  def describe(self, roots: Mapping[str, object]) -> list[str]:
    """Returns a line for each kind of difference; leaves out fields that have been edited in the configs `roots`."""
    now = fields_of(to_text(roots)) if any(self) else {}
    used = [f'{p} = {_short(v)} (now {_short(d)})' for p, (v, d) in self.used.items() if now.get(p) == v]
    unused = [f'{p} = {_short(d)} (recorded {_short(v)})' for p, (v, d) in self.unused.items() if now.get(p) == d]
    gone = [f'{p} = {_short(value)}' if value else p for p, value in self.gone.items()]
    new = [f'{p} = {_short(d)}' for p, d in self.new.items() if d not in _NO_NEWS and now.get(p) == d]
    required = [path for path, d in self.new.items() if now.get(path) == d == repr(REQUIRED)]
    kinds = {
      'defaults in the code have changed; the recorded values are used': used,
      "defaults in the code have changed, and today's are used, because those recorded cannot be read": unused,
      'the code no longer has fields that were recorded with their defaults': gone,
      'the code has new fields, with these defaults': new,
      'the code has new fields without a default; unless the layer around them sets them, give them by --set': required,
    }
    shown = {what: ', '.join(first_lines(lines, _MOST_FIELDS)) for what, lines in kinds.items() if lines}
    return [printable(f'{what}: {lines}', one_line=True) for what, lines in shown.items()]


_WITHOUT_EFFECT = ('None', 'False', '0', '0.0', "''", '()', '[]', '{}')  # Defaults that usually turn a feature off.
_NO_NEWS = (*_WITHOUT_EFFECT, repr(REQUIRED))
# Maps a field to other fields; the field has no effect if all of these are None.
_NEEDED_BY = {
  'train.best_metric_mode': ('train.best_metric', 'train.early_stopping.patience'),
  'train.early_stopping.mode': ('train.early_stopping.patience',),
}
_MOST_FIELDS, _MOST_CHARACTERS = 4, 48


def compare_defaults(
  roots: Mapping[str, object], edited: Collection[str], text: str, other: OtherFields
) -> OtherDefaults:
  """Compares a recorded config with the defaults of today's code.

  Args:
    edited: paths of the fields whose values differed from the defaults when the config was recorded.
    text: the text of the config when it was recorded; '' if it is missing.
    other: the fields that reading the config has found to be gone, new or unreadable.
  """
  recorded, now = fields_of(text), fields_of(to_text(roots))
  changed = {path: values for path, values in changed_fields(roots).items() if path not in edited}
  below = {p for p in changed for end, character in enumerate(p) if character in '.[' and p[:end] in changed}
  used = {p: values for p, values in changed.items() if not (p in below or _is_idle(p, now))}
  unused = {path: (recorded.get(path, '?'), now.get(path, '')) for path in other.unreadable}
  gone = {path: recorded.get(path, '') for path in other.gone}
  return OtherDefaults(used, unused, gone, {path: now.get(path, '') for path in other.new})


def restore_defaults(roots: Mapping[str, object], text: str) -> OtherDefaults:
  """Sets fields whose recorded defaults differ from today's to the recorded ones; returns the differences.

  Records of early versions have defaults only in `text`, the config as text.
  """
  recorded = fields_of(text)
  used, unused = {}, {}
  for path, config in configs_by_path(roots).items():
    for field, where, default in _unset_fields(config, path):
      value, now = recorded.get(where, ''), format_value(default)
      if value in ('', now, repr(REQUIRED)) or LEFT_OUT in value or _is_same_name(value, now):
        continue
      try:
        # A literal runs no code, so it need not be trusted.
        setattr(config, field, ast.literal_eval(value))
        used[where] = value, now
      except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        unused[where] = value, now
  fields = fields_of(to_text(roots))
  return OtherDefaults({path: values for path, values in used.items() if not _is_idle(path, fields)}, unused, {}, {})


def _unset_fields(config: Config, path: str) -> Iterator[tuple[str, str, object]]:
  for key, default in config_values(config).items():
    if isinstance(key, str) and key not in config.__arguments__:
      yield key, child_path(path, key), default


def _is_same_name(value: str, other: str) -> bool:
  """Whether two texts may name the same object, moved to another module."""
  return all(map(looks_like_reference, (value, other))) and value.rpartition('.')[2] == other.rpartition('.')[2]


def _is_idle(path: str, fields: Mapping[str, str]) -> bool:
  """Whether a field has no effect in a config, because all fields that would need it are None."""
  return any(
    all(fields.get(path.removesuffix(end) + other) == 'None' for other in others)
    for end, others in _NEEDED_BY.items()
    if path.endswith(end)
  )


def _short(text: str) -> str:
  return text if len(text) <= _MOST_CHARACTERS else f'{text[: _MOST_CHARACTERS - 3]}...'
