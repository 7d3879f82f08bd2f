"""Lines of a run, and the live display."""

from __future__ import annotations

import io

import numpy as np
import pytest

from praxis_lite.common.figures import short_number
from praxis_lite.runs.console import Console, LiveConsole, metrics_line, train_line
from praxis_lite.runs.throughput import Rates

METRICS = {'loss': np.float64(2.34549), 'learning_rate': np.float64(3e-4), 'grad_norm': np.float64(0.8134)}


def test_a_training_line_shows_everything():
  rates = Rates(12.34, 148.1, 50321.0, 0.412)
  assert train_line(120, 1000, METRICS, rates) == (
    'step 120/1000 loss 2.345 lr 3.0e-04 grad_norm 0.81 12.3 step/s 50.3k tok/s MFU 41%'
  )


def test_examples_stand_in_for_tokens_and_unknown_mfu_is_not_shown():
  rates = Rates(12.34, 148.1, None, None)
  assert train_line(120, 1000, METRICS, rates).endswith('grad_norm 0.81 12.3 step/s 148 ex/s')
  assert train_line(1, 1000, METRICS, None) == 'step 1/1000 loss 2.345 lr 3.0e-04 grad_norm 0.81'


def test_each_rule_of_a_learner_has_a_learning_rate():
  metrics = {
    'learning_rate/head': 0.01,
    'loss': 2.345,
    'learning_rate/body': 3e-4,
    'grad_norm': 0.81,
    'grad_norm/head': 0.5,
  }
  assert train_line(1, 9, metrics, None) == 'step 1/9 loss 2.345 lr/head 1.0e-02 lr/body 3.0e-04 grad_norm 0.81'


def test_a_long_run_fits_into_80_columns():
  assert len(train_line(12345, 100000, METRICS, Rates(12.34, 148.1, 50321.0, None))) <= 80


def test_a_diverging_loss_is_still_readable():
  assert 'loss 1.23e+08' in train_line(1, 2, {'loss': 1.23e8}, None)
  assert 'loss nan' in train_line(1, 2, {'loss': np.nan}, None)


@pytest.mark.parametrize(
  ('loss', 'text'),
  [(3.2e-5, '3.20e-05'), (0.00123, '0.00123'), (0.0512, '0.0512'), (0.1, '0.100'), (0.0, '0.000'), (-0.02, '-0.0200')],
)
def test_a_small_loss_keeps_its_digits(loss, text):
  assert train_line(1, 2, {'loss': loss}, None) == f'step 1/2 loss {text}'
  assert float(metrics_line(1, 'eval/valid', {'loss': loss}).split()[-1]) == pytest.approx(loss, rel=1e-3)


def test_an_evaluation_line_has_the_loss_first_and_leaves_arrays_out():
  line = metrics_line(120, 'eval/valid', {'acc': 0.5, 'loss': 2.0, 'aux': np.zeros(3)}, '57 batches, 3.1 s')
  assert line == 'step 120 eval/valid loss 2.000 acc 0.5000 (57 batches, 3.1 s)'


@pytest.mark.parametrize(
  ('value', 'text'),
  [
    (0.1234, '0.123'),
    (4, '4.00'),
    (12.34, '12.3'),
    (999.4, '999'),
    (999.9, '1.00k'),
    (9000, '9.00k'),
    (50321, '50.3k'),
    (2.5e6, '2.50M'),
    (3e9, '3.00B'),
  ],
)
def test_short_numbers_keep_their_digits(value, text):
  assert short_number(value) == text


@pytest.mark.parametrize(
  ('norm', 'text'), [(0.97, '0.97'), (1.0, '1.0'), (9.949, '9.9'), (9.97, '9.97'), (14.62, '14.6'), (100.0, '100')]
)
def test_the_gradient_norm_keeps_its_digits(norm, text):
  assert train_line(1, 2, {'grad_norm': norm}, None) == f'step 1/2 grad_norm {text}'


def test_plain_lines_go_to_the_stream_one_at_a_time():
  stream = io.StringIO()
  console = Console(1000, stream=stream)
  console.train_step(120, METRICS, None)
  console.line('step 120 eval/valid loss 2')
  assert stream.getvalue().splitlines() == [
    'step 120/1000 loss 2.345 lr 3.0e-04 grad_norm 0.81',
    'step 120 eval/valid loss 2',
  ]


def test_a_console_that_is_not_enabled_prints_nothing():
  stream = io.StringIO()
  Console(10, stream=stream, enabled=False).line('hello')
  assert stream.getvalue() == ''


def test_on_a_terminal_of_80_columns_nothing_is_cut_off(monkeypatch):
  monkeypatch.setenv('COLUMNS', '80')
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('TTY_COMPATIBLE', '1')
  stream = io.StringIO()
  console = LiveConsole(100000, stream=stream)
  assert stream.getvalue().rfind('\x1b[?25h') > stream.getvalue().rfind('\x1b[?25l')  # A kill leaves a cursor.
  console.train_step(12345, METRICS, Rates(12.34, 148.1, 50321.0, 0.412))
  console.line('step 12345 eval/valid loss 2 [not markup]')
  console.close()
  shown = stream.getvalue()
  assert 'step 12345/100000' in shown and '12%' in shown
  assert 'loss 2.345  lr 3.0e-04  grad_norm 0.81  12.3 step/s  50.3k tok/s  MFU 41%' in shown
  assert 'step 12345 eval/valid loss 2 [not markup]' in shown
  assert '…' not in shown
