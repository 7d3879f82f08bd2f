"""The rules that strategies are written in, their registry and their notation.

A rule changes the spec of one variable. It is made by a registered function from its arguments, which are literals:

    @register_rule('shard_first')
    def shard_first(axis):
      def rule(spec, variable, mesh):
        return (axis, *spec[1:])
      return rule

after which a strategy may say 'shard_first("data")', or 'shard_dim("model", -1) | shard_first("data")': rules joined
by `|` are applied from left to right, each to what the one before has left. The built-in ones are after those of
big_vision (Beyer et al., 2022).
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from praxis_lite.errors import ShardingError, did_you_mean

Spec = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Variable:
  """What a rule knows of a variable.

  Attributes:
    name: its path, such as 'lm.softmax.w'.
    shape: its true shape.
    dtype: its dtype.
    logical_axes: the logical name of each axis, where it is declared with them.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  logical_axes: tuple[Any, ...] | None = None

  @property
  def num_bytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


class Change(NamedTuple):
  """What a rule may return instead of a spec: the spec, and a remark for whoever asks why it is so."""

  spec: Spec
  remark: str


# (spec so far, variable, size of each mesh axis) -> spec
Rule = Callable[[Spec, Variable, Mapping[str, int]], 'Spec | Change']
RuleT = TypeVar('RuleT', bound=Callable[..., Rule])


class RuleNameError(ShardingError, KeyError):
  """A rule is registered twice, or not at all."""

  def __str__(self) -> str:
    return str(self.args[0])


_RULES: dict[str, Callable[..., Rule]] = {}


def register_rule(name: str) -> Callable[[RuleT], RuleT]:
  """Decorates a function that makes a rule from literal arguments.

  Raises:
    RuleNameError: there is a rule of that name.
  """

  def register(make_rule: RuleT) -> RuleT:
    if name in _RULES:
      raise RuleNameError(f'the sharding rule {name!r} is registered already; known rules: {", ".join(sorted(_RULES))}')
    _RULES[name] = make_rule
    return make_rule

  return register


def parse_rules(text: str) -> list[tuple[str, Rule]]:
  """Returns [(its text, rule)] of rules joined by `|`: 'shard_dim("model", 0) | fsdp(axis="data")'.

  Raises:
    RuleNameError: a rule is not registered.
    ShardingError: it is not a chain of calls with literal arguments, or a rule does not take these.
  """
  try:
    expression = ast.parse(text.strip(), mode='eval').body
  except SyntaxError as error:
    raise ShardingError(f'{text!r} is not a chain of rules: {error.msg}') from None
  return [(ast.get_source_segment(text.strip(), call) or text, _make_rule(call, text)) for call in _joined(expression)]


def _joined(node: ast.expr) -> list[ast.expr]:
  if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
    return [*_joined(node.left), *_joined(node.right)]
  return [node]


def _make_rule(node: ast.expr, text: str) -> Rule:
  function = node.func if isinstance(node, ast.Call) else node
  if not isinstance(function, ast.Name):
    raise ShardingError(
      f'{text!r}: {ast.unparse(node)!r} is not a call of a rule; known rules: {", ".join(sorted(_RULES))}'
    )
  name = function.id
  if name not in _RULES:
    raise RuleNameError(
      f'{text!r}: no sharding rule {name!r} is registered; known rules: {", ".join(sorted(_RULES))}.'
      f'{did_you_mean(name, _RULES)}'
    )
  args = [_literal(arg, text) for arg in node.args] if isinstance(node, ast.Call) else []
  given = node.keywords if isinstance(node, ast.Call) else []
  if any(k.arg is None for k in given):
    raise ShardingError(f'{text!r}: rules take literal arguments by position or name, no **')
  keywords = {str(k.arg): _literal(k.value, text) for k in given}
  signature = inspect.signature(_RULES[name])
  try:
    bound = signature.bind(*args, **keywords)
  except TypeError as error:
    raise ShardingError(f'{text!r}: {error}; it is {name}{signature}') from None
  return _RULES[name](*bound.args, **bound.kwargs)


def _literal(node: ast.expr, text: str) -> Any:
  try:
    return ast.literal_eval(node)
  except (ValueError, TypeError):
    raise ShardingError(
      f'{text!r}: {ast.unparse(node)!r} is not a literal; rules take literal arguments only'
    ) from None
