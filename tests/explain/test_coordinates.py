"""The coordinate check: standard parametrisations fail, and `Mup` passes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.instruments.coordinates import Scaling, add_mup, draw_scalings, format_coordinates, make_ladder
from praxis_lite.models import Mup, transformer_lm

MLP = ('--exp=digits.DigitsMlp', '--widths=1,8', '--steps=3', '--seeds=2', '--learning_rate=0.02')


def model(**fields) -> Config:
  return transformer_lm(vocab_size=11, model_dims=8, hidden_dims=12, num_layers=2, num_heads=2).set(**fields)


def test_an_mlp_fails(capsys):
  assert main(['coordinate-check', *MLP]) == 1
  fails = capsys.readouterr().out
  assert re.search(r'network\.linear_0 .* ok', fails) and re.search(r'\nsoftmax \(product\) .*FAILS: ', fails)
  assert re.search(r'\d+ of \d+ layers FAIL', fails)


def test_an_mlp_passes_with_mup(capsys, tmp_path):
  picture = tmp_path / 'check.svg'
  assert main(['coordinate-check', *MLP, '--mup', f'--svg={picture}']) == 0
  passes = capsys.readouterr().out
  assert 'narrowest model: network_tpl.hidden_dims[0] = 128\n' in passes
  assert 'FAIL' not in passes and re.search(r'all \d+ layers pass', passes)
  assert picture.read_text().count('<path class="ok"') > 2


@pytest.mark.slow
@pytest.mark.parametrize(
  'arguments',
  [
    ('--exp=lm.StdlibLmTiny', '--learning_rate=0.01'),
    ('--exp=moe.MoeTiny', '--learning_rate=0.01'),
    ('--exp=vision.DigitsVit', '--learning_rate=0.01', '--set=task.model.network_tpl.num_layers=1'),
  ],
  ids=['transformer', 'experts', 'vit'],
)
def test_transformers_do_too(arguments, capsys):
  ladder = ('--widths=1,2,4', '--steps=3')
  assert main(['coordinate-check', *arguments, *ladder]) == 1
  assert main(['coordinate-check', *arguments, *ladder, '--mup']) == 0, capsys.readouterr().out


def test_the_base_of_a_model_is_the_narrowest_one():
  """The number of layers is that of the base, and no width."""
  ladder = make_ladder(model(mup=Config(Mup, base={'model_dims': 4, 'hidden_dims': 6, 'num_layers': 1})), (1, 2))
  assert dict(ladder.fields) == {'model_dims': 4, 'hidden_dims': 6}
  wide = ladder.widen_model(2)
  assert (wide.model_dims, wide.hidden_dims, wide.num_layers) == (8, 12, 1)
  assert wide.mup.base['model_dims'] == 4


def test_widths_are_all_dims_unless_fields_are_named():
  assert dict(make_ladder(model(), (1, 2)).fields) == {'model_dims': 8, 'hidden_dims': 12}
  named = make_ladder(model(), (0.5, 1), ['num_heads'])
  assert dict(named.fields) == {'num_heads': 2}
  assert add_mup(named).model.mup.base == {'num_heads': 1}


@pytest.mark.parametrize(
  ('factors', 'fields', 'message'),
  [
    ((1,), (), '--widths: expected two or more different factors'),
    ((0, 1), (), '--widths: expected two or more different factors'),
    ((1, 2), ('model_dim',), 'model_dim'),
    ((1, 2), ('style',), 'style'),
    ((1, 2), ('tokens_are_bytes',), 'tokens_are_bytes = .* is not a width'),
  ],
)
def test_a_ladder_that_is_none_is_refused(factors, fields, message):
  with pytest.raises(ConfigError, match=message):
    make_ladder(model(), factors, fields)


def test_a_width_that_is_no_integer_is_refused():
  with pytest.raises(ConfigError, match=r'task\.model\.model_dims = 8: 1\.3 times that is not a width'):
    make_ladder(model(), (1, 1.3)).widen_model(1.3)


def test_flags_that_are_wrong_are_refused(capsys):
  assert main(['coordinate-check', '--exp=lm.SyntheticLmTiny', '--widths=1,wide']) == 2
  assert "--widths: 'wide' is not a number" in capsys.readouterr().err


def test_what_passes():
  flat = Scaling('a', (1.0, 1.0), (0.0, 0.0), 0.0, 0.0)
  grows, shrinks = flat._replace(slope=0.3), flat._replace(slope=-1.0, slope_of_change=-1.0)
  assert [s.trouble(0.25) for s in (flat, shrinks, grows)] == ['', '', 'grows']
  assert flat._replace(slope_of_change=0.5).trouble(0.25) == 'change grows'
  assert flat._replace(sizes=(1.0, np.nan)).trouble(0.25) == 'not finite'
  assert 'FAILS: grows' in format_coordinates([grows], (1, 2), 0.25)
  assert '<path class="fails"' in draw_scalings([grows._replace(changes=(1.0, 2.0))], (1, 2), 0.25)
  assert draw_scalings([], (1, 2), 0.25).endswith('</svg>\n')
