"""Expected iterations of loops whose end depends on data: a layer states them, and plans read them.

The name of the loop carries the number into the compiled program, so it costs a step nothing.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager

import jax

_SCOPE = 'expected_trips='


def expected_trips(trips: float) -> AbstractContextManager[None]:
  """Tells `plan` the expected iterations of a `while_loop` or `fori_loop` whose end depends on data.

      with expected_trips(12):
        y = jax.lax.while_loop(moves, step, x)

  Args:
    trips: the mean number of iterations in one run of the loop.
  """
  return jax.named_scope(f'{_SCOPE}{trips:.8g}')


def find_expected_trips(program: str) -> list[str]:
  """Returns the numbers that `expected_trips` gave the loops of a program, given its text with names of operations."""
  return sorted(re.findall(rf'{_SCOPE}([^/()"]+)', program))


def read_expected_trips(op_name: str) -> float | None:
  """Returns the number that `expected_trips` gave the loop of this name; None if the loop has no such number."""
  number, *inside = op_name.rpartition(_SCOPE)[2].split('/')
  found = re.match(r'\d+(\.\d+)?(e[+-]\d+)?', number)
  # A second loop is in the body of the first, and has its own number of iterations.
  return float(found[0]) if _SCOPE in op_name and found and inside.count('while') == 1 else None
