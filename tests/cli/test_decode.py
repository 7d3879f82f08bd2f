"""`praxis-lite decode`: prompts from files, and how samples are printed."""

from __future__ import annotations

import json

import pytest
from test_bad_input import STDLIB, fails

from praxis_lite.cli.main import main
from praxis_lite.cli.prompt_files import read_prompts
from praxis_lite.runs import DraftStatistics


@pytest.fixture
def decode(monkeypatch, tmp_path, capsys):
  """Runs the command with a model that continues a prompt by its number and `é`; returns the output and the calls."""
  calls = []

  def continued(config, job_log_dir, prompts, *, stream=None, **options):
    calls.append(([bytes(prompt).decode() for prompt in prompts], config.task.model.decoder_tpl, options))
    rows = [[*str(i).encode(), *'é'.encode()] for i in range(len(prompts))]
    for row, ids in enumerate(rows if stream else ()):
      for token in ids:
        stream(row, [token])
        pieces.append(capsys.readouterr().out)
    return rows

  def decode(*arguments):
    calls.clear()
    pieces.clear()
    assert main(['decode', STDLIB, '--nocompilation_cache', f'--job_log_dir={tmp_path}', *arguments]) == 0
    return capsys.readouterr().out, *calls

  decode.pieces = pieces = []
  monkeypatch.setattr('praxis_lite.runs.inference.decode_prompts', continued)
  monkeypatch.chdir(tmp_path)
  return decode


def test_lines_of_a_file_are_prompts(decode, tmp_path):
  (tmp_path / 'prompts.txt').write_text('a b \r\n\nccc')
  out, (prompts, *_) = decode('--prompts=prompts.txt', '--num_samples=2')
  assert prompts == ['a b ', 'a b ', 'ccc', 'ccc']
  assert out.splitlines()[:4] == ['----- sample 1 of 4', 'a b 0é', '----- sample 2 of 4', 'a b 1é']


def test_json_lines_are_printed_with_their_continuations(decode, tmp_path):
  lines = ['"a\\nb"', '{"prompt": "c", "id": 7}', '{"prompt_ids": [100, 101]}']
  (tmp_path / 'prompts.jsonl').write_text('\n'.join(lines))
  out, (prompts, *_) = decode('--prompts=prompts.jsonl')
  assert prompts == ['a\nb', 'c', 'de']
  assert [json.loads(line) for line in out.splitlines()] == [
    {'prompt': 'a\nb', 'continuation': '0é'},
    {'prompt': 'c', 'id': 7, 'continuation': '1é'},
    {'prompt_ids': [100, 101], 'continuation': '2é'},
  ]


def test_one_sample_is_printed_as_it_grows_in_whole_characters(decode):
  out, _ = decode('--prompt=a', '--stream')
  assert [*decode.pieces, out] == ['a0', '', 'é', '\n']
  assert decode('--prompt=a')[0] == 'a0é\n' and not decode.pieces  # The output is no terminal.


def test_settings_and_stop_texts_are_passed_on(decode):
  flags = ['--min_p=0.1', '--repetition_penalty=1.5', '--no_repeat_ngram_size=3', '--top_k=5', '--max_tokens=9']
  out, (_, decoder, options) = decode('--prompt=a', '--stop=0', '--batch_size=3', *flags)
  assert out == 'a0\n' and options['stop'] == ['0'] and options['batch_size'] == 3
  assert (decoder.min_p, decoder.repetition_penalty, decoder.no_repeat_ngram_size) == (0.1, 1.5, 3)
  assert (decoder.top_k, decoder.max_decode_steps) == (5, 9)


def test_beams_are_printed_the_best_first(decode, monkeypatch):
  flags = ['--beam_size=4', '--num_best=2', '--length_penalty=1.5', '--early_stopping', '--min_tokens=2']
  _, (prompts, decoder, _) = decode('--prompt=a', '--prompt=b', *flags)
  assert prompts == ['a', 'b']  # Each prompt is read once.
  found = decoder.beam_size, decoder.num_best, decoder.length_penalty, decoder.early_stopping, decoder.min_decode_steps
  assert found == (4, 2, 1.5, True, 2) and decoder.max_decode_steps == 16

  def two_for_each(config, job_log_dir, prompts, **options):
    return [[*b'0'], [*b'1']] * len(prompts)

  monkeypatch.setattr('praxis_lite.runs.inference.decode_prompts', two_for_each)
  out, *_ = decode('--prompt=a', '--prompt=b', '--beam_size=2', '--num_best=2')
  assert out.splitlines()[1::2] == ['a0', 'a1', 'b0', 'b1'] and out.startswith('----- sample 1 of 4')


def test_guesses_are_asked_for_and_reported(decode, capsys):
  _, (_, decoder, options) = decode('--prompt=a', '--lookup=3')
  assert (decoder.lookup, decoder.draft_tokens, options['draft']) == (3, 4, None)
  assert isinstance(options['statistics'], DraftStatistics)
  main(['decode', STDLIB, '--job_log_dir=x', '--prompt=a', '--draft=runs/small', '--draft_tokens=2'])
  assert capsys.readouterr().err == 'note: 0.00 tokens in each pass of the model; 0% of 0 guessed tokens were right\n'
  _, (_, decoder, options) = decode('--prompt=a')
  assert options['draft'] is None and options['statistics'] is None


def test_one_of_the_guesses_is_chosen(capsys):
  said = '--draft and --lookup cannot be combined: one of them guesses tokens; leave out the other'
  assert said in fails(capsys, 'decode', STDLIB, '--job_log_dir=x', '--prompt=a', '--draft=runs/small', '--lookup=3')


def test_settings_that_greedy_decoding_does_not_use_are_told(decode, capsys):
  main(['decode', STDLIB, '--job_log_dir=x', '--prompt=a', '--temperature=0', '--num_samples=2', '--top_k=5'])
  said = (
    'note: temperature = 0 takes the most probable token, so --num_samples and --top_k can change nothing; --temper'
  )
  assert capsys.readouterr().err.startswith(said)
  main(['decode', STDLIB, '--job_log_dir=x', '--prompt=a', '--temperature=1', '--num_samples=2'])
  assert capsys.readouterr().err == ''


@pytest.mark.parametrize(
  'name, content, message',
  [
    ('p.txt', b' \n', r'--prompts=p.txt has no prompts; expected one in each line'),
    ('p.txt', b'a\xff', r'--prompts=p.txt is not UTF-8 text: byte 1 is 0xff'),
    ('p.jsonl', b'"a"\n{', r'--prompts=p.jsonl: line 2 is not JSON: expecting property name'),
    (
      'p.jsonl',
      b'[1]',
      r'--prompts=p.jsonl: line 1: expected a text, or an object with one of prompt, prompt_ids, mes',
    ),
    ('p.jsonl', b'{"text": "a"}', r'line 1: expected a text, or an object with one of prompt, prompt_ids, messages'),
    ('p.jsonl', b'{"prompt_ids": "a"}', r'line 1: prompt_ids must be a list of ids'),
    ('p.jsonl', b'{"messages": ["a"]}', r'line 1: messages must be a list of {"role": ..., "content": ...}'),
    ('p.jsonl', b'{"messages": [{"role": "user", "content": "a"}]}', r'a chat needs a tokenizer with a chat template'),
  ],
)
def test_a_file_of_prompts_that_cannot_be_used_is_told(name, content, message, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / name).write_bytes(content)
  assert message in fails(capsys, 'decode', STDLIB, '--job_log_dir=run', f'--prompts={name}')


def test_blank_lines_of_a_file_of_prompts_are_named(capsys, tmp_path):
  (tmp_path / 'p.txt').write_text('one\n\n  \nfour\n\n')
  assert [prompt.value for prompt in read_prompts(f'{tmp_path}/p.txt')] == ['one', 'four']
  assert capsys.readouterr().err == f'note: --prompts={tmp_path}/p.txt: blank lines are no prompts: 2, 3\n'
  (tmp_path / 'p.txt').write_text('one\ntwo\n\n')
  read_prompts(f'{tmp_path}/p.txt')
  assert capsys.readouterr().err == ''
