"""Certificates: what a plan predicted for a run, beside what the run measured; and what plans learn from runs."""

import dataclasses
import json
import math

import pytest
from small_lm import small_lm

from praxis_lite.cli import train_plan
from praxis_lite.cli.main import main
from praxis_lite.common.errors import UserError
from praxis_lite.instruments.plan import plan
from praxis_lite.instruments.plan.experience import (
  Measurement,
  apply_experience,
  experience_file,
  format_experience,
  is_typical,
  remember,
)
from praxis_lite.runs.records.certificate import (
  Certificate,
  MeasuredSteps,
  Prediction,
  format_certificate,
  read_certificate,
  read_prediction,
  write_prediction,
)
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

EXPERIMENT = ['--exp=lm.SyntheticLmTiny', '--set=task.ici_mesh_shape=(1,8,1)']
STEPS = ['--set=task.train.num_train_steps=20', '--set=task.train.log_interval_steps=2']
PREDICTED = Prediction(
  topology='h100:1x8',
  chip='h100',
  mesh={'data': 8},
  mode='analytic',
  step_seconds=0.5,
  least_seconds=0.4,
  most_seconds=1.0,
  peak_bytes=2.0**30,
  waiting_seconds=0.05,
  fast_bytes=2.0**20,
  network_bytes=0.0,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


def train(run, *arguments):
  return main(['train', f'--job_log_dir={run}', '--noverify', *EXPERIMENT, *STEPS, *arguments])


@pytest.mark.slow
def test_a_run_on_a_cpu_has_no_certificate_and_prints_none(tmp_path, capsys):
  assert train(tmp_path / 'run') == 0
  assert 'planned' not in capsys.readouterr().out
  assert not (tmp_path / 'run' / 'plan.json').exists() and not experience_file().exists()
  assert main(['runs', str(tmp_path)]) == 0
  assert 'planned' not in capsys.readouterr().out


@pytest.fixture
def on_h100(monkeypatch):
  """The 8 simulated devices count as H100."""
  monkeypatch.setattr(train_plan, 'topology_of_run', lambda run: 'h100:8')


@pytest.mark.slow
def test_a_run_on_known_chips_ends_with_its_certificate(tmp_path, on_h100, capsys):
  run = tmp_path / 'runs' / 'one'
  assert train(run) == 0
  (line,) = [line for line in capsys.readouterr().out.splitlines() if 'planned' in line]
  assert line.startswith('planned by formulas for h100:1x8: step ') and 'memory' not in line  # A CPU reports none.
  assert 'as planned, ' in line and 'each device sends' in line
  found = read_certificate(run)
  config = configure(registry.get('lm.SyntheticLmTiny'))
  config.task.ici_mesh_shape = (1, 8, 1)
  assert found.predicted == train_plan.predict(plan(config, None, 'h100:8', compile=False))
  assert found.times == pytest.approx(found.measured.seconds / found.predicted.step_seconds)
  assert not experience_file().exists()  # Such short steps say nothing about a chip.
  assert main(['runs', str(run.parent)]) == 0
  head, row = capsys.readouterr().out.splitlines()[1:3]
  assert 'step / planned' in head and 'memory / planned' not in head and f'{found.times:.2f}' in row
  assert main(['runs', str(run.parent), '--csv']) == 0
  names, values = (line.split(',')[10:16] for line in capsys.readouterr().out.splitlines()[:2])
  cells = dict(zip(names, values))
  assert float(cells['planned_step_seconds']) == found.predicted.step_seconds and cells['measured_peak_bytes'] == ''
  assert main(['runs', str(run.parent), '--markdown']) == 0
  table = capsys.readouterr().out.splitlines()
  assert table[2].startswith('| run | step | age | loss |') and table[3].count('---') == table[2].count('|') - 1
  assert '| one | 20/20 | ' in table[4] and f'{found.times:.2f} x the planned' in table[4]
  assert train(run) == 0  # Nothing is left to train.
  assert 'planned' not in capsys.readouterr().out


@pytest.mark.slow
def test_a_plan_that_fails_does_not_fail_the_run(tmp_path, monkeypatch, capsys):
  def fail(run):
    raise ZeroDivisionError('a fault of plans')

  monkeypatch.setattr(train_plan, 'topology_of_run', fail)
  assert train(tmp_path / 'run') == 0
  assert 'no plan of this step: ZeroDivisionError: a fault of plans' in capsys.readouterr().out


@pytest.mark.slow
def test_few_steps_have_no_certificate(tmp_path, on_h100, capsys):
  assert train(tmp_path / 'run', '--set=task.train.num_train_steps=3') == 0
  assert 'planned' not in capsys.readouterr().out and not (tmp_path / 'run' / 'plan.json').exists()


@pytest.mark.slow
def test_a_run_records_the_figures_of_a_given_plan(tmp_path, capsys):
  file = tmp_path / 'figures.json'
  command = ['plan', *EXPERIMENT, '--topology=cpu:8', '--nocompile', f'--figures={file}']
  assert main(command) == 0
  assert f'wrote {file}' in capsys.readouterr().out
  assert train(tmp_path / 'run', f'--plan={file}') == 0
  assert 'x the planned' not in capsys.readouterr().out  # Times and memory of simulated devices are no figures.
  assert read_certificate(tmp_path / 'run').predicted == read_prediction(file)
  for change, told in (
    ({'mesh': {'data': 4, 'mdl': 2}}, 'is for the mesh data 4 x mdl 2, and this run has replica 1 x data 8 x mdl 1'),
    ({'chip': 'h100', 'topology': 'h100:1x8'}, 'is for h100:1x8, and this run is on cpu; leave it out'),
  ):
    other = dataclasses.replace(read_prediction(file), **change)
    write_prediction(file, other)
    assert train(tmp_path / 'other', f'--plan={file}') == 2
    assert told in capsys.readouterr().err
    write_prediction(file, read_certificate(tmp_path / 'run').predicted)
  assert train(tmp_path / 'third', f'--plan={tmp_path}/none.json') == 2
  assert 'none.json cannot be read: No such file' in capsys.readouterr().err
  assert not (tmp_path / 'third').exists()


@pytest.mark.parametrize(
  'content',
  ['', '[]', '{}', '{"format": 2}', '{"format": 1, "topology": "h100:8"}', '1', '"x"'],
)
def test_other_files_are_no_predictions(content, tmp_path):
  file = tmp_path / 'plan.json'
  file.write_text(content)
  with pytest.raises(UserError, match=r'plan.json is no prediction of `praxis-lite plan --figures`'):
    read_prediction(file)
  assert read_certificate(tmp_path) is None


@pytest.mark.parametrize(
  'field, value', [('step_seconds', -1), ('peak_bytes', 'x'), ('peak_bytes', True), ('mesh', []), ('chip', 3)]
)
def test_predictions_with_wrong_values_are_refused(field, value, tmp_path):
  file = tmp_path / 'plan.json'
  write_prediction(file, PREDICTED)
  assert read_prediction(file) == PREDICTED
  file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
  with pytest.raises(UserError, match='is no prediction'):
    read_prediction(file)


def test_the_line_says_what_was_measured_and_whether_it_is_in_its_range():
  text = format_certificate(Certificate(PREDICTED, MeasuredSteps(0.6, 100, 2.0**29, 0.0)))
  assert text == (
    'planned by formulas for h100:1x8: step 600 ms, 1.20 x the planned 500 ms (within its range, 400 ms to 1 s); '
    'memory 512 MiB, 0.50 x the planned 1 GiB; as planned, 10% of a step waits, and each device sends 1 MiB'
  )
  assert '(outside its range' in format_certificate(Certificate(PREDICTED, MeasuredSteps(2.0, 100, None, 0.0)))
  tiny = dataclasses.replace(PREDICTED, step_seconds=0.001, least_seconds=0.0008, most_seconds=0.002, peak_bytes=1e6)
  text = format_certificate(Certificate(tiny, MeasuredSteps(0.015, 100, 2.0**27, 0.0)))
  assert 'the host limits steps as short' in text and 'memory' not in text
  text = format_certificate(Certificate(tiny, MeasuredSteps(0.0011, 100, 2.0**30, 0.0)))
  assert 'within its range' in text and 'the host' not in text and 'memory 1 GiB' in text
  unknown = dataclasses.replace(PREDICTED, step_seconds=None, fast_bytes=0.0)
  assert format_certificate(Certificate(unknown, MeasuredSteps(2.0, 100, None, 0.0))) == ''
  assert format_certificate(Certificate(PREDICTED, None)) == ''
  simulated = dataclasses.replace(PREDICTED, chip='cpu')
  assert format_certificate(Certificate(simulated, MeasuredSteps(0.6, 100, None, 0.0))) == ''


@pytest.fixture(scope='module')
def planned():
  return plan(small_lm(), None, 'h100:1x8', compile=False)


def longer(planned):
  """The plan with steps that are long enough to say something about a chip."""
  cost = dataclasses.replace(planned.cost, seconds=0.1)
  return dataclasses.replace(planned, cost=cost)


@pytest.mark.parametrize(
  'factor, steps, is_one', [(1.5, 100, True), (1.5, 20, False), (5.0, 100, False), (0.2, 100, False)]
)
def test_plans_learn_from_typical_runs_only(planned, factor, steps, is_one):
  found = longer(planned)
  assert is_typical(found, Measurement('runs/1', 0.1 * factor, steps, None, 0.0)) is is_one
  assert not is_typical(planned, Measurement('runs/1', planned.step_seconds, 100, None, 0.0))  # Its steps are short.


def test_what_was_learned_has_counts_and_a_spread(planned, tmp_path, capsys):
  assert main(['plan', '--measured']) == 0
  assert 'plans have learned from no run yet' in capsys.readouterr().out
  for i, factor in enumerate((1.0, 4.0)):
    peak = 1.1 * planned.memory.peak
    remember(experience_file(), planned, Measurement(f'runs/{i}', factor * planned.step_seconds, 100, peak, 0.0))
  assert main(['plan', '--measured']) == 0
  row = capsys.readouterr().out.splitlines()[2]
  spread = math.exp(math.sqrt(2 * math.log(2) ** 2))  # Both are a factor of two from their mean.
  assert row.split() == ['h100', 'by', 'formulas', '2', '8', '2.00', '1.00', 'to', '4.00', 'x', f'{spread:.2f}', '1.10']


def test_files_of_earlier_versions_are_read(planned, tmp_path):
  file = tmp_path / 'measured.json'
  file.write_text('{"h100 analytic": {"runs/1": 2.0}}')
  assert apply_experience(planned.topology, file, 'analytic').experience.typical == pytest.approx(2.0)
  remember(file, planned, Measurement('runs/2', 8 * planned.step_seconds, 100, None, 0.0))
  assert apply_experience(planned.topology, file, 'analytic').experience.typical == pytest.approx(4.0)
  assert '2.00 to 8.00' in format_experience(file)
