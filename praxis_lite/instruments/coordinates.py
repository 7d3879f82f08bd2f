"""Coordinate check: how the activations of each layer, and their changes in training, depend on the width of a model.

A ladder of models, each wider than the one before, is trained for a few steps. If the activations of a layer grow or
shrink with a power of the width, a learning rate of a small model is wrong for a large one. With `Mup`, the exponents
of these powers are near zero (Yang et al., 2022, appendix D.1).
"""

from __future__ import annotations

import dataclasses
import functools
import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import Config, config_values
from praxis_lite.common.config.overrides import get_by_path, set_by_path
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import number_of
from praxis_lite.common.jax_internals.flags import quick_options
from praxis_lite.common.trees import NestedDict
from praxis_lite.instruments.explain.explanation import align_columns
from praxis_lite.models.mup import Mup, base_config
from praxis_lite.sharding.mesh import platform
from praxis_lite.training.first_nonfinite import Activations
from praxis_lite.training.learning.multi_learner import nested_learners
from praxis_lite.training.learning.schedules import Constant
from praxis_lite.training.steps import loss_and_gradients

_WIDTH, _HEIGHT = 340, 300
_STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f; text-anchor: middle }
text.title { font-weight: 600 } text.left { text-anchor: end }
path { fill: none; stroke-width: 1.3 } .frame { stroke: #d0d7de } .ok { stroke: #1f6fb0 } .fails { stroke: #cf5c1a }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .frame { stroke: #30363d } }
</style>"""
_DEPTH = 'num_layers'


class Scaling(NamedTuple):
  """How the result of a layer depends on the model's width.

  Attributes:
    layer: path of the layer, with its number if it is in a stack.
    sizes: for each width, the root mean square of the result after training.
    changes: for each width, the root mean square of the change of the result in training.
    slope, slope_of_change: the exponents of the width in `sizes` and `changes`, fitted to logarithms; 0 if a result is
      zero or not finite.
  """

  layer: str
  sizes: tuple[float, ...]
  changes: tuple[float, ...]
  slope: float
  slope_of_change: float

  def trouble(self, tolerance: float) -> str:
    """Returns 'not finite', 'grows' or 'change grows' if an exponent is above the tolerance; '' if all is well."""
    if not all(np.isfinite([*self.sizes, *self.changes])):
      return 'not finite'
    if self.slope > tolerance:
      return 'grows'
    return 'change grows' if self.slope_of_change > tolerance else ''


@dataclasses.dataclass(frozen=True)
class Ladder:
  """Models of several widths.

  Attributes:
    fields: the value of each width field in the narrowest model, by its path in the config of the model.
    factors: for each model, the ratio of its widths to those in `fields`.
    model: config of the model; its fields other than widths are the same in all models.
  """

  fields: Mapping[str, int]
  factors: tuple[float, ...]
  model: Config

  def widen_model(self, factor: float) -> Config:
    """Returns the config with `factor` times the widths in `fields`; raises ConfigError if a product is no integer."""
    model = self.model.clone()
    for path, width in self.fields.items():
      wide = width * factor
      if wide != int(wide) or wide < 1:
        raise ConfigError(f'task.model.{path} = {width}: {factor:g} times that is not a width; choose other --widths')
      set_by_path(model, path, int(wide))
    return model


def make_ladder(model: Config, factors: Sequence[float], fields: Sequence[str] = ()) -> Ladder:
  """Returns a ladder for the config of a model.

  Args:
    model: the config. If it has `mup`, the model with factor 1 is the base of `mup`. The widths are then the fields in
      which model and base differ, except `num_layers`.
    factors: see `Ladder`.
    fields: with `mup`, the paths of further fields that are widths. Without `mup`, the paths of all widths; () then
      means all integers named `*_dims`, except `input_dims`, which usually depends on the data.

  Raises:
    ConfigError: there are fewer than two different factors, a factor is not positive, or there are no widths.
  """
  if len(set(factors)) < 2 or min(factors, default=0) <= 0:
    raise ConfigError(f'--widths: expected two or more different factors above 0, got {tuple(factors)}')
  mup = config_values(model).get('mup')
  if isinstance(mup, Config):
    base = base_config(model, mup.instantiate(), 'task.model.mup')
    found = {path: value for path, value in _integers(base, '') if path in fields or value != get_by_path(model, path)}
    narrow = model.clone()
    for path, value in found.items():
      set_by_path(narrow, path, value)
    widths = {path: value for path, value in found.items() if path.rpartition('.')[2] != _DEPTH}
  else:
    narrow = model
    all_widths = {path: value for path, value in _integers(model, '') if _is_width(path)}
    widths = {path: _width_at(model, path) for path in fields} if fields else all_widths
  if not widths:
    raise ConfigError('--fields: the model has no widths; name the fields, as in --fields=model_dims,hidden_dims')
  return Ladder(widths, tuple(sorted(factors)), narrow)


def add_mup(ladder: Ladder) -> Ladder:
  """Returns the ladder with `Mup`, whose base is the narrowest model."""
  base = {path: int(width * ladder.factors[0]) for path, width in ladder.fields.items()}
  return dataclasses.replace(ladder, model=ladder.model.clone(mup=Config(Mup, base=base)))


def coordinate_check(
  task: Config,
  ladder: Ladder,
  batches: Sequence[NestedDict],
  seeds: Sequence[int] = (0, 1, 2, 3),
  report: Callable[[str], object] = lambda line: None,
) -> list[Scaling]:
  """Trains each model of the ladder for one step on each batch, on one device; returns what each layer computes.

  The learning rate is constant, without the learner's schedule. Results are compared on the first batch, in evaluation.

  Args:
    task: config of the task.
    ladder: from `make_ladder`.
    batches: batches for training, as NumPy arrays.
    seeds: seeds of initial values. Each model is trained once with each seed, and the magnitudes of activations are
      averages over seeds.
    report: called with a line for each model.

  Raises:
    ConfigError: a model cannot be built.
  """
  measured = []
  for factor in ladder.factors:
    one = task.clone(model=ladder.widen_model(factor), ici_mesh_shape=None, dcn_mesh_shape=None, partitioning='auto')
    for learner in nested_learners(one.train.learner).values():
      learner.schedule = Config(Constant)
    of_layers, loss = _train(one.instantiate(), batches, seeds)
    report(f'{factor:g} times as wide: loss {loss:.4g} after {number_of(len(batches), "step")}')
    measured.append(of_layers)
  found = []
  for path in measured[0]:
    sizes, changes = (tuple(values) for values in zip(*(of_model[path] for of_model in measured)))
    slopes = (_exponent(ladder.factors, values) for values in (sizes, changes))
    found.append(Scaling(path, sizes, changes, *slopes))
  return found


def format_coordinates(found: Sequence[Scaling], factors: Sequence[float], tolerance: float) -> str:
  """Returns a table with a line for each layer: its sizes, its exponents, and whether it passes."""
  rows = [('layer', *(f'x{factor:g}' for factor in factors), 'exponent', 'of change', '')]
  for s in found:
    passes = f'FAILS: {trouble}' if (trouble := s.trouble(tolerance)) else 'ok'
    slopes = f'{s.slope:.2f}', f'{s.slope_of_change:.2f}'
    rows.append((s.layer, *(f'{size:.3g}' for size in s.sizes), *slopes, passes))
  return '\n'.join(align_columns(rows, right=range(1, len(rows[0]) - 1)))


def draw_scalings(found: Sequence[Scaling], factors: Sequence[float], tolerance: float) -> str:
  """Returns an SVG of two log-log plots against the model's width, of sizes and of changes; each layer has a line."""
  plots = [
    _draw_plot('size of the result', [(s, s.sizes, s.slope > tolerance) for s in found], factors),
    _draw_plot('its change in training', [(s, s.changes, s.slope_of_change > tolerance) for s in found], factors),
  ]
  size = f'width="{2 * _WIDTH}" height="{_HEIGHT}" viewBox="0 0 {2 * _WIDTH} {_HEIGHT}"'
  groups = [f'<g transform="translate({i * _WIDTH} 0)">{plot}</g>' for i, plot in enumerate(plots)]
  return '\n'.join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', _STYLE, *groups, '</svg>', ''])


def _draw_plot(title: str, lines: Sequence[tuple[Scaling, Sequence[float], bool]], factors: Sequence[float]) -> str:
  drawn = [(s.layer, values, fails) for s, values, fails in lines if all(np.isfinite(values)) and min(values) > 1e-12]
  logs = np.log10([value for _, values, _ in drawn for value in values] or [1.0])
  low, high = np.floor(logs.min()), max(np.ceil(logs.max()), np.floor(logs.min()) + 1)
  left, top, right, bottom = 56, 30, _WIDTH - 14, _HEIGHT - 40
  x = np.interp(np.log(factors), np.log([factors[0], factors[-1]]), [left, right])

  def y(log: float) -> float:
    return float(bottom - (log - low) / (high - low) * (bottom - top))

  parts = [f'<text class="title" x="{(left + right) / 2}" y="18">{title}</text>']
  parts.append(f'<path class="frame" d="M{left} {top}V{bottom}H{right}"/>')
  parts += [f'<text x="{at:.1f}" y="{bottom + 18}">x{factor:g}</text>' for at, factor in zip(x, factors)]
  for power in range(int(low), int(high) + 1):
    parts.append(f'<text class="left" x="{left - 6}" y="{y(power) + 4:.1f}">1e{power}</text>')
  for layer, values, fails in drawn:
    points = ' '.join(f'{at:.1f},{y(np.log10(value)):.1f}' for at, value in zip(x, values))
    parts.append(f'<path class="{"fails" if fails else "ok"}" d="M{points}"><title>{html.escape(layer)}</title></path>')
  return ''.join(parts)


def _train(task: Any, batches: Sequence[NestedDict], seeds: Sequence[int]) -> tuple[dict[str, list[float]], float]:
  """Trains a model. Returns [size, size of the change] of each layer's result, by path, and the loss of the last step.

  Only results of rank 2 or more count. Sizes are root mean squares. All numbers are averaged over seeds.
  """
  model, learner, train_key = task.model, task.bind_learner(), jax.random.key(seeds[0])
  jit = functools.partial(jax.jit, compiler_options=quick_options(platform()))

  @jit
  def look(variables: NestedDict, batch: NestedDict) -> dict[str, jax.Array]:
    seen = Activations('' if model.name else type(model).__name__)
    seen.run(lambda v, b: model.apply(v, b, key=train_key, do_eval=True)[0][0]['loss'], variables, batch)
    # A product inside a layer, such as logits, gets its own name if its shape differs from the layer's result.
    others = {f'{path} (product)': x for path, x in seen.products.items() if x.shape != seen.results[path].shape}
    return {path: result for path, result in {**seen.results, **others}.items() if result.ndim > 1}

  @jit
  def step(variables: NestedDict, states: Any, number: jax.Array, batch: NestedDict) -> Any:
    loss, gradients = loss_and_gradients(task, variables, number, train_key, batch)
    update = learner.update(gradients, loss, variables, states, None, number)
    return update.mdl_vars, update.opt_states, loss

  init, init_learner, squares, losses = jit(model.init), jit(learner.init), dict[str, list[Any]](), []
  for seed in seeds:
    variables = init(jax.random.key(seed))
    states, loss = init_learner(variables), jnp.nan
    before = jax.device_get(look(variables, batches[0]))
    for number, batch in enumerate(batches):
      variables, states, loss = step(variables, states, jnp.int32(number), batch)
    after = jax.device_get(look(variables, batches[0]))
    losses.append(float(loss))
    for path, result in after.items():
      squares.setdefault(path, []).append((_mean_square(result), _mean_square(result - before[path])))
  sizes = {path: np.sqrt(np.mean(found, axis=0)).tolist() for path, found in squares.items()}
  return sizes, float(np.mean(losses))


def _mean_square(x: np.ndarray) -> float:
  return float(np.mean(np.square(np.asarray(x, np.float64))))


def _exponent(factors: Sequence[float], sizes: Sequence[float]) -> float:
  if not all(np.isfinite(sizes)) or min(sizes) < 1e-12:
    return 0.0
  return float(np.polyfit(np.log(factors), np.log(sizes), 1)[0])


def _integers(value: object, path: str) -> list[tuple[str, int]]:
  if isinstance(value, Config):
    below = [(f'{path}.{name}' if path else str(name), field) for name, field in config_values(value).items()]
  elif isinstance(value, list | tuple):
    below = [(f'{path}[{i}]', entry) for i, entry in enumerate(value)]
  else:
    return [(path, value)] if isinstance(value, int) and not isinstance(value, bool) else []
  return [found for name, entry in below for found in _integers(entry, name)]


def _is_width(path: str) -> bool:
  name = path.rpartition('.')[2].partition('[')[0]
  return name.endswith('_dims') and name != 'input_dims'


def _width_at(model: Config, path: str) -> int:
  width = get_by_path(model, path)
  if not isinstance(width, int) or isinstance(width, bool):
    raise ConfigError(f'--fields: task.model.{path} = {width!r} is not a width, an integer')
  return width
