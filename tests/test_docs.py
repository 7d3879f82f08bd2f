"""The Python of each guide runs, top to bottom as one script; links between documents lead somewhere."""

import json
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
from quick_xla import xla_flags

ROOT = pathlib.Path(__file__).parent.parent
GUIDES = [p for p in sorted((ROOT / 'docs').glob('*.md')) if '```python' in p.read_text()]
BLOCK = re.compile(r'^```python\n(.*?)^```', re.DOTALL | re.MULTILINE)
ON_EIGHT = [p for p in GUIDES if 'simulate_cpu_devices(8)' in p.read_text()]
ON_ONE = [p for p in GUIDES if p not in ON_EIGHT]
SHARDINGS = ROOT / 'docs' / 'five-ways-to-shard.md'
INPUTS = ROOT / 'docs' / 'inputs.md'


def write_script(guide, folder):
  """Writes the Python of a guide, on the lines that it has there, so that tracebacks have them."""
  text, code = guide.read_text(), ''
  for match in BLOCK.finditer(text):
    code += '\n' * (text.count('\n', 0, match.start(1)) - code.count('\n')) + match[1]
  script = folder / 'guide.py'
  script.write_text(code)
  return script


def run_script(guide, folder, **environment):
  """Runs the Python of a guide in a process of its own, which is killed if it hangs."""
  command, env = [sys.executable, write_script(guide, folder)], os.environ | {'XLA_FLAGS': xla_flags()} | environment
  return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize('guide', [p for p in ON_EIGHT if p != SHARDINGS], ids=lambda p: p.stem)
def test_guide_that_simulates_devices_runs_as_a_script(guide, shared_programs, tmp_path, monkeypatch):
  """In this process, which has as many devices."""
  monkeypatch.chdir(tmp_path)
  runpy.run_path(str(write_script(guide, tmp_path)), run_name='__main__')


@pytest.mark.slow
def test_guide_to_shardings_runs_as_a_script_and_xla_warns_of_none(tmp_path):
  """In another process, because this one hides warnings of XLA."""
  done = run_script(SHARDINGS, tmp_path, TF_CPP_MIN_LOG_LEVEL='1')
  assert done.returncode == 0 and 'full rematerialization' not in done.stderr, done.stderr


@pytest.mark.slow
def test_guide_to_inputs_runs_as_a_script(tmp_path):
  """In a process of its own, as a user has it: it imports TensorFlow, Grain and PyArrow."""
  done = run_script(INPUTS, tmp_path)
  assert done.returncode == 0, done.stderr


@pytest.fixture(scope='module')
def one_device(tmp_path_factory):
  """A process with one device, which guides run in: starting one for each would take a second or two.

  What one of them has compiled is not compiled again.
  """
  programs = {
    'JAX_COMPILATION_CACHE_DIR': str(tmp_path_factory.mktemp('programs')),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '0',
  }
  command = [sys.executable, ROOT / 'tests' / 'guide_process.py']
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': xla_flags()} | programs
  with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
    yield process
    process.kill()


@pytest.mark.slow
@pytest.mark.parametrize('guide', [p for p in ON_ONE if p != INPUTS], ids=lambda p: p.stem)
def test_guide_runs_as_a_script(guide, one_device, tmp_path):
  write_script(guide, tmp_path)
  print(tmp_path, file=one_device.stdin, flush=True)
  answer = one_device.stdout.readline()
  error = json.loads(answer) if answer else f'the process ended with {one_device.wait()}'
  assert not error, error


def test_a_layer_with_two_weights_is_short_and_imports_only_this_package_and_jax():
  guide = (ROOT / 'docs' / 'your-own-experiment.md').read_text()
  (block,) = [code for code in BLOCK.findall(guide) if 'class Bottleneck(Layer)' in code]
  lines = [line for line in block.splitlines() if line.strip()]
  assert len(lines) <= 30
  imports = {line for line in lines if line.startswith(('import', 'from'))}
  assert all(line.split()[1] in ('jax', 'jax.numpy', 'praxis_lite') for line in imports)


def test_links_between_documents_lead_somewhere():
  for document in [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]:
    for target in re.findall(r'\]\((?!https?:|#)([^)#]+)', document.read_text()):
      assert (document.parent / target).exists(), f'{document.name} links to {target}'


INSTALL_AND_TRAIN = r'pip install -e \.\npraxis-lite train --exp=lm\.StdlibLmTiny --job_log_dir=runs/tiny\n```'
LOG = r'^```\nlm: 13,392 parameters'


def assert_in_order(page, *patterns):
  text, at = page.read_text(), 0
  for pattern in patterns:
    match = re.compile(pattern, re.MULTILINE).search(text, at)
    assert match, f'{page.name} lacks {pattern}, or has it too early'
    at = match.end()


def test_readme_begins_with_what_one_can_do_the_first_run_and_a_picture_and_needs_no_pax():
  readme, four_lines = (
    ROOT / 'README.md',
    rf'^```\npython3 -m venv \.venv\nsource \.venv/bin/activate\n{INSTALL_AND_TRAIN}',
  )
  assert_in_order(readme, r'With it you can\n\n\* ', four_lines, LOG, r'lm_sizes\.Llama8B --html', '<picture>', r'^## ')
  assert 'Pax' not in readme.read_text().partition('<picture>')[0]


def test_the_front_page_begins_with_what_this_is_two_commands_and_what_comes_out_before_a_picture():
  front = ROOT / 'docs' / 'index.md'
  assert_in_order(front, '^praxis_lite is a', rf'^```\n{INSTALL_AND_TRAIN}', LOG, r'^!\[', '^## ')
  table = front.read_text().partition('|---|---|\n')[2].partition('\n\n')[0]
  rows = [line.strip('| ').split(' | ') for line in table.splitlines()]
  for word, page in {
    'decode': 'decoding.md',
    'chat with': 'hugging-face.md',
    'over HTTP': 'serving.md',
    'serve a model': 'hugging-face.md#serve-the-model',
    'from PyTorch': 'from-pytorch.md',
    'from Pax': 'from-pax.md',
  }.items():
    assert any(word in what and f'({page})' in where for what, where in rows), word
  assert len({where for _, where in rows}) == len(rows) > 40
