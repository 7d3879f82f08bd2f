"""`praxis-lite export`: writes a checkpoint as programs that run without praxis_lite."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command, configured_run, say_how_config_differs
from praxis_lite.cli.command_flags import CommandFlags, run_flags
from praxis_lite.common.errors import ConfigError, UserError, did_you_mean


def _run(values: flags.FlagValues) -> int:
  if not values.out:
    raise UserError('--out is missing: name a directory for the files, as in --out=exported')
  for name, what in {'inputs': 'forward', 'prompt_length': 'decode', 'max_tokens': 'decode'}.items():
    if values[name].present and values.what != what:
      raise UserError(f'--{name} is for --what={what}; leave it out, or add --what={what}')
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
  say_how_config_differs(values, config)
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


def _flags() -> CommandFlags:
  values = run_flags(restores=True)
  values.add_text('out', 'Directory to write, which must be empty or new.', 'exported')
  what = 'forward: predictions for a batch. decode: prefill and decode step of a language model or an encoder-decoder.'
  values.add_choice('what', what, ['forward', 'decode'], 'decode', 'forward')
  formats = 'stablehlo for JAX, saved_model for TensorFlow; by default both. May be repeated.'
  text = f'{formats} Example: --format=stablehlo'
  flags.DEFINE_multi_enum('format', [], ['stablehlo', 'saved_model'], text, flag_values=values)
  inputs = 'With --what=forward: arrays of a batch to take as inputs; by default those that predictions depend on.'
  values.add_list('inputs', inputs, 'ids')
  length = 'With --what=decode: the length that prompts are padded to.'
  values.add_integer('prompt_length', length, 128, 64, least=1)
  tokens = "With --what=decode: the largest number of tokens after a prompt; by default that of the model's sampler."
  values.add_integer('max_tokens', tokens, 200, least=1)
  values.add_integer('batch_size', 'Export for this batch size only; by default for any.', 8, least=1)
  platforms = 'Platforms that the programs run on: cpu, cuda, rocm, tpu; by default cpu, cuda and tpu.'
  values.add_list('platforms', platforms, 'cpu,cuda')
  return values


COMMAND = Command(
  'export',
  'write a checkpoint as StableHLO and a TensorFlow SavedModel',
  'write the model of a checkpoint as programs that run without praxis_lite, on one device, with any batch size: as '
  'serialized StableHLO for JAX, and as a TensorFlow SavedModel. Their README.md says how to call them.',
  'praxis-lite export --job_log_dir=runs/1 --what=decode --out=exported',
  _flags(),
  _run,
  stray='out',
)
