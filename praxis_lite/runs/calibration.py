"""Calibration: evaluates batches of data, and chooses the few-bit values of weights by their inputs in these batches.

    x    N rows of the inputs of one weight, [N, I]; for a stack of layers or for experts, one x each
    G    sum x x', [I, I]
    the sum and the maximum of |x| over the rows, [I] each
    how many |x|, rounded to bfloat16, have each of its 2^15 values

The rows are collected while the model with plain weights is evaluated on the mesh of the task, without padding.
The methods 'awq' and 'smooth' choose scales of inputs (`layers/input_scales.py`); 'gptq' chooses values
(`layers/gptq.py`); 'nearest' only finds ranges of inputs.

Shapes: I inputs and O outputs of a weight, E experts; * marks any number of dimensions, and *J are those before I.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.errors import ConfigError, DataError, check_choice, check_range, first_names
from praxis_lite.common.statistics import kind_of_part
from praxis_lite.common.trees import Path, path_name
from praxis_lite.inputs.prefetch import PrefetchIterator
from praxis_lite.layers.base.call import Surroundings
from praxis_lite.layers.base.summaries import Summary
from praxis_lite.layers.base.taps import TappedCall, Taps, raw_name
from praxis_lite.layers.gptq import compensation, quantize_in_turn
from praxis_lite.layers.input_scales import awq_scales, smooth_scales
from praxis_lite.layers.quantized_weights import QuantizedWeight
from praxis_lite.layers.weight_formats import WeightFormat, quantize
from praxis_lite.models import BaseModel
from praxis_lite.models.quantization import stored_weights
from praxis_lite.runs.evaluated_dataset import find_dataset
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.training.taps import StepTaps, TappedParts, real_tokens

METHODS = ('awq', 'gptq', 'nearest', 'smooth')
SCALES_INPUTS = ('awq', 'smooth')
"""Methods whose rules say `input_scale=True`."""


@dataclasses.dataclass(frozen=True)
class Calibration:
  """Settings for choosing weights in few bits by data.

  Attributes:
    method: one of `METHODS`.
    num_batches: how many batches are evaluated.
    dataset: the name or number of the dataset of the run that is read, in the dataset's own order. None reads the first
      dataset for training; if there is no such dataset, the first one.
    input_percentile: the range of inputs in int8 covers this percentage of their |x|; more than 50, and at most 100.
      None finds no ranges, so that they follow from the current values.
  """

  method: str
  num_batches: int = 16
  dataset: str | int | None = None
  input_percentile: float | None = None

  def __post_init__(self) -> None:
    check_choice('method', self.method, METHODS)
    check_range('calibration_batches', self.num_batches, least=1)
    if self.input_percentile is None:
      if self.method == 'nearest':
        raise ConfigError('method: rounding to nearest reads data only for input_percentile; set it, or choose another')
    elif not 50 < self.input_percentile <= 100:
      raise ConfigError(f'input_percentile: expected a number above 50, at most 100, got {self.input_percentile}')
    elif self.input_percentile < 100 and self.method in SCALES_INPUTS:
      raise ConfigError(f'input_percentile: with {self.method}, only 100 is possible, got {self.input_percentile}')


class _Point(NamedTuple):
  """How many dimensions of the values at a point, [..., *groups, *inputs], are groups and how many are inputs."""

  num_groups: int
  num_inputs: int


@dataclasses.dataclass(frozen=True)
class CalibratedWeight:
  """A weight in few bits, and statistics of its inputs in the data.

  Attributes:
    inputs: 'sum_abs' and 'max_abs' [*stack, *E, I]; for 'awq' and 'gptq' also 'gram' [*stack, *E, I, I], which is G;
      for an `input_percentile` below 100 also 'counts' [*stack, *E, 2^15].
    input_percentile: see `Calibration`.
  """

  stored: QuantizedWeight
  method: str
  inputs: Mapping[str, np.ndarray]
  input_percentile: float | None = None

  def input_range(self, index: tuple[int, ...], scale: jax.Array) -> float:
    """Returns the range of the inputs of the weight at `index`, after division by the scales of inputs, [*J, I, *1]."""
    if self.input_percentile in (None, 100):
      return float(np.max(self.inputs['max_abs'][index] / np.asarray(scale).reshape(-1)))
    counts = np.cumsum(self.inputs['counts'][index])
    covering = np.searchsorted(counts, counts[-1] * self.input_percentile / 100)
    return float((covering.astype(np.uint32) << 16).view(np.float32))

  def input_scale(
    self, forms: tuple[WeightFormat, ...], weights: Sequence[jax.Array], index: tuple[int, ...], repeats: int
  ) -> jax.Array:
    """Returns the scales of the inputs, [I], of weights [*J, I, *O] at `index` in a stack or among experts.

    All of these weights read the inputs that this one reads; see `layers/input_scales.py`.
    """
    if self.method == 'smooth':
      return smooth_scales(forms, weights, self._inputs_at('max_abs', index), repeats=repeats)
    inputs = self._inputs_at('sum_abs', index), self._inputs_at('gram', index)
    return awq_scales(forms, weights, *inputs, repeats=repeats)

  def quantize(self, w: jax.Array, index: tuple[int, ...], largest: jax.Array | None) -> dict[str, jax.Array]:
    """Returns the parts of one weight, or of some of its outputs; for `largest`, see `WeightFormat.quantize`."""
    form = self.stored.format
    if self.method == 'gptq':
      return quantize_in_turn(form, w, self._compensation(index), largest)
    return quantize(form, w, largest=largest)

  def _inputs_at(self, part: str, index: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(self.inputs[part][index], jnp.float32)

  @functools.cached_property
  def _compensation(self) -> Any:
    return functools.lru_cache(maxsize=1)(lambda index: compensation(self.inputs['gram'][index]))


def calibrate_weights(
  model: TrainedModel, quantized: BaseModel, calibration: Calibration
) -> dict[Path, CalibratedWeight]:
  """Returns, by path, the weights in few bits whose layers got inputs from the data, with statistics of these inputs.

  Args:
    model: the model with plain weights, on its mesh.
    quantized: the instantiated model with weights in few bits.

  Raises:
    UserError: there is no such dataset, the model cannot be evaluated on it, or inputs have NaN or infinities.
  """
  points: dict[str, _Point] = {}
  stored_by_path: dict[Path, tuple[str, QuantizedWeight]] = {}
  for path, layer, stored in stored_weights(quantized):
    if isinstance(stored, QuantizedWeight):
      point, form = f'{layer.path_name}.{layer.product_weights[path[-1]]}', stored.format
      points[point] = _Point(len(stored.weight.shape) - form.num_inputs - form.num_outputs, form.num_inputs)
      stored_by_path[path] = point, stored
  parts = {'gram'} if calibration.method in ('awq', 'gptq') else set()
  if calibration.input_percentile not in (None, 100):
    parts.add('counts')
  sums = _sum_over_batches(model, calibration, _InputTaps(model.layer, points, parts))
  for path, (point, stored) in stored_by_path.items():
    if not all(np.isfinite(x).all() for x in sums.get(point, {}).values()):
      raise DataError(
        f'the inputs of {path_name(path)} have NaN or infinities in the calibration data, so its values cannot '
        'be chosen by them; name other data by calibration_dataset, or round to nearest'
      )
    if stored.has_input_range and point not in sums:
      raise ConfigError(f'input_percentile: {path_name(path)} met no inputs; leave it out, or use other data')
    if stored.has_input_range and 'counts' in parts:
      counts, percentile = sums[point]['counts'], calibration.input_percentile or 0
      share = 100 * np.max(counts[..., 0] / np.sum(counts, axis=-1))
      if share >= percentile:  # The range would be 0, which makes all inputs zeros.
        raise ConfigError(
          f'input_percentile: {share:.4g} % of the inputs of {path_name(path)} are 0, so {percentile} would give them '
          'no range; choose a larger one, or leave it out'
        )
  return {
    path: CalibratedWeight(stored, calibration.method, sums[point], calibration.input_percentile)
    for path, (point, stored) in stored_by_path.items()
    if point in sums
  }


def _sum_over_batches(
  model: TrainedModel, calibration: Calibration, taps: _InputTaps
) -> dict[str, dict[str, np.ndarray]]:
  """Returns statistics of the inputs of weights, by point (see `layers/base/taps.py`), over all calibration batches.

  The statistics are sums, maxima and, if `taps` collects it, G. Points without data are left out.
  """
  config, wanted = model.config, calibration.dataset
  if wanted is None:
    wanted = next((i for i, data in enumerate(config.datasets) if getattr(data, 'is_training', False)), 0)
  if not config.datasets:
    raise ConfigError('datasets(): there is none to calibrate with; name an experiment that has some by --exp')
  data = find_dataset(config.datasets, wanted)
  tasks = TaskOnMesh(model.tasks.jax_task, model.tasks.mesh, model.tasks.layout, taps)
  step, parts = tasks.taking(data).eval_step, TappedParts()
  with PrefetchIterator(data.reset(), step.put_inputs) as batches:
    for batch in itertools.islice(batches, calibration.num_batches):
      parts.add(step(model.stored_variables, model.key, model.global_step, batch).summaries)
  found: dict[str, dict[str, np.ndarray]] = {}
  for (_, label), of_use in parts.combine().items():
    point = label if label in taps.points else re.sub(r'_\d+$', '', label)  # A repeated call has the suffix _1, _2, ...
    if (before := found.get(point)) is not None:
      of_use = {part: kind_of_part(part).combine_on_host([before[part], x]) for part, x in of_use.items()}
    found[point] = of_use
  return found


class _InputTaps(StepTaps):
  """Taps on the inputs of weights; `parts` may name more sums: 'gram' and 'counts', see `CalibratedWeight`."""

  def __init__(self, model: BaseModel, points: Mapping[str, _Point], parts: Collection[str]):
    super().__init__([], model.abstract_init(), None)
    self.points = points
    self._parts = parts

  def surround(
    self,
    surroundings: Surroundings,
    batch: Mapping[str, jax.Array],
    probed: dict[str, Path] | None = None,
    share: jax.Array | None = None,
  ) -> Surroundings:
    del probed, share  # Only taps on gradients use `probed` and `share`.

    def names_wanted(name: str) -> Sequence[str]:
      return ('inputs',) if name in self.points else ()

    taps = _SummingTaps(
      names_wanted,
      self.seen,
      real_tokens(batch),
      surroundings.manual_axes,
      wants_inputs=True,
      points=self.points,
      parts=self._parts,
    )
    return dataclasses.replace(surroundings, taps=taps)


@dataclasses.dataclass(frozen=True)
class _SummingTaps(Taps):
  """Taps that report sums over the rows of inputs; see `_InputTaps`."""

  points: Mapping[str, _Point] = dataclasses.field(default_factory=dict)
  parts: Collection[str] = ()

  def listen(self, frame: TappedCall, name: str, x: jax.Array) -> None:
    if not self.wanted(name):
      return
    problem = self._problem(frame, x)
    real, unknown = (None, '') if problem else self._entries_that_count(x)
    self.seen[name] = problem or unknown
    if self.seen[name]:
      return
    x = x.astype(jnp.float32) if real is None else jnp.where(real, x.astype(jnp.float32), 0)
    is_real = jnp.broadcast_to(True if real is None else real, x.shape)
    groups, inputs = self.points[name]
    first = x.ndim - groups - inputs
    flat = -1, *x.shape[first : first + groups], math.prod(x.shape[first + groups :])
    x, is_real = x.reshape(flat), is_real.reshape(flat)
    sums = {'sum_abs': jnp.sum(jnp.abs(x), 0), 'max_abs': jnp.max(jnp.abs(x), 0)}
    if 'counts' in self.parts:
      bits = jax.lax.bitcast_convert_type(jnp.abs(x).astype(jnp.bfloat16), jnp.uint16)
      sums['counts'] = _count(bits, is_real)
    if 'gram' in self.parts:
      sums['gram'] = jnp.einsum('n...i,n...j->...ij', x, x, precision='highest')
    for part, value in sums.items():
      frame.add_summary(raw_name(part, (), name), Summary(value, str(kind_of_part(part))))


def _count(bits: jax.Array, is_real: jax.Array) -> jax.Array:
  """Returns how often each number occurs, [*E, 2^15] int32, for bits and their mask, [N, *E, I]."""
  if bits.ndim > 2:
    return jax.vmap(_count, in_axes=1)(bits, is_real)
  return jnp.zeros(1 << 15, jnp.int32).at[bits].add(is_real.astype(jnp.int32))


def describe_uncalibrated(model: BaseModel, found: Mapping[Path, CalibratedWeight]) -> str:
  """Returns a line about weights that are rounded to nearest because they had no inputs in the data; '' without any."""
  stored = [path for path, _, kind in stored_weights(model) if isinstance(kind, QuantizedWeight)]
  missing = [path_name(path) for path in stored if path not in found]
  return f'rounded to nearest, because no inputs were met: {first_names(missing)}' if missing else ''
