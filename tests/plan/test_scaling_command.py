"""The best size for an amount of compute, by brute force, and the command that proposes it."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from test_scaling_law import LAW, LAW_OF_RUNS, exact, folder, noisy, runs_of

from praxis_lite.cli.main import main
from praxis_lite.instruments.plan.scaling_law import ScalingLaw, fit_scaling_law

__all__ = ['exact', 'folder', 'noisy']  # Fixtures.


@pytest.mark.parametrize('law', [LAW, ScalingLaw(0.4, 20.0, 0.2, 3000.0, 0.45)])
@pytest.mark.parametrize('flops', [1e17, 3e21])
def test_no_other_size_has_a_lower_loss(law, flops):
  sizes = np.geomspace(1e4, 1e13, 4001)
  losses = [law.loss(n, flops / 6 / n) for n in sizes]
  assert law.best_size(flops)[0] == pytest.approx(sizes[np.argmin(losses)], rel=0.01)
  assert law.best_size(flops)[2] <= min(losses) * (1 + 1e-12)
  more = math.log(law.best_size(10 * flops)[0] / law.best_size(flops)[0]) / math.log(10)
  assert more == pytest.approx(law.growth_of_parameters)


def test_planted_constants_and_sizes_are_in_their_ranges(noisy):
  for field in ScalingLaw._fields:
    low, high = noisy.interval(lambda law, field=field: getattr(law, field))
    assert low <= getattr(LAW, field) <= high, field
  found = noisy.best_size(1e20)
  assert found.of_parameters[0] <= LAW.best_size(1e20)[0] <= found.of_parameters[1]
  assert found.of_loss[0] <= LAW.best_size(1e20)[2] <= found.of_loss[1]


def test_without_noise_the_size_is_that_of_the_law(exact):
  found = exact.best_size(1e20)
  assert found.parameters == pytest.approx(LAW.best_size(1e20)[0], rel=0.01)
  assert 6 * found.parameters * found.tokens == pytest.approx(1e20)


@pytest.mark.slow
def test_the_command_prints_runs_law_and_sizes(folder, tmp_path, capsys):
  picture = tmp_path / 'scaling.svg'
  arguments = [str(folder), '--flops=1e15,1e16', '--prices=h100=2', f'--svg={picture}']
  code = main(['scaling', *arguments])
  out, err = capsys.readouterr()
  assert code == 0, err
  text = ' '.join(out.split())
  assert 'L = 1 + 60 / N^0.4 + 40 / D^0.3' in text and 'the losses are eval/validation/loss' in text
  assert re.search(r'parameters grow with C\^0.43 \(0.43 to 0.43\) and tokens with C\^0.57', text)
  n = float(re.search(r'1.00e\+16 +[\d.e+]+ x +([\d.]+)M', text)[1])
  assert n == pytest.approx(LAW_OF_RUNS.best_size(1e16)[0] / 1e6, rel=0.02)
  assert '--prices=h100=2 --tokens=' in text and 'left out: ' in err
  circles = [x for x in ElementTree.parse(picture).iter() if x.tag.endswith('circle')]
  assert len(circles) == 9 + 2


@pytest.mark.parametrize(
  'arguments, told',
  [
    (['--flops=0'], 'expected operations of a training'),
    (['--flops=x'], 'expected operations of a training'),
    (['--prices=h100'], '--prices: expected chips with a price'),
    (['--metric=eval/test/loss'], 'no run has it'),
  ],
)
def test_mistakes_are_one_line(folder, arguments, told, capsys):
  assert main(['scaling', str(folder), *arguments]) == 2
  assert told in capsys.readouterr().err.splitlines()[-1]


def test_a_law_is_drawn_for_runs_of_one_name_or_none(exact):
  from praxis_lite.instruments.plan.scaling_picture import draw_scaling

  assert ElementTree.fromstring(draw_scaling(exact, [])).tag.endswith('svg')
  assert fit_scaling_law(runs_of(), samples=1).runs[0].name == ''
