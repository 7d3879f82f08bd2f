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
from collections.abc import Mapping

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


def collectives(compiled: jax.stages.Compiled | str) -> dict[str, Collective]:
  """Returns the collectives of one run of a compiled program, by kind; kinds that do not occur count 0.

  Raises:
    ValueError: the program is given as HLO text, and this has no entry computation.
  """
  text = compiled if isinstance(compiled, str) else compiled.as_text() or ''
  bodies: dict[str, list[str]] = {}
  entry, body = None, []
  for line in text.splitlines():
    header = _COMPUTATION.match(line)
    if header:
      body = bodies.setdefault(header[2], [])
      entry = header[2] if header[1] else entry
    body.append(line)
  if entry is None:
    raise ValueError('not HLO text: there is no ENTRY computation')
  totals = {kind: [0, 0] for kind in KINDS}

  def run(computation: str, times: int) -> None:
    """Adds what a computation, run so many times, executes: its own instructions and those of what it calls."""
    for line in bodies.get(computation, ()):
      instruction = _INSTRUCTION.match(line)
      if not instruction:
        continue
      result, opcode = instruction.groups()
      kind = opcode.removesuffix('-start')
      if kind in totals:
        # The result of an asynchronous start is a pair of operands and results.
        halves = 2 if opcode != kind and kind != 'all-reduce' else 1
        totals[kind][0] += times
        totals[kind][1] += times * (_bytes(result) // halves)
      elif opcode != 'reduce':
        trips = _TRIP_COUNT.search(line)
        for called in (name for group in _CALLED.findall(line) for name in group.split(',')):
          run(called.strip().lstrip('%'), times * int(trips[1]) if trips else times)

  run(entry, 1)
  return {kind: Collective(*total) for kind, total in totals.items()}


def scopes(name: str) -> str:
  """The scopes in the name of an operation: 'lm/ff/dot' of 'jit(step)/transpose(jvp(lm))/ff/jit(f)/dot'."""
  name = re.sub(r'jit\([^()]*\)', '', name)
  while (inner := re.sub(r'\w+\(([^()]*)\)', r'\1', name)) != name:
    name = inner
  return '/'.join(filter(None, name.split('/')))


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


def _bytes(shape: str) -> int:
  total = 0
  for dtype, dims in _ARRAY.findall(shape):
    bits = 8 if dtype == 'pred' else int(re.sub(r'\D*(\d+).*', r'\1', dtype))
    total += math.prod(int(d) for d in dims.split(',') if d) * bits // 8
  return total
