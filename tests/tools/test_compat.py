"""Which Pythons `tools/compat.sh` and continuous integration find, and that what is declared is what they try."""

import itertools
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
DECLARED = [c.rpartition(' ')[2] for c in PROJECT['classifiers'] if 'Python :: 3.' in c]
HERE = f'python3.{sys.version_info.minor}'


def test_the_short_set_of_tests_exists():
  script = (ROOT / 'tools' / 'compat.sh').read_text()
  short = re.search(r"^SHORT='(.*?)'$", script, re.MULTILINE | re.DOTALL)[1].split()
  assert len(short) > 5 and [name for name in short if not (ROOT / name).exists()] == []


def script(path, text):
  path.parent.mkdir(exist_ok=True)
  path.write_text(f'#!/bin/sh\n{text}\n')
  path.chmod(0o755)


def pythons(tmp_path, *arguments):
  """The names of what `pythons.sh` prints, for a PATH of `first` and `second`, and versions of pyenv."""
  path = os.pathsep.join([str(tmp_path / 'first'), str(tmp_path / 'second'), '/usr/bin', '/bin'])
  env = {'PATH': path, 'HOME': str(tmp_path), 'PYENV_ROOT': str(tmp_path / 'pyenv')}
  done = subprocess.run(
    [ROOT / 'tools' / 'pythons.sh', *arguments], env=env, capture_output=True, text=True, check=True
  )
  found = [pathlib.Path(line) for line in done.stdout.splitlines()]
  return {p.name: str(p.parent) for p in found if p.is_relative_to(tmp_path)}, [p.name for p in found]


def test_what_does_not_run_is_no_python(tmp_path):
  script(tmp_path / 'first' / HERE, 'exit 127')  # As pyenv's shim of a version that is not chosen.
  script(tmp_path / 'first' / 'python3.97', f'exec {sys.executable} "$@"')  # It is another one than its name says.
  script(tmp_path / 'first' / 'python3.98', 'echo 98')
  script(tmp_path / 'first' / 'python3.99', 'echo 99; exit 1')
  script(tmp_path / 'first' / 'python3.10', 'echo 10')
  script(tmp_path / 'first' / 'python3.98-config', 'echo 98')
  script(tmp_path / 'second' / HERE, f'exec {sys.executable} "$@"')
  found, names = pythons(tmp_path)
  assert found == {HERE: str(tmp_path / 'second'), 'python3.98': str(tmp_path / 'first')}
  assert names[-1] == 'python3.98' and names == sorted(names)
  assert 'python3.98' not in pythons(tmp_path, '--declared')[1]


def test_pythons_of_pyenv_are_found(tmp_path):
  (tmp_path / 'pyenv' / 'versions' / '1').mkdir(parents=True)
  script(tmp_path / 'pyenv' / 'versions' / '1' / 'bin' / 'python3.98', 'echo 98')
  assert pythons(tmp_path)[0] == {'python3.98': str(tmp_path / 'pyenv' / 'versions' / '1' / 'bin')}


def test_an_argument_that_there_is_not():
  done = subprocess.run([ROOT / 'tools' / 'compat.sh', '--set=oldest'], capture_output=True, text=True, check=False)
  assert done.returncode == 2 and 'unknown argument: --set=oldest' in done.stderr and '--sets=newest' in done.stderr


def test_the_matrix_of_continuous_integration_is_what_is_declared():
  jobs = yaml.safe_load((ROOT / '.github' / 'workflows' / 'tests.yml').read_text())['jobs']
  assert jobs['compat']['strategy']['matrix'] == {'python': DECLARED, 'releases': ['oldest', 'newest']}
  assert PROJECT['requires-python'] == f'>={DECLARED[0]}'


def test_packages_of_jax_have_the_same_bounds():
  everything = [*PROJECT['dependencies'], *itertools.chain(*PROJECT['optional-dependencies'].values())]
  bounds = {d.split('>')[0]: re.search(r'>=[^;]*', d)[0] for d in everything if re.match(r'jax', d)}
  bounds.pop('jax-triton', None)  # Its releases do not follow those of JAX.
  assert {*bounds} == {'jax', 'jaxlib', 'jax-cuda12-pjrt', 'jax-cuda12-plugin'}
  assert len({*bounds.values()}) == 1, bounds


@pytest.mark.parametrize('path', ['.ci/run', 'tools/compat.sh', 'tools/pythons.sh'])
def test_scripts_are_valid(path):
  assert os.access(ROOT / path, os.X_OK)
  subprocess.run(['bash', '-n', ROOT / path], check=True)
