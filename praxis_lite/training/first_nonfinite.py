"""Finds where a non-finite value first appears in a step, by running its program operation by operation on one device.

Each operation carries the path of its layer, even in the backward pass, so the layers themselves are not needed. Scans
are unrolled, so the index of a repeated layer is known.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.jax_internals.programs import bind, called_program, run_program, scan_sizes

_MOST_ORIGINS = 5
_NOT_LAYERS = re.compile(r'^(jit|pjit|checkpoint|remat.*|rematted_computation|closed_call|vmap|custom_.*|shard_map|)$')


@dataclasses.dataclass
class Origin:
  """An operation whose inputs are finite and whose result is not."""

  where: str  # The path of the layer, with indices of repeated layers, as in 'lm.transformer[3].layers.mlp'.
  is_backward: bool  # Whether the operation belongs to the backward pass.
  operation: str  # The operation's name in JAX, such as 'exp'.
  found: str  # The non-finite value in its result: 'nan' or 'inf'.
  inputs: list[str]  # A text for each input, with its shape and range.

  def __str__(self) -> str:
    direction = 'backward, ' if self.is_backward else ''
    return f'{self.where or "the step"}: {direction}{self.operation} of {", ".join(self.inputs)} gives {self.found}'


@dataclasses.dataclass
class Statistics:
  """Statistics of a layer's last result: root mean square, largest magnitude, number of non-finite values, and size."""

  rms: float
  largest: float
  not_finite: int
  size: int


class Trace:
  """The values that a program computes, one operation at a time; paths leave out `root`, the scope of the model."""

  def __init__(self, root: str = ''):
    # The first operations where non-finite values appear, in order. Some may be intended, such as in masks.
    self.origins: list[Origin] = []
    # Statistics by the path of their layer, in the order of the computation. A path that ends in ~ is for the backward
    # pass.
    self.layers: dict[str, Statistics] = {}
    self._root = root

  def run(self, function: Callable[..., Any], *args: Any) -> Any:
    """Returns function(*args), computed one operation at a time."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    out = self._run(closed, jax.tree.leaves(args), '', {})
    return jax.tree.unflatten(jax.tree.structure(shape), out)

  def _run(self, program: Any, args: Sequence[Any], stack: str, at: dict[str, str]) -> list[Any]:
    def apply(eqn: Any, operands: list[Any]) -> list[Any]:
      return self._apply(eqn, operands, '/'.join(filter(None, (stack, str(eqn.source_info.name_stack)))), at)

    return run_program(program, args, apply)

  def _apply(self, eqn: Any, args: list[Any], stack: str, at: dict[str, str]) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name == 'scan':
      return self._scan(eqn, args, stack, at)
    if name == 'cond' and not isinstance(args[0], jax.core.Tracer):
      branch = int(np.clip(int(args[0]), 0, len(params['branches']) - 1))
      return self._run(params['branches'][branch], args[1:], stack, at)
    if name == 'sharding_constraint':
      return args
    inner = called_program(eqn)
    if inner is not None and name not in ('while', 'shard_map', 'reduce', 'scatter', 'pallas_call'):
      return self._run(inner, args, stack, at)
    results = bind(eqn, args)
    self._look(name, args, results, stack, at)
    return results

  def _scan(self, eqn: Any, args: list[Any], stack: str, at: dict[str, str]) -> list[Any]:
    consts, carry, _ = scan_sizes(eqn)
    params, outvars = eqn.params, eqn.outvars[carry:]
    fixed, state, xs = args[:consts], args[consts : consts + carry], args[consts + carry :]
    length, body, where = params['length'], params['jaxpr'], _path(stack)
    rows: list[list[Any]] = [[] for _ in body.jaxpr.outvars[carry:]]
    order = range(length - 1, -1, -1) if params['reverse'] else range(length)
    for i in order:
      out = self._run(body, [*fixed, *state, *(x[i] for x in xs)], stack, {**at, where: f'[{i}]'})
      state = out[:carry]
      for row, y in zip(rows, out[carry:], strict=True):
        row.append(y)
    ordered = [row[::-1] if params['reverse'] else row for row in rows]
    empty = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in outvars] if not length else []
    return [*state, *(empty or [jnp.stack(row) for row in ordered])]

  def _layer_of(self, stack: str, at: dict[str, str]) -> str:
    """Returns the path of the layer in whose scope an operation is; '' if it is in no layer."""
    where = _path(stack)
    # The scan with the longest matching path is the innermost one; it gives the index of the repeated layer.
    for prefix in sorted(at, key=len, reverse=True):
      if where.startswith(prefix):
        where = f'{prefix}{at[prefix]}{where[len(prefix) :]}'
        break
    return where.removeprefix(self._root).removeprefix('.')

  def _look(self, name: str, args: list[Any], results: list[Any], stack: str, at: dict[str, str]) -> None:
    where, is_backward = self._layer_of(stack, at), 'transpose' in stack
    for result in results:
      if not jnp.issubdtype(jnp.result_type(result), jnp.floating) or not jnp.size(result):
        continue
      x = np.asarray(result, np.float64)
      good = np.isfinite(x)
      if where:
        finite = x[good] if good.any() else np.array(np.nan)
        rms, largest = float(np.sqrt(np.mean(finite**2))), float(np.max(np.abs(finite)))
        name_in_pass = f'{where}~' if is_backward else where
        self.layers[name_in_pass] = Statistics(rms, largest, int(x.size - good.sum()), x.size)
      if not good.all() and len(self.origins) < _MOST_ORIGINS and all(map(_is_finite, args)):
        found = 'nan' if np.isnan(x).any() else 'inf'
        self.origins.append(Origin(where, is_backward, name, found, [_range(a) for a in args]))


class Activations(Trace):
  """The last result of each layer in a forward pass, by path, and its last matrix product, such as logits.

  Inside a traced function, these are traced values.
  """

  def __init__(self, root: str = ''):
    super().__init__(root)
    self.results: dict[str, jax.Array] = {}
    self.products: dict[str, jax.Array] = {}

  def _look(self, name: str, args: list[Any], results: list[Any], stack: str, at: dict[str, str]) -> None:
    for result in results:
      if (where := self._layer_of(stack, at)) and jnp.issubdtype(jnp.result_type(result), jnp.floating):
        self.results[where] = result
        if name == 'dot_general':
          self.products[where] = result


def _path(stack: str) -> str:
  """Returns the path of a layer, given its scopes: 'lm.softmax' for 'transpose(jvp(lm))/softmax'."""
  names = re.sub(r'\b(transpose|jvp|vmap)\(|\)', '', stack).split('/')
  return '.'.join(name for name in names if not _NOT_LAYERS.match(name) and not re.search(r'[^\w~\[\]]', name))


def _is_finite(x: Any) -> bool:
  return not jnp.issubdtype(jnp.result_type(x), jnp.floating) or bool(np.isfinite(np.asarray(x, np.float64)).all())


def _range(x: Any) -> str:
  if not jnp.size(x) or jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
    return f'{jnp.result_type(x)}{list(jnp.shape(x))}'
  low, high = float(np.min(np.asarray(x, np.float64))), float(np.max(np.asarray(x, np.float64)))
  shape = ','.join(map(str, jnp.shape(x)))
  return f'{low:.3g}' if low == high and not shape else f'[{shape}] from {low:.3g} to {high:.3g}'
