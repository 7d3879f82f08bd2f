"""Stores a plan as a text file (splits of weights, memory, collectives), and compares a later plan with it.

    keep(snapshot_of(found, 'lm_sizes.Llama8B'), path)
    regressions(read(path), snapshot_of(found, 'lm_sizes.Llama8B'))

The file is meant for people: each entry has its own line, so that a diff shows each change. Two or more spaces separate
columns. The file also contains the limits of the comparison, which users may edit.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import format_bytes
from praxis_lite.common.files import read_plain
from praxis_lite.instruments.explain.explanation import (
  Explanation,
  align_columns,
  format_mesh,
  format_shape,
  format_spec,
)
from praxis_lite.instruments.plan.planning import Plan

_TITLE = 'praxis-lite plan: a snapshot'
_HEADS = ('experiment', 'set', 'topology', 'mesh', 'mode', 'limits')
_SECTIONS = ('memory', 'weights', 'collectives')
_STATE = ('parameters', 'optimizer slots', 'moving averages')


@dataclasses.dataclass(frozen=True)
class GrowthLimits:
  """Allowed relative increases of memory and sent bytes.

  A collective that the snapshot lacks may send the fraction `sent` / 50 of all the bytes in the snapshot.
  """

  memory: float = 0.05
  sent: float = 0.05

  def __str__(self) -> str:
    return f'memory {self.memory:.3g}, sent {self.sent:.3g}'


@dataclasses.dataclass(frozen=True)
class Weight:
  """The split of a weight: its shape, the mesh axes of each dimension, and the fields that declare them."""

  shape: str
  split: str
  fields: str


@dataclasses.dataclass(frozen=True)
class Group:
  """Collectives of one kind, over the same axes, in one layer and phase of a step.

  Attributes:
    times: number of collectives in a step.
    sent: total bytes that each device sends.
    why, fields: the reason for the collectives, and the fields that declare them.
  """

  times: float
  sent: int
  why: str
  fields: str


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """The part of a plan that a file stores.

  Attributes:
    experiment, overrides: name of the experiment, and its overrides.
    topology, mesh, mode: see `Plan`; mode is 'declared' for a snapshot that was made without a trace.
    limits: how much worse a later plan may be.
    memory: bytes on each device by kind; 'peak' is the total.
    weights: the splits of weights, by path.
    collectives: groups of collectives, by (kind, mesh axes, layer, phase).
  """

  experiment: str
  overrides: tuple[str, ...]
  topology: str
  mesh: str
  mode: str
  limits: GrowthLimits
  memory: Mapping[str, int]
  weights: Mapping[str, Weight]
  collectives: Mapping[tuple[str, str, str, str], Group]

  @property
  def sent(self) -> int:
    return sum(group.sent for group in self.collectives.values())

  def __str__(self) -> str:
    heads = [self.experiment, '; '.join(self.overrides), self.topology, self.mesh, self.mode, str(self.limits)]
    lines = [_TITLE, '', *(f'{head}: {text}' for head, text in zip(_HEADS, heads) if text)]
    memory = [(f'{size:,}', name) for name, size in self.memory.items()]
    weights = [(w.split, path, w.shape, w.fields) for path, w in self.weights.items()]
    collectives = [
      (f'{group.sent:,}', f'{group.times:.6g} x', *key, group.why, group.fields or '-')
      for key, group in self.collectives.items()
    ]
    for title, rows, right in (
      ('memory: bytes on each device', memory, {0}),
      ('weights: mesh axes of each dimension', weights, set()),
      ('collectives: bytes that each device sends in a step', collectives, {0, 1}),
    ):
      if rows:
        lines += ['', title, *(f'  {line}' for line in align_columns(rows, right=right))]
    return '\n'.join(lines) + '\n'


def snapshot_of(
  plan: Plan, experiment: str = '', overrides: Iterable[str] = (), limits: GrowthLimits | None = None
) -> Snapshot:
  """Returns a snapshot of a plan; `experiment` and `overrides` are the experiment's name and --set arguments."""
  groups: dict[tuple[str, str, str, str], Group] = {}
  for c in plan.collectives:
    key = (c.kind, '+'.join(c.axes) or '-', c.layer or '-', c.phase)
    sent, cause = round(c.count * c.sent_bytes), c.cause
    why, fields = (str(cause), ', '.join(cause.fields[:2])) if cause else ('unknown', '')
    old = groups.get(key, Group(0, 0, why, fields))
    if cause is not None and not cause.expected:  # One surprise makes the whole group a surprise.
      old = dataclasses.replace(old, why=why, fields=fields)
    groups[key] = dataclasses.replace(old, times=old.times + c.count, sent=old.sent + sent)
  least = sum(group.sent for group in groups.values()) / 1e5
  ordered = sorted(groups.items(), key=lambda item: (-item[1].sent, item[0]))
  return Snapshot(
    *(experiment or plan.name, tuple(overrides), plan.topology.name, format_mesh(plan.mesh), plan.mode),
    limits or GrowthLimits(),
    dict(_memory(plan)),
    weights_of(plan.weights),
    {key: group for key, group in ordered if group.sent > least},
  )


def _memory(plan: Plan) -> Iterator[tuple[str, int]]:
  yield 'peak', plan.memory.peak
  for name, size in plan.memory.bytes_by_kind().items():
    if size > 0:
      yield name, size
  for live in plan.memory.live:
    if live.bytes >= plan.memory.peak / 50 and live.layer:
      yield f'{live.kind} of {live.layer}, {live.phase}', live.bytes


def weights_of(explained: Iterable[Explanation]) -> dict[str, Weight]:
  """Returns the splits of weights by path, from the report of `explain`."""
  return {e.path: Weight(format_shape(e.shape), format_spec(e.spec), e.why.replace('; ', ', ')) for e in explained}


# ---------------------------------------------------------------- files


def keep(snapshot: Snapshot, path: Path) -> None:
  """Writes a snapshot to `path`. If there was one, its limits are kept, because users may have edited them."""
  if path.exists():
    snapshot = dataclasses.replace(snapshot, limits=read(path).limits)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(str(snapshot))


def read(path: Path) -> Snapshot:
  """Returns the snapshot in a file.

  Raises:
    ConfigError: the file is missing, or a line has the wrong format; the message names the line.
  """
  try:
    lines = read_plain(path).decode().splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f'{path}: {getattr(error, "strerror", error)}; plan --snapshot={path} writes one') from None
  if not lines or lines[0] != _TITLE:
    raise ConfigError(f'{path}: this is not a snapshot of a plan; plan --snapshot={path} writes one')
  heads: dict[str, str] = {}
  rows: dict[str, list[list[str]]] = {section: [] for section in _SECTIONS}
  section = ''
  for number, line in enumerate(lines[1:], 2):
    name, colon, text = line.partition(':')
    if line.startswith('  ') and section:
      rows[section].append(re.split(r' {2,}', line.strip()))
    elif colon and name in _SECTIONS:
      section = name
    elif colon and name in _HEADS:
      heads[name] = text.strip()
    elif line.strip():
      raise ConfigError(f'{path}, line {number}: {line.strip()!r} is not as plan --snapshot writes it')
  try:
    return Snapshot(
      heads['experiment'],
      tuple(filter(None, heads.get('set', '').split('; '))),
      heads['topology'],
      heads['mesh'],
      heads['mode'],
      _limits(heads['limits']),
      {name: _number(size) for size, name in rows['memory']},
      {row[1]: Weight(row[2], row[0], row[3] if len(row) > 3 else '') for row in rows['weights']},
      {
        (kind, axes, layer, phase): Group(_number(times), _number(sent), why, '' if fields == '-' else fields)
        for sent, times, kind, axes, layer, phase, why, fields in rows['collectives']
      },
    )
  except (KeyError, ValueError, IndexError) as error:
    raise ConfigError(f'{path}: {error} is missing, or not as plan --snapshot writes it') from None


def _number(text: str) -> int:
  number = int(text.removesuffix(' x').replace(',', ''))
  if number < 0:
    raise ValueError(text)
  return number


def _limits(text: str) -> GrowthLimits:
  found = dict(re.findall(r'(memory|sent) ([\d.]+)', text))
  return GrowthLimits(float(found['memory']), float(found['sent']))


# ---------------------------------------------------------------- differences


def regressions(kept: Snapshot, new: Snapshot, limits: GrowthLimits | None = None) -> list[str]:
  """Returns a text for each regression, and an empty list if everything is within the limits.

  If the topology or the mesh differs, the list says only this. If only the modes differ, it compares the splits of
  weights and the memory of the state.

  Args:
    kept, new: snapshots on the same topology and mesh.
    limits: replace the limits of `kept`.
  """
  limits = limits or kept.limits
  chips = ('topology', kept.topology, new.topology), ('mesh', kept.mesh, new.mesh)
  found = [f'{name}: it was {before}, and is {now}' for name, before, now in chips if before != now]
  if found:  # With other chips or another mesh, no figures can be compared.
    return found
  found += _weights(kept.weights, new.weights)
  if kept.mode == new.mode:
    return [*found, *_memory_growth(kept, new, limits), *_collectives(kept, new, limits)]
  for kind in _STATE:
    before, now = kept.memory.get(kind, 0), new.memory.get(kind, 0)
    if now > before * (1 + limits.memory):
      found.append(f'memory: {kind} were {format_bytes(before)}, and are {format_bytes(now)} on each device')
  return found


def _weights(kept: Mapping[str, Weight], new: Mapping[str, Weight]) -> Iterator[str]:
  for path in [*kept, *(path for path in new if path not in kept)]:
    before, now = kept.get(path), new.get(path)
    if before is None or now is None:
      yield f'{path}: {"it is new" if before is None else "it is gone"}'
    elif (before.shape, before.split) != (now.shape, now.split):
      was, is_now = (f'{weight.shape} split ({weight.split})' for weight in (before, now))
      yield f'{path}: it was {was}, and is {is_now}: {now.fields}'


def _memory_growth(kept: Snapshot, new: Snapshot, limits: GrowthLimits) -> Iterator[str]:
  before, now = kept.memory.get('peak', 0), new.memory.get('peak', 0)
  if now <= before * (1 + limits.memory):
    return
  grown = {name: size - kept.memory.get(name, 0) for name, size in new.memory.items() if name != 'peak'}
  of_layers = {name: size for name, size in grown.items() if ' of ' in name}
  most = max(of_layers or grown, key=lambda name: grown[name], default='')
  by = f', most of it {most}, by {format_bytes(grown[most])}' if most and grown[most] > 0 else ''
  share = f'{now / max(before, 1) - 1:.1%}, more than {limits.memory:.3g}'
  yield f'memory: the peak grew from {format_bytes(before)} to {format_bytes(now)} on each device, by {share}{by}'


def _collectives(kept: Snapshot, new: Snapshot, limits: GrowthLimits) -> Iterator[str]:
  least = limits.sent * max(kept.sent, 1) / 50
  for key, group in new.collectives.items():
    kind, axes, layer, phase = key
    before = kept.collectives.get(key)
    what = f'{kind} over {axes} in {layer} ({phase})'
    why = f'{group.why}{f"; see {group.fields}" if group.fields else ""}'
    if before is None and group.sent > least:
      yield f'collectives: added: {what}, {format_bytes(group.sent)} in {group.times} of a step: {why}'
    elif before is not None and group.sent > before.sent * (1 + limits.sent) and group.sent - before.sent > least:
      sizes = f'{format_bytes(before.sent)} to {format_bytes(group.sent)}'
      yield f'collectives: {what} sends more, {sizes} in a step: {why}'
