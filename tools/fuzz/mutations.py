"""Makes bad input from good input: bytes, text and JSON, changed at random places."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

# Values that often break parsers.
_VALUES: tuple[Any, ...] = (
  *(None, True, False, 0, 1, -1, 2**31, -(2**63), 10**40, 0.5, 1e308, -0.0, float('nan'), float('inf')),
  *('', ' ', '0', '-1', 'nan', 'None', '\x00', '\ud800', 'ü', '../../x', '/etc/passwd', 'a' * 300, '{', '%s', '$(id)'),
  *([], {}, [[]], [{}], {'': {}}, [None], {'$config': 1}, {'$ref': 'os:system'}, {'shape': [2**62, 2**62]}),
  *('fuzz_canary:run', 'os:system', 'builtins:eval', 'subprocess:Popen', 'praxis_lite.common.importing:os.system'),
  *({'$partial': [{'$ref': 'builtins:exec'}, ['1'], {}]}, {'$config': 'fuzz_canary:run'}, {'$path': '../..'}),
  *({'$array': ['float32', [2**40], '']}, {'$array': ['object', [1], 'AAAAAAAAAAA=']}, {'$dtype': 'O'}),
  *({'$object': 'praxis_lite.sharding.weights:WeightHParams'}, {'$enum': ['enum:Enum', 'x']}, {'$set': [[]]}),
)
_TOKENS = (
  *(
    '[',
    ']',
    '(',
    ')',
    '{',
    '}',
    ',',
    '.',
    '..',
    '=',
    ':',
    '|',
    '*',
    '**',
    "'",
    '"',
    '\\',
    '\n',
    '\x00',
    ' ',
    '_',
    '-',
  ),
  *('None', 'True', '1e999', '0x', '9' * 30, '-1', '[*]', '[0]', '__class__', '__import__("os")', 'lambda: 0', 'f""'),
  *('task', 'datasets', 'praxis_lite', 'fuzz_canary', 'optax', 'x', 'é', '\U0001f600', '\ud800', '../', '~', '%d'),
)


def mutated_bytes(data: bytes, rng: np.random.Generator) -> bytes:
  """Returns the bytes with flipped bits, and with parts removed, repeated or inserted."""
  out = bytearray(data)
  for _ in range(int(rng.integers(1, 5))):
    at = int(rng.integers(len(out) + 1))
    length = int(rng.integers(1, 17))
    match int(rng.integers(7)):
      case 0 if out:
        out[at % len(out)] ^= 1 << int(rng.integers(8))
      case 1 if out:
        out[at % len(out)] = int(rng.integers(256))
      case 2:
        del out[at:]
      case 3:
        del out[at : at + length]
      case 4:
        out[at:at] = rng.bytes(length)
      case 5:
        start = int(rng.integers(len(out) + 1))
        out[at:at] = out[start : start + length]
      case _:
        out[at : at + 8] = (2 ** int(rng.integers(64)) - int(rng.integers(2))).to_bytes(8, 'little')
  return bytes(out)


def mutated_text(text: str, rng: np.random.Generator) -> str:
  """Returns the text with tokens inserted, and with parts removed, repeated or replaced."""
  for _ in range(int(rng.integers(1, 5))):
    at = int(rng.integers(len(text) + 1))
    end = at + int(rng.integers(1, 9))
    token = _TOKENS[int(rng.integers(len(_TOKENS)))]
    match int(rng.integers(6)):
      case 0 | 1:
        text = text[:at] + token + text[at:]
      case 2:
        text = text[:at] + text[end:]
      case 3:
        text = text[:at] + token + text[end:]
      case 4:
        text = text[:at] + text[at:end] * int(rng.integers(2, 40)) + text[end:]
      case _:
        text = text[:at] + (chr(int(rng.integers(1, 0x3000))) if rng.random() < 0.9 else token * 200) + text[at:]
  return text


def mutated_json(value: Any, rng: np.random.Generator) -> Any:
  """Returns nested lists and dicts with entries replaced, removed, renamed or repeated."""
  value = copy.deepcopy(value)
  for _ in range(int(rng.integers(1, 4))):
    places = list(_places(value))
    if not places:
      return _a_value(rng)
    container, key = places[int(rng.integers(len(places)))]
    match int(rng.integers(8)):
      case 0 | 1 | 2:
        container[key] = _a_value(rng)
      case 3:
        del container[key]
      case 4:
        other, its_key = places[int(rng.integers(len(places)))]
        container[key] = copy.deepcopy(other.get(its_key) if isinstance(other, dict) else (other or [None])[-1])
      case 5:
        container[key] = [container[key]] * int(rng.integers(3))
      case 6 if isinstance(container[key], str):
        container[key] = mutated_text(container[key], rng)
      case 6 if isinstance(container[key], int):
        container[key] += int(rng.choice([-1, 1, -1000, 2**40]))
      case _ if isinstance(container, dict):
        name = mutated_text(str(key), rng) if rng.random() < 0.5 else str(_TOKENS[int(rng.integers(len(_TOKENS)))])
        container[name] = container.pop(key)
      case _:
        container[key] = {'': container[key]}
  return value


def mutated_json_text(value: Any, rng: np.random.Generator) -> bytes:
  """Returns JSON with changed values or changed text, or very deeply nested JSON."""
  kind = rng.random()
  if kind < 0.02:
    depth = int(rng.choice([900, 5000, 200_000]))
    return (b'[' * depth + b']' * depth) if rng.random() < 0.5 else b'{"a":' * depth + b'1' + b'}' * depth
  if kind < 0.7:
    return json.dumps(mutated_json(value, rng)).encode()
  if kind < 0.85:
    return mutated_text(json.dumps(value), rng).encode(errors='surrogatepass')
  return mutated_bytes(json.dumps(value).encode(), rng)


def _a_value(rng: np.random.Generator) -> Any:
  return copy.deepcopy(_VALUES[int(rng.integers(len(_VALUES)))])


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
  """Yields (container, key) of each entry at any depth."""
  entries = (
    list(value.items()) if isinstance(value, dict) else list(enumerate(value) if isinstance(value, list) else ())
  )
  for key, entry in entries:
    yield value, key
    yield from _places(entry)
