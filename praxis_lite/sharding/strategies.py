"""Strategies: shardings of whole trees by patterns on the paths of their variables.

A strategy is a list of pairs (pattern, ops). For each variable, the first pattern that matches its whole path counts.
The ops of that pattern, joined by `|` and applied from left to right, give its spec. A variable that no pattern
matches is replicated. A pattern that contains a slash is matched against 'lm/softmax/w', any other against
'lm.softmax.w'. Optimizer slots are variables like parameters: one pass over the train state covers both.

    mesh: data = 8, model = 4
    strategy = [('.*/embedding/.*', 'shard_dim("model", 0) | fsdp(axis="data")'), ('.*', 'fsdp(axis="data")')]

    lm/embedding/w (32000, 4096)   shard_dim gives ('model', None), fsdp splits the largest free one: ('model', 'data')
    lm/ff/w        (4096, 16384)   (None, 'data')
    lm/norm/scale  (4096,)         too small for fsdp: (None,)

The ops `replicate`, `fsdp`, `shard_dim` and `logical_partitioning` are built in; they follow big_vision (Beyer et al.,
2022). Further ops are registered functions that make an op from literal arguments:

    @register_rule('shard_first')
    def shard_first(axis):
      def op(spec, variable, mesh):
        return (axis, *spec[1:])
      return op
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

from praxis_lite.common.errors import ShardingError, did_you_mean
from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import (
  Path,
  is_named_box,
  leaves_by_path,
  map_with_path,
  path_matches,
  path_name,
  put_into_boxes,
)
from praxis_lite.sharding.constraints import current_axis_rules
from praxis_lite.sharding.padding import MeshLike, axis_sizes, num_parts
from praxis_lite.sharding.rules import LogicalAxisRules, resolve, standard_logical_axis_rules
from praxis_lite.sharding.specs import Placement, axes_to_entry, check_axes_once, spec_axes

Spec = tuple[Any, ...]
Strategy = Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Variable:
  """What an op knows about a variable: its path, such as 'lm.softmax.w', and its shape without padding.

  If it is declared with names, `logical_axes` has the name of each axis. The task sets `logical_axis_rules`.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  logical_axes: tuple[Any, ...] | None = None
  logical_axis_rules: LogicalAxisRules = ()

  @property
  def num_bytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


class OpResult(NamedTuple):
  """What an op may return instead of a spec: the spec, and texts for `explain`."""

  spec: Spec
  remark: str = ''  # Why nothing is split, or what the split needs, such as padding.
  why: tuple[str, ...] = ()  # What decided each dimension, besides the op itself.


# (spec so far, variable, size of each mesh axis) -> spec
Op = Callable[[Spec, Variable, Mapping[str, int]], 'Spec | OpResult']
MakerT = TypeVar('MakerT', bound=Callable[..., Op])
T = TypeVar('T')


class OpNameError(ShardingError, KeyError):
  """An op is registered twice, or unknown."""

  def __str__(self) -> str:
    return str(self.args[0])


class ParsedOp(NamedTuple):
  """An op of a strategy: its text, its function, and whether it acts on logical names; see `register_rule`."""

  text: str
  op: Op
  for_named: bool


ParsedStrategy = Sequence[tuple[str, list[ParsedOp]]]

# For each op, by name: the function that makes the op, and whether the op acts on logical names.
_OPS: dict[str, tuple[Callable[..., Op], bool]] = {}


def register_rule(name: str, *, for_named: bool = False) -> Callable[[MakerT], MakerT]:
  """Decorates a function that makes an op from literal arguments.

  Args:
    name: its name in strategies.
    for_named: whether the op acts on logical names. A mapping that names logical axes decides how its weight is split,
      unless the strategy's ops for the weight include an op that acts on logical names; then the strategy decides.

  Raises:
    OpNameError: an op with this name exists.
  """

  def register(make_op: MakerT) -> MakerT:
    if name in _OPS:
      raise OpNameError(f'the sharding op {name!r} is registered already; known ops: {", ".join(sorted(_OPS))}')
    _OPS[name] = (make_op, for_named)
    return make_op

  return register


def parse_ops(text: str) -> list[ParsedOp]:
  """Returns the ops in a text, which joins them by `|`: 'shard_dim("model", 0) | fsdp(axis="data")'.

  Raises:
    OpNameError: an op is not registered.
    ShardingError: the text is not a chain of calls with literal arguments, or an op does not accept its arguments.
  """
  try:
    expression = ast.parse(text.strip(), mode='eval').body
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # All that Python's parser may raise.
    reason = error.msg if isinstance(error, SyntaxError) else str(error) or 'nested too deeply'
    raise ShardingError(f'{text!r} is not a chain of ops: {reason}') from None
  return [_make_op(call, text) for call in _flatten_sum(expression)]


def _flatten_sum(node: ast.expr) -> list[ast.expr]:
  if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
    return [*_flatten_sum(node.left), *_flatten_sum(node.right)]
  return [node]


# The types of literals allowed for an argument with such an annotation; other annotations are not checked.
_KINDS: dict[object, tuple[type, ...]] = {'bool': (bool,), 'int': (int,), 'float': (int, float)}


def _make_op(node: ast.expr, text: str) -> ParsedOp:
  call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
  if not isinstance(call.func, ast.Name):
    raise ShardingError(f'{text!r}: {ast.unparse(node)!r} is not a call of an op; known ops: {", ".join(sorted(_OPS))}')
  name = call.func.id
  if name not in _OPS:
    raise OpNameError(
      f'{text!r}: no sharding op {name!r} is registered; known ops: {", ".join(sorted(_OPS))}.'
      f'{did_you_mean(name, _OPS)}'
    )
  if any(k.arg is None for k in call.keywords):
    raise ShardingError(f'{text!r}: ops take literal arguments by position or by name, no **')
  args = [_literal(arg, text) for arg in call.args]
  keywords = {str(k.arg): _literal(k.value, text) for k in call.keywords}
  make_op, for_named = _OPS[name]
  signature = inspect.signature(make_op)
  try:
    bound = signature.bind(*args, **keywords)
  except TypeError as error:
    raise ShardingError(f'{text!r}: {error}; it is {name}{signature}') from None
  for argument, value in bound.arguments.items():
    kind = signature.parameters[argument].annotation
    kind = getattr(kind, '__name__', kind)
    if kind in _KINDS and (not isinstance(value, _KINDS[kind]) or isinstance(value, bool) != (kind == 'bool')):
      raise ShardingError(f'{text!r}: {argument} = {value!r} is not of type {kind}; the op is {name}{signature}')
  own_text = ast.get_source_segment(text.strip(), node) or text
  return ParsedOp(own_text, make_op(*bound.args, **bound.kwargs), for_named)


def _literal(node: ast.expr, text: str) -> object:
  try:
    return ast.literal_eval(node)
  except (ValueError, TypeError):
    raise ShardingError(f'{text!r}: {ast.unparse(node)!r} is not a literal; ops take literal arguments only') from None


@register_rule('replicate')
def replicate() -> Op:
  """Asserts that the variable is replicated: raises ShardingError if an earlier op has split it."""

  def op(spec: Spec, variable: Variable, mesh: Mapping[str, int]) -> Spec:
    if any(entry is not None for entry in spec):
      raise ShardingError(f'{variable.name} is split {spec!r} already, which is inconsistent with replicate()')
    return spec

  return op


@register_rule('fsdp')
def fsdp(axis: str | tuple[str, ...], min_size_to_shard_mb: float = 4, allow_padding: bool = True) -> Op:
  """Splits the largest free dimension that divides evenly, the last one if several are equally large.

  Args:
    axis: mesh axis, or several, over which to split.
    min_size_to_shard_mb: variables of up to this many MiB are not split.
    allow_padding: if no free dimension divides evenly, True splits and pads the largest, and False splits none.
  """

  def op(spec: Spec, variable: Variable, mesh: Mapping[str, int]) -> Spec | OpResult:
    parts = num_parts(axis, mesh)
    if variable.num_bytes <= min_size_to_shard_mb * 2**20:
      return OpResult(spec, f'{variable.num_bytes / 2**20:.3g} MiB is not above the {min_size_to_shard_mb} MiB of fsdp')
    free = [i for i, entry in enumerate(spec) if entry is None]
    largest_first = sorted(free, key=lambda i: (variable.shape[i], i), reverse=True)
    divisible = [i for i in largest_first if variable.shape[i] % parts == 0]
    if divisible:
      return _split(spec, divisible[0], axis)
    if not largest_first or not allow_padding:
      return OpResult(spec, f'fsdp splits nothing: none of the free dimensions of {variable.shape} divides by {parts}')
    size = variable.shape[largest_first[0]]
    remark = f'none of the free dimensions of {variable.shape} divides by {parts}; {size} is padded'
    return OpResult(_split(spec, largest_first[0], axis), f'{remark} to {-(-size // parts) * parts}')

  return op


@register_rule('shard_dim')
def shard_dim(axis: str | tuple[str, ...], dim: int, ignore_ndim_error: bool = False, allow_padding: bool = True) -> Op:
  """Splits one dimension.

  Args:
    axis, dim: mesh axis, or several; and the dimension. Negative dimensions count from the end.
    ignore_ndim_error: do not split variables that have no such dimension, instead of raising an error.
    allow_padding: pad the dimension if it does not divide evenly; False makes that an error.
  """

  def op(spec: Spec, variable: Variable, mesh: Mapping[str, int]) -> Spec | OpResult:
    rank = len(variable.shape)
    if not -rank <= dim < rank:
      if ignore_ndim_error:
        return OpResult(spec, f'it has no dimension {dim} for shard_dim to split')
      raise ShardingError(
        f'{variable.name} has {number_of(rank, "dimension")}, and shard_dim is to split dimension {dim}; '
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

  return op


@register_rule('logical_partitioning', for_named=True)
def logical_partitioning(rules: tuple[tuple[str, Any], ...] | None = None) -> Op:
  """Splits a variable by applying logical axis rules to its declared names; without names, leaves it unchanged.

  Args:
    rules: the rules. None takes those of the task; if it has none, the current ones (`axis_rules`); if there are none,
      the standard ones.
  """

  def op(spec: Spec, variable: Variable, mesh: Mapping[str, int]) -> Spec | OpResult:
    if variable.logical_axes is None:
      return OpResult(spec, 'it is declared without logical axes')
    chosen = rules or variable.logical_axis_rules or current_axis_rules() or standard_logical_axis_rules()
    logical = resolve(
      variable.logical_axes, tuple(mesh), chosen, rank=len(variable.shape), path=variable.name
    ).to_stored()
    both = next((i for i, e in enumerate(logical.spec) if spec[i] is not None and e not in (None, spec[i])), None)
    if both is not None:
      raise ShardingError(f'{variable.name}: dimension {both} is split over {spec[both]!r} already')
    return OpResult(tuple(new if old is None else old for old, new in zip(spec, logical.spec)), why=logical.why)

  return op


def _split(spec: Spec, dim: int, axis: str | tuple[str, ...]) -> Spec:
  return (*spec[:dim], axes_to_entry(spec_axes(axis)), *spec[dim + 1 :])


def infer_sharding(params: object, strategy: Strategy, mesh: MeshLike, *, rules: LogicalAxisRules | None = None) -> Any:
  """Returns the tree of full-rank PartitionSpecs that a strategy gives to a tree.

  Args:
    params: tree of arrays, shapes with dtypes, or weight declarations: parameters, or a whole train state. The names in
      Flax boxes, such as `LogicallyPartitioned`, are the arrays' logical axes; the specs are then in the same boxes.
    strategy, mesh: pairs (pattern, ops); and the mesh, or the sizes of its axes.
    rules: logical axis rules for `logical_partitioning`.

  Raises:
    ShardingError: a pattern or op is malformed, or ops contradict each other on a variable, which the message names.
  """
  return jax.tree.map(lambda placement: placement.spec, explain_sharding(params, strategy, mesh, rules=rules))


def explain_sharding(
  params: object, strategy: Strategy, mesh: MeshLike, *, rules: LogicalAxisRules | None = None
) -> Any:
  """Returns what `infer_sharding` returns, with a `Placement` in place of each spec."""
  parsed, sizes = parse_strategy(strategy), axis_sizes(mesh)

  def place(path: Path, leaf: Any) -> Placement:
    return decide(path, to_variable(path, leaf, rules), parsed, sizes)

  return put_into_boxes(params, map_with_path(place, params, is_leaf=is_named_box))


def unused_patterns(params: object, strategy: Strategy) -> list[int]:
  """Returns the indices of the patterns that decide no variable, because they match none, or an earlier one matches."""
  numbered = [(pattern, i) for i, (pattern, _) in enumerate(strategy)]
  used = [first_match(path, numbered) for path in leaves_by_path(params, is_leaf=is_named_box)]
  return [i for pattern, i in numbered if (pattern, i) not in used]


def parse_strategy(strategy: Strategy) -> ParsedStrategy:
  """Returns the pairs (pattern, ops) of a strategy, with parsed ops; raises an error if an op is not valid."""
  for pair in strategy:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
      raise ShardingError(f'a strategy is a list of pairs (pattern, ops), such as (".*", "replicate"); not {pair!r}')
  return [(pattern, parse_ops(ops)) for pattern, ops in strategy]


def first_match(path: Path, parsed: Sequence[tuple[str, T]]) -> tuple[str, T] | None:
  """Returns the first pair (pattern, ...) whose pattern matches `path`, or None."""
  return next(((pattern, rest) for pattern, rest in parsed if path_matches(pattern, path)), None)


def to_variable(path: Path, leaf: Any, rules: LogicalAxisRules | None = None) -> Variable:
  """Returns the `Variable` for an array, a shape with a dtype, a weight declaration, or an array in a Flax box."""
  if is_named_box(leaf):
    names, x = leaf.names, leaf.value
    # A factored slot is in the box of its parameter, but has fewer axes.
    axes = tuple(names) if names is not None and len(names) == len(x.shape) else None
    return Variable(
      path_name(path), tuple(x.shape), np.dtype(x.dtype), axes, rules or getattr(leaf, 'rules', None) or ()
    )
  shape = getattr(leaf, 'full_shape', leaf.shape)
  axes = getattr(leaf, 'logical_axes', None)
  if axes is None and getattr(leaf, 'tensor_split_dims_mapping', None) is not None:
    axes = leaf.full_split_dims_mapping
  dtype = leaf.dtype if hasattr(leaf.dtype, 'itemsize') else np.dtype(leaf.dtype or np.float32)
  return Variable(path_name(path), tuple(shape), dtype, axes, rules or ())


def decide(
  path: Path, variable: Variable, parsed: ParsedStrategy, sizes: Mapping[str, int], start: Placement | None = None
) -> Placement:
  """Returns the placement of one variable; `start`, if given, already splits some of its dimensions."""
  spec: Spec = (None,) * len(variable.shape) if start is None else tuple(start.spec)
  pattern, ops = first_match(path, parsed) or (None, [])
  left = 'no pattern of the strategy matches' if pattern is None else f'strategy {pattern!r} does not split it'
  why = [left if start is None or old is None else start.why[dim] for dim, old in enumerate(spec)]
  remarks: list[str] = []
  for text, op, _ in ops:
    result = op(spec, variable, sizes)
    change = result if isinstance(result, OpResult) else OpResult(tuple(result))
    if len(change.spec) != len(spec):
      raise ShardingError(
        f'{variable.name}: {text} gives {number_of(len(change.spec), "entry")} to {number_of(len(spec), "dimension")}'
      )
    for entry in change.spec:
      num_parts(entry, sizes)  # Raises an error if the mesh lacks one of its axes.
    check_axes_once(PartitionSpec(*change.spec), f'{variable.name}: {text}')
    for dim, (old, new) in enumerate(zip(spec, change.spec)):
      if new != old or (new is None and change.why):
        why[dim] = f'strategy {pattern!r}: {text}' + (f', {change.why[dim]}' if change.why else '')
    remarks += [change.remark] if change.remark else []
    spec = change.spec
  return Placement(PartitionSpec(*spec), tuple(why), tuple(remarks), pattern).to_stored()
