"""MixtureInput: mixes several inputs, example by example, in given proportions.

The source of example i of the mixture depends only on (seed, i), while no source is exhausted. Each source is read in
its own order and its own epochs. The mixture stops drawing from an exhausted source, and ends when all sources are
exhausted. So an evaluation sees each example of each source exactly once.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import CheckpointError, ConfigError, DataError
from praxis_lite.inputs.base import BaseInput
from praxis_lite.inputs.manifest import DataManifest
from praxis_lite.inputs.random_access import uniform
from praxis_lite.inputs.rows import Rows, Struct, add_weights, concatenate_rows, pad_rows


class MixtureInput(BaseInput):
  """Batches whose examples come from several inputs, with probabilities in proportion to their weights.

  Attributes:
    inputs: configs of the sources. Their examples must have the same arrays, shapes and dtypes. The sources get the
      mixture's `is_training` and `batch_size`, and its `num_epochs` and `shuffle` if these are set.
    weights: one positive number per source; None means equal weights.

  Raises:
    ConfigError: there are no sources, or `weights` and `inputs` have different lengths.
    DataError: the examples of the sources differ in structure; raised when the structure is first needed.
  """

  inputs: list[Config] = REQUIRED
  weights: list[float] | None = None

  def __post_init__(self) -> None:
    inherited = self.fields_of_sources()
    super().__post_init__()
    if not self.inputs:
      raise ConfigError(f'{self.label}.inputs: expected the configs of the inputs to mix, got none')
    weights = self.weights if self.weights is not None else [1.0] * len(self.inputs)
    if len(weights) != len(self.inputs) or any(not w > 0 for w in weights):
      raise ConfigError(
        f'{self.label}.weights: expected {len(self.inputs)} positive numbers, one for each input, got {weights}'
      )
    self._weights = np.asarray(weights, np.float64)
    self.sources = self._sources = [
      self.build_source(f'inputs[{i}]', config, inherited) for i, config in enumerate(self.inputs)
    ]

  def example_struct(self) -> Struct:
    first, *others = [add_weights(s.example_struct()) for s in self.sources]
    expected = dict(jax.tree_util.tree_leaves_with_path(first))
    for i, other in enumerate(others, 1):
      got = dict(jax.tree_util.tree_leaves_with_path(other))
      for path in sorted({*expected, *got}, key=jax.tree_util.keystr):
        if expected.get(path) != got.get(path):
          raise DataError(
            f'{self.label}.inputs: {jax.tree_util.keystr(path)} is {expected.get(path)} in inputs[0] and '
            f'{got.get(path)} in inputs[{i}]; the inputs of a mixture need the same arrays'
          )
    return first

  def get_next(self) -> Rows:
    struct = self._struct_with_weights  # Raises an error if the sources differ.
    rows, taken = self.take(self.batch_size, *self.host_rows)
    if not taken or (taken < self.batch_size and self.drop_remainder):
      raise StopIteration
    return pad_rows(rows, self.host_batch_size, struct)

  def take(self, count: int, start: int, stop: int) -> tuple[Rows | None, int]:
    before = [s.get_state() for s in self.sources]
    rows, filled = self._fill(count, start, stop)
    taken = int(filled.sum())
    if taken < count and (start > 0 or stop < count):
      # At the end of the stream, some slots of the batch stay empty, and the filled slots close the gaps. So the rows
      # of this slice depend on all slots, and all rows are read.
      for source, state in zip(self.sources, before):
        source.set_state(state)
      rows, filled = self._fill(count, 0, count)
      rows = None if rows is None or start >= taken else jax.tree.map(lambda x: x[start:stop], rows)
    self._position += taken
    return rows, taken

  def _fill(self, count: int, start: int, stop: int) -> tuple[Rows | None, np.ndarray]:
    """Fills `count` slots from the sources.

    Returns two things: the rows of the filled slots in [start, stop), or None if there are no such slots; and for each
    slot whether it is filled, bool [count].
    """
    tried = np.zeros((count, len(self.sources)), bool)
    filled = np.zeros(count, bool)
    parts: list[Rows] = []
    slots: list[np.ndarray] = []
    attempt = 0
    # If the source of a slot turns out to be exhausted, the slot draws again from its untried sources.
    while len(still_open := np.flatnonzero(~filled & ~tried.all(axis=1))):
      choice = self._choose(self._position + still_open, tried[still_open], attempt)
      for s, source in enumerate(self.sources):
        mine = still_open[choice == s]
        if not len(mine):
          continue
        first, last = np.searchsorted(mine, [start, stop])
        rows, taken = source.take(len(mine), int(first), int(last))
        if rows is not None:
          parts.append(rows)
          slots.append(mine[first : min(last, taken)])
        filled[mine[:taken]] = True
        tried[mine[taken:], s] = True
      attempt += 1
    rows = concatenate_rows(parts)
    if rows is None:
      return None, filled
    order = np.argsort(np.concatenate(slots))
    return jax.tree.map(lambda x: x[order], rows), filled

  def _choose(self, indices: np.ndarray, tried: np.ndarray, attempt: int) -> np.ndarray:
    """Draws a source for each example of `indices`, [n], from the sources for which `tried`, [n, sources], is False."""
    ends = np.cumsum(np.where(tried, 0.0, self._weights), axis=1)
    u = uniform((self.seed, attempt), indices)
    return np.argmax(u[:, None] * ends[:, -1:] < ends, axis=1)

  def manifest(self) -> DataManifest | None:
    return {'sources': [source.manifest() for source in self.sources]}

  def changes_since(self, saved: object, now: DataManifest | None) -> str:
    before = saved.get('sources') if isinstance(saved, dict) else None
    if not isinstance(before, list) or now is None:
      return ''
    of_sources = [s.changes_since(was, of) for s, was, of in zip(self.sources, before, now['sources'])]
    return '; '.join(filter(None, of_sources))

  def identity(self) -> dict[str, Any]:
    return {'seed': self.seed, 'weights': self._weights.tolist()}

  def get_state(self) -> dict[str, Any]:
    return {'position': self._position, 'sources': [s.get_state() for s in self.sources], **self.identity()}

  def set_state(self, state: dict[str, Any]) -> None:
    self.check_state(state, ('position', 'sources'))
    states = state['sources']
    if not isinstance(states, list) or len(states) != len(self.sources):
      raise CheckpointError(f'{self.label}: the saved input state is not that of {len(self.sources)} sources')
    for source, source_state in zip(self.sources, states):
      source.set_state(source_state)
    self._position = int(state['position'])
