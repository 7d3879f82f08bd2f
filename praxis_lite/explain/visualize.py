"""visualize_sharding: an array of rank 1 to 4 over a mesh, drawn in a terminal.

    shape (5, 6), spec ('data', 'mdl'), mesh data 2 x mdl 2

               0:3        3:6
            +----------+----------+
       0:3  | 0        | 1        |
            +----------+----------+
       3:5  | 2        | 3        |
     pad 1  |..........|..........|
            +----------+----------+

The last two dimensions are rows and columns; there is one such picture for each part of the dimensions before them.
A cell lists the devices that hold it; dots are padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.errors import ShardingError
from praxis_lite.explain.explanation import format_mesh, format_shape, format_spec
from praxis_lite.partitioning.padding import MeshLike, axis_sizes, num_parts
from praxis_lite.partitioning.specs import check_axes_once, complete_spec, spec_axes


def visualize_sharding(
  shape: Sequence[int], spec: PartitionSpec | None, mesh: MeshLike, *, max_parts: int = 16, file: object = None
) -> None:
  """Prints which device holds which part of an array.

  Args:
    shape: of the array, 1 to 4 dimensions.
    spec: how it is split; dimensions need not divide.
    mesh: the mesh, or the sizes of its axes. Devices are numbered in the order of the mesh.
    max_parts: so many parts of a dimension are drawn; of more, the first and the last.
    file: where to print; standard output by default.

  Raises:
    ShardingError: another rank, or the spec does not fit the shape or the mesh.
  """
  print(draw_sharding(shape, spec, mesh, max_parts=max_parts), file=file)  # type: ignore[call-overload]


def draw_sharding(shape: Sequence[int], spec: PartitionSpec | None, mesh: MeshLike, *, max_parts: int = 16) -> str:
  """Returns what `visualize_sharding` prints."""
  shape, sizes = tuple(shape), axis_sizes(mesh)
  if not 1 <= len(shape) <= 4:
    raise ShardingError(f'visualize_sharding draws arrays of 1 to 4 dimensions, and shape {shape} has {len(shape)}')
  spec = complete_spec(spec, len(shape))
  check_axes_once(spec)
  devices = device_grid(spec, mesh)
  parts, local = devices.shape[:-1], [-(-d // n) for d, n in zip(shape, devices.shape)]
  lines = [f'shape {format_shape(shape)}, split ({format_spec(spec)}), mesh {format_mesh(sizes)}']
  lines.append(f'each device holds {format_shape(local)}' + _copies(devices.shape[-1]))
  leading = len(shape) - 2 if len(shape) > 2 else 0
  shown = [_shown(n, max_parts) for n in parts[:leading]]
  for index in itertools.product(*shown):
    slices = [_slice_name(i, local[d], shape[d]) for d, i in enumerate(index)]
    lines.append('')
    if slices:
      lines.append(f'[{", ".join(slices)}, ...]')
    lines += _picture(devices[index], shape[leading:], local[leading:], max_parts)
  hidden = [
    f'dimension {d}: {n} parts, of which {len(s)} are drawn' for d, (n, s) in enumerate(zip(parts, shown)) if n > len(s)
  ]
  return '\n'.join([*lines, *hidden])


def device_grid(spec: PartitionSpec, mesh: MeshLike) -> np.ndarray:
  """Numbers of the devices that hold each part: [parts of dimension 0, ..., parts of the last, copies].

  Args:
    spec: of full rank.
    mesh: the mesh, or the sizes of its axes; devices are numbered in its order, the last axis fastest.
  """
  sizes = axis_sizes(mesh)
  parts = [num_parts(entry, mesh) for entry in spec]
  names = list(sizes)
  devices = np.arange(int(np.prod(list(sizes.values())))).reshape(tuple(sizes.values()))
  used = [axis for entry in spec for axis in spec_axes(entry)]
  order = [names.index(axis) for axis in (*used, *(n for n in names if n not in used))]
  return devices.transpose(order).reshape(*parts, -1)


def _picture(devices: np.ndarray, shape: Sequence[int], local: Sequence[int], max_parts: int) -> list[str]:
  """One or two dimensions: rows of cells with a heading; a vector is one row."""
  if len(shape) == 1:
    devices, shape, local = devices[None], (1, *shape), (1, *local)
    is_vector = True
  else:
    is_vector = False
  rows, columns = _shown(devices.shape[0], max_parts), _shown(devices.shape[1], max_parts)
  names = {(r, c): _devices(devices[r, c]) for r in rows for c in columns}
  heads = {c: _slice_name(c, local[1], shape[1]) for c in columns}
  width = max(8, *(len(text) for text in (*names.values(), *heads.values()))) + 2
  pads = {c: _dots(_pad(c, local[1], shape[1]), local[1], width) for c in columns}
  gutter = max(len(_slice_name(r, local[0], shape[0])) for r in rows)
  gutter = max(gutter, len('pad ') + len(str(shape[0])))

  def line(label: str, cells: Sequence[str], edge: str) -> str:
    return (f'  {label.rjust(gutter)}  {edge}' + ''.join(cell + edge for cell in cells)).rstrip()

  def gapped(cells: dict[int, str], fill: str) -> list[str]:
    return _with_gap([cells[c] for c in columns], columns, devices.shape[1], fill)

  rule = line('', gapped(dict.fromkeys(columns, '-' * width), '-----'), '+')
  out = [line('', gapped({c: heads[c].ljust(width) for c in columns}, ' ... '), ' '), rule]
  for k, r in enumerate(rows):
    if k and rows[k] != rows[k - 1] + 1:
      out += [line('...', gapped(dict.fromkeys(columns, ' ' * width), '     '), ' '), rule]
    cells = {c: f' {names[r, c]} '.ljust(width)[: width - pads[c]] + '.' * pads[c] for c in columns}
    label = '' if is_vector else _slice_name(r, local[0], shape[0])
    padding = _pad(r, local[0], shape[0])
    if padding < local[0]:
      out.append(line(label, gapped(cells, '     '), '|'))
    if padding:
      note = label if padding == local[0] else f'pad {padding}'
      out.append(line(note, gapped(dict.fromkeys(columns, '.' * width), '.....'), '|'))
    out.append(rule)
  right = [f'{_pad(c, local[1], shape[1])} in {heads[c]}' for c in columns if _pad(c, local[1], shape[1])]
  return [*out, f'  padding of columns: {", ".join(right)}'] if right else out


def _dots(padding: int, local: int, width: int) -> int:
  """Width of the padding in a cell: in proportion, and seen where there is any."""
  if not padding:
    return 0
  return width if padding == local else min(max(1, round(width * padding / local)), width - 4)


def _pad(part: int, local: int, size: int) -> int:
  return min(max(0, (part + 1) * local - size), local)


def _slice_name(part: int, local: int, size: int) -> str:
  start, stop = part * local, min((part + 1) * local, size)
  return f'{start}:{stop}' if stop > start else 'padding'


def _devices(numbers: np.ndarray) -> str:
  """'0', '0,4', '0-3', or '0,4,... 16 devices'."""
  values = sorted(int(n) for n in numbers)
  if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
    return f'{values[0]}-{values[-1]}'
  if len(values) <= 4:
    return ','.join(map(str, values))
  return f'{values[0]},{values[1]},..,{values[-1]} ({len(values)})'


def _shown(count: int, limit: int) -> list[int]:
  """Indices to draw: all, or the first ones and the last."""
  return list(range(count)) if count <= limit else [*range(limit - 1), count - 1]


def _with_gap(cells: list[str], indices: list[int], count: int, gap: str) -> list[str]:
  return cells if len(indices) == count else [*cells[:-1], gap, cells[-1]]


def _copies(count: int) -> str:
  return f', each part on {count} devices' if count > 1 else ''
