"""The experiments of `speech.py` learn, in a shorter form than in their guide, and write down WAV files."""

from __future__ import annotations

import json
import os
import pathlib

import numpy as np
import pytest

from praxis_lite.cli.main import main
from praxis_lite.experiments import speech
from praxis_lite.inputs import read_wav, write_wav
from praxis_lite.instruments.verification import format_verification, verify
from praxis_lite.runs import run_train
from praxis_lite.training.experiment import configure


def test_spelled_digits_are_written_once_and_differ_between_splits(tmp_path):
  table = speech.spelled_digits(count=3, folder=str(tmp_path))
  text = pathlib.Path(table).read_text()
  lines = [line.split('\t') for line in text.splitlines()]
  assert len(lines) == 3 and all(set(said) <= set(speech.SYMBOLS) for _, said in lines)
  sound, rate = read_wav((tmp_path / 'spelled_digits-train-3' / lines[0][0]).read_bytes())
  assert rate == 4000 and 0.1 < np.abs(sound).max() <= 1
  written = os.stat(table).st_mtime_ns
  assert speech.spelled_digits(count=3, folder=str(tmp_path)) == table and os.stat(table).st_mtime_ns == written
  other = speech.spelled_digits('validation', count=3, folder=str(tmp_path))
  assert pathlib.Path(other).read_text() != text
  assert sorted(os.listdir(tmp_path)) == ['spelled_digits-train-3', 'spelled_digits-validation-3']


def test_the_longest_recording_fits():
  draw = np.random.default_rng(0)
  longest = max(len(speech.spell(['three', 'seven', 'eight'], draw)) for _ in range(20))
  data = configure(speech.SpelledDigits).datasets[0]
  assert longest <= data.num_samples and len('three seven eight') <= data.label_len


@pytest.mark.slow
def test_a_conformer_learns_to_write_down_digits(tmp_path, capsys):
  """In 120 steps; a model that writes nothing has an error rate of 1."""
  config = configure(speech.SpelledDigits)
  config.task.train.set(num_train_steps=120, eval_interval_steps=120, save_interval_steps=120)
  run = tmp_path / 'run'
  assert run_train(config, run).metrics['eval/validation']['token_error_rate'] < 0.25
  sound = speech.spell(['six', 'four'], np.random.default_rng(5))
  write_wav(tmp_path / 'a.wav', np.repeat(sound, 2), 8000)
  capsys.readouterr()
  assert main(['predict', f'--job_log_dir={run}', str(tmp_path / 'a.wav'), str(tmp_path / 'a.wav')]) == 0
  first, second = map(json.loads, capsys.readouterr().out.splitlines())
  assert first == second and first['file'].endswith('a.wav') and set(first) == {'file', 'text', 'log_prob'}
  assert sum(letter in 'sixfour ' for letter in first['text']) > 4
  for other in ('b.wav', 'b.mp3', 'b.FLAC'):
    (tmp_path / other).write_bytes(b'')
    assert main(['predict', f'--job_log_dir={run}', str(tmp_path / other)]) != 0
    assert f'{other}: is not a WAV file; convert it' in capsys.readouterr().err
  assert main(['predict', f'--job_log_dir={run}', str(tmp_path / 'a.wav'), '--what=evaluate']) != 0
  assert 'has no transcript to compare with' in capsys.readouterr().err
  assert main(['decode', f'--job_log_dir={run}', '--prompt=a']) != 0
  assert 'it is a CtcModel, whose results' in capsys.readouterr().err


@pytest.mark.slow
def test_a_transducer_learns_to_write_down_digits(tmp_path):
  """In 120 steps; a model that writes nothing has an error rate of 1."""
  config = configure(speech.SpelledDigitsTransducer)
  config.task.train.set(num_train_steps=120, eval_interval_steps=120, save_interval_steps=120)
  metrics = run_train(config, tmp_path / 'run').metrics['eval/validation']
  assert metrics['token_error_rate'] < 0.25


@pytest.mark.slow
def test_it_is_right_on_a_mesh_that_divides_nothing():
  config = configure(speech.SpelledDigitsTiny)
  config.task.set(ici_mesh_shape=(2, 2, 2))
  found = verify(config.task, config.datasets[0].instantiate().batch_struct(), quick=True, search_seconds=0)
  assert found.is_right, format_verification(found)
