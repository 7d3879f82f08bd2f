"""Checks whether a language model computes the same log-probabilities in training, evaluation, decoding and elsewhere.

Each way computes the log-probabilities of the same known texts. They are compared with the log-probabilities of the
training step, token by token. The tolerance is measured: it depends on how much the log-probabilities of this model
change when it computes in bfloat16, and when its weights change by a rounding error. Rounding errors of other dtypes
are assumed to be proportional to their machine epsilon. If a way differs by more, the values between its layers are
compared with those of the reference, and the first layer that differs is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from praxis_lite.common.config import Config, field_names, nested_configs
from praxis_lite.common.errors import ConfigError, UserError, first_line
from praxis_lite.common.figures import format_axes, number_of
from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs.rows import Rows
from praxis_lite.layers.attention_spec import FUSED_ATTENTION
from praxis_lite.models import EncoderDecoderModel, LanguageModel
from praxis_lite.runs.forced_tokens import KnownTexts, batch_texts, change_model, decode_texts
from praxis_lite.runs.layer_values import (
  PointValues,
  first_layer_difference,
  values_in_decoding,
  values_on_mesh,
)
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.scoring import score_rows
from praxis_lite.runs.trained import TrainedModel

LogProbs = Sequence[np.ndarray]  # [n] for each text of n tokens; a masked array if a way skips tokens.
PAGE_SIZE = 8  # Cache slots in a page: so few that short texts take several pages.


class Way(NamedTuple):
  """A way to compute log-probabilities of known texts.

  Attributes:
    compute: returns an array [n] for each continuation, with the log-probabilities of its n tokens. Masked tokens are
      not compared.
    values: returns the values between the layers, by point; None if the way cannot record them.
    is_exact: whether the way computes in float32, whatever the dtype of the model.
    cache_dtype: the dtype of its caches; None if it is the dtype in which the way computes.
  """

  name: str
  compute: Callable[[], LogProbs]
  values: Callable[[], dict[str, PointValues]] | None = None
  is_exact: bool = False
  cache_dtype: str | None = None


class WayResult(NamedTuple):
  """The result of comparing a way with the reference.

  Attributes:
    num_tokens: how many tokens were compared. If there were none, a way that is checked counts as wrong.
    difference: the largest difference of log-probabilities, in nats; infinity if one is not finite.
    tolerance: the largest difference that counts as equal; None if the way is shown but not checked.
    first: (text, index) of the first token that differs; None if none does.
    layer: the first layer that differs, in words, or why no layer is named; '' if no token differs.
    problem: why the way was not compared; '' if it was.
  """

  name: str
  num_tokens: int = 0
  difference: float = 0.0
  tolerance: float | None = None
  first: tuple[int, int] | None = None
  layer: str = ''
  problem: str = ''

  @property
  def is_right(self) -> bool:
    return self.first is None and (self.tolerance is None or self.num_tokens > 0)


class Agreement:
  """Compares ways with the training step of a model.

  Args:
    texts: what to compare; see `texts_of_batch`.

  Attributes:
    model: the user's model without label smoothing, and with experts that have room for all tokens.
    exact: the same model, but computing in float32.
    drops_tokens: whether experts of the user's model skip tokens beyond their capacity; `model` skips no tokens.
    note: how the reference differs from the training step; '' if it does not.
    reference, exact_reference: the log-probabilities of each continuation in the training step, in `dtype` and in
      float32.
    rounding: the largest change of a log-probability from computing in bfloat16 instead of float32, in nats.
    rounding_of_dtype: the largest change from computing in `dtype` instead of float32.
    sensitivity: the largest change of a log-probability when weights change by a rounding error of float32, in nats.

  Raises:
    ConfigError: the model is not a language model.
    UserError: log-probabilities of the training step are not finite.
  """

  def __init__(self, model: TrainedModel, texts: KnownTexts):
    if (limits := model.layer.score_limits()) is None:
      raise ConfigError(f'agree: needs a language model; this model is a {type(model.layer).__name__}')
    self.limits, self.texts = limits, texts
    self.model = change_model(model, _make_comparable)
    self.drops_tokens = any(map(_has_capacity, nested_configs(model.config.task.model)))
    self.dtype = np.dtype(jnp.dtype(self.model.layer.fprop_dtype)).name
    self.exact = self.model if self.dtype == 'float32' else change_model(self.model, _compute_in_float32)
    self.note = ''
    self.reference = self.score_training(self.model)
    _check_finite(self.reference, 'the training step')
    self.exact_reference = self.reference if self.exact is self.model else self.score_training(self.exact)
    _check_finite(self.exact_reference, 'the training step in float32')
    rounded = change_model(self.exact, lambda task: _set_everywhere(task, 'fprop_dtype', 'bfloat16'))
    in_bfloat16 = self.reference if self.dtype == 'bfloat16' else self.score(rounded)
    _check_finite(in_bfloat16, 'an evaluation in bfloat16')  # Infinities would make the tolerance infinite.
    self.rounding = largest_difference(in_bfloat16, self.exact_reference)
    self.sensitivity = self._measure_sensitivity()
    self.rounding_of_dtype = largest_difference(self.reference, self.exact_reference)

  # ---------------------------------------------------------------- ways

  def list_ways(self, cache_dtype: str | None = None) -> list[Way]:
    """Returns the built-in ways to compute log-probabilities; `cache_dtype` adds decoding with caches of this dtype."""
    plain, exact, in_float32 = self.model, self.exact, self.exact is not self.model
    ways = [Way('one pass, as in evaluation', partial(self.score, plain), partial(self.values_in_one_pass, plain))]
    if in_float32:
      ways.append(self._way_of_decoding('cached decoding', plain, is_exact=False))
    suffix = ', in float32' if in_float32 else ''
    ways.append(self._way_of_decoding(f'cached decoding{suffix}', exact))
    if has_field(exact.config.task.model, 'cache_page_size'):
      paged = change_model(exact, lambda task: _set_everywhere(task, 'cache_page_size', PAGE_SIZE))
      ways.append(self._way_of_decoding(f'decoding in pages of {PAGE_SIZE} slots{suffix}', paged))
    if cache_dtype is not None:
      stored = change_model(exact, lambda task: _set_everywhere(task, 'cache_dtype', cache_dtype))
      way = self._way_of_decoding(f'decoding with {cache_dtype} caches{suffix}', stored)
      ways.append(way._replace(cache_dtype=cache_dtype))
    name, values = f'a batcher, contexts in chunks of 8{suffix}', partial(self._values_in_decoding, exact, True, 8)
    ways.append(Way(name, partial(batch_texts, exact, self.texts, chunk=8), values, is_exact=True))
    if self.model.tasks.mesh.size > 1:
      alone = move_to_one_device(exact)
      name, values = f'one pass on one device{suffix}', partial(self.values_in_one_pass, alone)
      ways.append(Way(name, partial(self.score, alone), values, is_exact=True))
    return ways

  def _way_of_decoding(self, name: str, model: TrainedModel, is_exact: bool = True) -> Way:
    values = partial(self._values_in_decoding, model, False, None)
    return Way(name, partial(decode_texts, model, self.texts), values, is_exact=is_exact)

  # ---------------------------------------------------------------- computing

  def score(self, model: TrainedModel) -> LogProbs:
    """Returns the log-probabilities that an evaluation of `model` computes for the texts."""
    return self.score_with(lambda rows: model._run_by_rows(model.tasks, rows, lambda task: task.score_step).predictions)

  def score_with(self, run: Callable[[Rows], dict[str, np.ndarray]]) -> LogProbs:
    """Returns the log-probabilities that `run` computes for a batch with all texts."""
    scores = score_rows(self.limits, lambda: None, *self.texts, len(self.texts.contexts), run)
    return [score.log_probs for score in scores]

  def score_training(self, model: TrainedModel) -> LogProbs:
    """Returns the log-probabilities of a training step.

    If it has none, returns those of evaluation; `note` says why.
    """

    def run(batch: Rows) -> dict[str, np.ndarray]:
      return model._run_by_rows(model.tasks, batch, lambda task: task.score_training_step).predictions

    own = getattr(type(model.layer), 'compute_predictions', None)
    if own not in (LanguageModel.compute_predictions, EncoderDecoderModel.compute_predictions):
      self.note = f'as in evaluation: a {type(model.layer).__name__} trains on other batches'
      return self.score(model)
    try:
      return self.score_with(run)
    except ConfigError as error:
      if 'draws random numbers' not in str(error):
        raise
      self.note = f'without random numbers, as in evaluation: {first_line(error).partition(" draws")[0]} draws some'
    return self.score(model)

  def batch(self) -> Rows:
    """Returns the texts as one batch, in their order, padded to the longest one."""
    batches: list[Rows] = []

    def keep(batch: Rows) -> dict[str, np.ndarray]:
      batches.append(batch)
      return {'log_probs': np.zeros(batch['ids'].shape), 'is_greedy': np.zeros(batch['ids'].shape, bool)}

    self.score_with(keep)
    (batch,) = batches
    contexts = [[0]] * len(self.texts.contexts) if self.limits.start_id is not None else self.texts.contexts
    lengths = [len(context) + len(more) - 1 for context, more in zip(contexts, self.texts.continuations)]
    rows = np.argsort(np.argsort(lengths, kind='stable'))  # The rows of `batch` are in order of length.
    width = batch['ids'].shape[1]
    return {
      name: x[rows, : max(lengths)] if x.shape[1:] == (width,) and 'source' not in name else x[rows]
      for name, x in batch.items()
    }

  def values_in_one_pass(self, model: TrainedModel) -> dict[str, PointValues]:
    """Returns the values between the layers in one pass of a model over all texts, on its mesh."""
    return values_on_mesh(model, self.batch())

  def _values_in_decoding(self, model: TrainedModel, can_go_back: bool, chunk: int | None) -> dict[str, PointValues]:
    starts = [1 if self.limits.start_id is not None else len(context) for context in self.texts.contexts]
    return values_in_decoding(model, self.batch(), starts, can_go_back=can_go_back, chunk=chunk)

  # ---------------------------------------------------------------- comparing

  def tolerance_of(self, way: Way) -> float:
    """Returns the largest difference that rounding can explain, in nats."""
    narrowest = way.cache_dtype or ('float32' if way.is_exact else self.dtype)
    largest = max(float(np.max(np.abs(x), initial=1.0)) for x in self.exact_reference)
    scaled = self.rounding * _epsilon(narrowest) / _epsilon('bfloat16')
    return max(4 * scaled, 8 * self.sensitivity, 32 * largest * _epsilon('float32'))

  def _measure_sensitivity(self) -> float:
    """Returns the largest change of a log-probability, in nats, if weights change by a rounding error of float32."""
    expected, stored = self.score(self.exact), self.exact.stored_variables
    floats = [x.dtype for x in jax.tree.leaves(stored) if jnp.issubdtype(x.dtype, jnp.floating)]
    coarsest = max((_epsilon(dtype.name) for dtype in floats), default=_epsilon('float32'))
    found = [self.score(dataclasses.replace(self.exact, stored_variables=_perturb(stored, seed))) for seed in range(2)]
    for log_probs in (expected, *found):
      _check_finite(log_probs, 'an evaluation in float32')
    return max(largest_difference(expected, x) for x in found) * _epsilon('float32') / coarsest

  def compare(self, way: Way) -> WayResult:
    """Computes a way, and compares it with the reference."""
    expected = self.exact_reference if way.is_exact else self.reference
    try:
      found = way.compute()
    except UserError as error:
      return WayResult(way.name, problem=first_line(error))
    tolerance = self.tolerance_of(way)
    count = sum(int(np.ma.count(x)) for x in found)
    first = _first_token(expected, found, tolerance)
    compared = WayResult(way.name, count, largest_difference(expected, found), tolerance)
    if first is None:
      return compared
    row, token = first
    start = 0 if self.limits.start_id is not None else len(self.texts.contexts[row])
    return compared._replace(first=(row, start + token), layer=self._layer(way))

  def _layer(self, way: Way) -> str:
    """Returns, in words, the first layer whose values differ between a way to compute and the reference.

    Returns why no layer is named if none can be.
    """
    if way.values is None:
      return 'its layers cannot be compared'
    reference = self.values_in_one_pass(self.exact if way.is_exact else self.model)
    epsilon = _epsilon('float32' if way.is_exact else self.dtype)
    try:
      difference = first_layer_difference(reference, way.values(), (self.batch()['weights'] > 0).sum(1), 128 * epsilon)
    except UserError as error:
      return f'its layers cannot be compared: {first_line(error)}'
    return 'no layer alone: what is around the layers' if difference is None else str(difference)


def largest_difference(expected: LogProbs, found: LogProbs) -> float:
  """Returns the largest difference of log-probabilities; infinity if one is not finite, or if there are no tokens."""
  differences = np.concatenate([x[~np.isnan(x)] for x in _differences(expected, found)])
  return float(np.max(differences)) if len(differences) else float('inf')


def _first_token(expected: LogProbs, found: LogProbs, tolerance: float) -> tuple[int, int] | None:
  pairs = enumerate(_differences(expected, found))
  differs = [(row, int(i)) for row, difference in pairs for i in np.flatnonzero(difference > tolerance)]
  return min(differs, key=lambda at: at[::-1], default=None)


def _differences(expected: LogProbs, found: LogProbs) -> Iterator[np.ndarray]:
  """Yields the differences of each text, [n] for n tokens: infinity if not finite, and NaN for masked tokens."""
  for a, b in zip(expected, found, strict=True):
    with np.errstate(invalid='ignore'):
      difference = np.abs(np.ma.getdata(a) - np.ma.getdata(b))
    yield np.where(np.ma.getmaskarray(b), np.nan, np.where(np.isfinite(difference), difference, np.inf))


def _check_finite(log_probs: LogProbs, where: str) -> None:
  """Raises UserError if a log-probability of the reference is not finite."""
  for row, text in enumerate(log_probs):
    if len(wrong := np.flatnonzero(~np.isfinite(text))):
      raise UserError(
        f'agree: nothing can be compared: the log-probability of token {wrong[0]} of the continuation of text {row} '
        f'is {text[wrong[0]]} in {where}; `praxis-lite replay` shows where such values come from'
      )


def _perturb(stored: NestedDict, seed: int) -> NestedDict:
  """Returns variables on the same devices, with each number changed by one machine epsilon, up or down at random."""

  def change(variables: NestedDict) -> NestedDict:
    leaves, structure = jax.tree.flatten(variables)
    for i, x in enumerate(leaves):
      if jnp.issubdtype(x.dtype, jnp.floating):
        signs = jax.random.rademacher(jax.random.fold_in(jax.random.key(seed), i), x.shape, x.dtype)
        leaves[i] = x * (1 + signs * jnp.finfo(x.dtype).eps)
    return jax.tree.unflatten(structure, leaves)

  return jax.jit(change, out_shardings=jax.tree.map(lambda x: x.sharding, stored))(stored)


def _epsilon(dtype: str) -> float:
  """Returns the machine epsilon of a dtype; for int8, the spacing of numbers relative to the largest one."""
  return 1 / 127 if dtype == 'int8' else float(jnp.finfo(dtype).eps)


# ---------------------------------------------------------------- changes of a model


def _compute_in_float32(task: Config) -> None:
  """Makes a task compute in float32, without fused kernels."""
  _set_everywhere(task, 'fprop_dtype', 'float32')
  for config in nested_configs(task.model):
    if getattr(config, 'implementation', None) in FUSED_ATTENTION:
      config.implementation = 'dense'


def _set_everywhere(task: Config, field: str, value: object) -> None:
  """Sets a field in all configs of a model that have it.

  `fprop_dtype` is always set in `task.model`. In other configs, None stays: it means the dtype of the layer above.
  """
  for config in nested_configs(task.model):
    if field in (field_names(config) or ()) and (field != 'fprop_dtype' or config.fprop_dtype is not None):
      setattr(config, field, value)
  if field == 'fprop_dtype':
    task.model.fprop_dtype = value


def _make_comparable(task: Config) -> None:
  """Removes label smoothing from a task, and gives its experts room for all tokens, as in decoding."""
  for config in nested_configs(task.model):
    if getattr(config, 'label_smoothing', 0):
      config.label_smoothing = 0.0
    if _has_capacity(config):
      config.capacity_factor = float(config.num_experts)


def _has_capacity(config: Config) -> bool:
  """Whether a config describes experts that skip tokens beyond their capacity."""
  return getattr(config, 'dispatch', None) == 'capacity' and isinstance(getattr(config, 'num_experts', None), int)


def has_field(model: Config, field: str) -> bool:
  """Whether a config, or a config nested in it, has a field."""
  return any(field in (field_names(config) or ()) for config in nested_configs(model))


def move_to_one_device(model: TrainedModel) -> TrainedModel:
  """Returns the model on the first device of its mesh."""
  mesh = model.tasks.mesh
  one = Mesh(mesh.devices.reshape(-1)[:1].reshape((1,) * mesh.devices.ndim), mesh.axis_names)
  tasks = TaskOnMesh.make_for_inference(model.tasks.jax_task, one)
  variables = tasks.layout.mdl_vars.to_mesh(model.variables)
  return dataclasses.replace(model, tasks=tasks, stored_variables=variables, global_step=jnp.int32(model.step))


# ---------------------------------------------------------------- the table


def format_result(agreement: Agreement, compared: WayResult | None = None) -> str:
  """Returns a comparison as a line of the table.

  Without a comparison, returns the table's head, and the reference's line.
  """
  if compared is None:
    texts, tokens = number_of(len(agreement.texts.contexts), 'text'), number_of(agreement.texts.num_tokens, 'token')
    mesh = f'{agreement.dtype}, mesh {format_axes(agreement.model.tasks.mesh.shape)}'
    head = f'log-probabilities of {tokens} in {texts}, in nats; {mesh}'
    measured = f'bfloat16 changes {agreement.rounding:.1e}, other last bits of weights {agreement.sensitivity:.1e}'
    why = f'tolerance: what rounding explains; measured: {measured}'
    columns = _row('way', 'tokens', 'largest difference', 'tolerance', '')
    reference = _row('training step', str(agreement.texts.num_tokens), '', '', 'the reference')
    note = f'note: the training step {agreement.note}' if agreement.note else ''
    return '\n'.join(filter(None, [head, why, note, columns, reference]))
  if compared.problem:
    return _row(compared.name, '-', '', '', f'not compared: {compared.problem}')
  figures = str(compared.num_tokens), f'{compared.difference:.1e}'
  if compared.tolerance is None:
    return _row(compared.name, *figures, '', 'for information')
  result = 'ok' if compared.is_right else 'WRONG: it computed none of these tokens'
  if compared.first is not None:
    row, token = compared.first
    result = f'DIFFERS from token {token} of text {row}; first in {compared.layer}'
  return _row(compared.name, *figures, f'{compared.tolerance:.1e}', result)


def _row(name: str, tokens: str, difference: str, tolerance: str, result: str) -> str:
  return f'{name:<46} {tokens:>6}  {difference:>18}  {tolerance:>9}  {result}'.rstrip()
