"""Reads the text of an override as a Python literal, in which names inside containers need no quotes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence

from praxis_lite.common.errors import ConfigError, did_you_mean

BRACKETS = {'(': ')', '[': ']', '{': '}'}


def unclosed_bracket(text: str) -> str:
  """Returns the last quote or bracket that `text` opens and does not close; '' if there is none."""
  opened = ''
  for character in text:
    if opened[-1:] in ('"', "'"):
      opened = opened[:-1] if character == opened[-1] else opened
    elif character in BRACKETS or character in '"\'':
      opened += character
    elif opened and character == BRACKETS[opened[-1]]:
      opened = opened[:-1]
  return opened[-1:]


def lone_quote(text: str) -> str:
  """Returns the quote that a text begins or ends with, but not both; '' if there is none."""
  ends = text[:1] + text[-1:]
  quotes = [quote for quote in '"\'' if quote in ends and text.count(quote) % 2]
  return quotes[0] if quotes else ''


_NAMES = {'none': None, 'null': None, 'true': True, 'false': False, 'inf': float('inf'), 'nan': float('nan')}


def read_literal(text: str, classes: list[type]) -> object:
  """Reads a literal, or a call of one of `classes` such as `WeightInit('gaussian', 0.02)`; returns other text as is."""
  if text.lower() in _NAMES:
    return _NAMES[text.lower()]
  try:
    node = ast.parse(text, mode='eval').body
    return text if isinstance(node, ast.Name) else ast.literal_eval(_Literals(classes).visit(node))
  except ConfigError:
    raise
  except (SyntaxError, ValueError, TypeError, RecursionError):
    return text


class _Literals(ast.NodeTransformer):
  """Replaces names by strings, and calls of some classes by their results; raises ValueError if no literal remains."""

  def __init__(self, classes: Sequence[type]):
    self._classes = {c.__name__: c for c in classes}

  def visit_Constant(self, node: ast.Constant) -> ast.Constant:
    if node.value is Ellipsis:
      raise ValueError('no value of a field')
    return node

  def visit_Name(self, node: ast.Name) -> ast.Constant:
    return ast.Constant(_NAMES.get(node.id.lower(), node.id))

  def visit_Call(self, node: ast.Call) -> ast.Constant:
    make = self._maker(node.func)
    args = [ast.literal_eval(self.visit(a)) for a in node.args]
    keywords = {str(k.arg): ast.literal_eval(self.visit(k.value)) for k in node.keywords}
    try:
      return ast.Constant(make(*args, **keywords))  # type: ignore[arg-type]
    except TypeError as error:
      raise ConfigError(str(error)) from None

  def _maker(self, function: ast.expr) -> Callable[..., object]:
    """Returns the class, or the class method of a class, that a call names; raises ValueError if it names neither."""
    match function:
      case ast.Name(id=name) if name in self._classes:
        return self._classes[name]
      case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in self._classes:
        methods = [n for n, _ in inspect.getmembers(self._classes[name], inspect.ismethod) if n[0] != '_']
        if attribute not in methods:
          close = did_you_mean(attribute, methods)
          raise ConfigError(f'{name} has no {attribute!r}.{close} It has {", ".join(methods)}.')
        return getattr(self._classes[name], attribute)
    raise ValueError('no class that may be called')
