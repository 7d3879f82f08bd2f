# ruff: noqa: E402
"""Peak memory and time of importing a Hugging Face checkpoint of random weights; on CPU the model itself counts too.

  python tools/benchmark_hf_import.py --gigabytes=1 --devices=1
  python tools/benchmark_hf_import.py --read_only     onto the devices alone, without writing the checkpoint of the run

Each measurement is a process of its own. What it needs beyond the model is what JAX takes when it is imported, blocks
of 4 MB, and what Orbax has in flight while it writes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import ml_dtypes
import numpy as np

from praxis_lite.hf.files import Declared, write_folder

_HEADS, _HEAD_DIM, _DIMS, _HIDDEN, _VOCAB = 8, 128, 1024, 4096, 32_000

_MEASURED = """
import re, sys, time
def memory(field):
  return int(re.search(field + r':\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024
start = time.perf_counter()
if {read_only}:
  sys.path.insert(0, 'tests/hf')
  import on_meshes
  there = on_meshes.load({source!r}, (1, {devices}, 1), block_bytes=4 << 20)
else:
  from praxis_lite.cli.main import main
  arguments = ['import-hf', {source!r}, '--job_log_dir={run}', '--set', 'task.ici_mesh_shape=(1,{devices},1)']
  assert main(arguments) == 0
print(memory('VmHWM'), time.perf_counter() - start)
"""


def make_checkpoint(folder: Path, gigabytes: float, dtype: str) -> int:
  """Writes a Llama of about this size in files of 0.4 GB, one tensor in memory at a time; returns its bytes."""
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
  write_folder(folder, declared, lambda n: rng.standard_normal(shapes[n], dtype=np.float32).astype(kind), 4 * 10**8)
  return sum(d.nbytes for d in declared.values())


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--gigabytes', type=float, default=1.0)
  parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'])
  parser.add_argument('--devices', type=int, default=1, help='simulated CPU devices')
  parser.add_argument('--read_only', action='store_true')
  flags = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    source = Path(folder, 'source')
    size = make_checkpoint(source, flags.gigabytes, flags.dtype)
    code = _MEASURED.format(
      read_only=flags.read_only, source=str(source), run=Path(folder, 'run'), devices=flags.devices
    )
    devices = f'--xla_force_host_platform_device_count={flags.devices}'
    env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': devices, 'PYTHONPATH': str(ROOT)}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
      sys.exit(done.stderr)
    peak, seconds = done.stdout.splitlines()[-1].split()
    print(
      f'{size / 1e9:.2f} GB, {flags.devices} devices: peak {int(peak) / 1e9:.2f} GB of host memory, '
      f'{float(seconds):.1f} s, {time.perf_counter() - start:.1f} s with start-up'
    )


if __name__ == '__main__':
  main()
