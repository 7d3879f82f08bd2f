"""`praxis-lite decode`: prints samples from a checkpoint, or decodes the experiment's decode_datasets."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from absl import flags

from praxis_lite.cli.command import Command, configured_run
from praxis_lite.cli.command_flags import CommandFlags, add_on_damage, run_flags
from praxis_lite.common.errors import UserError
from praxis_lite.common.foreign_text import printable

if TYPE_CHECKING:
  from praxis_lite.inputs import BaseTokenizer


def _run(values: flags.FlagValues) -> int:
  config, job_log_dir = configured_run(values)

  from praxis_lite.runs.inference import decode_prompts, run_decode
  from praxis_lite.runs.prompts import continued_text, task_with_sampler, tokenizer_of
  from praxis_lite.runs.vocabulary import use_kept_vocabulary
  from praxis_lite.training.experiment import ExperimentConfig

  if not values.prompt and not values.prompt_ids:
    run_decode(config, job_log_dir, step=values.step, seed=values.seed, on_damage=values.on_damage)
    return 0

  if values.prompt and values.prompt_ids:
    raise UserError('--prompt and --prompt_ids cannot be combined; leave out one of them')
  if values.chat and values.prompt_ids:
    raise UserError('--chat puts texts into a template; use it with --prompt, not with --prompt_ids')
  config = use_kept_vocabulary(config, job_log_dir)
  try:
    tokenizer = tokenizer_of(config)
  except UserError as error:
    if not values.prompt_ids:
      raise
    print(f'note: printing ids instead of text: {error}', file=sys.stderr)
    tokenizer = None
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
  prompts = [prompt for prompt in _prompts(values, tokenizer) for _ in range(values.num_samples)]
  continuations = decode_prompts(
    config,
    job_log_dir,
    [prompt.ids for prompt in prompts],
    step=values.step,
    seed=values.seed,
    on_damage=values.on_damage,
  )
  for i, (prompt, continuation) in enumerate(zip(prompts, continuations), 1):
    if len(prompts) > 1:
      print(f'----- sample {i} of {len(prompts)}')
    if tokenizer is None:
      print(','.join(map(str, [*prompt.ids, *continuation])))
    else:
      text = tokenizer.decode(continuation) if values.chat else continued_text(tokenizer, prompt.ids, continuation)
      text = text if values.chat else prompt.text + text
      print(printable(text) if sys.stdout.isatty() else text)  # A model may have learned escape sequences.
  return 0


class _Prompt(NamedTuple):
  """A prompt, as text and token ids. The text is empty if there is no tokenizer."""

  text: str
  ids: list[int]


def _prompts(values: flags.FlagValues, tokenizer: BaseTokenizer | None) -> list[_Prompt]:
  """Returns the prompts that the flags give."""
  from praxis_lite.runs.prompts import chat_prompt, encode_prompt

  if tokenizer is None:
    if values.prompt:
      raise UserError(
        '--prompt needs an experiment whose dataset has a tokenizer, and none of its datasets has one; pass ids, as in '
        '--prompt_ids=1,2,3'
      )
    return [_Prompt('', ids) for ids in values.prompt_ids]
  if values.prompt_ids:
    return [_Prompt(tokenizer.decode(ids), ids) for ids in values.prompt_ids]
  if values.chat:
    return [_Prompt(text, chat_prompt(tokenizer, text, values.system)) for text in values.prompt]
  return [_Prompt(text, encode_prompt(tokenizer, text, '--prompt')) for text in values.prompt]


class _IdsParser(flags.ArgumentParser[list[int]]):
  """Parses token ids separated by commas."""

  def parse(self, argument: str) -> list[int]:
    try:
      return [int(part) for part in argument.split(',')] if argument else []
    except ValueError:
      raise ValueError('expected token ids, such as 1,2,3') from None

  def flag_type(self) -> str:
    return 'token ids'


def _flags() -> CommandFlags:
  values = run_flags(seed='Seed of the samples.', restores=True)
  add_on_damage(values)
  without = 'Without a prompt, the decode_datasets of the experiment are decoded into job_log_dir/decoded.'
  values.add_texts('prompt', f'Text to continue. {without}', "'def main('")
  ids = 'Token ids to continue. For a model without a tokenizer, ids are printed. May be repeated.'
  flags.DEFINE_multi(
    _IdsParser(),
    flags.ArgumentSerializer[list[int]](),
    'prompt_ids',
    [],
    f'{ids} Example: --prompt_ids=1,2,3',
    flag_values=values,
  )
  values.add_integer('num_samples', 'Number of samples for each prompt.', 3, 1, least=1)
  own = "by default as in the model's decoder_tpl"
  values.add_integer('max_tokens', f'Add at most this many tokens; {own}.', 200, least=1)
  temperature = f'0 takes the most probable token; 1 samples from the model as it is; {own}.'
  values.add_number('temperature', temperature, '0.8')
  values.add_integer('top_k', f'Sample from the k most probable tokens; {own}.', 40)
  values.add_number('top_p', f'Sample from the fewest tokens whose probabilities sum to p; {own}.', '0.95')
  chat = "Put each --prompt, as a user's message, into the tokenizer's chat template, and print the answer."
  values.add_switch('chat', chat)
  values.add_text('system', 'With --chat: the system message.', '"Be brief."')
  values.add_texts('stop', 'Token that ends a sample.', '";"')
  return values


COMMAND = Command(
  'decode',
  'print samples from a checkpoint',
  'continue prompts with a checkpoint and print the results; or, without a prompt, decode the decode_datasets of the '
  'experiment.',
  "praxis-lite decode --job_log_dir=runs/1 --prompt='def ' --temperature=0.7 --max_tokens=200",
  _flags(),
  _run,
)
