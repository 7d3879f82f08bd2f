"""The programs of `docs/xla-partitioner-faults.md` show what it says. After one that prints 'right', a guard can go."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jaxlib
import pytest

PAGE = (pathlib.Path(__file__).parent.parent / 'docs' / 'xla-partitioner-faults.md').read_text()
PROGRAMS = dict(re.findall(r'^## (\d+)[^`]*^```py\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE))
# The releases that the page says are right.
MENDED = dict(re.findall(r'^## (\d+)\.(?:(?!^## ).)*?; (\S+) is right\.$', PAGE, re.DOTALL | re.MULTILINE))

ABORTS = ('9', '12', '18', '25', '30', '31')

# Each program runs in a process of its own, forked after the imports, which take longer than the programs.
FORKS = """
import json, os, sys, tempfile, traceback
import jax, jax.numpy

found = {}
for number, program in json.load(sys.stdin).items():
  with tempfile.TemporaryFile('w+') as out, tempfile.TemporaryFile('w+') as err:
    child = os.fork()
    if not child:
      os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
      try:
        exec(compile(program, 'program', 'exec'), {'__name__': '__main__'})
        sys.stdout.flush()
        os._exit(0)
      except BaseException:
        traceback.print_exc()
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    out.seek(0), err.seek(0)
    found[number] = code, out.read(), err.read()
print(json.dumps(found))
"""


@pytest.fixture(scope='module')
def ended():
  """The exit code of each program, and what it wrote to stdout and to stderr."""
  env = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'} | {'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run(
    [sys.executable, '-c', FORKS], input=json.dumps(PROGRAMS), capture_output=True, text=True, check=False, env=env
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def test_every_fault_of_the_partitioner_has_a_program():
  assert [*PROGRAMS] == [str(n) for n in range(1, 32) if n not in (14, 20, 21)]  # 14 may wait forever.


@pytest.mark.slow
@pytest.mark.parametrize('number', PROGRAMS)
def test_the_program_shows_the_fault(number, ended):
  code, out, err = ended[number]
  if number in ABORTS:
    assert code < 0, out
    return
  assert code == 0, err
  assert out.split()[-1] == ('right' if _is_mended(number) else 'wrong'), out


def _is_mended(number):
  release, here = (
    [int(part) for part in text.split('.')[:3]] for text in (MENDED.get(number, '999'), jaxlib.__version__)
  )
  return here >= release
