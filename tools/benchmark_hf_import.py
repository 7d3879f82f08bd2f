# ruff: noqa: E402
"""Measures peak memory and time of importing and exporting a Hugging Face checkpoint of random weights.

  python tools/benchmark_hf_import.py --gigabytes=1
  python tools/benchmark_hf_import.py --read --devices=8     onto a mesh, without a run; on CPU, including the model

Each measurement runs in a separate process. Its memory includes Python, JAX and Orbax after their import, and the parts
of arrays that are read and written at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import ml_dtypes
import numpy as np

from praxis_lite.bridges.hf.files import Declared, write_folder

_HEADS, _HEAD_DIM, _DIMS, _HIDDEN, _VOCAB = 8, 128, 1024, 4096, 32_000

_MEASURED = """
import re, sys, time
start = time.perf_counter()
{statements}
seconds = time.perf_counter() - start
peak = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024
print(peak, seconds)
"""
_READ = """
sys.path.insert(0, 'tests/hf')
import on_meshes
there = on_meshes.load({source!r}, (1, {devices}, 1), block_bytes=4 << 20)
"""
_COMMAND = """
from praxis_lite.cli.main import main
assert main({arguments!r}) == 0
"""


def make_checkpoint(folder: Path, gigabytes: float, dtype: str) -> int:
  """Writes a Llama checkpoint of about this size, one tensor at a time, in files of 0.4 GB; returns its bytes."""
  kind = np.dtype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype)
  layer = 2 * _DIMS**2 + 2 * _DIMS * _HEAD_DIM * _HEADS // 4 + 3 * _DIMS * _HIDDEN
  layers = max(1, round((gigabytes * 1e9 / kind.itemsize - 2 * _VOCAB * _DIMS) / layer))
  shapes: dict[str, tuple[int, ...]] = {'model.embed_tokens.weight': (_VOCAB, _DIMS), 'model.norm.weight': (_DIMS,)}
  for i in range(layers):
    name = f'model.layers.{i}.'
    shapes |= {f'{name}{norm}_layernorm.weight': (_DIMS,) for norm in ('input', 'post_attention')}
    shapes |= {f'{name}self_attn.{p}_proj.weight': (_DIMS, _DIMS) for p in 'qo'}
    shapes |= {f'{name}self_attn.{p}_proj.weight': (_DIMS // 4, _DIMS) for p in 'kv'}
    shapes |= {f'{name}mlp.{p}_proj.weight': (_HIDDEN, _DIMS) for p in ('gate', 'up')}
    shapes[f'{name}mlp.down_proj.weight'] = (_DIMS, _HIDDEN)
  shapes['lm_head.weight'] = (_VOCAB, _DIMS)
  config = {
    'model_type': 'llama',
    'vocab_size': _VOCAB,
    'hidden_size': _DIMS,
    'intermediate_size': _HIDDEN,
    'num_hidden_layers': layers,
    'num_attention_heads': _HEADS,
    'num_key_value_heads': _HEADS // 4,
    'torch_dtype': dtype,
  }
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(config))
  declared = {name: Declared(kind, shape) for name, shape in shapes.items()}
  rng = np.random.default_rng(0)
  write_folder(folder, declared, lambda n: rng.random(shapes[n], dtype=np.float32).astype(kind), 4 * 10**8)
  return sum(d.nbytes for d in declared.values())


def measure_statements(what: str, statements: str, devices: int = 1) -> float:
  """Runs statements in a new process, and prints their time and peak memory. Returns the peak in GB."""
  devices_flag = f'--xla_force_host_platform_device_count={devices}'
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': devices_flag, 'PYTHONPATH': str(ROOT)}
  code = _MEASURED.format(statements=statements)
  done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
  if done.returncode:
    sys.exit(done.stderr)
  peak, seconds = map(float, done.stdout.splitlines()[-1].split())
  print(f'{what}: peak {peak / 1e9:.2f} GB of host memory, {seconds:.1f} s', flush=True)
  return peak / 1e9


def command(*arguments: str) -> str:
  """Returns the statements that run a command of praxis-lite."""
  return _COMMAND.format(arguments=list(arguments))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--gigabytes', type=float, default=1.0)
  parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'])
  parser.add_argument('--read', action='store_true', help='onto simulated CPU devices, in place of import and export')
  parser.add_argument('--devices', type=int, default=1, help='simulated CPU devices for --read')
  flags = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    source, run, out = (str(Path(folder, name)) for name in ('source', 'run', 'out'))
    size = f'{make_checkpoint(Path(source), flags.gigabytes, flags.dtype) / 1e9:.2f} GB'
    if flags.read:
      read = _READ.format(source=source, devices=flags.devices)
      measure_statements(f'reading {size} onto {flags.devices} devices', read, flags.devices)
    else:
      measure_statements(f'import of {size}', command('import-hf', source, f'--job_log_dir={run}'))
      measure_statements(f'export of {size}', command('export-hf', f'--job_log_dir={run}', f'--out={out}'))


if __name__ == '__main__':
  main()
