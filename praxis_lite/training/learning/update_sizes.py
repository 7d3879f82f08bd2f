"""The size of an optimizer's updates, and the factors that correct it in a model with `Mup`.

`sharding/growth.py` says how large an entry of an update should be, relative to the smaller model. How large it would
be depends on the optimizer:

    size          optimizers                       an entry of the update, without a factor
    'normalized'  Adam, Lion, RMSprop              as in the smaller model
    'gradient'    SGD, momentum                    like the gradient: 1 / fan out, and depth^-a in a branch
    'relative'    LAMB, Adafactor                  like the variable, whose initial values are also smaller
    'spectral'    Muon, for matrices               a matrix of orthogonal rows or columns, times a factor of its shape

The factor of a variable is the size that is right, divided by this size. To detect the size, the optimizer updates
small variables: once as usual, and then with gradients that are 4 times larger, with variables that are 4 times larger,
and with gradients of rank 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite.common.config import Config, config_values, nested_configs, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, Path, leaves, leaves_by_path, map_with_path, node_at, path_name, select
from praxis_lite.sharding.growth import depth_ratio, fan_growth, fan_sizes, init_ratio, update_ratio
from praxis_lite.sharding.weights import WeightHParams, init_magnitude
from praxis_lite.training.learning.matrices import matrix_dims, takes_matrices

_Build = Callable[[float], optax.GradientTransformationExtraArgs]  # (learning rate) -> the transformation

UPDATE_SIZES = ('auto', 'normalized', 'gradient', 'relative', 'spectral')

# Optimizers whose state has other values of the variables, such as averages. If updates were multiplied by factors,
# these values would no longer match the variables.
_OWN_POINTS = ('schedule_free', 'lookahead', 'prodigy', 'dog', 'dowg', 'mechanize', 'cocob')
_TIMES = 4.0


def has_growth(weights: NestedDict) -> bool:
  """Whether the variables belong to a model with `Mup`."""
  return any(weight.growth is not None for weight in leaves(weights).values())


def update_factors(
  config: Config, build: _Build, weights: NestedDict, size: str, decays: bool = False
) -> dict[Path, float]:
  """Returns the factor of the update of each variable, by path.

  Args:
    config: config of the optimizer, which has a weight decay if `decays`.
    build: makes the transformation, without weight decay.
    weights: declarations of the variables.
    size: one of `UPDATE_SIZES`; 'auto' detects it for each variable.

  Raises:
    ConfigError: the size of an update is not one of these; the optimizer is one of `_OWN_POINTS`; or it decays
      variables, and also scales updates by their norms.
  """
  for nested in nested_configs(config):
    name = getattr(target(nested), '__name__', '')
    if name.startswith(_OWN_POINTS):
      raise ConfigError(f'learner.optimizer: {name} keeps points of its own, so a model with mup cannot use it')
  declared = leaves(weights)
  sizes = find_sizes(config, build, weights) if size == 'auto' else dict.fromkeys(declared, size)
  # If the optimizer itself decays variables, the learner passes it variables that are divided by their factors. Their
  # norms would then be wrong for updates that are relative to these norms.
  if decays and (relative := next((path for path, of in sizes.items() if of == 'relative'), None)) is not None:
    raise ConfigError(
      f'learner.optimizer: its updates are relative to the sizes of variables, such as {path_name(relative)}, and it '
      'decays weights; with mup, set learner.decoupled_weight_decay instead of its own weight decay'
    )
  return {path: _factor(weight, sizes[path], config) for path, weight in declared.items()}


def find_sizes(config: Config, build: _Build, weights: NestedDict) -> dict[Path, str]:
  """Returns the size of the updates of each variable, by path; see the top of this file."""
  matrices = _matrices(config, weights)
  alike = _group(config, weights, matrices)
  chosen = select(weights, set(alike.values()).__contains__)
  gradients = jax.tree.map(lambda weight: 1000 * _small(weight), chosen)
  variables = jax.tree.map(_small, chosen)

  @jax.jit
  def update(gradients: NestedDict, variables: NestedDict) -> Any:
    transformation = build(1e-3)
    return transformation.update(gradients, transformation.init(variables), variables, value=jnp.float32(1.0))[0]

  def updates(gradients: NestedDict, variables: NestedDict) -> dict[Path, np.ndarray]:
    with jax.ensure_compile_time_eval():  # A learner may be bound while a step is traced.
      return {path: np.asarray(x) for path, x in leaves_by_path(update(gradients, variables)).items()}

  one = updates(gradients, variables)
  large = updates(jax.tree.map(lambda x: _TIMES * x, gradients), variables)
  of_large = updates(gradients, jax.tree.map(lambda x: _TIMES * x, variables))
  of_rank_1 = updates(jax.tree.map(_rank_1, gradients), variables)
  orthogonalizes = any('muon' in getattr(target(nested), '__name__', '') for nested in nested_configs(config))
  sizes = {}
  for path, change in one.items():
    by_gradient, by_variable = _ratio(large[path], change), _ratio(of_large[path], change)
    is_even = np.ptp(np.abs(of_rank_1[path])) <= 0.5 * np.max(np.abs(of_rank_1[path]))
    if by_gradient > 3:
      sizes[path] = 'gradient'
    elif by_gradient < 1.3 and path in matrices and orthogonalizes:
      sizes[path] = 'spectral'
    elif by_gradient < 1.3 and is_even and np.any(change):  # SOAP changes nothing in the first step.
      sizes[path] = 'relative' if by_variable > 3 else 'normalized'
    else:
      name = getattr(target(config), '__name__', 'the optimizer')
      raise ConfigError(
        f'learner.update_size: mup cannot find out how large the updates of {name} are; set it to '
        f'{", ".join(map(repr, UPDATE_SIZES[1:-1]))} or {UPDATE_SIZES[-1]!r}'
      )
  return {path: sizes[like] for path, like in alike.items()}


def remark_of(weight: WeightHParams, factor: float) -> str:
  """Returns a text about what `Mup` changes for a variable, and why; '' if it changes nothing."""
  growth = weight.growth
  if growth is None or (growth.base_shape == weight.shape and growth.depth == 1):
    return ''
  fans, ((fan_in, fan_out), (base_in, base_out)) = fan_growth(weight), fan_sizes(weight)
  sizes = ('fan in', base_in, fan_in), ('fan out', base_out, fan_out)
  why = [f'{name} {before} -> {now}' for name, before, now in sizes if before != now]
  if growth.depth != 1:
    why.append(f'layers x {growth.depth:.3g}')
  init = init_ratio(weight) if init_magnitude(weight) else 1.0
  kind = '' if fans.kind == 'equal' else f'{fans.kind}: '
  return f'initial values x {init:.3g}, updates x {factor:.3g}; {kind}{", ".join(why)}'


def _factor(weight: WeightHParams, size: str, config: Config) -> float:
  growth = weight.growth
  if growth is None:
    return 1.0
  fans = fan_growth(weight)
  if size == 'gradient':
    return fans.fan_out / fans.fan_in * growth.depth ** (2 * growth.depth_exponent - 1)
  if size == 'relative':
    return update_ratio(weight) / (init_ratio(weight) if init_magnitude(weight) else 1.0)
  if size == 'spectral':
    here, there = fan_sizes(weight)
    by_itself = _muon_scale(*here, config) / _muon_scale(*there, config)
    return math.sqrt(fans.fan_out / fans.fan_in) * depth_ratio(weight) / by_itself
  return update_ratio(weight)


def _muon_scale(fan_in: int, fan_out: int, config: Config) -> float:
  """Returns the scale that Muon gives a matrix of orthogonal rows or columns; 1 for optimizers without matrices."""
  for nested in filter(takes_matrices, nested_configs(config)):
    if config_values(nested).get('consistent_rms') is not None:
      return math.sqrt(max(fan_in, fan_out))
    return math.sqrt(max(1.0, fan_out / fan_in))
  return 1.0


def _matrices(config: Config, weights: NestedDict) -> set[Path]:
  """Returns the paths of the variables that an optimizer treats as matrices."""
  if not any(map(takes_matrices, nested_configs(config))):
    return set()
  declared = leaves(weights)
  structs = map_with_path(lambda path, weight: jax.ShapeDtypeStruct(weight.shape, jnp.float32), weights)
  dims: Any = matrix_dims(declared, structs)
  return {path for path in declared if node_at(dims, path) is not None}


def _group(config: Config, weights: NestedDict, matrices: set[Path]) -> dict[Path, Path]:
  """Returns, for each variable, the first variable that the optimizer treats in the same way.

  This is the variable itself if the optimizer may treat variables differently because of their paths.
  """
  declared = leaves(weights)
  if any(not _is_of_optax(nested) for nested in nested_configs(config)):
    return {path: path for path in declared}
  first: dict[Any, Path] = {}
  return {
    path: first.setdefault((path in matrices, len(weight.shape), weight.collections), path)
    for path, weight in declared.items()
  }


def _is_of_optax(config: Config) -> bool:
  """Whether a config makes a transformation of optax that ignores the paths of variables."""
  build = target(config)
  name, module = getattr(build, '__name__', ''), getattr(build, '__module__', '')
  return module.startswith('optax') and name not in ('multi_transform', 'partition', 'masked', 'multi_steps')


def _small(weight: WeightHParams) -> np.ndarray:
  """Returns random values, none near zero, for a small variable with the rank of `weight`."""
  shape = tuple(range(3, 3 + len(weight.shape)))
  draws = np.random.default_rng(1)
  return (draws.uniform(0.5, 1.5, shape) * draws.choice([-1.0, 1.0], shape)).astype(np.float32)


def _rank_1(x: np.ndarray) -> np.ndarray:
  """Returns an outer product of vectors of unequal positive entries, with the shape of x."""
  product = np.ones((), np.float32)
  for size in x.shape:
    product = np.multiply.outer(product, 1000.0 ** np.linspace(0, 1 / x.ndim, size, dtype=np.float32))
  return np.asarray(1000 * product, np.float32)


def _ratio(x: np.ndarray, y: np.ndarray) -> float:
  size = float(np.linalg.norm(y))
  return float(np.linalg.norm(x)) / size if size else 1.0
