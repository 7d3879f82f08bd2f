"""Unlike runs side by side: groups, their columns and order, the tables that `runs` prints, CSV and the page."""

from __future__ import annotations

import csv
import io
import json
import re

import numpy as np
import pytest
from browser import IS_NARROW, needs_chromium, use_page
from test_runs import make_run

from praxis_lite.cli import run_table
from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.errors import UserError
from praxis_lite.layers import QuantizedWeights
from praxis_lite.models import quantize_weights
from praxis_lite.runs.records.comparing import differing_fields, group_runs
from praxis_lite.runs.records.record import write_record
from praxis_lite.runs.records.runs import find_runs, read_run
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

RATE = 'task.train.learner.learning_rate'
LOSSES = {'lm/a2': ('1e-3', 3.0), 'lm/a10': ('1e-2', 2.0), 'lm/b': ('3e-4', 2.5), 'lm/none': ('1', None)}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Four language models and two classifiers with other rates, two runs alone, and one without a record."""
  folder = tmp_path_factory.mktemp('runs')

  def add(where, exp, *overrides, valid=(), **kwargs):
    run = make_run(folder / where, *overrides, exp=exp, valid=valid, losses=valid, **kwargs)
    config = configure(registry.get(exp))
    apply_overrides(config.roots(), overrides)
    write_record(run, config, seed=7 if where == 'lm/b' else 0, command=f'praxis-lite train --exp={exp} --seed=1')

  for name, (rate, loss) in LOSSES.items():
    add(name, 'lm.SyntheticLmTiny', f'{RATE}={rate}', valid=[] if loss is None else [loss + 1, loss])
  best = ['task.train.best_metric=accuracy', 'task.train.best_metric_mode=max']
  for name, size in (('digits/x', 8), ('digits/y', 4)):
    add(name, 'digits.DigitsMlp', f'datasets[*].batch_size={size}', *best, valid=[size], name='test')
  add('one', 'moe.MoeTiny', f'{RATE}=0.5', valid=[1.0])
  add('two', 'digits.DigitsConvNet', valid=[2.0])
  (folder / 'old' / 'checkpoints' / '7').mkdir(parents=True)
  return folder


def groups_of(folder, *args, **kwargs):
  return group_runs([read_run(path) for path in find_runs(folder)], *args, **kwargs)


def names(group):
  return [run.directory.name for run in group.runs]


def test_fields_that_share_the_end_of_their_paths_are_columns_of_their_own(folder, capsys):
  (group,) = groups_of(folder / 'lm', columns=['name'])
  assert group.columns == ['task.name', 'datasets[0].name', 'datasets[1].name']  # Layers have names too, all empty.
  assert list(group.values[0].values()) == ["'lm'", "'train'", "'validation'"]
  only = groups_of(folder / 'lm', columns=['path', 'batch_size'])[0].columns  # Both inputs have 16; one path is set.
  assert only == ['path', 'batch_size']
  assert main(['runs', str(folder), '--sort=-datasets[0].name']) == 0
  assert main(['runs', str(folder / 'lm'), '--sort=is_training']) == 2
  assert (
    'is_training: several fields end with it; write datasets[0].is_training or datasets[1]' in capsys.readouterr().err
  )


@pytest.mark.slow
def test_runs_are_in_groups_of_their_experiment_with_the_fields_that_differ_in_it(folder):
  digits, lm, others = groups_of(folder)
  assert [group.title for group in (digits, lm, others)] == [
    'digits.DigitsMlp (ClassificationModel)',
    'lm.SyntheticLmTiny (LanguageModel)',
    'other runs, one of each experiment',
  ]
  assert lm.columns == ['learning_rate', 'seed'] and digits.columns == ['batch_size']
  assert lm.values[0] == {'learning_rate': '0.01', 'seed': '0'} and digits.values[1] == {'batch_size': '4'}
  assert (lm.metric, lm.mode) == ('eval/valid/loss', 'min')
  assert (digits.metric, digits.mode) == ('eval/test/accuracy', 'max')  # Each group by its own metric.
  assert others.columns[:2] == ['experiment', 'learning_rate'] and names(others) == ['old', 'one', 'two']
  assert [own['experiment'] for own in others.values] == [
    'runs without a record',
    'moe.MoeTiny',
    'digits.DigitsConvNet',
  ]
  assert [own['learning_rate'] for own in others.values] == ['', '0.5', '0.001']


@pytest.mark.slow_cases
def test_the_fields_of_a_config_that_only_some_runs_have_are_not_compared(tmp_path):
  """Of a quantized run and its source, only that one has a rule; of two quantized runs, fields of the rules."""
  for name, rules in {'plain': (), 'four': ('int4',), 'eight': ('int8',)}.items():
    config = configure(registry.get('lm.SyntheticLmTiny'))
    quantize_weights(config.task.model, *(Config(QuantizedWeights, format=form) for form in rules))
    (tmp_path / name).mkdir()
    write_record(tmp_path / name, config)
  found = [read_run(tmp_path / name) for name in ('plain', 'four', 'eight')]
  assert set(differing_fields(found[:2])[0]) == {'quantized', 'quantized[0]'}
  assert differing_fields(found[1:])[0] == ['format']


def test_two_files_of_one_class_and_a_class_that_was_set_are_groups_of_their_own(tmp_path):
  def add(name, command):
    (tmp_path / name).mkdir()
    write_record(tmp_path / name, configure(registry.get('lm.SyntheticLmTiny')), command=command)

  for name, command in {
    'a': 'praxis-lite train --exp=/home/me/one.py:Mine --job_log_dir=x',
    'b': "python -m praxis_lite train --exp '/else/one.py:Mine' --job_log_dir=x",
    'c': 'python script.py',
    'd': 'python other.py --expand=7',
    'e': 'praxis-lite train --exp=one:Mine',
    'f': 'praxis-lite train --exp=one.py --job_log_dir=x',
    'g': 'praxis-lite train --exp=runs/a --job_log_dir=x',
  }.items():
    add(name, command)
  assert {group.title: names(group) for group in groups_of(tmp_path)} == {
    'one.Mine (LanguageModel)': ['a', 'b', 'e', 'f'],
    'lm (LanguageModel)': ['c', 'd', 'g'],
  }
  add('h', 'praxis-lite train --exp=one.py:Other')  # Now one.py may be either.
  assert {run['experiment'] for run in groups_of(tmp_path)[-1].values} == {'one', 'one.Other'}


def test_a_field_that_changed_in_training_shows_its_earlier_values(tmp_path, capsys):
  config = configure(registry.get('lm.SyntheticLmTiny'))
  for name in 'ab':
    make_run(tmp_path / name, valid=[1.0])
    for step, rate in enumerate((3e-3, 1e-3, 5e-4) if name == 'a' else (2e-3,)):
      config.task.train.learner.learning_rate = rate
      write_record(tmp_path / name, config, command='', step=step)
  for arguments in ([], ['--columns=learning_rate']):
    assert main(['runs', str(tmp_path), *arguments]) == 0
    assert re.search(r'^a .* 0\.003 -> 0\.001 -> 0\.0005\nb .* 0\.002$', capsys.readouterr().out, re.MULTILINE)
  assert main(['runs', str(tmp_path), '--csv']) == 0 and '->' not in capsys.readouterr().out


@pytest.mark.parametrize(
  ('sort', 'order'),
  [
    ('best', ['a10', 'b', 'a2', 'none']),
    ('-best', ['a2', 'b', 'a10', 'none']),
    ('name', ['a2', 'a10', 'b', 'none']),
    ('learning_rate', ['b', 'a2', 'a10', 'none']),
    (f'-{RATE}', ['none', 'a10', 'a2', 'b']),
    ('eval/valid/loss', ['a10', 'b', 'a2', 'none']),
    ('valid/loss', ['a10', 'b', 'a2', 'none']),
    ('loss', ['a10', 'b', 'a2', 'none']),
    ('-step', ['a2', 'a10', 'b', 'none']),
    ('-num_layers', ['a10', 'b', 'a2', 'none']),  # A field that does not differ gives no order.
  ],
)
def test_the_best_run_is_first_or_another_order_is_asked_for(folder, sort, order):
  assert names(groups_of(folder / 'lm', sort=sort)[0]) == order


def test_a_field_to_sort_by_that_does_not_differ_is_told(folder, capsys):
  for sort, is_told in (('-seq_len', True), ('learning_rate', False), ('loss', False)):
    assert main(['runs', str(folder / 'lm'), f'--sort={sort}']) == 0
    told = capsys.readouterr().err
    assert (told == f'note: --sort={sort}: all runs have the same value, 32; the best run is first\n') == is_told, told


def test_runs_whose_value_is_nan_are_last(tmp_path):
  for name, loss in (('a', 3.0), ('b', np.nan), ('c', 1.0), ('d', 2.0)):
    make_run(tmp_path / name, valid=[loss], losses=[loss])
  for metric in ('loss', 'eval/valid/loss'):
    assert [names(group) for group in groups_of(tmp_path, sort=metric)] == [['c', 'd', 'a', 'b']]
    assert [names(group) for group in groups_of(tmp_path, sort=f'-{metric}')] == [['a', 'd', 'c', 'b']]


def test_columns_are_fields_by_their_ends_and_metrics(folder):
  columns = ['lm.transformer.num_layers', 'datasets[*].seq_len', 'datasets[0].seq_len', 'eval/valid/accuracy']
  (group,) = groups_of(folder / 'lm', columns=columns)
  assert group.columns == columns
  assert [group.values[0][name] for name in columns[1:4]] == ['32', '32', '1']
  rates = groups_of(folder / 'one', columns=['learning_rate'])[0].values  # The optimizer's own one is REQUIRED.
  assert rates == [{'learning_rate': '0.5'}]
  assert groups_of(folder / 'lm', columns=['all'])[0].columns == ['learning_rate', 'seed']
  with pytest.raises(UserError, match=r"learning_rat: no run has a field or a metric.* Did you mean 'learning_rate'"):
    groups_of(folder, columns=['learning_rat'])
  several = r'\. Fields that differ: model, learning_rate, .* more\. Metrics: eval/test/acc.*, train/loss\.$'
  with pytest.raises(UserError, match=f'^nothing: no run has a field or a metric of this name{several}'):
    groups_of(folder, sort='-nothing')
  with pytest.raises(UserError, match='--metric=nothing: no run has it'):
    groups_of(folder, 'nothing')
  with pytest.raises(UserError, match=r"--metric=acuracy: no run has it\. Did you mean 'accuracy'.* They have eval/"):
    groups_of(folder, 'acuracy')
  digits, lm, _ = groups_of(folder, 'eval/valid/loss')  # Only some have it.
  assert lm.metric == digits.metric == 'eval/valid/loss'


def test_an_experiment_without_the_metric_has_no_best(tmp_path, capsys):
  make_run(tmp_path / 'a', valid=[1.0])
  assert main(['runs', str(tmp_path)]) == 0
  assert '; best: lowest eval/valid/loss' in capsys.readouterr().out
  (tmp_path / 'a' / 'metrics.jsonl').write_text('')
  assert main(['runs', str(tmp_path)]) == 0
  assert 'best' not in capsys.readouterr().out


def test_columns_are_metrics_by_their_ends(folder):
  best = groups_of(folder / 'digits', columns=['accuracy', 'loss'])[0].values[0]
  # Those of the evaluation, where training has the metric too. The table has a column `loss` for the training.
  assert best == {'accuracy': '1', 'eval/test/loss': '8'}
  assert groups_of(folder / 'digits', columns=['train/loss'])[0].values[1]['train/loss'] == '4'


def test_a_column_that_may_be_several_metrics_names_them(tmp_path):
  make_run(tmp_path / 'a', valid=[1.0])
  lines = [{'step': 1, 'split': split, 'metrics': {'close': 1.0}} for split in ('eval/one', 'eval/two')]
  (tmp_path / 'a' / 'metrics.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
  for wanted in ({'columns': ['close']}, {'sort': '-close'}):
    with pytest.raises(
      UserError, match=r'^close: several metrics end with it; write eval/one/close or eval/two/close$'
    ):
      groups_of(tmp_path, **wanted)


def test_the_tables_of_a_pipe(folder, capsys):
  assert main(['runs', str(folder)]) == 0
  tables = [table.splitlines() for table in capsys.readouterr().out.split('\n\n')]
  digits, lm, others = tables
  assert digits[0] == 'digits.DigitsMlp (ClassificationModel), 2 runs; best: highest eval/test/accuracy'
  assert lm[1].split() == ['run', 'step', 'age', 'loss', 'best', 'learning_rate', 'seed']
  assert re.fullmatch(r'lm/a10  +2/20  +[\d.]+ s  +2  +2 @2  +0.01  +0', lm[2])
  assert re.fullmatch(r'lm/none  +0/20  +[\d.]+ s  +-  +-  +1.0  +0', lm[5])
  assert 'moe.MoeTiny' not in others[0] and re.search('one .* MoeTiny +0.5 ', '\n'.join(others))
  assert others[-1].startswith('also differ: ') and others[-1].endswith('--csv has all')
  assert main(['runs', str(folder / 'one')]) == 0
  title, header, row = capsys.readouterr().out.splitlines()
  assert title == 'moe.MoeTiny (LanguageModel), 1 run; best: lowest eval/valid/loss'
  assert header.split()[-1] == 'best' and row.split()[0] == 'one'
  assert main(['runs', str(folder), '--columns=learning_rat']) == 2
  assert capsys.readouterr().err.startswith('praxis-lite runs: error: learning_rat: no run has')


@pytest.mark.parametrize('columns', [40, 60, 80, 200])
@pytest.mark.parametrize('arguments', [[], ['--columns=learning_rate,eval/valid/accuracy,num_layers']])
def test_the_tables_fit_the_terminal_and_the_learning_rate_is_in_them(folder, capsys, monkeypatch, columns, arguments):
  monkeypatch.setattr(run_table.sys.stdout, 'isatty', lambda: True, raising=False)
  monkeypatch.setenv('COLUMNS', str(columns))
  assert main(['runs', str(folder / 'lm'), *arguments]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert max(map(len, lines)) <= columns
  text = ' '.join(' '.join(lines).split())
  assert all(word in text for word in ('a10', '2 @2', 'learning_rate', '0.0003'))
  assert not arguments or ('eval/valid/accuracy' in text and 'num_layers' in text and 'also differ' not in text)


def test_csv_has_all_runs_and_all_fields_that_differ(folder, capsys):
  assert main(['runs', str(folder), '--csv']) == 0
  rows = {row['run']: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
  assert list(rows)[2:6] == ['lm/a10', 'lm/b', 'lm/a2', 'lm/none'] and len(rows) == 9
  row = rows['lm/b']
  wanted = ('group', 'step', 'num_steps', 'running', 'metric', 'best', 'best_step', 'learning_rate', 'seed')
  values = [row[name] for name in wanted]
  assert values == [
    'lm.SyntheticLmTiny (LanguageModel)',
    '2',
    '20',
    'False',
    'eval/valid/loss',
    '2.5',
    '2',
    '0.0003',
    '7',
  ]
  assert rows['digits/x']['batch_size'] == '8' and rows['digits/x']['experiment'] == ''
  assert rows['one']['experiment'] == 'moe.MoeTiny' and rows['old']['best'] == ''
  assert main(['runs', str(folder / 'lm'), '--csv', '--columns=learning_rate', '--sort=name']) == 0
  header, first, *_ = capsys.readouterr().out.splitlines()
  assert header.endswith(',best_step,learning_rate') and first.endswith(',3.0,2,0.001')
  assert main(['runs', str(folder / 'old' / 'checkpoints' / '7'), '--csv']) == 0
  assert capsys.readouterr().out == ''


@pytest.fixture(scope='module')
def page(folder, tmp_path_factory):
  file = tmp_path_factory.mktemp('page') / 'new' / 'runs.html'
  assert main(['runs', str(folder), f'--html={file}']) == 0
  return file.read_text()


def test_the_page_has_the_curves_of_all_runs_and_refers_to_nothing(page, folder, capsys):
  data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])
  lm = data['groups'][1]
  assert lm['title'] == 'lm.SyntheticLmTiny (LanguageModel)' and lm['columns'] == ['learning_rate', 'seed']
  assert lm['runs'][0]['curves']['eval/valid/loss'] == [[1.0, 3.0], [2.0, 2.0]] and lm['runs'][3]['curves'] == {}
  assert lm['runs'][0]['best'] == ['2', 2] and lm['runs'][3]['best'] is None
  for pattern in (r'https?:', r'\bsrc\s*=', r'<link', r'@import', r'url\((?!#)', r'\bfetch\('):
    assert not re.search(pattern, page.replace('http://www.w3.org/2000/svg', '')), pattern
  assert not re.search(r'%[A-Z]+%', page)
  assert main(['runs', str(folder), '--html=']) == 2 and main(['runs', str(folder), '--html=/dev/null/x']) == 2
  told = capsys.readouterr().err.splitlines()
  assert '--html is empty: name a file' in told[0] and 'cannot write the page /dev/null/x' in told[1]


def test_names_on_the_page_and_in_csv_are_no_markup_and_no_commands(tmp_path, capsys):
  make_run(tmp_path / '<img src=x>\x1b[2J', "task.name='</script>'", valid=[1.0])
  assert main(['runs', str(tmp_path), f'--html={tmp_path / "page.html"}']) == 0
  text = (tmp_path / 'page.html').read_text()
  assert text.count('</script>') == 2 and '\x1b' not in text
  assert main(['runs', str(tmp_path), '--csv']) == 0 and '\x1b' not in capsys.readouterr().out


@needs_chromium
def test_the_page_in_use(page, tmp_path):
  said = use_page(
    page,
    """
    const sections = [...document.querySelectorAll('section')];
    const lines = () => sections.map((s) => s.querySelector('svg').querySelectorAll('.line').length);
    const first = () => sections[1].querySelector('tbody td').textContent;
    say(lines(), first());
    sections[1].querySelectorAll('th button')[5].click();
    say(first());
    $('search').value = 'a10'; $('search').oninput();
    say(lines(), sections.map((s) => s.hidden));
    $('search').value = ''; $('search').oninput();
    document.querySelector('.chip').click();
    say(lines());
    document.querySelector('tbody tr').onmouseenter();
    say(document.querySelectorAll('.line.on').length);
    """,
    tmp_path,
  )
  assert said == ['2,3,2', 'lm/a10', 'lm/b', '0,1,0', 'true,false,true', '2,3,2', '2']


@needs_chromium
def test_a_table_of_many_fields_shows_eight_until_it_is_asked_for_all(page, tmp_path):
  given = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1]
  data = json.loads(given)
  data['groups'][1]['columns'] = [f'field{i}' for i in range(11)]
  for run in data['groups'][1]['runs']:
    run['fields'] = ['1'] * 11
  said = use_page(
    page.replace(given, json.dumps(data)),
    """
    const table = document.querySelectorAll('table')[1], chips = [...table.parentNode.querySelectorAll('.chip')];
    const count = (kind) => [...table.querySelector(`${kind} tr`).children].filter((cell) => cell.offsetWidth).length;
    say(chips.map((chip) => chip.textContent), count('thead'), count('tbody'));
    chips[0].click();
    say(count('thead'), count('tbody'));
    chips[0].click();
    say(count('thead'));
    """,
    tmp_path,
  )
  assert said == ['all 11 fields', '13', '13', '16', '16', '13']


@needs_chromium
def test_neighbouring_marks_of_an_axis_differ_and_enclose_the_values(page, tmp_path):
  ranges = [[4.9, 5.6], [2.6, 3.2], [12345, 12351], [5.00001, 5.00002], [-1.2e-4, 2e-4], [0, 9e7], [0.1, 0.1000001]]
  said = use_page(
    page,
    f"""
    const labels = (marks) => marks.map(([, text]) => text);
    for (const [low, high] of {ranges}) {{
      const marks = evenMarks(low, high, 4), texts = labels(marks), error = 1e-9 * Math.abs(high);
      const isRight = marks.every(([value], i) => Math.abs(parseFloat(texts[i].replaceAll(',', '')) - value) <= error);
      const isAround = marks[0][0] <= low + error && marks.at(-1)[0] >= high - error;
      say(isRight && isAround && new Set(texts).size === texts.length && marks.length > 2);
    }}
    for (const marks of [evenMarks(4.9, 5.6, 4), evenMarks(0, 1, 5, 1), evenMarks(0, 1.5e6, 3, 1),
      logMarks(1e-8, 100), logMarks(2.5, 6), logMarks(20, 900)]) say(labels(marks).join(' '));
    """,
    tmp_path,
  )
  assert said[: len(ranges)] == ['true'] * len(ranges)
  assert said[len(ranges) :] == [
    '4.8 5.0 5.2 5.4 5.6',
    '0 1',
    '0 500,000 1,000,000 1,500,000',
    '1e-8 1e-6 1e-4 0.01 1 100',
    '3 4 5 6',
    '20 50 100 200 500',
  ]


@needs_chromium
def test_the_page_on_a_phone(page, tmp_path):
  assert use_page(page, IS_NARROW, tmp_path, width=400)[0::2] == ['true', 'true']


def test_markdown_has_age_and_the_fields_that_differ_and_no_empty_figures(folder, capsys):
  assert main(['runs', str(folder / 'lm'), '--markdown']) == 0
  head, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith('|')]
  names = [name.strip() for name in head.strip('|').split('|')]
  assert names[:4] == ['run', 'step', 'age', 'loss'] and 'learning_rate' in names and 'step time' not in names
  cells = {row.split('|')[1].strip(): row.strip('|').split('|')[names.index('learning_rate')].strip() for row in rows}
  assert float(cells['a10']) == 0.01 and float(cells['b']) == 3e-4
