"""visualize_sharding: draws an array of rank 1 to 4 on a mesh in a terminal.

    shape (5, 6), spec ('data', 'mdl'), mesh data 2 x mdl 2

               0:3        3:6
            +----------+----------+
       0:3  | 0        | 1        |
            +----------+----------+
       3:5  | 2        | 3        |
     pad 1  |..........|..........|
            +----------+----------+

The last two dimensions are rows and columns; each part of the leading dimensions gets its own picture. A cell lists
the devices that hold it; dots are padding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.common.errors import ShardingError
from praxis_lite.instruments.explain.explanation import format_mesh, format_shape, format_spec
from praxis_lite.sharding.padding import MeshLike, axis_sizes, num_parts
from praxis_lite.sharding.specs import all_axes, check_axes_once, complete_spec


def visualize_sharding(
  shape: Sequence[int], spec: PartitionSpec | None, mesh: MeshLike, *, max_parts: int = 16, file: object = None
) -> None:
  """Prints which device holds which part of an array.

  Args:
    shape, spec: shape and spec of the array, which has 1 to 4 dimensions; mesh axes need not divide them.
    mesh: the mesh, or the sizes of its axes. Devices are numbered in the order of the mesh.
    max_parts: largest number of parts to draw in a dimension; if there are more, only the first ones and the last one
      are drawn.
    file: the file to print to; standard output by default.

  Raises:
    ShardingError: the array has another rank, or the spec does not fit the shape or the mesh.
  """
  print(draw_sharding(shape, spec, mesh, max_parts=max_parts), file=file)  # type: ignore[call-overload]


def draw_sharding(shape: Sequence[int], spec: PartitionSpec | None, mesh: MeshLike, *, max_parts: int = 16) -> str:
  """Returns what `visualize_sharding` prints."""
  shape, sizes = tuple(shape), axis_sizes(mesh)
  if not 1 <= len(shape) <= 4:
    raise ShardingError(f'visualize_sharding draws arrays of 1 to 4 dimensions, and shape {shape} has {len(shape)}')
  spec = complete_spec(spec, len(shape))
  check_axes_once(spec)
  devices, leading = device_grid(spec, mesh), max(len(shape) - 2, 0)
  copies = f', each part on {devices.shape[-1]} devices' if devices.shape[-1] > 1 else ''
  lines = [
    f'shape {format_shape(shape)}, split ({format_spec(spec)}), mesh {format_mesh(sizes)}',
    f'each device holds {format_shape([-(-d // n) for d, n in zip(shape, devices.shape)])}{copies}',
  ]
  drawn = [[part for part in _parts(*sides, max_parts) if part] for sides in zip(devices.shape, shape[:leading])]
  for parts in itertools.product(*drawn):
    lines.append('')
    if parts:
      lines.append(f'[{", ".join(part.name for part in parts)}, ...]')
    lines += _picture(devices[tuple(part.number for part in parts)], shape[leading:], max_parts)
  for dim, (count, shown) in enumerate(zip(devices.shape, drawn)):
    if count > len(shown):
      lines.append(f'dimension {dim}: {len(shown)} of its {count} parts are drawn')
  return '\n'.join(lines)


def device_grid(spec: PartitionSpec, mesh: MeshLike) -> np.ndarray:
  """Returns the numbers of the devices that hold each part, [parts of dimension 0, ..., parts of the last, copies].

  The spec has full rank. Devices are numbered in the order of the mesh, the last axis fastest.
  """
  sizes = axis_sizes(mesh)
  parts = [num_parts(entry, mesh) for entry in spec]
  devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
  used = all_axes(spec)
  order = [[*sizes].index(axis) for axis in dict.fromkeys((*used, *sizes))]
  return devices.transpose(order).reshape(*parts, -1)


class _Part(NamedTuple):
  """A part of a dimension: its number, its slice of the unpadded array, its size, and its padding."""

  number: int
  name: str
  size: int
  padding: int


def _parts(count: int, size: int, limit: int) -> list[_Part | None]:
  """Returns the parts to draw; None stands for the omitted parts if there are more than `limit`."""
  local = -(-size // count)
  parts: list[_Part | None] = []
  for i in range(count):
    start, stop = i * local, min((i + 1) * local, size)
    name = f'{start}:{stop}' if stop > start else 'padding'
    parts.append(_Part(i, name, local, min(start + local - stop, local)))
  return parts if count <= limit else [*parts[: limit - 1], None, parts[-1]]


def _picture(devices: np.ndarray, shape: Sequence[int], max_parts: int) -> list[str]:
  """Draws one or two dimensions as rows of cells with a heading; a vector is one row."""
  is_vector = len(shape) == 1
  if is_vector:
    devices, shape = devices[None], (1, *shape)
  rows, columns = (_parts(*sides, max_parts) for sides in zip(devices.shape, shape))
  held = {(r, c): _devices(devices[r.number, c.number]) for r in rows if r for c in columns if c}
  width = max(8, *map(len, held.values()), *(len(c.name) for c in columns if c)) + 2
  gutter = max(len(f'pad {shape[0]}'), *(len(r.name) for r in rows if r))

  def line(label: str, cell: Callable[[_Part], str], gap: str, edge: str) -> str:
    cells = (cell(c) if c else gap for c in columns)
    return (f'  {label.rjust(gutter)}  {edge}' + ''.join(text + edge for text in cells)).rstrip()

  def row_cells(row: _Part) -> Callable[[_Part], str]:
    return lambda column: _cell(held[row, column], column, width)

  rule = line('', lambda _: '-' * width, '-----', '+')
  out = [line('', lambda column: column.name.ljust(width), ' ... ', ' '), rule]
  for row in rows:
    if row is None:
      out += [line('...', lambda _: ' ' * width, '     ', ' '), rule]
      continue
    label = '' if is_vector else row.name
    if row.padding < row.size:
      out.append(line(label, row_cells(row), '     ', '|'))
    if row.padding:
      note = label if row.padding == row.size else f'pad {row.padding}'
      out.append(line(note, lambda _: '.' * width, '.....', '|'))
    out.append(rule)
  padded = [f'{c.padding} in {c.name}' for c in columns if c and c.padding]
  return [*out, f'  padding of columns: {", ".join(padded)}'] if padded else out


def _cell(text: str, part: _Part, width: int) -> str:
  """Returns the text of a cell, with dots in proportion to the part's padding; any padding gives at least one dot."""
  if not part.padding:
    dots = 0
  elif part.padding == part.size:
    dots = width
  else:
    dots = min(max(1, round(width * part.padding / part.size)), width - 4)
  return f' {text} '.ljust(width)[: width - dots] + '.' * dots


def _devices(numbers: np.ndarray) -> str:
  """Returns '0', '0,4', '0-3', or '0,4,..,60 (16)'."""
  values = sorted(int(n) for n in numbers)
  if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
    return f'{values[0]}-{values[-1]}'
  if len(values) <= 4:
    return ','.join(map(str, values))
  return f'{values[0]},{values[1]},..,{values[-1]} ({len(values)})'
