"""The fuzzer of shardings: what it draws is right through the guards, and it finds, and makes small, what is not."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from tools.graphs import drawing
from tools.graphs.families import FAMILIES
from tools.graphs.programs import GraphCase, Line
from tools.hunt.cases import Outcome, shrink
from tools.hunt_shardings import report_cases

# Rows of this product come back permuted without guards.
PERMUTED = GraphCase(
  lines=(
    Line('v1', 'ints((8, 32))', (8, 32), 'float32', is_input=True, entries=(('r', 'd'), ('m',))),
    Line('v2', 'ints((64, 32))', (64, 32), 'float32', is_input=True, entries=(('d',), ('m',))),
    Line('v3', "jnp.einsum('bv,cv->bc', v1, v2)", (8, 64), 'float32', entries=(('r', 'd'), ('m',))),
  ),
  mesh=(('r', 2), ('d', 2), ('m', 2)),
  outputs=('v3',),
  is_exact=True,
  gradient=False,
)


def outcomes(reports):
  counts = collections.Counter()
  for report in reports:
    counts[report.outcome.kind] += 1
    counts['guarded'] += bool(report.outcome.guarded)
    assert report.outcome.kind != 'wrong', f'{report.outcome.why}\n{report.smallest.script()}'
  return counts


@pytest.mark.slow
def test_random_operations_are_right():
  counts = outcomes(report_cases('operations', 2026, range(45)))
  assert counts['right'] > 40
  assert counts['guarded'] > 2


# Of the cases of this seed, a step of each kind that compiles in seconds.
CASES = {
  33: ('tower', ('train',), 'shard_map'),
  41: ('lm', ('train', 'evaluate'), 'auto'),
  84: ('lm', ('train', 'decode'), 'auto'),
  101: ('convolutions', ('train',), 'shard_map'),
}


@pytest.mark.slow
def test_random_tasks_are_right():
  reports = [*report_cases('tasks', 2026, CASES)]
  assert {r.number: (r.case.family, r.case.steps, r.case.partitioning) for r in reports} == CASES
  counts = outcomes(reports)
  assert counts['right'] == len(CASES)
  assert counts['guarded']


@pytest.mark.slow_cases
@pytest.mark.parametrize('family', [*FAMILIES])
def test_a_case_is_a_function_of_its_seed(family):
  one, other = (
    drawing.draw_program(np.random.default_rng(7), FAMILIES, operations=1, family=family, most_devices=8)
    for _ in range(2)
  )
  assert one == other
  assert one.run().kind == 'right'


def test_the_product_is_right_through_the_guards():
  assert PERMUTED.run() == Outcome('right', guarded=1)


@dataclasses.dataclass(frozen=True)
class Numbers:
  """A case that is wrong if it holds both 3 and 5."""

  values: tuple[int, ...]
  family: str = 'numbers'

  def run(self):
    return Outcome('wrong' if {3, 5} <= {*self.values} else 'right')

  def smaller(self):
    for i in range(len(self.values)):
      yield Numbers(self.values[:i] + self.values[i + 1 :])

  def script(self):
    return str(self.values)


def test_shrinking_leaves_what_is_needed():
  asked = []

  def is_wrong(case):
    asked.append(case)
    return case.run().kind == 'wrong'

  assert shrink(Numbers((1, 2, 3, 4, 5, 6)), is_wrong) == Numbers((3, 5))
  assert len(asked) < 30
  assert shrink(Numbers((1, 2, 3, 4, 5, 6)), is_wrong, max_runs=1) == Numbers((2, 3, 4, 5, 6))


def test_failures_are_alike_by_their_exception():
  numbers, error = Outcome('wrong', 'result 0 differs by 3'), Outcome('wrong', 'ValueError: no')
  assert numbers.fails_like(Outcome('wrong', 'result 1 differs by 9'))
  assert error.fails_like(Outcome('wrong', 'ValueError: yes'))
  assert not error.fails_like(numbers)
  assert not numbers.fails_like(Outcome('right'))


def test_an_error_of_a_user_is_a_refusal():
  jax.config.update('jax_use_shardy_partitioner', False)
  try:
    outcome = PERMUTED.run()
  finally:
    jax.config.update('jax_use_shardy_partitioner', True)
  assert outcome.kind == 'refused'
  assert outcome.why.startswith('jax_use_shardy_partitioner is False')
