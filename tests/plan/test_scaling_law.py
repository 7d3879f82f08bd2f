"""A law of scaling: its constants are recovered, its ranges hold the truth, and runs that do not tell are refused."""

import itertools
import json
import math
import re

import numpy as np
import pytest
from small_lm import ALL, TOKENS, small_lm

from praxis_lite.cli.main import main
from praxis_lite.cli.scaling_runs import count_active_parameters, read_finished_runs
from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import short_number
from praxis_lite.instruments.plan.loss_goal import tokens_to_reach
from praxis_lite.instruments.plan.scaling_law import FinishedRun, ScalingLaw, fit_scaling_law
from praxis_lite.runs.records.record import write_record
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

LAW = ScalingLaw(1.69, 406.4, 0.34, 410.7, 0.28)  # Hoffmann et al. (2022), approach 3.
GOAL = 3.4
PARAMETERS, TOKEN_COUNTS = (1e6, 4e6, 2e7, 1e8), (1e8, 5e8, 3e9)


def runs_of(law=LAW, noise=0.0, parameters=PARAMETERS, tokens=TOKEN_COUNTS, seed=0):
  random = np.random.default_rng(seed)
  sizes = itertools.product(parameters, tokens)
  return [FinishedRun(n, d, law.loss(n, d) * math.exp(noise * random.normal())) for n, d in sizes]


@pytest.fixture(scope='module')
def exact():
  return fit_scaling_law(runs_of(), samples=4)


@pytest.fixture(scope='module')
def noisy():
  return fit_scaling_law(runs_of(noise=0.003, seed=3), samples=60)


@pytest.mark.parametrize('law', [LAW, ScalingLaw(0.4, 20.0, 0.2, 3000.0, 0.45), ScalingLaw(2.5, 5e4, 0.7, 80.0, 0.15)])
def test_known_constants_are_recovered(law):
  found = fit_scaling_law(runs_of(law), samples=1)
  assert np.allclose(found.law, law, rtol=1e-3) and found.error < 1e-6


def test_six_runs_suffice():
  few = [run for run in runs_of(parameters=PARAMETERS[:3]) if run.tokens != 5e8 or run.parameters == 4e6]
  assert np.allclose(fit_scaling_law(few[:7], samples=1).law, LAW, rtol=0.01)


def test_one_run_that_failed_does_not_move_the_law():
  wrong = runs_of()
  wrong[5] = wrong[5]._replace(loss=1.1 * wrong[5].loss)
  found = fit_scaling_law(wrong, samples=1)
  assert found.law.tokens_for(GOAL, 1e8) == pytest.approx(LAW.tokens_for(GOAL, 1e8), rel=0.25)
  assert found.error > 0.02  # And the error shows it.


@pytest.mark.slow
def test_ranges_hold_the_truth_and_grow_with_noise(exact):
  truth, widths, held = LAW.tokens_for(GOAL, 1e8), [], 0
  for seed in range(6):
    low, high = fit_scaling_law(runs_of(noise=0.003, seed=seed), samples=30).interval(to_goal)
    held += low <= truth <= high
    widths.append(high / low)
  assert held >= 4 and min(widths) > 1.05
  assert exact.interval(to_goal) == pytest.approx((truth, truth), rel=1e-2)


def to_goal(law):
  return law.tokens_for(GOAL, 1e8)


def test_a_law_inverts_itself():
  assert LAW.tokens_for(LAW.loss(3e7, 2e9), 3e7) == pytest.approx(2e9)
  assert LAW.limit(LAW.parameters_for(2.5)) == pytest.approx(2.5)
  assert LAW.tokens_for(LAW.limit(3e7), 3e7) == LAW.parameters_for(1.69) == math.inf


@pytest.mark.parametrize(
  'runs, told',
  [
    ([], r'6 finished runs or more; there are 0'),
    (runs_of()[:5], r'6 finished runs or more; there are 5'),
    (runs_of(parameters=(1e6, 1e7)), r'falls with parameters: they have 1.00M, 10.0M; train with 3 different'),
    (runs_of(parameters=(1e6, 1.5e6, 2e6)), r'falls with parameters: .*the largest 3 times the smallest'),
    (runs_of(tokens=(1e9,), parameters=np.geomspace(1e6, 1e8, 8)), r'falls with tokens: they have 1.00B;'),
    (runs_of(tokens=(1e9, 1.01e9, 1.02e9)), r'falls with tokens: they have 1.00B;'),
    ([FinishedRun(n, 20 * n, LAW.loss(n, 20 * n)) for n in np.geomspace(1e6, 1e8, 8)], r'proportionally more tokens'),
    ([*runs_of(), FinishedRun(1e6, 1e8, math.nan, 'runs/x')], r'runs/x has .* a loss of nan'),
    ([*runs_of(), FinishedRun(1e6, 0, 3.0)], r'a run has .*, 0 tokens'),
    (runs_of(LAW._replace(b=0.0), noise=0.01), r'do not fall with tokens'),
    (runs_of(LAW._replace(a=0.0), noise=0.01), r'do not fall with parameters'),
  ],
)
def test_runs_that_do_not_tell_the_law_are_refused(runs, told):
  with pytest.raises(UserError, match=told):
    fit_scaling_law(runs, samples=1)


def test_a_goal_within_the_runs_is_not_extrapolated(exact):
  found = tokens_to_reach(LAW.loss(2e7, 1e9), 2e7, exact)
  assert found.tokens == pytest.approx(1e9, rel=1e-2) and found.least <= found.tokens <= found.most
  text = ' '.join(found.notes)
  assert 'the law of 12 runs of 1.00M to 100M parameters N and 100M to 3.00B tokens D' in text
  assert 'extrapolated' not in text and 'may not be reached' not in text


def test_an_extrapolated_goal_says_how_far(exact):
  text = tokens_to_reach(LAW.loss(1e9, 3e10), 1e9, exact).notes[-1]
  assert 'extrapolated: 10 times the most parameters of the runs and 10 times the most tokens' in text
  assert 'a loss below their lowest, 3.376' in text
  assert '0.5 of the least parameters of the runs' in tokens_to_reach(LAW.loss(5e5, 1e9), 5e5, exact).notes[-1]


def test_a_loss_that_is_not_reached_is_refused(exact, noisy):
  with pytest.raises(UserError, match=r'no model goes below 1\.69 \(1\.69 to 1\.69\), however large'):
    tokens_to_reach(1.5, 1e8, exact)
  with pytest.raises(UserError, match=r'100M parameters does not go below 2\.464.* a model of more than 129M'):
    tokens_to_reach(2.4, 1e8, exact)
  nearly = noisy.law.limit(1e8) * 1.0005
  found = tokens_to_reach(nearly, 1e8, noisy)
  assert found.most == math.inf and '% of these fits say that this model does not go below it' in ' '.join(found.notes)


# ---------------------------------------------------------------- runs on disk


STEPS = (40, 200, 1000)
HIDDEN = (16, 600, 4000)


def make_run(directory, hidden=128, steps=40, loss=3.0, done=None, split='eval/validation', vocab_size=None):
  """Writes a run as `train` leaves it; returns its parameters and tokens."""
  directory.mkdir(parents=True)
  config = small_lm(mesh=(1, 1, 1), hidden_dims=hidden)
  config.task.train.num_train_steps = steps
  if vocab_size is not None:
    config.task.model.vocab_size = config.datasets[0].vocab_size = vocab_size
  write_record(directory, config, command='praxis-lite train --exp=lm.X')
  done = steps if done is None else done
  lines = [{'step': done, 'split': split, 'time': 0.0, 'metrics': {'loss': loss}}]
  (directory / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return count_active_parameters(config.task), steps * TOKENS


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Nine finished runs of a law that holds for them, and some that tell nothing."""
  folder = tmp_path_factory.mktemp('sizes')
  sizes = [count_active_parameters(small_lm(hidden_dims=hidden).task) for hidden in HIDDEN]
  for hidden, n in zip(HIDDEN, sizes):
    for steps in STEPS:
      make_run(folder / f'{hidden}-{steps}', hidden, steps, LAW_OF_RUNS.loss(n, steps * TOKENS))
  make_run(folder / 'interrupted', done=30)
  make_run(folder / 'other-metric', split='train')
  return folder


LAW_OF_RUNS = ScalingLaw(1.0, 60.0, 0.4, 40.0, 0.3)


def test_finished_runs_are_read_with_their_sizes(folder):
  found = read_finished_runs(str(folder))
  assert len(found.runs) == 9 and found.metric == 'eval/validation/loss'
  assert {run.tokens for run in found.runs} == {steps * TOKENS for steps in STEPS}
  assert count_active_parameters(small_lm().task) == ALL
  assert {name.rpartition('/')[2]: reason for name, reason in found.left_out.items()} == {
    'interrupted': 'it is not finished: step 30 of 40',
    'other-metric': 'it has no eval/validation/loss',
  }


def test_the_training_loss_is_a_mean_over_the_end(tmp_path):
  make_run(tmp_path / '1', steps=100, split='train')
  lines = [{'step': s, 'split': 'train', 'time': 0.0, 'metrics': {'loss': float(s)}} for s in range(5, 101, 5)]
  (tmp_path / '1' / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  found = read_finished_runs(str(tmp_path))
  assert (found.metric, found.runs[0].loss) == ('train/loss', 97.5)


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
  make_run(tmp_path / 'a')
  make_run(tmp_path / 'b', vocab_size=64)
  with pytest.raises(UserError, match=r'different vocabularies .*a has vocab_size = 128, and .*b 64'):
    read_finished_runs(str(tmp_path))
  (tmp_path / 'empty').mkdir()
  with pytest.raises(UserError, match='there are no runs'):
    read_finished_runs(str(tmp_path / 'empty'))
  with pytest.raises(UserError, match='does not exist'):
    read_finished_runs(str(tmp_path / 'missing'))


SIZE = [f'--set=task.model.vocab_size={128}', f'--set=datasets[*].vocab_size={128}']
CHEAPEST = ['plan', 'lm.SyntheticLmTiny', '--cheapest', '--prices=h100=2', '--chips=1', '--nocompile', *SIZE]


@pytest.mark.slow
def test_a_command_says_what_a_loss_takes(folder, capsys):
  code = main([*CHEAPEST, '--loss=2.6', f'--runs={folder}', '--search_seconds=1'])
  out, err = capsys.readouterr()
  assert code == 0, err
  text = ' '.join(out.split())
  config = configure(registry.get('lm.SyntheticLmTiny'))
  config.task.model.vocab_size = 128
  needed = LAW_OF_RUNS.tokens_for(2.6, count_active_parameters(config.task))
  assert f'a loss of 2.6, {short_number(needed)} tokens' in text and 'L = 1 + 60 / N^0.4 + 40 / D^0.3' in text
  assert f'--tokens={needed:g}' in text
  assert 'left out: ' in err and 'it is not finished: step 30 of 40' in err


@pytest.mark.parametrize(
  'flags, told',
  [
    (['--loss=2.2'], r'--loss needs --runs, the folder of finished runs'),
    (['--runs=x'], r'--runs needs --loss'),
    (['--metric=x'], r'--metric needs --loss'),
    (['--loss=0', '--runs=x'], r'--loss=0: expected a loss of more than 0'),
    (['--loss=2.2', '--runs=x', '--tokens=1e9'], r'--loss and --tokens both'),
    (['--loss=2.2', '--runs={}/16-40'], r'--runs=.*16-40: a law of scaling .* 6 finished runs or more; there are 1'),
    (['--loss=0.5', '--runs={}'], r'--loss=0.5: by the law of these runs, no model goes below 1 '),
    (['--loss=2.2', '--runs={}', '--metric=eval/test/loss'], r'--metric=eval/test/loss: no run has it'),
    (['--loss=2.2', '--runs={}', '--set=task.model.vocab_size=96'], r'runs have vocab_size = 128, and .* model 96'),
  ],
)
def test_mistakes_are_one_line(folder, flags, told, capsys):
  assert main([*CHEAPEST, *(flag.replace('{}', str(folder)) for flag in flags)]) == 2
  lines = capsys.readouterr().err.strip().splitlines()
  assert re.search(told, lines[-1]) and not [line for line in lines[:-1] if not line.startswith('left out: ')]
