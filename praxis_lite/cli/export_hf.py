"""`praxis-lite export-hf`: writes a checkpoint of a run in the format of transformers."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command, configured_run, run_flags
from praxis_lite.common.errors import UserError


def _run(values: flags.FlagValues) -> int:
  if not values.out:
    raise UserError('--out is missing: name the folder to write, as in --out=exported/llama')
  config, job_log_dir = configured_run(values)

  from praxis_lite.bridges.hf.runs import export_run

  size = max(1, int(values.max_file_gb * 10**9))
  files = export_run(config, job_log_dir, values.out, step=values.step, dtype=values.dtype, max_file_bytes=size)
  print(f'{values.out}: {", ".join(files)}')
  return 0


def _flags() -> flags.FlagValues:
  values = run_flags(restores=True)
  flags.DEFINE_string('out', None, 'Folder to write. Example: --out=exported/llama', flag_values=values)
  dtype = 'dtype to write; by default that of the checkpoint. Example: --dtype=bfloat16'
  flags.DEFINE_enum('dtype', None, ['float32', 'bfloat16', 'float16'], dtype, flag_values=values)
  size = 'Size from which on there are several files. Example: --max_file_gb=2'
  flags.DEFINE_float('max_file_gb', 5.0, size, lower_bound=0.0, flag_values=values)
  return values


COMMAND = Command(
  'export-hf',
  'write a checkpoint that transformers loads',
  'write a checkpoint of a run as a folder that transformers loads: config.json, safetensors and, if it was imported, '
  'its tokenizer. The model may have been trained from the start, if a family of transformers computes the same.',
  'praxis-lite export-hf --job_log_dir=runs/llama --out=exported/llama',
  _flags(),
  _run,
)
