"""`praxis-lite decode`: prints samples from a checkpoint, or decodes the experiment's decode_datasets."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, cast

from absl import flags

from praxis_lite.cli.command import Command, configured_run, say_how_config_differs
from praxis_lite.cli.command_flags import CommandFlags, add_on_damage, run_flags
from praxis_lite.cli.prompt_files import GivenPrompt, read_prompts
from praxis_lite.common.errors import UserError
from praxis_lite.common.foreign_text import printable

if TYPE_CHECKING:
  from praxis_lite.inputs import BaseTokenizer


def _run(values: flags.FlagValues) -> int:
  config, job_log_dir = configured_run(values)

  from praxis_lite.common.config import target
  from praxis_lite.models.decoding import SpeculativeSampler
  from praxis_lite.runs.constraints import make_constraint
  from praxis_lite.runs.draft_statistics import DraftStatistics
  from praxis_lite.runs.inference import decode_prompts, run_decode
  from praxis_lite.runs.prompts import (
    Sampling,
    check_decodes,
    is_beam_search,
    is_decoder,
    stop_ids,
    task_with_sampler,
    tokenizer_of,
  )
  from praxis_lite.runs.records.run_inputs import use_kept_vocabulary
  from praxis_lite.training.experiment import ExperimentConfig

  given = [f'--{name}' for name in ('prompt', 'prompt_ids', 'prompts') if values[name].value]
  if not given:
    run_decode(config, job_log_dir, step=values.step, seed=values.seed, on_damage=values.on_damage)
    say_how_config_differs(values, config)
    return 0

  prompts = _given_prompts(values, given)
  check_decodes(config.task)  # This is checked first, because the run may lack the tokenizer that later checks need.
  kept = use_kept_vocabulary(config, job_log_dir)
  try:
    tokenizer = tokenizer_of(kept, job_log_dir)
  except UserError as error:
    if any(prompt.kind != 'prompt_ids' for prompt in prompts):
      raise
    print(f'note: printing ids instead of text: {error}', file=sys.stderr)
    tokenizer = None
  stop_ids(tokenizer, values.stop, '--stop')  # Reports mistakes before slow work.
  sampling = cast(Sampling, {name: values[name].value for name in Sampling.__annotations__ if name in values})
  constraint = make_constraint(tokenizer, values.regex, values.json_schema, '--')
  if constraint is not None:
    sampling['logit_processors'] = (constraint,)
  sampled = ExperimentConfig(task_with_sampler(kept.task, **sampling), kept.datasets, kept.decode_datasets)
  decoder, count = sampled.task.model.decoder_tpl, values.num_samples
  if searches := is_beam_search(sampled.task):
    for name, instead in (('num_samples', 'use --num_best'), ('stream', 'leave it out')):
      if values[name].present and values[name].value:
        raise UserError(f'--{name}: a beam search draws no samples and ends before it can print; {instead}')
    count = decoder.num_best
  _note_unused_flags(values, decoder)
  is_source = bool(getattr(target(kept.task.model), 'prompts_are_sources', False))
  samples = [_Sample(prompt, tokenizer, values, is_source) for prompt in prompts for _ in range(count)]
  if values.stream and len(samples) > 1:
    raise UserError(f'--stream prints one sample as it grows, but there are {len(samples)}; leave it out')
  is_streamed = len(samples) == 1 and not searches and (sys.stdout.isatty() if values.stream is None else values.stream)
  speculates = values.draft is not None or is_decoder(sampled.task, SpeculativeSampler)
  statistics = DraftStatistics() if speculates else None
  continuations = decode_prompts(
    sampled,
    job_log_dir,
    [sample.ids for sample in (samples[::count] if searches else samples)],
    stop=values.stop,
    stream=samples[0].stream if is_streamed else None,
    batch_size=values.batch_size,
    draft=values.draft,
    statistics=statistics,
    step=values.step,
    seed=values.seed,
    on_damage=values.on_damage,
  )
  say_how_config_differs(values, config)
  for i, (sample, continuation) in enumerate(zip(samples, continuations), 1):
    if len(samples) > 1 and sample.given.record is None:
      print(f'----- sample {i} of {len(samples)}')
    sample.finish(continuation)
    if constraint is not None and not constraint.is_match(continuation):
      which = f'sample {i}' if len(samples) > 1 else 'the sample'
      print(f'note: {which} ended before it was complete; --max_tokens allows more', file=sys.stderr)
  if statistics is not None:
    print(f'note: {statistics}', file=sys.stderr)
  return 0


def _note_unused_flags(values: flags.FlagValues, decoder: object) -> None:
  of_draws = ('num_samples', 'top_k', 'top_p', 'min_p', 'typical_p', 'top_n_sigma')
  drawn = [f'--{name}' for name in of_draws if values[name].present]
  if drawn and getattr(decoder, 'temperature', None) == 0:
    equal = f'temperature = 0 takes the most probable token, so {" and ".join(drawn)} can change nothing'
    print(f'note: {equal}; --temperature=1 draws tokens', file=sys.stderr)


def _given_prompts(values: flags.FlagValues, given: list[str]) -> list[GivenPrompt]:
  """Returns the prompts of the flags in `given`; raises UserError if flags cannot be combined."""
  if len(given) > 1:
    raise UserError(f'{given[0]} and {given[1]} cannot be combined; leave out one of them')
  if values.chat and values.prompt_ids:
    raise UserError('--chat puts texts into a template; use it with --prompt or --prompts, not with --prompt_ids')
  prompts = _read_given(values)
  if values.draft is not None and values.lookup is not None:
    raise UserError('--draft and --lookup cannot be combined: one of them guesses tokens; leave out the other')
  if values.system is not None and not values.chat and all(prompt.kind != 'messages' for prompt in prompts):
    raise UserError('--system is the system message of a chat; add --chat, or leave it out')
  return prompts


def _read_given(values: flags.FlagValues) -> list[GivenPrompt]:
  if values.prompts:
    return read_prompts(values.prompts)
  if values.prompt_ids:
    return [GivenPrompt('--prompt_ids', ids, 'prompt_ids') for ids in values.prompt_ids]
  return [GivenPrompt('--prompt', text) for text in values.prompt]


class _Sample:
  """Prints the continuation of a prompt. `given` is the prompt, and `ids` are its tokens.

  `is_source` says whether the model writes a new text for a prompt; then only the new text is printed.
  """

  def __init__(self, given: GivenPrompt, tokenizer: BaseTokenizer | None, values: flags.FlagValues, is_source: bool):
    from praxis_lite.runs.continuations import GrowingText
    from praxis_lite.runs.prompts import chat_prompt, encode_prompt

    self.given, self._stream_ids, self._is_source = given, list[int](), is_source
    if tokenizer is None:
      if given.kind != 'prompt_ids':
        raise UserError(
          f'{given.where} needs an experiment whose dataset has a tokenizer, and none of its datasets has one; if they '
          "have a field for it, set it, as in --set 'datasets[*].tokenizer_tpl=praxis_lite.inputs.ByteTokenizer', or "
          'pass ids, as in --prompt_ids=1,2,3'
        )
      self.ids, self._text = given.value, None
      return
    is_chat = given.kind == 'messages' or (values.chat and given.kind == 'prompt')
    self._before = ''
    if is_chat:
      self.ids = chat_prompt(tokenizer, given.value, values.system)
    elif given.kind == 'prompt_ids':
      self.ids, self._before = given.value, tokenizer.decode(given.value)
    else:
      self.ids, self._before = encode_prompt(tokenizer, given.value, given.where), given.value
    if is_source:
      self._before = ''
    # An answer in a chat begins a text, so it is decoded without the tokens before it.
    self._text = GrowingText(tokenizer, [] if is_chat or is_source else self.ids, values.stop)

  def stream(self, row: int, ids: list[int]) -> None:
    """Prints the text of new tokens."""
    self._print_new(self._stream_ids + ids, is_all=False)

  def finish(self, ids: list[int]) -> None:
    """Prints what is not printed yet, given all tokens of the continuation."""
    if self.given.record is not None:
      text = self._text and self._text.add(ids, is_all=True)
      continuation = {'continuation_ids': ids} if text is None else {'continuation': text}
      print(json.dumps({**self.given.record, **continuation}, ensure_ascii=False), flush=True)
    elif self._text is None:
      print(','.join(map(str, ids if self._is_source else [*self.ids, *ids])))
    else:
      self._print_new(ids, is_all=True)
      print(flush=True)

  def _print_new(self, ids: list[int], *, is_all: bool) -> None:
    if self._text is None or self.given.record is not None:
      return
    self._stream_ids = ids
    text, self._before = self._before + self._text.add(ids, is_all=is_all), ''
    # The text may contain escape sequences, which a model can learn.
    print(printable(text) if sys.stdout.isatty() else text, end='', flush=True)


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
  text, to_text = f'{ids} Example: --prompt_ids=1,2,3', flags.ArgumentSerializer[list[int]]()
  flags.DEFINE_multi(_IdsParser(), to_text, 'prompt_ids', [], text, flag_values=values)
  file = 'File with a prompt in each line, or *.jsonl with texts, {"prompt": ...}, {"prompt_ids": ...} or'
  values.add_text('prompts', f'{file} {{"messages": ...}}, for which the output is JSON lines too.', 'prompts.jsonl')
  values.add_integer('batch_size', 'Continue this many samples at a time.', 8, 64, least=1)
  values.add_integer('num_samples', 'Number of samples for each prompt.', 3, 1, least=1)
  own = "by default as in the model's decoder_tpl"
  values.add_integer('max_tokens', f'Add at most this many tokens; {own}.', 200, least=1)
  temperature = f'0 takes the most probable token; 1 samples from the model as it is; {own}.'
  values.add_number('temperature', temperature, '0.8')
  values.add_integer('top_k', f'Sample from the k most probable tokens, or with 0 from all; {own}.', 40)
  values.add_number('top_p', f'Sample from the fewest tokens whose probabilities sum to p; {own}.', '0.95')
  probable = 'Sample from tokens at least this many times as probable as the most probable one'
  values.add_number('min_p', f'{probable}; {own}.', '0.05')
  penalty = 'Divide the logits of tokens that occurred before by this; 1 changes nothing'
  values.add_number('repetition_penalty', f'{penalty}; {own}.', '1.1')
  values.add_integer('no_repeat_ngram_size', f'Never repeat this many consecutive tokens; {own}.', 3)
  penalty = 'Subtract this from the logits of tokens that the continuation has'
  values.add_number('presence_penalty', f'{penalty}; {own}.', '0.5')
  values.add_number('frequency_penalty', f'{penalty}, for each time that it has them; {own}.', '0.2')
  typical = 'Sample from the fewest of the most typical tokens whose probabilities sum to this'
  values.add_number('typical_p', f'{typical}; {own}.', '0.9')
  sigmas = 'Sample from tokens whose logits are at most this many standard deviations below the largest'
  values.add_number('top_n_sigma', f'{sigmas}; {own}.', '1.0')
  values.add_integer('min_tokens', f'Add at least this many tokens before a stop token; {own}.', 10)
  values.add_integer('beam_size', 'Search with this many beams for the most probable continuation.', 4, least=1)
  values.add_integer(
    'num_best', 'With beams: print this many continuations of each prompt, the best first.', 3, least=1
  )
  values.add_number('length_penalty', f'With beams: larger values prefer longer continuations; {own}.', '0.6')
  early = 'With beams: end as soon as there are as many complete continuations as beams.'
  values.add_switch('early_stopping', early, default=None)
  values.add_text('draft', 'Run of a smaller model with the same vocabulary, which proposes tokens.', 'runs/small')
  guess = 'Propose what followed the last tokens, at most this many, where they occurred before'
  values.add_integer('lookup', f'{guess}; {own}.', 3, least=1)
  values.add_integer('draft_tokens', 'Propose at most this many tokens for each pass of the model.', 4, least=1)
  regex = 'Continue with a text that matches this regular expression as a whole.'
  values.add_text('regex', regex, "'[0-9]+ (cats|dogs)'")
  values.add_text('json_schema', 'Continue with JSON that is valid for the JSON schema in this file.', 'schema.json')
  chat = "Put each --prompt, as a user's message, into the tokenizer's chat template, and print the answer."
  values.add_switch('chat', chat)
  values.add_text('system', 'With --chat: the system message.', '"Be brief."')
  values.add_texts('stop', 'Text that ends a sample.', '";"')
  stream = 'Print one sample as it grows; by default if the output is a terminal.'
  values.add_switch('stream', stream, default=None)
  return values


COMMAND = Command(
  'decode',
  'print samples from a checkpoint',
  'continue prompts with a checkpoint and print the results; or, without a prompt, decode the decode_datasets of the '
  'experiment.',
  "praxis-lite decode --job_log_dir=runs/1 --prompt='def ' --temperature=0.7 --max_tokens=200",
  _flags(),
  _run,
  stray='prompt',
)
