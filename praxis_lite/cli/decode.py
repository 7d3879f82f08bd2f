"""`praxis-lite decode`: prints samples from a checkpoint, or decodes the experiment's decode_datasets."""

from __future__ import annotations

from typing import Any

from absl import flags

from praxis_lite.cli.command import MAX_SEED, Command, checkpoint_flags, experiment_flags
from praxis_lite.errors import UserError

# Flags that set a field of the model's decoder where they are given.
_DECODER_FLAGS = {'max_tokens': 'max_decode_steps', 'temperature': 'temperature', 'top_k': 'top_k', 'top_p': 'top_p'}


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.cli.experiments import configured_experiment, prepare_devices, required_job_log_dir

  job_log_dir = required_job_log_dir(values)
  prepare_devices(values.devices)
  config = configured_experiment(values)

  from praxis_lite.runtime.distributed import set_up_compilation_cache
  from praxis_lite.runtime.inference import run_decode

  set_up_compilation_cache(enabled=values.compilation_cache)
  if not values.prompt:
    run_decode(config, job_log_dir, step=values.step, seed=values.seed)
    return 0

  from praxis_lite.runtime.inference import decode_prompts

  tokenizer = _tokenizer(config)
  _set_decoder(config.task, tokenizer, values)
  prompts = [prompt for prompt in values.prompt for _ in range(values.num_samples)]
  ids = [_encode(tokenizer, prompt) for prompt in prompts]
  for i, (prompt, continuation) in enumerate(
    zip(prompts, decode_prompts(config, job_log_dir, ids, step=values.step, seed=values.seed))
  ):
    if len(prompts) > 1:
      print(f'----- sample {i + 1} of {len(prompts)}')
    print(prompt + tokenizer.decode(continuation))
  return 0


def _tokenizer(config: Any) -> Any:
  """The tokenizer of the first dataset that has one."""
  for dataset in config.datasets:
    tokenizer = getattr(dataset.instantiate(), 'tokenizer', None)
    if tokenizer is not None:
      return tokenizer
  raise UserError('--prompt needs an experiment whose dataset has a tokenizer, and none of its datasets has one')


def _encode(tokenizer: Any, prompt: str) -> list[int]:
  try:
    return list(tokenizer.encode(prompt))
  except UnicodeEncodeError as error:  # Bytes of the command line that are no text.
    raise UserError(f'--prompt={prompt!r} is not UTF-8 text: character {error.start} is a byte of its own') from None


def _set_decoder(task: Any, tokenizer: Any, values: flags.FlagValues) -> None:
  try:
    decoder = task.model.decoder_tpl
  except AttributeError:
    raise UserError('--prompt needs a language model; the model of this experiment has no decoder_tpl') from None
  for flag, field in _DECODER_FLAGS.items():
    if values[flag].present:
      setattr(decoder, field, values[flag].value)
  for stop in values.stop:
    ids = tokenizer.encode(stop)
    if len(ids) != 1:
      raise UserError(f'--stop={stop!r} is {len(ids)} tokens; a stop text must be one')
    decoder.stop_ids = (*decoder.stop_ids, *ids)


def _flags() -> flags.FlagValues:
  values = experiment_flags()
  checkpoint_flags(values)
  flags.DEFINE_multi_string(
    'prompt',
    [],
    'Text to continue; may be repeated. Without it, the decode_datasets of the experiment are decoded into '
    "job_log_dir/decoded. Example: --prompt='def main('",
    flag_values=values,
  )
  flags.DEFINE_integer(
    'num_samples', 1, 'Samples for each prompt. Example: --num_samples=3', lower_bound=1, flag_values=values
  )
  flags.DEFINE_integer(
    'max_tokens', None, 'Most tokens to add. Example: --max_tokens=200', lower_bound=1, flag_values=values
  )
  flags.DEFINE_float(
    'temperature', None, '0 is greedy, 1 is the model itself. Example: --temperature=0.8', flag_values=values
  )
  flags.DEFINE_integer('top_k', None, 'Sample from the k likeliest tokens. Example: --top_k=40', flag_values=values)
  flags.DEFINE_float(
    'top_p', None, 'Sample from the likeliest tokens that make up p. Example: --top_p=0.95', flag_values=values
  )
  flags.DEFINE_multi_string(
    'stop', [], 'Token that ends a sample; may be repeated. Example: --stop=";"', flag_values=values
  )
  flags.DEFINE_integer(
    'seed',
    0,
    'Seed of the samples. Example: --seed=1',
    lower_bound=0,
    upper_bound=MAX_SEED,
    flag_values=values,
  )
  return values


COMMAND = Command(
  'decode',
  'print samples from a checkpoint, or decode the decode_datasets of the experiment.',
  "praxis-lite decode --exp=lm.StdlibLm --job_log_dir=runs/1 --prompt='def ' --temperature=0.7 --max_tokens=200",
  _flags(),
  _run,
)
