"""Explanation: how one array is split over a mesh, what decided the split, and what it costs. Also formats tables.

dimension   size   mesh axes   parts   each device   padding   why
0           50257  mdl         4       12565         3         lm.softmax.weight_split_dims_mapping.wt
1           768    data        2       384           0         strategy '.*': fsdp(axis="data")
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.common.errors import ConfigError, did_you_mean
from praxis_lite.common.figures import format_axes, format_bytes, number_of
from praxis_lite.layers.base.facts import Exchange
from praxis_lite.sharding.padding import num_parts
from praxis_lite.sharding.specs import UNCONSTRAINED, Placement, spec_axes


class ArrayKind(enum.StrEnum):
  """Kinds of explained arrays."""

  VARIABLE = 'variable'
  SLOT = 'optimizer slot'
  ACTIVATION = 'activation'
  INPUT = 'input'


@dataclasses.dataclass(frozen=True)
class Dimension:
  """One dimension of an array on a mesh.

  Attributes:
    size, entry: the size without padding, and the entry of the spec for this dimension.
    parts, local: the number of parts, and the size of each part with padding.
    source: the field, rule or strategy that decided the split, or the reason why it is not split.
  """

  size: int
  entry: str | tuple[str, ...] | None
  parts: int
  local: int
  source: str

  @property
  def axes(self) -> tuple[str, ...]:
    """The mesh axes that split the dimension."""
    return spec_axes(self.entry)

  @property
  def free(self) -> bool:
    """Whether the compiler decides how the dimension is split."""
    return self.entry is UNCONSTRAINED

  @property
  def padded(self) -> int:
    return self.local * self.parts

  @property
  def padding(self) -> int:
    return self.padded - self.size


def dimensions(shape: Sequence[int], placement: Placement, sizes: Mapping[str, int]) -> tuple[Dimension, ...]:
  """Returns the dimensions of an array of `shape`, on a mesh of these sizes."""
  parts = [num_parts(entry, sizes) for entry in placement.spec]
  return tuple(
    Dimension(int(size), entry, n, -(-int(size) // n), why)
    for size, entry, n, why in zip(shape, placement.spec, parts, placement.why)
  )


@dataclasses.dataclass(frozen=True)
class Explanation:
  """How an array is split, and why.

  Attributes:
    path, kind: its name and its kind.
    dims: its dimensions. If the compiler places an activation, they count as not split, and its bytes are an upper
      bound.
    dtype, mesh_sizes: its dtype, and the size of each mesh axis.
    remarks: further remarks.
    owner: for an optimizer slot, the variable that it belongs to.
    trainable: for a variable, whether an optimizer may change it.
    frozen: for a trainable variable, whether the task's learner leaves it unchanged.
    per_device: whether the shape describes only the part on one device, as inside `shard_map`.
    of_weight: for an activation, whether it is a weight that its layer constrains where it is used.
    num_params: for a variable, the number of parameters that it represents; None means its number of entries.
    num_active: for a variable, the number of parameters that one token uses; None if it uses all of them.
    compiled: for an activation, its shape on each device in a compiled program; None if that is not known.
  """

  path: str
  kind: ArrayKind
  dims: tuple[Dimension, ...]
  dtype: np.dtype
  mesh_sizes: Mapping[str, int]
  remarks: tuple[str, ...] = ()
  owner: str = ''
  trainable: bool = True
  frozen: bool = False
  per_device: bool = False
  of_weight: bool = False
  num_params: int | None = None
  num_active: int | None = None
  compiled: tuple[int, ...] | None = None

  @property
  def layer(self) -> str:
    """The path of the layer of a variable or an activation."""
    return self.path.partition('[')[0].rpartition('.')[0]

  @property
  def differs(self) -> bool:
    """Whether the compiler split the array in another way than declared."""
    return self.compiled is not None and any(
      part != dim.local and not dim.free for part, dim in zip(self.compiled, self.dims)
    )

  @property
  def constrained(self) -> bool:
    """Whether the split is declared. False if the compiler decides all of it, or if each device has its own array."""
    return not self.per_device and not (self.dims and all(d.free for d in self.dims))

  @property
  def at_most(self) -> bool:
    """Whether the bytes on each device are an upper bound, because the compiler decides a dimension."""
    return any(d.free for d in self.dims)

  @property
  def spec(self) -> PartitionSpec:
    return PartitionSpec(*(d.entry for d in self.dims))

  @property
  def mesh_axes(self) -> tuple[str, ...]:
    """All mesh axes that split the array."""
    return tuple(axis for d in self.dims for axis in d.axes)

  @property
  def shape(self) -> tuple[int, ...]:
    """The global shape without padding."""
    return tuple(d.size for d in self.dims)

  @property
  def padded_shape(self) -> tuple[int, ...]:
    return tuple(d.padded for d in self.dims)

  @property
  def local_shape(self) -> tuple[int, ...]:
    """The shape of the part on each device, with padding."""
    return tuple(d.local for d in self.dims)

  @property
  def num_devices(self) -> int:
    return math.prod(self.mesh_sizes.values())

  @property
  def replication(self) -> int:
    """The number of devices that hold each element."""
    return self.num_devices // math.prod(d.parts for d in self.dims)

  @property
  def bytes(self) -> int:
    """The bytes of one copy of the array without padding."""
    return math.prod(self.shape) * self.dtype.itemsize

  @property
  def bytes_per_device(self) -> int:
    return math.prod(self.local_shape) * self.dtype.itemsize

  @property
  def wasted_bytes(self) -> int:
    """The bytes of padding in one copy of the array, summed over the devices that hold a part of it."""
    return (math.prod(self.padded_shape) - math.prod(self.shape)) * self.dtype.itemsize

  @property
  def wasted_fraction(self) -> float:
    """The share of padding in the stored bytes."""
    return self.wasted_bytes / max(self.bytes + self.wasted_bytes, 1)

  @property
  def sources(self) -> tuple[str, ...]:
    """For each dimension, what decided its split."""
    return tuple(d.source for d in self.dims)

  @property
  def why(self) -> str:
    """What decided how the array is split.

    If some dimensions are split, the text says what decided them. Otherwise, it says what decided the last dimension.
    For a scalar, it is the first remark.
    """
    split = dict.fromkeys(d.source for d in self.dims if d.axes)
    return '; '.join(split or self.sources[-1:] or self.remarks[:1])

  def __str__(self) -> str:
    rows = [('dimension', 'size', 'mesh axes', 'parts', 'each device', 'padding', 'why')]
    for i, d in enumerate(self.dims):
      rows.append((str(i), str(d.size), format_entry(d.entry), str(d.parts), str(d.local), str(d.padding), d.source))
    parts = self.num_devices // self.replication
    if self.per_device:
      copies = 'each device has its own part'
    elif parts == 1:
      copies = 'replicated on every device' if self.num_devices > 1 else 'on the one device'
    else:
      copies = f'{number_of(parts, "part")}, each on {number_of(self.replication, "device")}'
    on_each = f'{"at most " if self.at_most else ""}{format_bytes(self.bytes_per_device)} on each device'
    lines = [
      f'{self.path}: {self.kind}, {format_shape(self.shape)} {self.dtype.name}',
      '',
      *(f'  {line}' for line in align_columns(rows)),
      '',
      f'  spec ({format_spec(self.spec)}) on mesh {format_mesh(self.mesh_sizes)}',
      f'  {format_bytes(self.bytes)} in all, {on_each}; {copies}',
      f'  padding {format_bytes(self.wasted_bytes)}, {self.wasted_fraction:.2%} of what is stored',
      *(f'  {remark}' for remark in self.remarks),
    ]
    return '\n'.join(lines)


@dataclasses.dataclass(frozen=True)
class ShardingReport:
  """An `Explanation` of every array of a task: activations in the order of the train step, the rest in tree order.

  Activations and inputs are empty if the shapes of a batch are not known. `exchanges` has the communication that layers
  declare, by the path of the field that causes it.
  """

  mesh_sizes: Mapping[str, int]
  variables: list[Explanation]
  slots: list[Explanation]
  activations: list[Explanation]
  inputs: list[Explanation]
  exchanges: Mapping[str, Exchange] = dataclasses.field(default_factory=dict)

  def arrays(self) -> list[Explanation]:
    return [*self.variables, *self.slots, *self.activations, *self.inputs]

  def find(self, path: str) -> Explanation:
    """Returns the explanation of the array with this path. Raises ConfigError if there is no such array.

    The path of a variable is 'lm.softmax.w' or 'mdl_vars.lm.softmax.w'. The path of a slot begins with 'opt_states',
    that of a moving average with 'ema_vars', and that of an input with 'inputs'. The path of an activation is
    'lm.softmax.out' or the path of the field that splits it.
    """
    wanted = path.replace('/', '.').removeprefix('mdl_vars.').replace('.activation_split_dims_mapping.', '.')
    known = {e.path: e for e in reversed(self.arrays())}
    if wanted not in known:
      below = [p for p in known if p.startswith(f'{wanted}.')]
      hint = f' Below it are {", ".join(sorted(below)[:5])}.' if below else did_you_mean(wanted, known)
      raise ConfigError(f'explain: there is no variable, optimizer slot, activation or input {path!r}.{hint}')
    return known[wanted]


# ---------------------------------------------------------------- tables


def format_report(report: ShardingReport) -> str:
  """Returns the tables of parameters, optimizer slots, activations and inputs for a terminal, with totals."""
  sections = [f'mesh {format_mesh(report.mesh_sizes)}']
  for title, rows in (
    ('Parameters', report.variables),
    ('Optimizer slots and averages', report.slots),
    ('Activations', report.activations),
    ('Inputs', report.inputs),
  ):
    once, wasted, on_each = (sum(getattr(e, n) for e in rows) for n in ('bytes', 'wasted_bytes', 'bytes_per_device'))
    padding = f', {format_bytes(once + wasted)} with padding' if wasted else ''
    total = f'{format_bytes(once)}{padding}, {format_bytes(on_each)} on each device'
    if title == 'Activations':  # The sum of their bytes has no meaning, because they do not all exist at once.
      total = f'{len(rows)}, of one layer each where layers repeat'
    if rows:
      sections.append(f'{title}: {total}\n{_format_rows(rows)}')
  if report.exchanges:
    head = ('over', 'communication that layers declare', 'field')
    found = [('+'.join(e.axes) or '-', e.purpose, field) for field, e in report.exchanges.items()]
    sections.append('\n'.join(align_columns([head, *found])))
  if not report.inputs:
    sections.append('Activations and inputs: not known, because the shapes of a batch are known only from its data')
  return '\n\n'.join(sections)


def format_parameter_table(rows: Sequence[Explanation], mesh_sizes: Mapping[str, int]) -> str:
  """Returns the table of a model's variables for a terminal, with totals. On one device, it shows no splits."""
  table = [('variable', 'shape', 'dtype', 'split', 'local shape', 'padding', 'bytes', 'per device')]
  for e in rows:
    shapes = format_shape(e.shape), e.dtype.name, format_spec(e.spec), format_shape(e.local_shape)
    table.append((e.path, *shapes, _format_padding(e), format_bytes(e.bytes), format_bytes(e.bytes_per_device)))
  if math.prod(mesh_sizes.values()) == 1:
    lines = align_columns([(*row[:3], row[6]) for row in table], right={3})
  else:
    lines = align_columns(table, right={6, 7})
  rule = '-' * len(lines[0])
  count, stored = (sum(math.prod(getattr(e, name)) for e in rows) for name in ('shape', 'padded_shape'))
  totals = [
    f'{format_counts(rows)}, {format_bytes(sum(e.bytes for e in rows))}',
    f'mesh {format_mesh(mesh_sizes)}: {format_bytes(sum(e.bytes_per_device for e in rows))} of parameters on each, '
    f'{(stored - count) / max(count, 1):.2%} of it padding',
  ]
  return '\n'.join([lines[0], rule, *lines[1:], rule, *totals])


def _format_rows(rows: Sequence[Explanation]) -> str:
  is_compiled = any(e.compiled is not None for e in rows)
  header = ('array', 'shape', 'dtype', 'split', 'each device', *(('compiled',) if is_compiled else ()))
  header += ('padding', 'copies', 'per device', 'why')
  body = []
  for e in rows:
    split, copies = format_spec(e.spec), f'x{e.replication}'
    if not e.constrained:
      split, copies = 'own part' if e.per_device else 'free', '?'
    local, cost = format_shape(e.local_shape), format_bytes(e.bytes_per_device)
    if e.at_most:
      local, cost = '?', f'<= {cost}'
    compiled = '?' if e.compiled is None else f'{format_shape(e.compiled)}{" (differs)" if e.differs else ""}'
    row = (e.path, format_shape(e.shape), e.dtype.name, split, local, *((compiled,) if is_compiled else ()))
    body.append((*row, _format_padding(e), copies, cost, e.why))
  lines = align_columns([header, *body], right={6 + is_compiled, 7 + is_compiled})
  return '\n'.join([lines[0], '-' * min(max(map(len, lines)), 160), *lines[1:]])


def align_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
  """Returns the rows as lines with aligned columns; columns in `right` are aligned to the right."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  align = [str.rjust if i in right else str.ljust for i in range(len(widths))]
  return ['  '.join(fill(c, w) for fill, c, w in zip(align, row, widths)).rstrip() for row in rows]


# ---------------------------------------------------------------- text


def format_counts(variables: Sequence[Explanation]) -> str:
  """Returns '5,916 parameters, all trained', or how many parameters are trained, frozen and not trainable.

  If a token uses only some of the parameters, as with experts, the text also says how many it uses.
  """
  counts = dict.fromkeys(('trained', 'frozen', 'not trainable'), 0)
  params = [math.prod(e.shape) if e.num_params is None else e.num_params for e in variables]
  for e, count in zip(variables, params):
    counts['frozen' if e.frozen else 'trained' if e.trainable else 'not trainable'] += count
  total = number_of(sum(counts.values()), 'parameter')
  if any(e.num_active is not None for e in variables):
    active = sum(count if e.num_active is None else e.num_active for e, count in zip(variables, params))
    total += f' ({active:,} active for each token)'
  parts = [f'{count:,} {what}' for what, count in counts.items() if count or what == 'trained']
  return f'{total}, {"all trained" if len(parts) == 1 else ", ".join(parts)}'


def format_shape(shape: Sequence[int]) -> str:
  """Returns '512 x 2048', or 'scalar'."""
  return ' x '.join(map(str, shape)) or 'scalar'


def format_entry(entry: str | tuple[str, ...] | None) -> str:
  """Returns 'replica+mdl', '-' if the dimension is not split, or '?' if the compiler decides."""
  return '?' if entry is UNCONSTRAINED else '+'.join(spec_axes(entry)) or '-'


def format_spec(spec: PartitionSpec) -> str:
  """Returns the mesh axes of each dimension: 'data, -, replica+mdl'."""
  return ', '.join(map(format_entry, spec)) or '-'


def format_mesh(sizes: Mapping[str, int]) -> str:
  """Returns 'replica 1 x data 16 x mdl 4 = 64 devices'."""
  devices = math.prod(sizes.values())
  return f'{format_axes(sizes)} = {number_of(devices, "device")}'


def _format_padding(e: Explanation) -> str:
  """Returns the padding of each dimension: '+1, -'."""
  return ', '.join(f'+{d.padding}' if d.padding else '-' for d in e.dims) if e.wasted_bytes else '-'
