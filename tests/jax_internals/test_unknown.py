"""An unknown shape of JAX costs one line, and no more; what users do wrong is said as ever."""

import pytest

from praxis_lite.common import jax_internals
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.jax_internals import UnknownJax, reading, unless_unknown


@pytest.fixture(autouse=True)
def _told_nothing(monkeypatch):
  monkeypatch.setattr(jax_internals, 'told', [])


@pytest.mark.parametrize('kind', [KeyError, AttributeError, TypeError, IndexError, RuntimeError, ImportError])
@pytest.mark.parametrize(('message', 'told'), [('', ''), ('x', ": '?x'?"), ('a\nb', r": ('a\\nb'|a)")])
def test_what_is_not_there_is_an_unknown_shape(kind, message, told):
  told = told if message or kind is not KeyError else ": ''"
  said = rf"\AJAX \d.* is not as praxis_lite knows it: scan's parameters: {kind.__name__}{told}\Z"
  with pytest.raises(UnknownJax, match=said), reading("scan's parameters"):
    raise kind(message)


@pytest.mark.parametrize('error', [ConfigError('no'), UnknownJax('inner'), KeyboardInterrupt()])
def test_what_is_something_else_stays_that(error):
  with pytest.raises(type(error)) as raised, reading('scan'):
    raise error
  assert raised.value is error


def test_the_user_is_told_once_for_each_consequence(capsys):
  def read():
    raise UnknownJax('scan: KeyError')

  assert [unless_unknown('no advice on x', read, 3) for _ in range(3)] == [3, 3, 3]
  assert unless_unknown('no advice on y', read, None) is None
  assert unless_unknown('no advice on z', lambda: 5, 3) == 5
  lines = capsys.readouterr().out.splitlines()
  assert [line.split(' (')[0] for line in lines] == ['no advice on x', 'no advice on y']
  assert all(line.endswith('is not as praxis_lite knows it: scan: KeyError)') for line in lines)
