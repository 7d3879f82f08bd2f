"""`praxis-lite agree`: what it compares, its exit code, and messages about bad input."""

from __future__ import annotations

import json

import pytest
from tiny_language_model import import_tiny_run

from praxis_lite.bridges.hf import agreement
from praxis_lite.cli.main import main
from praxis_lite.runs.agreement import WayResult


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  return import_tiny_run(tmp_path_factory.mktemp('agree'))


def call(capsys, run, *arguments, code=0):
  assert main(['agree', str(run), '--nocompilation_cache', *arguments]) == code
  return capsys.readouterr()


@pytest.fixture
def asked(monkeypatch):
  """What the command asks to compare; nothing is computed, and one way differs."""
  calls = []

  def agree(model, texts, *, progress, **settings):
    calls.append((texts, settings))
    progress('a line of the table')
    return [WayResult('one pass'), WayResult('decoding', first=(0, 3), layer='lm.softmax')]

  monkeypatch.setattr(agreement, 'agree', agree)
  return calls


def test_a_difference_is_an_exit_code(capsys, run, asked):
  out, err = call(capsys, run, '--rows=2', '--tokens=9', '--cache_dtype=int8', code=1)
  assert out.splitlines() == ['a line of the table', 'these differ from the training step: decoding']
  assert 'note: comparing random tokens: datasets[' in err  # An imported run has no data yet.
  texts, settings = asked[0]
  assert [len(c + k) for c, k in zip(*texts)] == [9, 6] and settings['cache_dtype'] == 'int8'


def test_prompts_are_compared(capsys, run, asked, tmp_path):
  lines = [{'prompt_ids': [1, 2, 3, 4, 5]}, {'prompt_ids': [6, 7, 8, 9]}]
  (tmp_path / 'texts.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  call(capsys, run, f'--prompts={tmp_path / "texts.jsonl"}', code=1)
  assert [c + k for c, k in zip(*asked[0][0])] == [[1, 2, 3, 4, 5], [6, 7, 8, 9]]


def test_bad_input_is_one_line(capsys, run, asked, tmp_path):
  (tmp_path / 'texts.txt').write_text('to be\n')
  (tmp_path / 'chat.jsonl').write_text('{"messages": [{"role": "user", "content": "Why?"}]}\n')
  (tmp_path / 'short.jsonl').write_text('{"prompt_ids": [1, 2]}\n')
  for flag, message in (
    (f'--prompts={tmp_path / "chat.jsonl"}', 'line 1: expected a text, or prompt_ids'),
    (f'--prompts={tmp_path / "short.jsonl"}', 'agree: there is no text of at least 4 tokens'),
    (f'--prompts={tmp_path / "texts.txt"}', 'tokenizer'),
    ('--cache_dtype=int4', 'cache_dtype'),
    ('--tokens=3', 'tokens'),
  ):
    _, err = call(capsys, run, flag, code=2)
    assert message in err and len(err.splitlines()) <= 2, err
  assert not asked


@pytest.mark.slow
def test_an_imported_run_agrees(capsys, run):
  out, _ = call(capsys, run, '--rows=3', '--tokens=12', '--cache_dtype=int8')
  assert out.splitlines()[-1] == 'all agree'
  assert out.count(' ok') >= 6 and 'exported, and read again' in out
