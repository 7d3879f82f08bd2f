"""name_unknown_keywords: errors about an unknown keyword of a public function suggest a known one, as configs do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

from praxis_lite.common.errors import ConfigError, did_you_mean

P = ParamSpec('P')
R = TypeVar('R')


class UnknownKeywordError(ConfigError, TypeError):
  """A function has no keyword of this name."""


def name_unknown_keywords(
  function: Callable[P, R],
  elsewhere: str = '',
  of_elsewhere: Iterable[str] = (),
  settings: Mapping[str, object] | None = None,
) -> Callable[P, R]:
  """Returns `function` with a check of its keywords: an unknown one raises `UnknownKeywordError`.

  The error suggests the nearest known name. If the unknown one is in `of_elsewhere`, the error instead says that it is
  set for all calls, by `<elsewhere>(name=...)`. `settings` are the keywords that the function takes as `**settings`,
  with their defaults; help and completion show them.
  """
  signature = inspect.signature(function)
  own = [p for p in signature.parameters.values() if not (settings and p.kind is p.VAR_KEYWORD)]
  own += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d) for n, d in (settings or {}).items()]
  known = [parameter.name for parameter in own if parameter.name != 'self']

  @functools.wraps(function)
  def call_checked(*args: P.args, **kwargs: P.kwargs) -> R:
    for name in kwargs:
      if name not in known and name in of_elsewhere:
        raise UnknownKeywordError(f'{function.__name__}: {name} is set for all calls, as in {elsewhere}({name}=...)')
    check_keywords(function.__name__, kwargs, known)
    return function(*args, **kwargs)

  call_checked.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
  return call_checked


def check_keywords(function: str, given: Iterable[str], known: list[str]) -> None:
  """Raises an `UnknownKeywordError` if one of the keywords given to a function is not `known`."""
  for name in given:
    if name not in known:
      near = did_you_mean(name, known) or f' There are: {", ".join(known)}'
      raise UnknownKeywordError(f'{function}: there is no setting {name!r}.{near}')
