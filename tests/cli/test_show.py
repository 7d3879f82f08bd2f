"""praxis-lite show: the summary, the fields that differ from the defaults, all fields, and differences of two."""

from __future__ import annotations

import pathlib
import re

import pytest

from praxis_lite.cli.main import main
from praxis_lite.common.config import Config, target
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.config.text import to_text
from praxis_lite.runs.records.record import write_record
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
TINY = '--exp=lm.SyntheticLmTiny'


def shown(capsys, *arguments):
  assert main(['show', *arguments]) == 0
  return capsys.readouterr().out


def test_the_summary_comes_first(capsys):
  lines = shown(capsys, '--exp=lm_sizes.Llama8B').splitlines()
  assert lines[:5] == [
    'model           lm (LanguageModel): 8,030,261,248 parameters, all trained',
    'mesh            replica 1 x data 16 x mdl 4 = 64 devices',
    'on each device  1.405 GiB of state: 479.6 MiB of parameters, 959.3 MiB of slots and averages',
    'batch           128 examples x 8,192 tokens = 1,048,576 tokens a step',
    'training        100,000 steps = 104,857,600,000 tokens; optax.adamw, learning rate 0.0003',
  ]


def test_an_experiment_or_a_run_needs_no_flag(capsys, tmp_path):
  by_flag = shown(capsys, TINY, '--set=task.name=other')
  assert 'other' in by_flag
  assert shown(capsys, 'lm.SyntheticLmTiny', '--set=task.name=other') == by_flag
  write_record(tmp_path, configure(registry.get('lm.SyntheticLmTiny')))
  assert 'task.model.model_dims' in shown(capsys, str(tmp_path), '--nosummary')
  assert main(['show', str(tmp_path / 'typo')]) == 2
  assert f'{tmp_path}/typo records none' in capsys.readouterr().err
  assert main(['show', 'lm.SyntheticLmTiny', 'task.name=other']) == 2
  assert 'as in --set=task.name=other' in capsys.readouterr().err


def test_the_table_of_one_device_has_no_columns_about_splits(capsys):
  tables = [
    shown(capsys, exp, '--nosummary', '--noconfig') for exp in ('--exp=lm.StdlibLmTiny', '--exp=lm.StdlibLmData')
  ]
  one, eight = (table.splitlines() for table in tables)
  assert one[0].split() == ['variable', 'shape', 'dtype', 'bytes'] and max(map(len, one)) <= 80
  assert eight[0].split() == [
    'variable',
    'shape',
    'dtype',
    'split',
    'local',
    'shape',
    'padding',
    'bytes',
    'per',
    'device',
  ]


def test_frozen_variables_are_counted_as_such(capsys):
  exclusion = "--set=task.train.learner.bprop_variable_exclusion=('network.*',)"
  out = shown(capsys, '--exp=digits.DigitsConvNet', exclusion)
  assert out.splitlines()[0].endswith(': 5,274 parameters, 330 trained, 4,848 frozen, 96 not trainable')
  assert '5,274 parameters, 330 trained, 4,848 frozen, 96 not trainable, 20.6 KiB' in out
  assert "task.train.learner.bprop_variable_exclusion = ('network.*',)" in out
  sharding = shown(capsys, '--exp=digits.DigitsConvNet', exclusion, '--sharding')
  assert 'network.conv_0.w' in sharding and sharding.splitlines()[-1].endswith('; --set takes them below task.model')


def test_only_what_differs_from_the_defaults_is_shown_and_all_of_it_on_demand(capsys):
  short = shown(capsys, TINY, '--noparameters', '--nosummary').splitlines()
  whole = shown(capsys, TINY, '--noparameters', '--nosummary', '--all')
  assert whole == (GOLDEN / 'lm.SyntheticLmTiny.txt').read_text()
  assert set(short) < set(whole.splitlines())
  assert len(short) < len(whole.splitlines()) / 3
  assert 'task.model.model_dims = 18' in short and not any('on_nonfinite' in line for line in short)


@pytest.mark.parametrize('name', ['digits.DigitsMlpSharded', 'lm.StdlibLmMixed', 'lm_sizes.Gpt2Xl', 'lm_sizes.Llama8B'])
def test_what_is_shown_makes_the_config_again(capsys, name):
  """Each line is an override; together they turn a config of defaults into the one shown."""
  task = configure(registry.get(name)).task
  lines = shown(capsys, f'--exp={name}', '--noparameters', '--nosummary').splitlines()
  assert lines[0].startswith('task: ')
  again = Config(target(task))
  of_task = [line for line in lines[1:] if line.startswith('task.')]
  apply_overrides({'task': again}, [re.sub(r'^(\S+?)(?:: | = )', r'\1=', line) for line in of_task])
  assert to_text(again).replace("'bfloat16'", 'bfloat16') == to_text(task)


def test_the_difference_of_two_experiments_and_of_a_run(capsys, tmp_path):
  assert shown(capsys, TINY, '--diff=lm.SyntheticLmTiny') == 'their configs are equal\n'
  out = shown(capsys, TINY, '--diff=lm.StdlibLmTiny')
  assert 'datasets[0]: praxis_lite.inputs.synthetic.SyntheticLMInput -> praxis_lite.inputs.text.TextInput' in out
  unlike = shown(capsys, '--exp=moe.MoeTiny', '--diff=lm.SyntheticLmTiny').splitlines()
  ff = 'task.model.lm_tpl.transformer_tpl.layers_tpl.ff_tpl'
  every = shown(capsys, '--exp=moe.MoeTiny', '--diff=lm.SyntheticLmTiny', '--all').splitlines()
  of_router = [line for line in every if line.startswith(f'- {ff}.router_tpl.') and ' = ' in line]
  assert f"- {ff}.router_tpl.choice = 'token'" in of_router
  assert [line for line in unlike if f'{ff}.router_tpl' in line] == [
    f'- {ff}.router_tpl: praxis_lite.layers.routing.Router, {len(of_router)} fields'
  ]
  assert f'- {ff}.num_experts = 5' in unlike and len(unlike) < 35 < len(every)
  config = configure(registry.get('lm.SyntheticLmTiny'))
  apply_overrides(config.roots(), ['task.model.model_dims=24'])
  write_record(tmp_path, config)
  assert shown(capsys, TINY, f'--diff={tmp_path}') == 'task.model.model_dims: 18 -> 24\n'
  assert shown(capsys, f'--job_log_dir={tmp_path}', '--diff=lm.SyntheticLmTiny') == 'task.model.model_dims: 24 -> 18\n'
  assert main(['show', TINY, '--diff=nothing/there']) == 2
  assert "there is no experiment 'nothing/there'" in capsys.readouterr().err


def test_fields_that_a_summary_needs_and_are_not_set_are_left_out(capsys):
  out = shown(capsys, '--exp=lm.TextLm')
  assert 'datasets[0]: praxis_lite.inputs.text.TextInput' in out


def test_what_mup_changes_and_why(capsys):
  text = shown(
    capsys,
    TINY,
    '--set=task.model.mup=praxis_lite.models.Mup',
    "--set=task.model.mup.base={'model_dims': 9, 'num_layers': 1}",
  )
  assert 'lm.transformer.layers multiplies residual branches by 0.707' in text
  found = {line.split()[0]: ' '.join(line.split()[1:]) for line in text.splitlines() if 'updates x' in line}
  assert found['lm.softmax.w'] == 'initial values x 0.5, updates x 0.5; output: fan in 9 -> 18'
  assert found['lm.transformer.layers.ff.up.w'] == (
    'initial values x 0.5, updates x 0.354; output: fan in 9 -> 18, layers x 2'
  )
