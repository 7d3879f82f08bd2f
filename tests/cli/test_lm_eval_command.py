"""`praxis-lite-lm-eval` without lm_eval, and with a run that does not exist."""

from __future__ import annotations

import sys

import pytest

from praxis_lite.cli.lm_eval_command import run_lm_eval


def test_a_missing_package_is_one_line(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, 'lm_eval', None)  # As if it were not installed.
  for name in [name for name in sys.modules if name.startswith('lm_eval.')]:
    monkeypatch.setitem(sys.modules, name, None)
  monkeypatch.delitem(sys.modules, 'praxis_lite.bridges.lm_eval', raising=False)
  with pytest.raises(SystemExit) as end:
    run_lm_eval()
  (line,) = capsys.readouterr().err.splitlines()
  assert end.value.code == 2
  assert line.startswith('praxis-lite-lm-eval: error: lm_eval cannot be imported')
  assert line.endswith("pip install 'praxis_lite[eval]'")


@pytest.mark.slow
def test_a_run_that_does_not_exist_is_one_line(monkeypatch, capsys, tmp_path):
  pytest.importorskip('lm_eval', reason="needs lm_eval: pip install 'praxis_lite[eval]'")
  (tmp_path / 'questions.jsonl').write_text('{"question": "x", "text": "y"}\n')
  (tmp_path / 'tiny.yaml').write_text(
    f'task: tiny\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / "questions.jsonl"}}}}}\n'
    'test_split: test\noutput_type: loglikelihood\ndoc_to_text: question\ndoc_to_target: text\n'
    'metric_list: [{metric: acc}]\n'
  )
  arguments = ['--model', 'praxis_lite', '--model_args', 'path=runs/none', '--tasks', 'tiny']
  monkeypatch.setattr(sys, 'argv', ['lm_eval', *arguments, '--include_path', str(tmp_path)])
  with pytest.raises(SystemExit) as end:
    run_lm_eval()
  assert end.value.code == 2
  assert 'praxis-lite-lm-eval: error: there is no run in runs/none' in capsys.readouterr().err
