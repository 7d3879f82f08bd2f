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

The sharding rules that are always there, after those of big_vision (Beyer et al., 2022).

On a mesh of data = 8, model = 4, for a float32 variable of shape (2048, 2048):

    replicate                                    (None, None)
    fsdp(axis="data")                            (None, 'data')      the largest dimension; of equal ones, the last
    shard_dim("model", 0)                        ('model', None)
    shard_dim("model", 0) | fsdp(axis="data")    ('model', 'data')
    logical_partitioning                         as the logical axis rules say for its declared names

Strategies: shardings of whole trees by patterns on the paths of their variables.

A strategy is a list of pairs (pattern, rules). Each variable takes the first pattern that matches its whole path, and
the rules of that pattern, applied from left to right, give its spec; a variable that no pattern matches is
replicated. Nothing distinguishes optimizer slots from parameters: one pass over the train state covers both.

    mesh: data = 8, model = 4
    strategy = [('.*/embedding/.*', 'shard_dim("model", 0) | fsdp(axis="data")'),
                ('.*', 'fsdp(axis="data")')]

    lm/embedding/w (32000, 4096)   shard_dim gives ('model', None), fsdp adds the largest one left: ('model', 'data')
    lm/ff/w        (4096, 16384)   (None, 'data')
    lm/norm/scale  (4096,)         smaller than fsdp cares for: (None,)
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.errors import ShardingError, did_you_mean
from praxis_lite.partitioning.constraints import current_axis_rules
from praxis_lite.partitioning.padding import MeshLike, axis_sizes, num_parts
from praxis_lite.partitioning.rules import resolve_split_mapping, standard_logical_axis_rules
from praxis_lite.partitioning.specs import axes_to_entry, check_axes_once, spec_axes
from praxis_lite.trees import Path, leaves_by_path, path_matches, path_names

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


@register_rule('replicate')
def replicate() -> Rule:
  """Says that the variable is whole on every device."""

  def rule(spec: Spec, variable: Variable, mesh: Mapping[str, int]) -> Spec:
    if any(entry is not None for entry in spec):
      raise ShardingError(f'{variable.name} is split {spec!r} already; to replicate it is inconsistent with that')
    return spec

  return rule


@register_rule('fsdp')
def fsdp(axis: str | tuple[str, ...], min_size_to_shard_mb: float = 4, allow_padding: bool = True) -> Rule:
  """Splits the largest free dimension that divides; of equal ones, the last.

  Args:
    axis: mesh axis, or several, over which to split.
    min_size_to_shard_mb: variables of up to this many MiB are left as they are.
    allow_padding: where no free dimension divides, split the largest all the same, and pad it; otherwise leave it
      whole.
  """

  def rule(spec: Spec, variable: Variable, mesh: Mapping[str, int]) -> Spec | Change:
    parts = num_parts(axis, mesh)
    if variable.num_bytes <= min_size_to_shard_mb * 2**20:
      return Change(spec, f'{variable.num_bytes / 2**20:.3g} MiB is not above the {min_size_to_shard_mb} MiB of fsdp')
    free = [i for i, entry in enumerate(spec) if entry is None]
    largest_first = sorted(free, key=lambda i: (variable.shape[i], i), reverse=True)
    divisible = [i for i in largest_first if variable.shape[i] % parts == 0]
    if divisible:
      return _split(spec, divisible[0], axis)
    if not largest_first or not allow_padding:
      return Change(spec, f'fsdp splits nothing: none of the free dimensions of {variable.shape} divides by {parts}')
    size = variable.shape[largest_first[0]]
    remark = f'none of the free dimensions of {variable.shape} divides by {parts}; {size} is padded'
    return Change(_split(spec, largest_first[0], axis), f'{remark} to {-(-size // parts) * parts}')

  return rule


@register_rule('shard_dim')
def shard_dim(
  axis: str | tuple[str, ...], dim: int, ignore_ndim_error: bool = False, allow_padding: bool = True
) -> Rule:
  """Splits one dimension.

  Args:
    axis: mesh axis, or several.
    dim: the dimension; negative ones count from the last.
    ignore_ndim_error: leave variables as they are that have no such dimension.
    allow_padding: pad the dimension where it does not divide; otherwise that is an error.
  """

  def rule(spec: Spec, variable: Variable, mesh: Mapping[str, int]) -> Spec | Change:
    rank = len(variable.shape)
    if not -rank <= dim < rank:
      if ignore_ndim_error:
        return Change(spec, f'it has no dimension {dim} for shard_dim to split')
      raise ShardingError(
        f'{variable.name} has {rank} dimensions, and shard_dim is to split dimension {dim}; '
        'pass ignore_ndim_error=True to leave such variables as they are'
      )
    if spec[dim] is not None:
      raise ShardingError(
        f'{variable.name}: dimension {dim} is split over {spec[dim]!r} already, not over {axis!r} too'
      )
    size, parts = variable.shape[dim], num_parts(axis, mesh)
    if size % parts and not allow_padding:
      raise ShardingError(
        f'{variable.name}: dimension {dim} of size {size} does not divide by the {parts} parts of {axis!r}; '
        'allow_padding=True pads it'
      )
    return _split(spec, dim % rank, axis)

  return rule


@register_rule('logical_partitioning')
def logical_partitioning(rules: tuple[tuple[str, Any], ...] | None = None) -> Rule:
  """Splits the variable as logical axis rules say for the names it is declared with; without names, leaves it.

  Args:
    rules: the rules; by default those in force (`axis_rules`), or else the standard ones.
  """

  def rule(spec: Spec, variable: Variable, mesh: Mapping[str, int]) -> Spec | Change:
    if variable.logical_axes is None:
      return Change(spec, 'it is declared without logical axes')
    chosen = rules or current_axis_rules() or standard_logical_axis_rules()
    logical = resolve_split_mapping(
      variable.logical_axes, tuple(mesh), chosen, rank=len(variable.shape), path=variable.name
    )
    both = next((i for i in range(len(spec)) if spec[i] is not None and logical[i] not in (None, spec[i])), None)
    if both is not None:
      raise ShardingError(f'{variable.name}: dimension {both} is split over {spec[both]!r} already')
    return tuple(entry if entry is not None else new for entry, new in zip(spec, logical))

  return rule


def _split(spec: Spec, dim: int, axis: str | tuple[str, ...]) -> Spec:
  return (*spec[:dim], axes_to_entry(spec_axes(axis)), *spec[dim + 1 :])


Strategy = Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Decision:
  """A spec and where it comes from.

  Attributes:
    spec: of full rank.
    sources: for each dimension, what split it; '' where it is not split.
    remarks: what is worth knowing besides, such as padding, or why nothing was split.
    pattern: the pattern of the strategy that matched, if one did.
  """

  spec: PartitionSpec
  sources: tuple[str, ...]
  remarks: tuple[str, ...] = ()
  pattern: str | None = None


def infer_sharding(params: Any, strategy: Strategy, mesh: MeshLike) -> Any:
  """Returns the tree of full-rank PartitionSpecs that a strategy gives to a tree.

  Args:
    params: tree of arrays, shapes with dtypes, or weight declarations: parameters, or a whole train state.
    strategy: pairs (pattern, rules).
    mesh: the mesh, or the sizes of its axes.

  Raises:
    ShardingError: a pattern or rule is malformed, or rules contradict each other on a variable, which is named.
  """
  return jax.tree.map(lambda decision: decision.spec, explain_sharding(params, strategy, mesh))


def explain_sharding(params: Any, strategy: Strategy, mesh: MeshLike) -> Any:
  """As `infer_sharding`, with a `Decision` for each variable."""
  parsed, sizes = parse_strategy(strategy), axis_sizes(mesh)

  def decide_one(key_path: Any, leaf: Any) -> Decision:
    path = path_names(key_path)
    return decide(path, as_variable(path, leaf), parsed, sizes)

  return jax.tree_util.tree_map_with_path(decide_one, params)


def unused_patterns(params: Any, strategy: Strategy) -> list[str]:
  """Returns the patterns that decide no variable, because they match none or earlier ones match first."""
  used = {
    next((i for i, (p, _) in enumerate(strategy) if path_matches(p, path)), None) for path in leaves_by_path(params)
  }
  return [pattern for i, (pattern, _) in enumerate(strategy) if i not in used]


def parse_strategy(strategy: Strategy) -> list[tuple[str, list[tuple[str, Rule]]]]:
  """Returns [(pattern, [(text, rule)])]."""
  for pair in strategy:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
      raise ShardingError(f'a strategy is a list of pairs (pattern, rules), such as (".*", "replicate"); not {pair!r}')
  return [(pattern, parse_rules(rules)) for pattern, rules in strategy]


def as_variable(path: Path, leaf: Any) -> Variable:
  """Describes an array, a shape with a dtype, or a weight declaration."""
  shape = getattr(leaf, 'full_shape', leaf.shape)
  axes = getattr(leaf, 'logical_axes', None)
  if axes is None and getattr(leaf, 'tensor_split_dims_mapping', None) is not None:
    axes = leaf.full_split_dims_mapping
  dtype = leaf.dtype if hasattr(leaf.dtype, 'itemsize') else np.dtype(leaf.dtype or np.float32)
  return Variable('.'.join(path), tuple(shape), dtype, None if axes is None else tuple(axes))


def decide(
  path: Path,
  variable: Variable,
  parsed: Sequence[tuple[str, list[tuple[str, Rule]]]],
  sizes: Mapping[str, int],
  start: Spec | None = None,
) -> Decision:
  """Returns the decision on one variable, whose dimensions may be split in part already, by `start`."""
  spec: Spec = (None,) * len(variable.shape) if start is None else start
  sources, remarks = [''] * len(spec), []
  matched = next(((pattern, rules) for pattern, rules in parsed if path_matches(pattern, path)), None)
  if matched is None:
    return Decision(PartitionSpec(*spec), tuple(sources), ('no pattern of the strategy matches it',))
  pattern, rules = matched
  for text, rule in rules:
    result = rule(spec, variable, sizes)
    new, remark = result if isinstance(result, Change) else (tuple(result), '')
    _check(new, variable, sizes, text)
    for dim in range(len(spec)):
      if new[dim] != spec[dim]:
        sources[dim] = f'strategy {pattern!r}: {text}'
    remarks += [remark] if remark else []
    spec = new
  return Decision(PartitionSpec(*spec), tuple(sources), tuple(remarks), pattern)


def _check(spec: Spec, variable: Variable, sizes: Mapping[str, int], text: str) -> None:
  if len(spec) != len(variable.shape):
    raise ShardingError(f'{variable.name}: {text} gives {len(spec)} entries to {len(variable.shape)} dimensions')
  for entry in spec:
    num_parts(entry, sizes)
  check_axes_once(PartitionSpec(*spec), f'{variable.name}: {text}')
