"""`praxis-lite decode`: prints samples from a checkpoint, or decodes the experiment's decode_datasets."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.cli.command import Command, configured_run, run_flags
from praxis_lite.errors import UserError

if TYPE_CHECKING:
  from praxis_lite.config import Config
  from praxis_lite.experiment import ExperimentConfig
  from praxis_lite.inputs import BaseTokenizer

# Flags that set a field of the model's decoder, where given.
_DECODER_FLAGS = {'max_tokens': 'max_decode_steps', 'temperature': 'temperature', 'top_k': 'top_k', 'top_p': 'top_p'}


def _run(values: flags.FlagValues) -> int:
  config, job_log_dir = configured_run(values)

  from praxis_lite.runtime.inference import decode_prompts, run_decode

  if not values.prompt:
    run_decode(config, job_log_dir, step=values.step, seed=values.seed)
    return 0

  tokenizer = _tokenizer(config)
  _set_decoder(config.task, tokenizer, values)
  prompts = [prompt for prompt in values.prompt for _ in range(values.num_samples)]
  ids = [_chat_ids(tokenizer, prompt, values) if values.chat else _encode(tokenizer, prompt) for prompt in prompts]
  continuations = decode_prompts(config, job_log_dir, ids, step=values.step, seed=values.seed)
  for i, (prompt, known, continuation) in enumerate(zip(prompts, ids, continuations), 1):
    if len(prompts) > 1:
      print(f'----- sample {i} of {len(prompts)}')
    print(tokenizer.decode(continuation) if values.chat else prompt + _continued(tokenizer, known, continuation))
  return 0


def _tokenizer(config: ExperimentConfig) -> BaseTokenizer:
  """Returns the tokenizer of the first dataset that has one."""
  from praxis_lite.config import Config

  for dataset in config.datasets:
    template = getattr(dataset, 'tokenizer_tpl', None)  # The data need not be there.
    if isinstance(template, Config):
      return template.instantiate()
    tokenizer = getattr(dataset.instantiate(), 'tokenizer', None)
    if tokenizer is not None:
      return tokenizer
  raise UserError('--prompt needs an experiment whose dataset has a tokenizer, and none of its datasets has one')


def _encode(tokenizer: BaseTokenizer, prompt: str) -> list[int]:
  try:
    return tokenizer.prompt_ids(prompt)
  except UnicodeEncodeError as error:  # The shell passed bytes that are not text.
    raise UserError(f'--prompt={prompt!r} is not UTF-8 text: character {error.start} is a stray byte') from None


def _chat_ids(tokenizer: BaseTokenizer, prompt: str, values: flags.FlagValues) -> list[int]:
  from praxis_lite.inputs import HfTokenizer

  if not isinstance(tokenizer, HfTokenizer):
    raise UserError(f'--chat needs a tokenizer with a chat template, and this run has a {type(tokenizer).__name__}')
  messages = [{'role': 'system', 'content': values.system}] if values.system else []
  return tokenizer.chat_ids([*messages, {'role': 'user', 'content': prompt}])


def _continued(tokenizer: BaseTokenizer, known: list[int], continuation: list[int]) -> str:
  """Returns the text after the prompt: some tokenizers drop the space at the beginning of what they decode."""
  before, whole = tokenizer.decode(known), tokenizer.decode([*known, *continuation])
  return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(continuation)


def _set_decoder(task: Config, tokenizer: BaseTokenizer, values: flags.FlagValues) -> None:
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
      raise UserError(f'--stop={stop!r} is {len(ids)} tokens; a stop text must be one token')
    decoder.stop_ids = (*decoder.stop_ids, *ids)


def _flags() -> flags.FlagValues:
  values = run_flags(seed='Seed of the samples. Example: --seed=1', restores=True)
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
