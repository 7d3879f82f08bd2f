"""`praxis-lite export`: writes a checkpoint as programs that run without praxis_lite."""

from __future__ import annotations

import functools

from absl import flags

from praxis_lite.cli.command import Command, configured_run, run_flags
from praxis_lite.common.errors import ConfigError, UserError, did_you_mean


def _run(values: flags.FlagValues) -> int:
  if not values.out:
    raise UserError('--out is missing: name a directory for the files, as in --out=exported')
  config, job_log_dir = configured_run(values)

  from praxis_lite.runs.export import DEFAULT_PLATFORMS, FORMATS, ExportSettings, check_export
  from praxis_lite.runs.run import open_run

  settings = ExportSettings(
    values.what,
    tuple(values.format) or FORMATS,
    values.batch_size,
    values.prompt_length,
    values.max_tokens,
    tuple(values.platforms) or DEFAULT_PLATFORMS,
  )
  check_export(config.task.instantiate().model, values.out, settings)  # Reports mistakes before slow work.
  model = open_run(job_log_dir, config).load(step=values.step)
  batch = None
  if values.inputs:
    struct = model.batch_struct()
    for name in values.inputs:
      if name not in struct:
        raise ConfigError(
          f'--inputs={name}: not in a batch.{did_you_mean(name, struct)} There are: {", ".join(struct)}'
        )
    batch = {name: struct[name] for name in values.inputs}
  options = settings._asdict()
  print(f'wrote {model.export(values.out, options.pop("what"), batch=batch, **options)}')
  return 0


def _flags() -> flags.FlagValues:
  values = run_flags(restores=True)
  names = functools.partial(flags.DEFINE_list, flag_values=values)
  integer = functools.partial(flags.DEFINE_integer, lower_bound=1, flag_values=values)
  out = 'Directory to write; it does not exist, or is empty. Example: --out=exported'
  flags.DEFINE_string('out', None, out, flag_values=values)
  what = 'forward: predictions for a batch. decode: prefill and decode step of a language model, with caches.'
  flags.DEFINE_enum('what', 'forward', ['forward', 'decode'], f'{what} Example: --what=decode', flag_values=values)
  formats = 'stablehlo (for JAX) or saved_model (for TensorFlow); may be repeated. Default: both.'
  flags.DEFINE_multi_enum(
    'format', [], ['stablehlo', 'saved_model'], f'{formats} Example: --format=stablehlo', flag_values=values
  )
  inputs = 'With --what=forward, the arrays of a batch that are inputs; by default those the predictions depend on.'
  names('inputs', [], f'{inputs} Example: --inputs=ids')
  integer(
    'prompt_length', 64, 'With --what=decode, the length that prompts are padded to. Example: --prompt_length=128'
  )
  tokens = "With --what=decode, the most tokens after a prompt; by default those of the model's sampler."
  integer('max_tokens', None, f'{tokens} Example: --max_tokens=200')
  integer('batch_size', None, 'Export for this batch size only; by default for any. Example: --batch_size=8')
  platforms = 'Where the programs shall run: cpu, cuda, rocm, tpu. Default: cpu,cuda,tpu.'
  names('platforms', [], f'{platforms} Example: --platforms=cpu,cuda')
  return values


COMMAND = Command(
  'export',
  'write a checkpoint as StableHLO and as a TensorFlow SavedModel',
  'write the model of a checkpoint as programs of one device, for any batch size, that run without praxis_lite: as '
  'serialized StableHLO for JAX, and as a TensorFlow SavedModel. README.md beside them says how they are called.',
  'praxis-lite export --job_log_dir=runs/1 --what=decode --out=exported',
  _flags(),
  _run,
)
