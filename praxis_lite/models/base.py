"""BaseModel: a layer that computes a loss from a batch, and continuations from prompts.

A batch is a dict of arrays with the batch as dimension 0. Its leaf `weights`, [B] or [B, T], is the weight of each
example or token. Weight zero marks padding, which must not influence anything, including statistics.

B batch, T length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError, did_you_mean
from praxis_lite.common.figures import number_of
from praxis_lite.common.mistakes import missing_return_hint
from praxis_lite.common.trees import NestedDict, Path, leaves_by_path, path_name
from praxis_lite.common.weighted import WeightedScalars
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.growth import Counterpart
from praxis_lite.layers.position_limit import PositionLimit
from praxis_lite.models.labels import IdLimit, check_labels, labels_in, number_of_classes
from praxis_lite.models.model_edits import ModelEdits
from praxis_lite.models.mup import build_counterpart

PredictionsT = TypeVar('PredictionsT')


class PromptLimits(NamedTuple):
  """What `LanguageModel.decode` accepts when one compiled program continues prompts of different lengths."""

  max_tokens: int  # The largest number of tokens that the model's config allows after a prompt.
  stop_ids: tuple[int, ...]  # Tokens that end a continuation.
  context: int | None  # How many of the last tokens the model sees at once; None means all.
  # (tokens of a prompt, tokens to add) -> None; raises a `ConfigError` if the model cannot decode this number of
  # tokens.
  check_fits: Callable[[int, int], None]
  # (rows, token slots in each row) -> the bytes of the decode state, such as caches.
  state_bytes: Callable[[int, int], int]


class ScoreLimits(NamedTuple):
  """What the `score` method of a model accepts: see `LanguageModel.score`."""

  vocab_size: int  # V; labels are from 0 to V - 1.
  max_positions: int | None  # The largest number of tokens in a row; None means any number.
  takes_prefixes: bool  # Whether a batch has `prefix_lengths`, [B] int32.
  # For an encoder-decoder: the token of `ids` that comes before a continuation. Contexts are then in `source_ids` and
  # `source_segment_ids`, [B, S]. None means that a row of `ids` holds both a context and its continuation.
  start_id: int | None = None
  source_end_id: int | None = None  # The token that ends a source; None means that there is no such token.


class FrozenVariables(NamedTuple):
  """Variables that must keep their values. They have no gradients, but the learner's weight decay would change them."""

  paths: frozenset[Path]  # Paths of the variables.
  field: str  # A field of the learner.
  value: str  # The regex that this field must contain to exclude the variables.
  reason: str  # Why they must keep their values: the end of the message '<a variable> would be trained, but ...'.


class BaseModel(Layer, Generic[PredictionsT]):
  """The model that a task trains. Subclasses define `compute_predictions`, `compute_loss` and, optionally, `decode`.

  Attributes:
    adapters: one or several configs of adapters, such as `Lora`, for layers below the model. Each layer gets the first
      one that matches it. `add_adapters` sets this field.
    quantized: one or several configs of `QuantizedWeights`. Each layer gets the first one that matches it.
      `quantize_weights` sets this field.
    mup: config of a `Mup`, which names a smaller model whose training hyperparameters are transferred to this one; None
      disables it.
  """

  adapters: Config | tuple[Config, ...] = ()
  quantized: Config | tuple[Config, ...] = ()
  mup: Config | None = None

  # Whether `decode` writes a separate text for each prompt, such as a translation, instead of continuing it.
  prompts_are_sources: ClassVar[bool] = False
  # Whether the network also reads images, sound or sources. If so, a plan counts the FLOPs in the program of a step,
  # instead of using a formula for each token in `ids`.
  has_work_besides_ids: ClassVar[bool] = False
  # Children whose weights are quantized only if a regex matches their paths.
  plain_children: ClassVar[tuple[str, ...]] = ()

  def _child_edits(self) -> ModelEdits | None:
    if not (self.adapters or self.quantized):
      return None
    return ModelEdits(self.path, self.path_name, self.adapters, self.quantized, self.plain_children)

  def _smaller_model(self) -> Counterpart | None:
    return None if self.mup is None else build_counterpart(self, self.mup)

  @property
  def total_num_params(self) -> int:
    """The number of parameters, including moving statistics."""
    return sum(weight.num_params for weight in jax.tree.leaves(self.abstract_init()))

  @property
  def active_num_params(self) -> int:
    """The number of parameters that one token uses; an expert counts only if the token is sent to it."""
    return sum(weight.num_active for weight in jax.tree.leaves(self.abstract_init()))

  def compute_predictions(self, batch: NestedDict) -> PredictionsT:
    """Returns the inputs of the loss, such as logits: any tree of arrays."""
    raise ConfigError(f'task.model: {type(self).__name__} has no method compute_predictions(batch); define it')

  def compute_loss(self, predictions: PredictionsT, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns (metrics, per-example outputs), given the result of `compute_predictions` for the same batch.

    Metrics are (mean, weight) by name; they include `loss`, which is minimized. Per-example outputs are a dict of
    arrays with the batch as dimension 0.
    """
    raise ConfigError(f'task.model: {type(self).__name__} has no method compute_loss(predictions, batch); define it')

  def __call__(self, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns metrics and per-example outputs of `compute_loss` for a batch, whose padding may hold any numbers."""
    batch = _make_padding_finite(batch)
    predictions = self.compute_predictions(batch)
    if predictions is None:
      raise ConfigError(f'{_method_name(self, "compute_predictions")} {missing_return_hint(self.compute_predictions)}')
    return checked_outputs(self, self.compute_loss(predictions, batch))

  def predict(self, batch: NestedDict) -> Any:
    """Returns what a user of the trained model wants to know: a tree of arrays with the batch as dimension 0.

    By default this is the result of `compute_predictions`. Override it if the predictions need the labels, or contain
    more than a user wants.
    """
    return self.compute_predictions(batch)

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `UserError` if this model cannot use the input `data`; `batch` is its first batch, in NumPy arrays.

    Called on the host before anything is compiled. It finds errors that shapes do not show, such as ids out of bounds,
    for which JAX silently reads another entry. If the arrays of an input are in memory, `batch` contains all its rows.

    By default it checks labels, if `number_of_classes` finds the number of classes. Labels are integer arrays named
    `y`, or with `label` or `target` in their name; those of weight zero are not checked.
    """
    if (classes := number_of_classes(self)) is not None:
      remedy = '; a model whose loss ignores such labels has a check_input(data, batch) of its own'
      check_labels(data, labels_in(batch), batch, *classes, remedy)

  @property
  def frozen_variables(self) -> FrozenVariables | None:
    """The variables that a learner must not train, or None if it may train all; building a task checks this."""
    return None

  def decode(self, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns (metrics, decoded outputs); the outputs are a dict of arrays with the batch as dimension 0.

    Raises:
      ConfigError: this model does not decode.
    """
    raise ConfigError(f'task.model: {type(self).__name__} has no method decode(batch), so it cannot decode')

  @property
  def num_ids(self) -> int | None:
    """The vocabulary size V if batches have `ids` [B, T], which a trained model checks against V; otherwise None."""
    return None

  def id_limits(self) -> dict[str, IdLimit]:
    """Returns which integers are valid in the arrays of a batch that index a table of the model, by the array's name.

    A trained model checks these arrays before it computes a batch. It checks `ids` by `num_ids` instead.
    """
    return {}

  def position_limits(self) -> dict[str, PositionLimit]:
    """Returns how many positions the model has, by the name of an array of positions in a batch, such as `segment_pos`.

    The result has no entry for arrays that the model does not read, or whose positions have no limit. `check_positions`
    uses these limits.
    """
    return {}

  def score_limits(self) -> ScoreLimits | None:
    """Returns what `score` accepts; None if the model has no `score`."""
    return None

  def most_prompt_tokens(self) -> int | None:
    """Returns the most tokens that a prompt may have, for a model with its own `decode`; None if there is no limit."""
    return None

  def prompt_limits(self) -> PromptLimits | None:
    """Returns the limits of prompts, if one program decodes prompts of all lengths.

    None means that a program is compiled for each length.
    """
    return None

  def _leaf(self, batch: NestedDict, name: str) -> jax.Array:
    """Returns an array of a batch; raises DataError if it is missing."""
    if name not in batch:
      raise DataError(
        f'{self.path_name}: the batch has no leaf {name!r}.{did_you_mean(name, batch)} Its leaves: {", ".join(batch)}'
      )
    return batch[name]


def _make_padding_finite(batch: NestedDict) -> NestedDict:
  """Replaces NaN and infinities in rows of weight 0 by 0, because the gradient of 0 times NaN is NaN.

  Args:
    batch: arrays, and `weights`, [B, ...]; a row counts if any of its weights is not 0. If there are no weights, all
      rows count. Arrays whose first dimension is not B are returned unchanged.
  """
  weights = batch.get('weights')
  if weights is None:
    return batch

  def clear(x: jax.Array) -> jax.Array:
    if x is weights or jnp.shape(x)[:1] != weights.shape[:1] or not jnp.issubdtype(x.dtype, jnp.inexact):
      return x
    is_padding_B = jnp.all(weights == 0, axis=range(1, weights.ndim))
    return jnp.where(jnp.expand_dims(is_padding_B, range(1, x.ndim)) & ~jnp.isfinite(x), 0, x)

  return jax.tree.map(clear, batch)


def checked_predictions(model: BaseModel, predictions: Any, rows: int) -> Any:
  """Returns the result of `predict` for `rows` examples.

  Raises:
    ConfigError: the result is None, or an array in it does not have the batch as dimension 0.
  """
  if predictions is None:
    raise ConfigError(f'{_method_name(model, "predict")} {missing_return_hint(model.predict)}')
  for path, x in leaves_by_path(predictions).items():
    if jnp.shape(x)[:1] != (rows,):
      raise ConfigError(
        f'task.model: of {number_of(rows, "example")}, {type(model).__name__} predicts {path_name(path) or "an array"} '
        f'of shape {jnp.shape(x)}; predict(batch) takes a whole batch, and returns only arrays with the batch as '
        'dimension 0'
      )
  return predictions


def checked_outputs(
  model: BaseModel, outputs: Any, rows: int | None = None, method: str = 'compute_loss'
) -> tuple[WeightedScalars, NestedDict]:
  """Checks and returns the result of a method of a model: (metrics, per-example or decoded outputs).

  Raises:
    ConfigError: the result is not a pair of dicts, a metric is not a pair (mean, weight), there is no scalar `loss`, or
      dimension 0 of an output is not `rows`.
  """
  where = _method_name(model, method)
  second = 'decoded outputs' if method == 'decode' else 'per-example outputs'
  if not (isinstance(outputs, tuple) and len(outputs) == 2 and all(isinstance(part, dict) for part in outputs)):
    raise ConfigError(
      f'{where} returned {_describe(outputs)}; it must return two dicts, metrics and {second}, as in '
      "return {'loss': weighted_mean(losses, batch['weights'])}, {}"
    )
  metrics, by_row = outputs
  for name in (*metrics, *by_row):
    if not isinstance(name, str):
      raise ConfigError(f'{where}: the names of metrics and outputs must be strings, got {name!r}')
  pairs: WeightedScalars = {}
  for name, metric in metrics.items():
    if not (isinstance(metric, tuple | list) and len(metric) == 2 and all(map(_is_number, metric))):
      raise ConfigError(
        f'{where}: the metric {name!r} is {_describe(metric)}; it must be a pair (mean, weight), as '
        "weighted_mean(values, batch['weights']) returns, or (mean, number of examples)"
      )
    mean, weight = pairs[name] = jnp.asarray(metric[0]), jnp.asarray(metric[1])
    if name == 'loss' and (mean.shape, weight.shape) != ((), ()):
      raise ConfigError(
        f'{where}: the loss is {_describe(mean)} with a weight of {_describe(weight)}; both must be scalars, as '
        "weighted_mean(losses, batch['weights']) returns"
      )
  if method == 'compute_loss' and 'loss' not in metrics:
    raise ConfigError(
      f"{where}: there is no 'loss' among the metrics ({', '.join(metrics) or 'none'}). "
      "Training minimizes it; add 'loss': weighted_mean(losses, batch['weights'])"
    )
  for path, x in leaves_by_path(by_row, is_leaf=lambda x: x is None).items():
    size = jnp.shape(x)[:1] if _is_number(x) else ()
    if not size or rows not in (None, *size):
      here = '' if rows is None else f', of {rows} here'
      remedy = '; a scalar is a metric' if _is_number(x) and not size else ''
      raise ConfigError(
        f'{where}: {path_name(path)} is {_describe(x)}; the second dict, {second}, has only arrays with the batch as '
        f'dimension 0{here}{remedy}'
      )
  return pairs, by_row


def check_is_trained(
  model: BaseModel, loss: jax.Array, weight: jax.Array, trained: NestedDict, name: str = 'loss'
) -> None:
  """Raises ConfigError if the loss does not depend on any trained variable; to be called inside `jax.grad`.

  `name` is the name of the loss among the metrics.

  There, a value that depends on a trained variable is a tracer of the same class as the variable. Other values are
  constants for the gradient. `name` is the metric that is the loss.
  """
  kinds = tuple({type(x) for x in jax.tree.leaves(trained) if isinstance(x, jax.core.Tracer)})
  if not kinds or isinstance(loss, kinds):
    return
  where, remedy = _method_name(model, 'compute_loss'), 'leave out stop_gradient, rounding, comparisons and integers'
  if isinstance(weight, kinds):
    remedy = 'its weight does, so the pair seems to be reversed: it is (mean, weight)'
  what = 'the loss depends on no variable that is trained'
  if name != 'loss':
    what = f"the metric {name!r}, the loss of a rule, depends on none of the rule's variables"
  raise ConfigError(f'{where}: {what}, so its gradient is zero; {remedy}')


def _method_name(model: BaseModel, method: str) -> str:
  return f'task.model: {type(model).__name__}.{method}'


def _is_number(value: Any) -> bool:
  """Whether a value is an array, or a number that can become one."""
  return isinstance(value, jax.Array | np.ndarray | np.generic | int | float)


def _describe(value: Any) -> str:
  """Returns a description for messages: dtype and shape of an array, parts of a tuple, or names in a dict."""
  if hasattr(value, 'dtype') and hasattr(value, 'shape'):
    return f'{value.dtype}{list(value.shape)}' if value.shape else f'a {value.dtype} scalar'
  if isinstance(value, tuple | list):
    return f'({", ".join(map(_describe, value))})'
  if isinstance(value, dict):
    return f'a dict of {", ".join(map(str, value)) or "nothing"}'
  return 'None' if value is None else repr(value)
