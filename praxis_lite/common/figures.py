"""Formats figures for people, with few digits and suitable units."""

import re
from collections.abc import Mapping


def number_of(count: int, noun: str) -> str:
  """Returns a count and its noun: '1 device', '8 devices', '4,096 entries', '2 batches', '3 axes'."""
  if count == 1:
    return f'1 {noun}'
  cut, ending = next(plural for pattern, *plural in _PLURALS if re.search(pattern, noun))
  return f'{count:,} {re.sub(cut, "", noun)}{ending}'


# For each pattern of nouns: the ending that the plural drops, and the ending that the plural adds.
_PLURALS = (('axis$', 'is$', 'es'), ('[^aeiou]y$', 'y$', 'ies'), ('(s|x|ch|sh)$', '', 'es'), ('', '', 's'))


def short_number(value: float) -> str:
  """Returns a number with three digits: 0.123, 12.3, 50.0k, 1.23M, 1.23B."""
  for size, suffix in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
    if value >= 0.9995 * size:
      return f'{significant_digits(value / size, 3)}{suffix}'
  return significant_digits(value, 3)


def significant_digits(value: float, count: int) -> str:
  """Returns a number with `count` digits, final zeros included, so that figures in successive lines align."""
  return f'{value:#.{count}g}'.removesuffix('.')


def duration(seconds: float) -> str:
  """Returns '12 s', '5 min', '3.0 h' or '8.2 d'."""
  if seconds < 120:
    return f'{seconds:.1f} s' if seconds < 10 else f'{seconds:.0f} s'
  if seconds < 7200:
    return f'{seconds / 60:.0f} min'
  return f'{seconds / 3600:.1f} h' if seconds < 48 * 3600 else f'{seconds / 86400:.1f} d'


def format_seconds(seconds: float) -> str:
  """Returns '1.23 s', '45.6 ms' or '7.8 us'."""
  for factor, unit in ((1.0, 's'), (1e3, 'ms')):
    if seconds * factor >= 1:
      return f'{seconds * factor:.3g} {unit}'
  return f'{seconds * 1e6:.3g} us' if seconds else '0 s'


def format_bytes(count: float) -> str:
  """Returns bytes with four digits and a binary unit: '1.5 MiB'."""
  for unit in ('B', 'KiB', 'MiB', 'GiB', 'TiB'):
    if count < 1024 or unit == 'TiB':
      break
    count /= 1024
  return f'{count:.0f} {unit}' if unit == 'B' else f'{count:.4g} {unit}'


def format_axes(sizes: Mapping[str, int]) -> str:
  """Returns the axes of a mesh with their sizes: 'replica 1 x data 16 x mdl 4'."""
  return ' x '.join(f'{name} {size}' for name, size in sizes.items())
