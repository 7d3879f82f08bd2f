"""The fuzzer's graphs of operations: what they draw, and that it finds, and makes small, what is wrong."""

import collections
import math
import subprocess
import sys

import numpy as np
import pytest

from praxis_lite.sharding import guards
from tools.graphs import drawing
from tools.graphs.families import FAMILIES
from tools.graphs.meshes import draw_mesh
from tools.graphs.programs import GraphCase, Line
from tools.hunt.cases import shrink

# Rows of this product come back permuted; around it are operations that the fault does not need.
PERMUTED = GraphCase(
  lines=(
    Line('v1', 'ints((8, 32))', (8, 32), 'float32', is_input=True, entries=(('r', 'd'), ('m',))),
    Line('v2', 'ints((64, 32))', (64, 32), 'float32', is_input=True, entries=(('d',), ('m',))),
    Line('v3', '(v1 + 1)', (8, 32), 'float32', entries=(('r', 'd'), ('m',))),
    Line('v4', "jnp.einsum('bv,cv->bc', v3, v2)", (8, 64), 'float32', entries=(('r', 'd'), ('m',))),
    Line('v5', 'jnp.roll(v4, 1, axis=0)', (8, 64), 'float32'),
  ),
  mesh=(('r', 2), ('d', 2), ('m', 2)),
  outputs=('v5',),
  is_exact=True,
  gradient=False,
)


def draw(seed, **options):
  return drawing.draw_program(np.random.default_rng(seed), FAMILIES, **{'operations': 10, 'most_devices': 8, **options})


def test_meshes_have_odd_axes_and_unused_ones():
  meshes = [draw_mesh(np.random.default_rng(i)) for i in range(200)]
  sizes = {tuple(n for _, n in mesh) for mesh in meshes}
  assert all(2 <= math.prod(shape) <= 24 for shape in sizes)
  assert {n for shape in sizes for n in shape} == {2, 3, 4, 5, 6}
  assert {len(shape) for shape in sizes} == {1, 2, 3, 4}
  assert (2, 2, 3) in sizes and (3, 2, 2) in sizes


def test_a_program_is_a_function_of_its_seed():
  assert draw(3) == draw(3) and draw(3) != draw(4)


def test_a_program_is_drawn_of_every_seed():
  """Here the first array that is drawn is too large."""
  rng = np.random.default_rng([50, 14])
  assert drawing.draw_program(rng, FAMILIES, operations=1).lines


def test_what_one_device_computes_is_guarded_too():
  """XLA forgets there too that the inner one of two slices begins inside of its array."""
  slices = 'lax.dynamic_slice_in_dim({}, {}, {}, 0)'
  program = GraphCase(
    lines=(
      Line('v1', 'ints((15,))', (15,), 'float32', is_input=True),
      Line('v2', 'ids((), 1) + 13', (), 'int32', is_input=True),
      Line('v3', 'ids((), 1)', (), 'int32', is_input=True),
      Line('v4', slices.format('v1', 'v2', 10), (10,), 'float32'),
      Line('v5', slices.format('v4', 'v3', 8), (8,), 'float32'),
    ),
    mesh=(('c', 2),),
    outputs=('v5',),
    is_exact=True,
    gradient=False,
  )
  assert program.run().kind == 'right', program.run().why


@pytest.mark.slow
def test_all_families_are_drawn():
  programs = [draw(i, operations=40) for i in range(8)]
  found = collections.Counter(line.family for program in programs for line in program.lines)
  assert len({*FAMILIES} & {*found}) > 0.9 * len(FAMILIES)
  assert {program.is_exact for program in programs} == {program.gradient for program in programs} == {True, False}
  assert any(line.entries for program in programs for line in program.lines)


@pytest.mark.slow
@pytest.mark.parametrize('seed', [1, 2])
def test_random_programs_are_right(seed):
  program = draw(seed)
  assert program.size >= 10
  outcome = program.run()
  assert outcome.kind == 'right', f'{outcome.why}\n{program.script()}'


@pytest.mark.slow
def test_a_wrong_program_is_found_and_made_small(monkeypatch, capsys):
  assert PERMUTED.run().kind == 'right' and PERMUTED.run().guarded
  monkeypatch.setattr(guards, 'guard', lambda lowered: [])
  outcome = PERMUTED.run()
  assert outcome.kind == 'wrong' and outcome.why.startswith('v5 of shape (8, 64) differs by')
  smallest = shrink(PERMUTED, lambda case: case.run().kind == 'wrong')
  assert [line.name for line in smallest.lines if not line.is_input] == ['v4']
  exec(compile(smallest.script(), 'script', 'exec'), {})
  assert 'WRONG' in capsys.readouterr().out


# In a process without threads, which forks safely.
PLANTED = """
import os, time
from tools import hunt_shardings
from tools.hunt.cases import Outcome

class Planted:
  family, size = 'planted', 3
  def __init__(self, number):
    self.number = number
  def run(self):
    if self.number == 1:
      os.abort()
    if self.number == 2:
      time.sleep(3600)
    return Outcome('right')
  def smaller(self):
    return iter(())

hunt_shardings._KINDS['planted'] = lambda rng: Planted(int(rng.integers(4)))
hunt_shardings._MOST_SECONDS = 2.0
for report in hunt_shardings.hunt_in_processes('planted', 1, range(6)):
  print(report.number, report.case.number, report.outcome.why)
"""


@pytest.mark.slow
def test_a_process_that_ends_or_hangs_is_a_finding():
  """The next cases go on in another process, and none is lost."""
  done = subprocess.run([sys.executable, '-c', PLANTED], capture_output=True, text=True, timeout=200, check=True)
  lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
  assert [line[0] for line in lines] == [str(n) for n in range(6)]
  whys = {'1': ['XLA aborts the process'], '2': ['the process does not end']}
  assert all(line[2:] == whys.get(line[1], []) for line in lines)
  assert {'1', '2'} <= {line[1] for line in lines}


def test_gradients_that_do_not_exist_are_not_drawn():
  graph = drawing.Graph(np.random.default_rng(0), is_exact=True, gradient=True)
  x = graph.array((4,))
  loop = f'lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, -c[1]), (0, {x.name}))[1]'
  with pytest.raises(drawing.NotDrawn):
    graph.add('loop', drawing.DrawnOperation(loop, 3.0))
  assert graph.shape_of(f'{x.name} * 2').shape == (4,)
