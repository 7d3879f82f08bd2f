"""Starts a run from the variables of another run, by rules on the paths of variables; see `InitFromParams`.

    variable here     first rule that matches            in the checkpoint
    head.w            ('head\\..*', None)                 -                     starts from the seed
    body.up.w         ('body\\.(.*)', r'encoder.\\1')      encoder.up.w          renamed
    emb.w             none; 'emb\\.w' is in `partial`     emb.w                 copied where both have entries
    position.w        none; positions of patches         position.w            resampled if image sizes differ

The checkpoint may come from any mesh. The optimizer and the moving averages start afresh from the new variables.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.checkpoints import Checkpointer, Step
from praxis_lite.checkpoints.base import Base
from praxis_lite.checkpoints.contents import ArrayRecord, array_records, castable
from praxis_lite.checkpoints.retention import being_read
from praxis_lite.checkpoints.seal import SEAL
from praxis_lite.common.errors import CheckpointError, ConfigError, did_you_mean, first_lines, prefix_errors
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import user_path
from praxis_lite.common.trees import Path as TreePath, leaves, nest, node_at, path_name, suggest_pattern, to_path
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.facts import PositionGrid
from praxis_lite.layers.positions import grid_of, resample_positions
from praxis_lite.runs.records.runs import runs_near
from praxis_lite.training.learning.base_learner import BoundLearner
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import GivenVariables, TrainState
from praxis_lite.training.task import InitFromParams

_FIELD = 'task.train.init_from'
_SHOWN = 12  # The most rows of each kind in the report.


class _Origin(NamedTuple):
  """Where a variable comes from.

  Attributes:
    source: name of the array in the checkpoint; None if the seed gives the values.
    known: the shape of the part that is copied from the checkpoint.
    grid: the grid of the checkpoint's table of positions; None if it is not resampled.
  """

  source: str | None
  known: tuple[int, ...]
  grid: PositionGrid | None = None


class WarmStart:
  """The plan of where each variable of a new run comes from, made before anything is compiled.

  Raises:
    CheckpointError: there is no such checkpoint; or a variable is neither in it nor covered by a rule, or its shape
      there differs.
    ConfigError: a rule is not valid, or matches no variable.
  """

  def __init__(self, settings: InitFromParams, partitioned: PartitionedTask):
    with prefix_errors(_FIELD):
      if settings.path is None or (isinstance(settings.step, str) and settings.step != 'best'):
        raise ConfigError(
          f"path = {settings.path!r}, step = {settings.step!r}: expected a directory, and a number, 'best' or None"
        )
      self._partitioned = partitioned
      self._use_ema = settings.use_ema
      self._directory = str(user_path(settings.path))
      remedy = f'path is the directory of a run{runs_near(settings.path)}'
      with contextlib.closing(Checkpointer(self._directory, read_only=True)) as checkpointer:
        self._step = checkpointer.existing_step(cast(Step, settings.step), remedy=remedy)
        self._where = checkpointer.folder(self._step)
        about = checkpointer.about(self._step)
        self._saved: dict[str, ArrayRecord] = about['variables']
        self._seal: str | None = about.get(SEAL)
      self._grids = dict(_grids_below(partitioned.jax_task.model))
      self._wanted = array_records(partitioned.unpadded_state_shapes.mdl_vars)
      self._origins = self._plan(settings)

  def init_state(self, init_key: jax.Array) -> TrainState[jax.Array]:
    """Returns the state before the first step, on the mesh; raises CheckpointError if the checkpoint cannot be read."""
    shapes = self._partitioned.state_shapes.mdl_vars
    known = {to_path(name): origin.known for name, origin in self._origins.items() if origin.source}
    left = {name: origin.source for name, origin in self._origins.items() if origin.source}
    values: dict[TreePath, jax.Array] = {}
    with being_read(self._where), contextlib.closing(Checkpointer(self._directory, read_only=True)) as checkpointer:
      while left:
        now = {source: name for name, source in left.items()}  # Several variables may share a source.
        wanted = {to_path(s): self._shape_to_read(name, node_at(shapes, to_path(name))) for s, name in now.items()}
        read = checkpointer.restore_arrays(nest(wanted), step=self._step)
        for source, name in now.items():
          values[to_path(name)] = self._resample(name, node_at(read, to_path(source)), node_at(shapes, to_path(name)))
          del left[name]
    return self._partitioned.init_state_from(init_key, GivenVariables(nest(values), known))

  def base(self, learner: BoundLearner) -> Base:
    """Returns the base of a run that starts from the checkpoint: the variables in it that training does not change.

    Raises:
      ConfigError: training changes all variables that come from the checkpoint.
    """
    constant = constant_variables(self._partitioned.jax_task.model, learner)
    unchanged = {
      f'mdl_vars.{name}': origin.source
      for name, origin in self._origins.items()
      if origin.source and origin.grid is None and origin.known == tuple(self._wanted[name]['shape'])
      if f'mdl_vars.{name}' in constant
    }
    if not unchanged:
      raise ConfigError(
        f'{_FIELD}.store_changes_only: the learner trains all variables that come from {self._where}, so checkpoints '
        'must have all of them; set it to False, or train only some, as train_adapters does'
      )
    return Base(Path(self._where), self._seal, unchanged)

  def _shape_to_read(self, name: str, padded: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape in which to read a variable: as in the state; a table to resample, as in the checkpoint."""
    origin = self._origins[name]
    if origin.grid is None:
      return padded
    shape = tuple(self._saved[origin.source or '']['shape'])
    return jax.ShapeDtypeStruct(shape, padded.dtype, sharding=NamedSharding(self._partitioned.mesh, PartitionSpec()))

  def _resample(self, name: str, value: jax.Array, padded: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a variable in the shape of the state: `value` itself or, for a table of positions, `value` resampled."""
    origin = self._origins[name]
    if origin.grid is None:
      return value
    whole = np.asarray(resample_positions(value.addressable_data(0), origin.grid, self._grids[name]))
    filled = np.pad(whole, [(0, wanted - size) for wanted, size in zip(padded.shape, whole.shape)])
    return jax.make_array_from_callback(padded.shape, padded.sharding, lambda index: filled[index])

  def report(self) -> Iterator[str]:
    """Yields the lines of a table of where variables come from; variables that keep name and shape are only counted."""
    rows: dict[str, list[str]] = {'the same': [], 'renamed': [], 'resampled': [], 'partial': [], 'fresh': []}
    for name, origin in self._origins.items():
      shape = tuple(self._wanted[name]['shape'])
      source = (origin.source or '').partition('.')[2]
      renamed = f'{name} <- {source}' if source != name else name
      if not origin.source:
        rows['fresh'].append(f'{name} {shape}')
      elif origin.grid is not None:
        grids = (f'{grid.rows} x {grid.columns}' for grid in (origin.grid, self._grids[name]))
        rows['resampled'].append(f'{renamed}: positions of {" to ".join(grids)} patches')
      elif origin.known != shape:
        rows['partial'].append(f'{renamed}: {origin.known} of {shape}')
      else:
        rows['renamed' if source != name else 'the same'].append(renamed)
    used = {origin.source for origin in self._origins.values()}
    rows['not used'] = [
      f'{name.partition(".")[2]} {tuple(record["shape"])}'
      for name, record in self._saved.items()
      if name.startswith('mdl_vars.') and not {name, _average_of(name)} & used
    ]
    has_averages = any(name.startswith('ema_vars.') for name in self._saved)
    values = 'moving averages' if self._use_ema and has_averages else 'last values'
    lacks = ', which has no moving averages' if self._use_ema and not has_averages else ''
    taken = f'{len(self._origins) - len(rows["fresh"])} of {number_of(len(self._origins), "variable")}'
    same = len(rows.pop('the same'))
    yield f'init_from {self._where}{lacks}: {values} of {taken}, {same} with the same name and shape'
    for kind, shown in rows.items():
      yield from (f'  {kind:<8}  {row}' for row in first_lines(shown, _SHOWN))

  # ---------------------------------------------------------------- the plan

  def _plan(self, settings: InitFromParams) -> dict[str, _Origin]:
    rules = [(self._regex(f'rules[{i}]', regex), source) for i, (regex, source) in enumerate(settings.rules)]
    partial = [self._regex(f'partial[{i}]', regex) for i, regex in enumerate(settings.partial)]
    return {
      name: self._origin(name, rules, settings.use_ema, any(regex.fullmatch(name) for regex in partial))
      for name in self._wanted
    }

  def _origin(
    self, name: str, rules: Sequence[tuple[re.Pattern[str], str | None]], use_ema: bool, may_differ: bool
  ) -> _Origin:
    wanted, source, by_rule = self._wanted[name], name, ''
    for i, (regex, replacement) in enumerate(rules):
      if match := regex.fullmatch(name):
        if replacement is None:
          return _Origin(None, ())
        source, by_rule = _expand(match, replacement, f'rules[{i}]'), f', by rules[{i}]'
        break
    stored = f'mdl_vars.{source}'
    if stored not in self._saved:
      known = [n.partition('.')[2] for n in self._saved if n.startswith('mdl_vars.')]
      if by_rule:
        near = did_you_mean(source, known) or (
          ' A rule is a pair: a pattern of paths here, and the path there, or None for the seed.'
        )
        raise CheckpointError(f'{name} comes from {source!r}{by_rule}, and {self._where} has no such variable.{near}')
      computed = ''
      table = '.'.join(name.split('.')[-2:])  # The end of the path, such as position.w.
      if name in self._grids and not any(f'.{n}'.endswith(f'.{table}') for n in known):
        computed = "The positions of that run are not learned: set positions='sinusoidal' here too. Or "
      raise CheckpointError(
        f'{name} is not in {self._where}.{did_you_mean(name, known)} {computed}{"a" if computed else "A"}dd a rule: '
        f'({re.escape(name)!r}, None) starts it from the seed; or name the variable that it comes from'
      )
    if use_ema and _average_of(stored) in self._saved:
      stored = _average_of(stored)
    saved = self._saved[stored]
    ours, theirs = tuple(wanted['shape']), tuple(saved['shape'])
    overlap = tuple(map(min, ours, theirs))
    grid = None if may_differ or ours[1:] != theirs[1:] else self._grids.get(name)
    old = None if grid is None else grid_of(theirs[0], like=grid)
    if ours != theirs and old is not None and castable(saved['dtype'], wanted['dtype']):
      return _Origin(stored, ours, old)
    if not castable(saved['dtype'], wanted['dtype']) or len(ours) != len(theirs) or (ours != theirs and not may_differ):
      remedy = f'({re.escape(name)!r}, None) among the rules starts it from the seed'
      if np.dtype(wanted['dtype']).itemsize == 1 and castable(saved['dtype'], 'float32'):
        remedy = '`praxis-lite quantize` makes a run with weights in few bits from that one'
      elif len(ours) == len(theirs):
        remedy += f', and {re.escape(name)!r} in partial copies the part {overlap} that both have'
      raise CheckpointError(
        f'{name} is {wanted["dtype"]}{list(ours)} here, and {source} is {saved["dtype"]}{list(theirs)} in '
        f'{self._where}; {remedy}'
      )
    return _Origin(stored, overlap)

  def _regex(self, field: str, pattern: str) -> re.Pattern[str]:
    try:
      regex = re.compile(pattern)
    except (re.error, TypeError) as error:
      raise ConfigError(f'{field}: {pattern!r} is not a regular expression: {error}') from None
    if not any(map(regex.fullmatch, self._wanted)):
      close = suggest_pattern(pattern, self._wanted)
      raise ConfigError(f'{field}: {pattern!r} matches no variable of this model.{close}')
    return regex


def constant_variables(model: Layer, learner: BoundLearner) -> set[str]:
  """Returns the names, in a checkpoint, of the variables of a model that training does not change."""
  return {
    f'mdl_vars.{path_name(path)}'
    for path, weight in leaves(model.abstract_init()).items()
    if not weight.is_updated_by_layer and not learner.is_trained(path)
  }


def _grids_below(model: Layer) -> Iterator[tuple[str, PositionGrid]]:
  """Yields (path, grid) for each table of patch positions in a model."""
  for layer in model.descendants():
    path = layer.path[len(model.path) :]
    yield from ((path_name((*path, name)), grid) for name, grid in layer.position_grids().items())


def _expand(match: re.Match[str], replacement: str, field: str) -> str:
  if not replacement.isprintable():  # The user wrote '\1' in a string that is not raw.
    raise ConfigError(f"{field}: {replacement!r} is not a path; write groups in a raw string, as in r'lm.\\1'")
  try:
    return match.expand(replacement)
  except (re.error, IndexError) as error:
    raise ConfigError(f'{field}: {replacement!r} is not a path with groups of {match.re.pattern!r}: {error}') from None


def _average_of(name: str) -> str:
  """Returns the name in a checkpoint of the moving average of a variable."""
  return name.replace('mdl_vars.', 'ema_vars.', 1)
