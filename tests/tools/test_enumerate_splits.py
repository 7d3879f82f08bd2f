"""A sample of the enumeration: what the guards leave as it is is right, and so is what they put into canonical form."""

import itertools
import json
import subprocess
import sys

import pytest

from praxis_lite.sharding.guards.products import is_nearly_local
from praxis_lite.sharding.propagation import Axis
from tools.splits.assign import arrangements, axes_of_mesh, left_as_stated, local, make_cases, ways_to_part
from tools.splits.batches import run_cases
from tools.splits.kinds import KINDS

A, B, C = Axis('a', 2), Axis('b', 2), Axis('c', 2)


def a_program(kind, begin=''):
  """The first program of a kind whose name begins so."""
  return next(program for program in KINDS[kind]() if program.name.startswith(begin))


def test_assignments():
  assert len(arrangements((A, B, C), 2)) == 49
  assert arrangements((A,), 1) == [((),), ((A,),)]
  assert axes_of_mesh((2, 6)) == (A, Axis('b', 2), Axis('b', 3, 2))
  assert ((Axis('b', 6),),) in arrangements(axes_of_mesh((2, 6)), 1)  # Parts that follow each other are one.
  assert len(local((A, B, C), (('b', 'v'), ('v', 'c'), ('b', 'c')))) == 106
  assert len([*make_cases((A, B, C), (('b',), ('b',)), 1000)]) == 16 * 16


@pytest.mark.parametrize('shape', [(2, 2), (2, 3), (4,), (6,)])
@pytest.mark.parametrize('equation', ['bv,vc->bc', 'v,vc->c', 'b,c->bc'])
def test_the_class_that_guards_leave_as_it_is_is_whole(equation, shape):
  """Of all splits of all arrays, those that the guards leave as they are."""
  dims = tuple(tuple(names) for names in equation.replace('->', ',').split(','))
  mesh = [Axis(name, size) for name, size in zip('abc', shape)]
  ways = [itertools.product(*(arrangements(axes, len(names)) for names in dims)) for axes in ways_to_part(shape)]
  every = {splits for splits in itertools.chain(*ways) if is_nearly_local(splits, dims, mesh)}
  found = left_as_stated(shape, dims)
  assert {*found} == every
  assert len(found) == len(every) > 50


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS)
def test_a_sample_of_each_kind(kind):
  program = a_program(kind)
  cases = [*make_cases(axes_of_mesh((2, 4)), program.dims, 12)]
  found = run_cases(program, (2, 4), cases)
  assert [case for case, one in zip(cases, found) if one.outcome != 'right'] == []


def test_a_wrong_product_is_found_without_the_guards():
  """Of 12 rows over (r, d), summed over m; the weight, which is larger, over (d, m)."""
  program = a_program('products', 'bv,vc->bc b=2 v=4 c=24')
  cases = [(((A, B), (C,)), ((C,), (B,)), ((A, B), (C,))), (((A,), ()), ((), ()), ((A,), ()))]
  assert [one.outcome for one in run_cases(program, (2, 2, 2), cases, guarded=False)] == ['wrong', 'right']
  found = run_cases(program, (2, 2, 2), cases)
  assert [one.outcome for one in found] == ['right', 'right']
  assert [one.guarded for one in found] == [True, False]


def test_a_wrong_gradient_of_several_operations_is_found_without_the_guards():
  """Of every third row, split over two devices."""
  program = a_program('functions of slices', 'gradient of every third')
  cases = [(((), ()), ((), ()), ((A,), ())), (((), (A,)), ((), (A,)), ((), (A,)))]
  assert [one.outcome for one in run_cases(program, (2,), cases, guarded=False)] == ['wrong', 'right']
  assert [(one.outcome, one.guarded) for one in run_cases(program, (2,), cases)] == [('right', True), ('right', False)]


@pytest.mark.slow
def test_the_command_goes_on_where_it_was_and_finds_what_aborts(tmp_path):
  record = tmp_path / 'record'
  command = [
    sys.executable,
    'tools/enumerate_splits.py',
    '--kinds=pads',
    '--program=(2, 6) ((-1, 0, 2)',
    '--meshes=2',
    '--cases=4',
    f'--record={record}',
  ]
  first = subprocess.run(command, capture_output=True, text=True, check=True).stdout
  lines = record.read_text()
  assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == first
  assert record.read_text() == lines
  assert all(json.loads(line)['wrong'] == [] for line in lines.splitlines())
  bare = [*command[:-1], '--unguarded']
  done = subprocess.run(bare, capture_output=True, text=True, check=False)
  assert done.returncode == 1
  assert 'aborted' in done.stdout
