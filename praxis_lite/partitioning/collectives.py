"""Reads the collectives of a compiled program, counted with the trip counts of the loops that contain them.

    counts = collectives(step.compiled)
    counts['all-reduce'].count, counts['all-reduce'].bytes
    assert_collectives(step.compiled, {'all-reduce': 2, 'all-gather': 0})

The program is parsed as XLA's HLO text. `bytes` is the size of the results on one device, summed over all executions of
the operation in one run of the program.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax

KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute', 'collective-broadcast')

_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{$')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(')
_CALLED = re.compile(
  r'(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation)=\{?([^,}]+(?:, %[^,}]+)*)'
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r'\b(pred|bf16|[suf]\d+\w*|c\d+)\[([\d,]*)\]')


@dataclasses.dataclass(frozen=True)
class Collective:
  """How often one kind of collective runs, and how many bytes its results have on one device."""

  count: int
  bytes: int


class _Instruction(NamedTuple):
  kind: str | None
  bytes: int
  calls: tuple[str, ...]
  times: int


def collectives(compiled: jax.stages.Compiled | str) -> dict[str, Collective]:
  """Returns the collectives of one run of a compiled program, by kind; kinds that do not occur count 0.

  Args:
    compiled: the program, or its HLO text.

  Raises:
    ValueError: the text has no entry computation.
  """
  text = compiled if isinstance(compiled, str) else compiled.as_text() or ''
  computations, entry = _parse(text)
  if entry is None:
    raise ValueError('not HLO text: there is no ENTRY computation')
  totals = {kind: [0, 0] for kind in KINDS}
  for instruction, times in _executed(computations, entry, 1):
    if instruction.kind is not None:
      totals[instruction.kind][0] += times
      totals[instruction.kind][1] += times * instruction.bytes
  return {kind: Collective(*total) for kind, total in totals.items()}


def assert_collectives(compiled: jax.stages.Compiled | str, expected: Mapping[str, int]) -> None:
  """Raises an AssertionError, listing all collectives, unless each kind in `expected` runs that many times.

  Raises:
    KeyError: `expected` has a kind that is not in `KINDS`.
  """
  unknown = set(expected) - set(KINDS)
  if unknown:
    raise KeyError(f'unknown collectives {sorted(unknown)}; known: {", ".join(KINDS)}')
  found = collectives(compiled)
  wrong = {kind: n for kind, n in expected.items() if found[kind].count != n}
  if wrong:
    lines = [f'  {kind}: {c.count} times, {c.bytes} bytes' for kind, c in found.items() if c.count]
    raise AssertionError(f'expected {dict(wrong)}; the program has\n' + ('\n'.join(lines) or '  no collectives'))


def _executed(
  computations: Mapping[str, list[_Instruction]], name: str, times: int
) -> Iterator[tuple[_Instruction, int]]:
  """Yields every instruction of a computation and those it calls, with the number of times it runs."""
  for instruction in computations.get(name, ()):
    yield instruction, times
    for called in instruction.calls:
      yield from _executed(computations, called, times * instruction.times)


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str | None]:
  computations: dict[str, list[_Instruction]] = {}
  entry, current = None, None
  for line in text.splitlines():
    header = _COMPUTATION.match(line)
    if header:
      current = header[2]
      computations[current] = []
      entry = current if header[1] else entry
    elif current is not None:
      instruction = _parse_instruction(line)
      if instruction is not None:
        computations[current].append(instruction)
  return computations, entry


def _parse_instruction(line: str) -> _Instruction | None:
  match = _INSTRUCTION.match(line)
  if not match:
    return None
  result, opcode = match.groups()
  kind = opcode.removesuffix('-start')
  if kind in KINDS:
    # The result of an asynchronous start is a pair of operands and results.
    return _Instruction(kind, _bytes(result) // (2 if opcode != kind and kind != 'all-reduce' else 1), (), 1)
  calls = tuple(name.strip().lstrip('%') for group in _CALLED.findall(line) for name in group.split(','))
  if not calls or opcode == 'reduce':
    return None
  trips = _TRIP_COUNT.search(line)
  return _Instruction(None, 0, calls, int(trips[1]) if trips else 1)


def _bytes(shape: str) -> int:
  total = 0
  for dtype, dims in _ARRAY.findall(shape):
    bits = 8 if dtype == 'pred' else int(re.sub(r'\D*(\d+).*', r'\1', dtype))
    total += math.prod(int(d) for d in dims.split(',') if d) * bits // 8
  return total
