"""praxis-lite show --sharding, show --html and check."""

from __future__ import annotations

from pathlib import Path

import pytest

from praxis_lite.cli.main import main


def test_show_sharding_has_all_kinds_of_arrays_with_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
  assert main(['show', '--exp=digits.DigitsMlpSharded', '--sharding']) == 0
  out = capsys.readouterr().out
  lines = {line.split()[0]: line for line in out.splitlines() if line}
  assert lines['network.linear_0.w'].endswith('network.linear_0.weight_split_dims_mapping.wt')
  assert '+2' in lines['network.linear_0.w']
  assert lines['inputs.image'].endswith('train.inputs_split_mapping.map_4d')
  assert lines['network.linear_0.out'].endswith('network.linear_0.activation_split_dims_mapping.out')
  assert any(name.startswith('opt_states.') and 'as its variable' in line for name, line in lines.items())
  assert 'mesh data 2 x mdl 4 = 8 devices' in out


def test_show_html_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  file = tmp_path / 'page.html'
  assert main(['show', '--exp=digits.DigitsMlpSharded', f'--html={file}']) == 0
  assert str(file) in capsys.readouterr().out
  assert 'digits.DigitsMlpSharded' in file.read_text(encoding='utf-8')


def test_check_returns_0_with_warnings_and_1_with_errors(capsys: pytest.CaptureFixture[str]) -> None:
  assert main(['check', '--exp=digits.DigitsMlp']) == 0
  assert capsys.readouterr().out == 'no problems found\n'
  assert main(['check', '--exp=digits.DigitsMlpSharded', '--wasted_percent=5']) == 0
  assert 'warning: padding: inputs' in capsys.readouterr().out
  wrong = "--set=task.model.softmax_tpl.weight_split_dims_mapping.wt=('mdl','dta')"
  assert main(['check', '--exp=digits.DigitsMlpSharded', wrong]) == 1
  out = capsys.readouterr().out
  assert "error: unknown axis: task.model.softmax.weight_split_dims_mapping.wt: axis 'dta' is not a mesh axis" in out
  assert "Did you mean 'data'?" in out
