"""The Python blocks of the guides run, each guide top to bottom as one script; so do their commands."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from quick_xla import xla_flags

from praxis_lite.cli.main import main

ROOT = pathlib.Path(__file__).parent.parent
GUIDES = [p for p in sorted((ROOT / 'docs').glob('*.md')) if '```python' in p.read_text()]
WITH_COMMANDS = [p for p in [ROOT / 'README.md', *GUIDES] if '```sh' in p.read_text()]
COMMANDS = re.compile(r'^```sh\n(.*?)^```', re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r'^```python\n(.*?)^```', re.DOTALL | re.MULTILINE)


ASK_FOR_DEVICES = [p for p in GUIDES if 'jax.devices()' in p.read_text() and 'simulate_cpu' not in p.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize('guide', ASK_FOR_DEVICES, ids=lambda p: p.stem)
def test_guide_that_asks_for_devices_runs_on_eight(guide, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  text = guide.read_text()
  namespace = {'__name__': f'guide_{guide.stem}'}
  for match in BLOCK.finditer(text):
    # Blank lines before the code make line numbers in a traceback those of the guide.
    code = '\n' * text[: match.start(1)].count('\n') + match[1]
    exec(compile(code, str(guide), 'exec'), namespace)


@pytest.mark.slow
@pytest.mark.parametrize('guide', GUIDES, ids=lambda p: p.stem)
def test_guide_runs_as_a_script(guide, tmp_path):
  """There is one device, unless the guide simulates more."""
  script = tmp_path / 'guide.py'
  script.write_text('\n'.join(BLOCK.findall(guide.read_text())))
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': xla_flags()}
  done = subprocess.run(
    [sys.executable, script.name], capture_output=True, text=True, check=False, cwd=tmp_path, env=env
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize('guide', WITH_COMMANDS, ids=lambda p: p.stem)
def test_commands_of_a_guide_run(guide, tmp_path, monkeypatch, shared_programs):
  """The blocks marked `sh`, in order, in one directory; in this process, because starting one takes seconds."""
  import jax

  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', jax.config.jax_compilation_cache_dir)  # For those that it starts.
  for block in COMMANDS.findall(guide.read_text()):
    for line in block.replace('\\\n', ' ').splitlines():
      program, command, *arguments = shlex.split(line)
      assert program == 'praxis-lite'
      assert main([command, *arguments]) == 0, line


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
