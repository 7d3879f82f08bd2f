"""`praxis-lite export-hf`: writes a checkpoint of a run in the format of transformers."""

from __future__ import annotations

import sys

from absl import flags

from praxis_lite.cli.command import Command, configured_run, say_how_config_differs
from praxis_lite.cli.command_flags import CommandFlags, run_flags
from praxis_lite.common.errors import UserError


def _run(values: flags.FlagValues) -> int:
  if not values.out:
    raise UserError('--out is missing: name the folder to write, as in --out=exported/llama')
  if values.max_file_gb * 10**9 < 1:
    raise UserError(f'--max_file_gb={values.max_file_gb:g}: expected more than 0, as in --max_file_gb=2')
  config, job_log_dir = configured_run(values)

  from praxis_lite.bridges.hf.runs import export_run
  from praxis_lite.inputs.hf_tokenizer import TOKENIZER_FILE
  from praxis_lite.runs.imported_files import SENTENCEPIECE_FILES

  size = int(values.max_file_gb * 10**9)
  files = export_run(
    config,
    job_log_dir,
    values.out,
    step=values.step,
    dtype=values.dtype,
    max_file_bytes=size,
    adapter=values.adapter,
    quantized=values.quantized,
  )
  say_how_config_differs(values, config)
  print(f'{values.out}: {", ".join(files)}')
  if not values.adapter and not {TOKENIZER_FILE, *SENTENCEPIECE_FILES, 'vocab.json'} & set(files):
    print('no files of a tokenizer: the run has none in the format of transformers', file=sys.stderr)
  return 0


def _flags() -> CommandFlags:
  values = run_flags(restores=True)
  values.add_text('out', 'Folder to write.', 'exported/llama')
  dtype = 'Convert the weights to this dtype; by default they keep that of the checkpoint.'
  values.add_choice('dtype', dtype, ['float32', 'bfloat16', 'float16'], 'bfloat16')
  values.add_number('max_file_gb', 'Split the weights into files of at most this size.', '2', 5.0)
  values.add_switch(
    'adapter', 'Write only the adapters (LoRA), as a folder that peft loads; otherwise they are merged.'
  )
  values.add_switch('quantized', 'Write weights in 8 or 4 bits as they are, for vLLM (compressed-tensors).')
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
  stray='out',
)
