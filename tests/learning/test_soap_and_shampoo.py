"""SOAP and Shampoo on one device: the updates are those of loops over single matrices in NumPy, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from small_trees import declarations, values, weight

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves, leaves_by_path
from praxis_lite.training.learning import Learner, muon, shampoo, soap
from praxis_lite.training.learning.owners import Splits

RATE, STEPS = 0.05, 6


def updates_of(optimizer: Config, weights: Any) -> Iterator[dict[Any, np.ndarray]]:
  """Yields what each step subtracts from the variables, divided by the learning rate."""
  bound = Config(Learner, optimizer=optimizer, learning_rate=RATE).instantiate().bind(weights)
  zeros = jax.tree.map(jnp.zeros_like, values(weights))
  state = bound.init(zeros)
  step = jax.jit(lambda g, s, t: bound.update(g, jnp.float32(1), zeros, s, None, t))
  for t in range(STEPS):
    new, state, *_ = step(values(weights, t, spread=4.0), state, jnp.int32(t))
    yield {path: -np.asarray(x) / RATE for path, x in leaves(new).items()}


def matrices_of(weights: Any, path: Any) -> list[list[np.ndarray]]:
  """Returns the gradients of all steps of each matrix of a variable."""
  found = [np.asarray(leaves(values(weights, t, spread=4.0))[path], np.float64) for t in range(STEPS)]
  return [list(each) for each in zip(*(x.reshape(-1, *x.shape[-2:]) for x in found))]


def complete(statistics: np.ndarray) -> np.ndarray:
  """Returns eigenvectors, the largest first; unit vectors, made orthogonal to them, in place of those of zero."""
  eigenvalues, vectors = np.linalg.eigh(statistics)
  basis = [vectors[:, i] for i in np.argsort(-eigenvalues) if eigenvalues[i] > 1e-5 * eigenvalues.max()]
  for unit in np.eye(len(statistics)):
    if len(basis) < len(statistics):
      rest = unit - sum(np.dot(unit, b) * b for b in basis)
      basis.append(rest / np.linalg.norm(rest))
  return np.stack(basis, axis=1)


def soap_by_hand(gradients: list[np.ndarray], refresh_every: int, largest: int) -> Iterator[np.ndarray]:
  """One matrix; decays 0.95."""
  mu, nu, decay = np.zeros_like(gradients[0]), np.zeros_like(gradients[0]), 0.95
  sides = [side <= largest for side in mu.shape]
  statistics = [np.zeros((side, side)) for side in mu.shape]
  bases = [np.eye(side) for side in mu.shape]
  for t, g in enumerate(gradients):
    if t:
      mu = decay * mu + (1 - decay) * g
      nu = decay * nu + (1 - decay) * (bases[0].T @ g @ bases[1]) ** 2
      rotated = bases[0].T @ mu @ bases[1] / (1 - decay**t)
      yield bases[0] @ (rotated / (np.sqrt(nu / (1 - decay**t)) + 1e-8)) @ bases[1].T
    else:
      yield np.zeros_like(g)
    for i, square in enumerate((g @ g.T, g.T @ g)):
      statistics[i] = decay * statistics[i] + (1 - decay) * square
      if t == 0 and sides[i]:
        bases[i] = complete(statistics[i])
      elif t % refresh_every == 0 and sides[i]:
        order = np.argsort(-np.diag(bases[i].T @ statistics[i] @ bases[i]))
        bases[i] = np.linalg.qr(statistics[i] @ bases[i][:, order])[0]
        nu = np.take(nu, order, axis=i)


def shampoo_by_hand(gradients: list[np.ndarray], refresh_every: int, largest: int, graft: str) -> Iterator[np.ndarray]:
  """One matrix; a ridge of 0.01."""
  mu, nu = np.zeros_like(gradients[0]), np.zeros_like(gradients[0])
  sides = [side <= largest for side in mu.shape]
  statistics = [np.zeros((side, side)) for side in mu.shape]
  roots = [np.eye(side) for side in mu.shape]
  for t, g in enumerate(gradients):
    mu, nu = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g**2
    momentum = mu / (1 - 0.9 ** (t + 1))
    for i, square in enumerate((g @ g.T, g.T @ g)):
      statistics[i] = 0.999 * statistics[i] + 0.001 * square
      if t % refresh_every == 0 and sides[i]:
        eigenvalues, vectors = np.linalg.eigh(statistics[i] / (1 - 0.999 ** (t + 1)))
        eigenvalues = np.maximum(eigenvalues, 0) + 0.01 * eigenvalues.max()
        roots[i] = vectors @ np.diag(eigenvalues ** (-1 / (2 * sum(sides)))) @ vectors.T
    update = roots[0] @ momentum @ roots[1]
    adam = momentum / (np.sqrt(nu / (1 - 0.999 ** (t + 1))) + 1e-8)
    like = {'adam': adam, 'sgd': momentum, 'none': update}[graft]
    yield update * np.linalg.norm(like) / np.linalg.norm(update)


MATRICES = [('lm', 'emb', 'w'), ('lm', 'layers', 'ff', 'w'), ('lm', 'deep', 'w')]


def assert_updates(optimizer: Config, by_hand: Any) -> None:
  weights = declarations()
  found = list(updates_of(optimizer, weights))
  for path in MATRICES:
    expected = [list(by_hand(gradients)) for gradients in matrices_of(weights, path)]
    for t in range(STEPS):
      ours = found[t][path]
      np.testing.assert_allclose(
        ours.reshape(-1, *ours.shape[-2:]), [each[t] for each in expected], rtol=2e-3, atol=2e-3, err_msg=f'{path} {t}'
      )


@pytest.mark.slow_cases
@pytest.mark.parametrize(('refresh_every', 'largest'), [(2, 100), (10, 100), (1, 4), (1, 3)])
def test_soap_is_a_loop_over_matrices(refresh_every: int, largest: int) -> None:
  """Sides above `largest` keep no statistics: one of the sides at 4, and both at 3, which leaves Adam."""
  optimizer = Config(soap, refresh_every=refresh_every, largest_side=largest)
  assert_updates(optimizer, lambda gradients: soap_by_hand(gradients, refresh_every, largest))


@pytest.mark.parametrize(
  ('refresh_every', 'largest', 'graft'), [(2, 100, 'adam'), (1, 4, 'none'), (3, 100, 'sgd'), (1, 3, 'adam')]
)
def test_shampoo_is_a_loop_over_matrices(refresh_every: int, largest: int, graft: str) -> None:
  optimizer = Config(shampoo, ridge=0.01, refresh_every=refresh_every, largest_side=largest, graft=graft)
  assert_updates(optimizer, lambda gradients: shampoo_by_hand(gradients, refresh_every, largest, graft))


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('optimizer', [soap, shampoo])
def test_other_variables_and_gradients_of_zero(optimizer: Any, dtype: Any) -> None:
  """AdamW updates the scale of a norm; a gradient of zeros gives an update of zeros."""
  weights = {'w': weight(4, 6), 'scale': weight(4)}
  bound = Config(Learner, optimizer=Config(optimizer), learning_rate=RATE).instantiate().bind(weights)
  params = jax.tree.map(lambda x: x.astype(dtype), values(weights))
  state, gradients = bound.init(params), {'w': jnp.zeros((4, 6), dtype), 'scale': jnp.ones(4, dtype)}
  for t in range(3):
    new, state, *_ = bound.update(gradients, jnp.float32(1), params, state, None, jnp.int32(t))
    assert new['w'].dtype == dtype
    np.testing.assert_array_equal(new['w'], params['w'])
    changed = new['scale'].astype(jnp.float32) - params['scale'].astype(jnp.float32)
    np.testing.assert_allclose(changed, -RATE, atol=1e-6 if dtype == jnp.float32 else 0.01)


@pytest.mark.parametrize('optimizer', [muon, soap, shampoo])
def test_a_matrix_without_entries_is_left_out(optimizer: Any) -> None:
  weights = {'w': weight(4, 6), 'empty': weight(0, 6), 'stack': weight(6, 0, repeat=(2,))}
  bound = Config(Learner, optimizer=Config(optimizer), learning_rate=RATE).instantiate().bind(weights)
  params = values(weights)
  out = bound.update(params, jnp.float32(1), params, bound.init(params), None, jnp.int32(1))
  assert {name: x.shape for name, x in out.mdl_vars.items()} == {'w': (4, 6), 'empty': (0, 6), 'stack': (2, 6, 0)}
  splits = Splits({(name,): x.shape for name, x in params.items()}, {('w',): PartitionSpec('x', None)}, {'x': 2})
  assert len(bound.describe_exchanges(splits)) == 1


@pytest.mark.parametrize('moments', ['bfloat16', 'int8'])
@pytest.mark.parametrize('optimizer', [soap, shampoo])
def test_only_moments_are_compressed_not_square_arrays_of_square_matrices(optimizer: Any, moments: str) -> None:
  weights = {'square': weight(4, 4), 'oblong': weight(4, 6), 'inputs': {'outputs': weight(5, 5, repeat=(2,))}}
  learner = Config(Learner, optimizer=Config(optimizer), learning_rate=RATE, moments=moments).instantiate()
  bound, stored = learner.bind(weights), set()
  for path, x in leaves_by_path(jax.eval_shape(bound.init, values(weights))).items():
    if {'statistics', 'bases', 'roots'} & {*path}:
      assert x.dtype == jnp.float32 and x.shape[-1] == x.shape[-2], path
    elif {'mu', 'nu'} & {*path} and x.ndim > 1:
      stored.add((x.shape, x.dtype.name))
  assert {shape for shape, _ in stored} >= {(4, 4), (4, 6), (2, 5, 5)}
  assert {dtype for shape, dtype in stored if shape in ((4, 4), (4, 6), (2, 5, 5))} <= {'bfloat16', 'int8', 'uint8'}


@pytest.mark.parametrize('optimizer', [soap, shampoo])
def test_square_arrays_are_split_over_the_owners(optimizer: Any) -> None:
  weights = {'w': weight(4, 6, repeat=(3,)), 'scale': weight(4)}
  bound = Config(Learner, optimizer=Config(optimizer), learning_rate=RATE).instantiate().bind(weights)
  shapes = {path: w.full_shape for path, w in leaves(weights).items()}
  splits = Splits(
    shapes, {('w',): PartitionSpec('z', None, 'x'), ('scale',): PartitionSpec()}, {'x': 2, 'y': 3, 'z': 1}
  )
  state = jax.eval_shape(bound.init, values(weights))
  specs = bound.slot_specs(state, splits)
  by_side = {path[-2:]: spec for path, spec in specs.items()}
  # Over y, which does not split the matrices, and x, which does; z has one device.
  assert by_side == dict.fromkeys((('inputs', 'w'), ('outputs', 'w')), PartitionSpec(None, ('y', 'x'), None))
  assert {leaves_by_path(state)[path].shape for path in specs} == {(3, 4, 4), (3, 6, 6)}


@pytest.mark.parametrize(
  ('optimizer', 'fields', 'message'),
  [
    (soap, {'b3': 1.0}, r'learner\.optimizer\.b3: expected at least 0 and less than 1, got 1\.0'),
    (soap, {'refresh_every': 0}, r'learner\.optimizer\.refresh_every: expected at least 1, got 0'),
    (shampoo, {'refresh_every': 2.5}, r'learner\.optimizer\.refresh_every: expected an integer .*, got 2\.5'),
    (shampoo, {'ridge': 0.0}, r'learner\.optimizer\.ridge: expected more than 0 .*, got 0\.0'),
    (shampoo, {'ridge': float('nan')}, r'learner\.optimizer\.ridge: .* got nan'),
    (shampoo, {'ridge': float('inf')}, r'learner\.optimizer\.ridge: .* got inf'),
    (soap, {'eps': -1e-8}, r'learner\.optimizer\.eps: expected at least 0 .*, got -1e-08'),
    (shampoo, {'largest_side': 0}, r'learner\.optimizer\.largest_side: expected at least 1, got 0'),
    (soap, {'adam_b1': -0.1}, r'learner\.optimizer\.adam_b1: .* got -0\.1'),
    (shampoo, {'adam_b2': 1.0}, r'learner\.optimizer\.adam_b2: .* got 1\.0'),
    (muon, {'beta': 1.0}, r'learner\.optimizer\.beta: .* got 1\.0'),
    (muon, {'ns_steps': 0}, r'learner\.optimizer\.ns_steps: expected at least 1, got 0'),
    (muon, {'ns_coeffs': (1.0,)}, r'learner\.optimizer\.ns_coeffs: expected 3 numbers, got \(1\.0,\)'),
    (shampoo, {'graft': 'adamw'}, r"learner\.optimizer\.graft: .*'adamw'"),
    (shampoo, {'placement': 'all'}, r"learner\.optimizer\.placement: .*'all'"),
  ],
)
def test_values_out_of_range_are_named(optimizer: Any, fields: dict[str, Any], message: str) -> None:
  learner = Config(Learner, optimizer=Config(optimizer, **fields), learning_rate=RATE).instantiate()
  with pytest.raises(ConfigError, match=message):
    learner.bind(declarations()).init(values(declarations()))
