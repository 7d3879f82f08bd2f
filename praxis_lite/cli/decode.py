"""`praxis-lite decode`: prints samples from a checkpoint, or decodes the experiment's decode_datasets."""

from __future__ import annotations

import functools

from absl import flags

from praxis_lite.cli.command import Command, configured_run, damage_flag, run_flags
from praxis_lite.errors import UserError


def _run(values: flags.FlagValues) -> int:
  config, job_log_dir = configured_run(values)

  from praxis_lite.experiment import ExperimentConfig
  from praxis_lite.runtime.inference import decode_prompts, run_decode
  from praxis_lite.runtime.prompts import chat_prompt, continued_text, encode_prompt, task_with_sampler, tokenizer_of
  from praxis_lite.runtime.vocabulary import with_vocabulary

  if not values.prompt:
    run_decode(config, job_log_dir, step=values.step, seed=values.seed, on_damage=values.on_damage)
    return 0

  config = with_vocabulary(config, job_log_dir)
  tokenizer = tokenizer_of(config)
  if tokenizer is None:
    raise UserError('--prompt needs an experiment whose dataset has a tokenizer, and none of its datasets has one')
  task = task_with_sampler(
    config.task,
    tokenizer,
    max_tokens=values.max_tokens,
    temperature=values.temperature,
    top_k=values.top_k,
    top_p=values.top_p,
    stop=values.stop,
    flag='--',
  )
  config = ExperimentConfig(task, config.datasets, config.decode_datasets)
  prompts = [prompt for prompt in values.prompt for _ in range(values.num_samples)]
  if values.chat:
    ids = [chat_prompt(tokenizer, prompt, values.system) for prompt in prompts]
  else:
    ids = [encode_prompt(tokenizer, prompt, '--prompt') for prompt in prompts]
  continuations = decode_prompts(
    config, job_log_dir, ids, step=values.step, seed=values.seed, on_damage=values.on_damage
  )
  for i, (prompt, known, continuation) in enumerate(zip(prompts, ids, continuations), 1):
    if len(prompts) > 1:
      print(f'----- sample {i} of {len(prompts)}')
    print(tokenizer.decode(continuation) if values.chat else prompt + continued_text(tokenizer, known, continuation))
  return 0


def _flags() -> flags.FlagValues:
  values = run_flags(seed='Seed of the samples. Example: --seed=1', restores=True)
  damage_flag(values)
  texts = functools.partial(flags.DEFINE_multi_string, flag_values=values)
  integer = functools.partial(flags.DEFINE_integer, flag_values=values)
  number = functools.partial(flags.DEFINE_float, flag_values=values)
  texts(
    'prompt',
    [],
    'Text to continue; may be repeated. Without it, the decode_datasets of the experiment are decoded into '
    "job_log_dir/decoded. Example: --prompt='def main('",
  )
  integer('num_samples', 1, 'Samples for each prompt. Example: --num_samples=3', lower_bound=1)
  integer('max_tokens', None, 'Largest number of tokens to add. Example: --max_tokens=200', lower_bound=1)
  likeliest = '0 takes the likeliest token, 1 samples from the model as it is.'
  number('temperature', None, f'{likeliest} Example: --temperature=0.8')
  integer('top_k', None, 'Sample from the k likeliest tokens. Example: --top_k=40')
  number('top_p', None, 'Sample from the fewest tokens whose probabilities reach p. Example: --top_p=0.95')
  chat = "Each --prompt is a user's message, put into the tokenizer's chat template; the answer is printed."
  flags.DEFINE_boolean('chat', False, f'{chat} Example: --chat', flag_values=values)
  system = 'With --chat, the message of the system before it. Example: --system="Be brief."'
  flags.DEFINE_string('system', None, system, flag_values=values)
  texts('stop', [], 'Token that ends a sample; may be repeated. Example: --stop=";"')
  return values


COMMAND = Command(
  'decode',
  'print samples from a checkpoint',
  'print samples from a checkpoint, or decode the decode_datasets of the experiment.',
  "praxis-lite decode --job_log_dir=runs/1 --prompt='def ' --temperature=0.7 --max_tokens=200",
  _flags(),
  _run,
)
