"""The fuzzer of shardings: what it draws is right through the guards, and it finds, and makes small, what is not."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from praxis_lite.sharding import guards
from praxis_lite.training import partitioned_step
from tools.hunt import models, operations
from tools.hunt.cases import Outcome, shrink
from tools.hunt.families import FAMILIES
from tools.hunt_shardings import report_cases

# Rows of this product come back permuted; in it are an axis, a dimension and a loop that the fault does not need.
PERMUTED = operations.OperationCase(
  family='product',
  sizes=(('equation', 1), ('seed', 0), ('b', 8), ('c', 64), ('v', 32)),
  mesh=(('r', 2), ('d', 2), ('m', 2)),
  splits=((('r', 'd'), ('m',)), (('d',), ('m',)), (('r', 'd'), ('m',))),
  gradient=False,
)
# A classifier in plain data parallelism; the gradient of its filter is multiplied by the unused axis's size.
GROUPED = models.Model(
  family='classifier',
  fields=tuple(
    (models._NET_PLAIN | {'global_pooling': 'mean', 'num_layers': 1, 'groups': 2, 'input_channels': 1, 'channels_0': 2})
    .__or__({'channels_1': 1, 'filter_height': 2, 'filter_width': 1, 'window_height': 1, 'window_width': 1})
    .__or__({'num_classes': 2, 'height': 4, 'width': 3, 'batch': 4, 'seed': 1})
    .items()
  ),
  mesh=(('a', 2), ('b', 2)),
  mappings=(('inputs 4', (('a',), (), (), ())), ('inputs 1', (('a',),))),
  step='train',
)


@pytest.fixture
def no_guards(monkeypatch):
  monkeypatch.setattr(guards, 'guard', lambda lowered: [])
  monkeypatch.setattr(partitioned_step, 'guard', lambda lowered: [])


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
CASES = {13: ('lm', 'train'), 27: ('classifier', 'train'), 89: ('lm', 'decode'), 230: ('lm', 'eval')}


@pytest.mark.slow
def test_random_models_are_right():
  reports = [*report_cases('models', 2026, CASES)]
  assert {report.number: (report.case.family, report.case.step) for report in reports} == CASES
  counts = outcomes(reports)
  assert counts['right'] == len(CASES)
  assert counts['guarded']


@pytest.mark.parametrize('family', [*FAMILIES])
def test_a_case_is_a_function_of_its_seed(family):
  one, other = (operations.draw_operation(np.random.default_rng(7), family) for _ in range(2))
  assert one == other
  assert one.run().kind == 'right'


@pytest.mark.slow
def test_a_wrong_product_is_found_and_made_small(no_guards, capsys):
  outcome = PERMUTED.run()
  assert outcome.kind == 'wrong'
  smallest = shrink(PERMUTED, lambda case: case.run().kind == 'wrong')
  assert smallest.run().kind == 'wrong'
  assert not any(case.run().kind == 'wrong' for case in smallest.smaller())
  assert np.prod([n for _, n in smallest.sizes[2:]]) < 8 * 64 * 32
  exec(compile(smallest.script(), 'script', 'exec'), {})
  assert 'WRONG' in capsys.readouterr().out


def test_the_product_is_right_through_the_guards():
  assert PERMUTED.run() == Outcome('right', guarded=1)


@pytest.mark.slow
def test_a_wrong_gradient_of_a_model_is_found(no_guards, capsys):
  outcome = GROUPED.run()
  assert outcome.kind == 'wrong'
  assert 'conv_0/w' in outcome.why
  exec(compile(GROUPED.script(), 'script', 'exec'), {})
  assert 'WRONG gradient network/conv_0/w' in capsys.readouterr().out


@pytest.mark.slow
def test_the_gradient_is_right_through_the_guards():
  outcome = GROUPED.run()
  assert outcome.kind == 'right'
  assert outcome.guarded


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
