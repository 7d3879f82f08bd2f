"""`praxis-lite export-hf`: writes a checkpoint of a run in the format of transformers."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command, configured_run
from praxis_lite.cli.command_flags import CommandFlags, run_flags
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


def _flags() -> CommandFlags:
  values = run_flags(restores=True)
  values.add_text('out', 'Folder to write.', 'exported/llama')
  dtype = 'Convert the weights to this dtype; by default they keep that of the checkpoint.'
  values.add_choice('dtype', dtype, ['float32', 'bfloat16', 'float16'], 'bfloat16')
  values.add_number('max_file_gb', 'Split the weights into files of at most this size.', '2', 5.0, least=0.0)
  return values


COMMAND = Command(
  'export-hf',
  'write a checkpoint for Hugging Face transformers',
  'write a checkpoint of a run as a folder that transformers loads: config.json, safetensors and, if the run was '
  'imported, the tokenizer. A model that was trained from scratch can be exported if a model of transformers computes '
  'the same.',
  'praxis-lite export-hf --job_log_dir=runs/llama --out=exported/llama',
  _flags(),
  _run,
)
