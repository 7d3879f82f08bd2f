"""The arithmetic of the GPU benchmark, and what it writes; `tools/benchmark_gpu.py --dry_run` runs its sides."""

import json

import numpy as np
import pytest

from tools.benchmark_gpu import Benchmark, Implementation, disagreements
from tools.gpu.case import TINY, ModelCase, case_of, first_weights, tokens
from tools.gpu.report import Row, results_table, section, write_section
from tools.gpu.turn import Measured

SMALL = ModelCase('small', 8, 4, 2, 2, 16, vocab=10)


def test_parameters_and_operations_of_a_token_are_those_counted_by_hand():
  """Table 10 x 4; a layer: 4 projections of 4 x 4, 3 of 4 x 16, 2 norms of 4; a last norm."""
  assert SMALL.num_params == 40 + 2 * (4 * 16 + 3 * 64 + 8) + 4 == 572
  assert SMALL.flops_of_token(causal=False) == 6 * 572 + 12 * 2 * 4 * 8
  assert SMALL.flops_of_token(causal=True) == 6 * 572 + 6 * 2 * 4 * 8
  assert case_of('124M', 1024).num_params == 123_587_328
  assert case_of('1.3B', 1024).num_params == 1_317_373_952
  assert (case_of('7B', 1024).state, case_of('1.3B', 1024).state) == ('bfloat16', 'float32')


def test_utilization_is_of_the_median_step():
  row = Row(SMALL, 'ours', 3, [0.5, 0.25, 0.25, 1.0, 0.25], 2**30, [9.0])
  assert row.median_s == 0.25 and row.tokens_per_s == 3 * 8 / 0.25
  assert row.spread == (0.5 - 0.25) / 0.25
  assert row.utilization(96_000) == 96 * (6 * 572 + 12 * 64) / 96_000
  assert row.utilization(96_000, causal=True) == 96 * (6 * 572 + 6 * 64) / 96_000


def test_the_table_compares_with_pytorch_at_the_same_length():
  rows = [
    Row(SMALL, 'ours', 2, [0.1], 3 * 2**30, [20.0, 5.0]),
    Row(SMALL, 'PyTorch', 1, [0.1], 0, [30.0]),
    Row(SMALL._replace(length=16), 'ours', 2, [0.1], 0, [1.0]),
  ]
  text = results_table(rows, 1e6, 2e6)
  heads, _, ours, torch, longer = (line.strip('| ').split(' | ') for line in text.splitlines())
  by_name = dict(zip(heads, ours))
  assert by_name['tokens/s'] == '160' and by_name['step ms'] == '100.0' and by_name['peak GiB'] == '3.0'
  assert by_name['MFU'] == f'{160 * 4200 / 1e6:.1%}' and by_name['MFU, causal'] == f'{160 * 3816 / 1e6:.1%}'
  assert by_name['of the ceiling'] == f'{160 * 4200 / 2e6:.1%}'
  assert by_name['to torch'] == '2.000' and by_name['first step s'] == '20, 5'
  assert dict(zip(heads, torch))['to torch'] == '1.000' and dict(zip(heads, longer))['to torch'] == '-'


def test_what_is_written_replaces_what_was_there(tmp_path):
  page = tmp_path / 'page.md'
  page.write_text('# A\n\n<!-- training: written by tools/benchmark_gpu.py -->\nold\n<!-- training: end -->\n\n## B\n')
  row = Row(SMALL, 'ours, tuned', 2, [0.1], 0, [1.0], 'unroll = 1')
  for _ in range(2):
    write_section(page, section('| table |', {'measured on': 'a GPU'}, [row], ['small, PyTorch: no memory']))
  text = page.read_text()
  assert 'old' not in text and text.count('| table |') == 1 and text.endswith('<!-- training: end -->\n\n## B\n')
  assert '* measured on: a GPU' in text and 'ours, tuned: unroll = 1' in text and 'Not measured: small, PyTorch' in text
  page.write_text('# A\n')
  with pytest.raises(ValueError, match='between which the tables go'):
    write_section(page, '')


def test_all_sides_get_the_same_weights_and_tokens():
  weights = {weight.name: weight for weight in first_weights(SMALL)}
  assert {name: weight.shape for name, weight in weights.items()} == SMALL.shapes
  assert np.all(weights['norm1'].values == 1) and 0.01 < weights['embedding'].values.std() < 0.03
  np.testing.assert_array_equal(tokens(SMALL, 4, 1)[:2], tokens(SMALL, 2, 2))
  assert tokens(SMALL, 4, 0).shape == (4, 9) and tokens(SMALL, 4, 0).max() < 10


def test_losses_that_differ_are_named():
  losses = {'ours': [5.0, 4.0], 'by hand': [5.00001, 4.0], 'PyTorch': [5.0, 4.1]}
  (line,) = disagreements(losses, 1e-4, 'tiny')
  assert 'the losses of PyTorch' in line and 'not those of ours' in line


class _Machine(Benchmark):
  """One whose memory ends beyond 16 rows, and which is fastest with 8."""

  def __init__(self):
    self.asked = []

  def turn(self, implementation, request):
    found = []
    for trial in request.trials:
      self.asked.append(trial)
      rows, slow = trial['batch'], trial['options'].get('slow', 1)
      if rows > 16:
        return [*found, Measured(**trial, error='RESOURCE_EXHAUSTED')]
      found.append(Measured(**trial, losses=[1.0], first_step_s=2.0, step_s=[slow * (rows + abs(rows - 8))]))
    return found


def test_the_search_takes_the_fastest_setting_that_fits(capsys):
  side = Implementation('side', 'side.py', ({'slow': 2}, {'slow': 1}), ({'small': True},))
  machine = _Machine()
  best = machine.search(side, SMALL._replace(length=1024))
  assert (best.batch, best.options) == (8, {'slow': 1})
  assert [t['batch'] for t in machine.asked] == [8, 16, 32, 8, 16]
  found = machine.case(SMALL._replace(length=1024), [side], 3, 1, 1)
  (row,) = found.rows
  assert row.batch == 8 and len(row.step_s) == 3 and row.settings == 'slow = 1' and not found.failed
  assert isinstance(machine.search(side, SMALL._replace(length=128)), str)  # 64 rows are the least that are tried.
  capsys.readouterr()


def test_a_process_that_dies_is_an_error_of_its_setting(tmp_path, monkeypatch):
  bench = Benchmark({'side': 'python'}, tmp_path, dry=True)
  done = type('Done', (), {'returncode': -6, 'stdout': '', 'stderr': 'a\nAborted: no memory'})
  monkeypatch.setattr(Benchmark, '_run', lambda self, command: done)
  side = Implementation('side', 'side.py', ({},), ())
  from tools.gpu.turn import TurnRequest

  (found,) = bench.turn(side, TurnRequest([*TINY], [{'batch': 2, 'options': {}}], 1, 1))
  assert found.error == 'Aborted: no memory' and found.batch == 2
  assert json.loads(json.dumps(found._asdict()))['batch'] == 2
