"""`praxis-lite import-hf`: makes a run directory from a Hugging Face checkpoint."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command
from praxis_lite.cli.command_flags import CommandFlags
from praxis_lite.common.errors import UserError


def _run(values: flags.FlagValues) -> int:
  if not values.path:
    raise UserError('the folder of the checkpoint is missing, as in praxis-lite import-hf llama/ --job_log_dir=runs/1')
  if not values.job_log_dir:
    raise UserError('--job_log_dir is missing: name a directory, as in --job_log_dir=runs/1')
  from praxis_lite.bridges.hf.runs import import_run
  from praxis_lite.common.devices import leave_accelerators_alone

  leave_accelerators_alone()
  for line in import_run(values.path, values.job_log_dir, overrides=values.set):
    print(line, flush=True)
  return 0


def _flags() -> CommandFlags:
  values = CommandFlags()
  path = 'Folder of the checkpoint: config.json, *.safetensors and the files of the tokenizer.'
  values.add_text('path', path, 'llama/')
  values.add_text('job_log_dir', 'Directory of the new run.', 'runs/1')
  override = 'Override a field of the config that the run records.'
  values.add_texts('set', override, "'task.ici_mesh_shape=(1,8,1)'")
  return values


COMMAND = Command(
  'import-hf',
  'make a run from a Hugging Face checkpoint',
  'make a run from a Hugging Face checkpoint of one of many families (Llama, Qwen, Gemma, T5, BERT and others; '
  'docs/families.md lists them), to decode, evaluate, fine-tune and export it. Importing needs little memory, and no '
  'device of the mesh.',
  'praxis-lite import-hf llama/ --job_log_dir=runs/llama',
  _flags(),
  _run,
  stray='job_log_dir',
  bare='path',
  usage='FOLDER [--flags]',
)
