"""The programs of `docs/xla-partitioner-faults.md` show what it says. After one that prints 'right', a guard can go."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

PAGE = (pathlib.Path(__file__).parent.parent / 'docs' / 'xla-partitioner-faults.md').read_text()
PROGRAMS = re.findall(r'^## (\d+)[^`]*^```py\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE)

ABORTS = ('9', '12')


def test_every_fault_of_the_partitioner_has_a_program():
  assert [number for number, _ in PROGRAMS] == [str(n) for n in range(1, 14)]


@pytest.mark.slow
@pytest.mark.parametrize(('number', 'program'), PROGRAMS, ids=[number for number, _ in PROGRAMS])
def test_the_program_shows_the_fault(number, program):
  env = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'} | {'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=False, env=env)
  if number in ABORTS:
    assert done.returncode < 0, done.stdout
    return
  assert done.returncode == 0, done.stderr
  assert done.stdout.split()[-1] == 'wrong', done.stdout
