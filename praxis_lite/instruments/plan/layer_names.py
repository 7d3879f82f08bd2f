"""Finds the layer of an operation by its JAX name, and asks layers about work that a program does not show."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from praxis_lite.common.jax_internals.programs import scopes
from praxis_lite.common.trees import path_name
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.expected_trips import read_expected_trips
from praxis_lite.models.decoding.reading import NEXT_TOKEN, READ_PROMPTS

# JAX draws from a gamma distribution by rejection, and repeats until the draws of all rows are accepted. A draw is
# accepted with a probability of at least 95 % (Marsaglia and Tsang, 2000), so thousands of rows take about 3 rounds.
_GAMMA, _DRAWS = 'jit(_gamma)', 3.0


# The phases of operations, by a part of their names; the first that occurs counts.
_PHASES = {READ_PROMPTS: 'prompts', NEXT_TOKEN: 'tokens', 'rematted_computation': 'recomputed'}
_PHASES |= {'transpose(': 'backward', 'jvp(': 'forward'}


class LayerNames:
  """Finds, from the name that JAX gave an operation, the layer of the operation, one of `paths`, and its phase."""

  def __init__(self, paths: Iterable[tuple[str, ...]]):
    self.layer = functools.cache(self._layer)
    self._tree: dict[str, dict] = {}
    for path in paths:
      below = self._tree
      for part in path:
        below = below.setdefault(part, {})

  def _layer(self, op_name: str) -> str:
    """Returns the path of the layer of an operation; '' if it belongs to no layer.

    'jit(step)/jvp(LanguageModel)/lm/transformer/while/body/layers/ff/dot_general' gives 'lm.transformer.layers.ff'.
    XLA joins the names of operations that it combines: 'layers/(ff/up/dot:ff/gate/dot)' gives 'layers.ff'.
    """
    paths = [layer.split('.') for layer in self.layers(op_name)]
    same = [parts[0] for parts in zip(*paths) if len(set(parts)) == 1]
    return '.'.join(same)

  def layers(self, op_name: str) -> tuple[str, ...]:
    """Returns the layers of all operations that XLA combined into the operation of this name."""
    head, _, joined = scopes(op_name).partition('/(')
    return tuple(self._path(f'{head}/{name}') for name in joined.split(')')[0].split(':'))

  def _path(self, text: str) -> str:
    """Returns the path of the layer in a name's scopes; scopes that are no layer are left out.

    For example, 'M/lm/while/body/ff/search/while' gives 'lm.ff'.
    """
    below, path = self._tree, list[str]()
    for part in text.split('/'):
      if part in below:
        below = below[part]
        path.append(part)
    return '.'.join(path)

  @staticmethod
  def phase(op_name: str) -> str:
    """Returns 'forward', 'backward', 'recomputed' or 'update'; in a decoding program, 'prompts' or 'tokens'."""
    return next((phase for part, phase in _PHASES.items() if part in op_name), 'update')


class HiddenWork:
  """Asks the layers of a model about work that a lowered program does not show, such as that of kernels."""

  def __init__(self, layers: Iterable[Layer] = ()):
    self._layers = {path_name(layer.path): layer for layer in layers}
    self._names = LayerNames(layer.path for layer in self._layers.values())
    self.paths: set[str] = set()  # Paths of the layers that have declared hidden work.

  def loop_trips(self, op_name: str) -> float | None:
    """Returns the trip count that a layer declares for its loop with `expected_trips`; None if it declares none.

    For the loops in which JAX draws from gamma and beta distributions, the count is known too.
    """
    trips, path = read_expected_trips(op_name), self._names.layer(op_name)
    if trips is not None and path:
      self.paths.add(path)
    return _DRAWS if trips is None and _GAMMA in op_name else trips

  def call_flops(self, op_name: str, target: str, shapes: Sequence[tuple[int, ...]]) -> float:
    """Returns the FLOPs that a layer declares for its custom call on operands of these shapes; 0 if it declares none.

    The shapes are on one device.
    """
    path = self._names.layer(op_name)
    flops = self._layers[path].call_flops(target, shapes) if path in self._layers else 0.0
    if flops:
      self.paths.add(path)
    return flops
