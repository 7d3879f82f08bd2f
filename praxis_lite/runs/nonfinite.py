"""Handles steps whose loss or gradient is not finite: reports them, decides when there are too many, and finds hints.

step 3: the loss or a gradient is not finite (loss nan, grad_norm nan); the update was skipped
steps 3 to 12: 10 updates in a row were skipped
step 15: finite again, after 12 updates in a row were skipped
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import NestedDict, leaves, path_name
from praxis_lite.inputs import BaseInput
from praxis_lite.models import BaseModel
from praxis_lite.models.labels import labels_in
from praxis_lite.runs.records.metrics import DeviceMetrics

# The name of a metric of the learner: 1 if a step's update was skipped because the loss or a gradient was not finite.
SKIPPED = 'skipped'
_LIMIT = 'task.train.max_skipped_steps'


class NonFiniteError(UserError):
  """The loss or a gradient was not finite.

  If the learner is set to raise, one such step suffices. Otherwise, this is raised after too many such steps in a row,
  or at the end of a run that ends with such steps, if these are more than half of all steps of this process.
  """


class Hints(NamedTuple):
  """Hints in a batch about why a step was not finite.

  Attributes:
    found: what is wrong with the batch, as a sentence without a full stop; '' if nothing is known to be wrong.
    integers: the ranges of its integers, because some may be labels of classes that do not exist; '' if all labels are
      known to be valid, or there are no integers.
  """

  found: str = ''
  integers: str = ''


@dataclasses.dataclass(eq=False)
class SkippedSteps:
  """The steps that the learner has skipped in a row, and the lines about them.

  Attributes:
    limit: how many skipped steps in a row end the run; None or 0 accepts any number.
    clip: the limit of the gradient norm, `clip_gradient_norm_to_value` of the learner; 0 for none.
    tell: called at the first of the steps skipped in a row, with its number and with what was wrong.
    rate_field: the path of the learning rate in the config of the learner.
    in_a_row: how many steps have been skipped since the last step that was taken.
  """

  first_step: int
  limit: int | None
  raises: bool
  clip: float
  line: Callable[[str], object]
  tell: Callable[[int, str], object] | None = None
  rate_field: str = 'learning_rate'
  in_a_row: int = 0

  def __post_init__(self) -> None:
    self._step = self.first_step
    self._cause = ''

  @property
  def too_many(self) -> bool:
    """Whether the number of steps skipped in a row has reached `limit`; False without a limit."""
    return 0 < (self.limit or 0) <= self.in_a_row

  @property
  def most_steps(self) -> bool:
    """Whether the latest steps, skipped in a row, are more than half of this process's steps; False without `limit`."""
    return bool(self.limit) and 2 * self.in_a_row > self._step - self.first_step

  def add(self, step: int, metrics: DeviceMetrics) -> bool:
    """Waits for the metrics of the next step, and returns whether that step was skipped.

    Raises NonFiniteError if it was skipped and the learner is set to raise.
    """
    self._step = step
    if SKIPPED not in metrics:
      jax.block_until_ready(metrics)
      return False
    if not float(np.asarray(metrics[SKIPPED][0])) > 0:
      if self.in_a_row > 1:
        self.line(f'step {step}: finite again, after {self.in_a_row} updates in a row were skipped')
      self.in_a_row = 0
      return False
    self.in_a_row += 1
    if self.in_a_row == 1:
      found = ', '.join(_not_finite(metrics))
      self._cause = f' ({found})' if found else ''
    what = f'step {step}: the loss or a gradient is not finite{self._cause}'
    if self.in_a_row == 1 and self.tell is not None:
      self.tell(step, what)
    if self.raises:
      raise NonFiniteError(
        f'{what}, and task.train.learner is set to raise; {self._smaller_updates}, or let it skip such steps. The '
        'checkpoints before this step are kept'
      )
    if self.in_a_row == 1:
      self.line(f'{what}; the update was skipped')
    elif math.log10(self.in_a_row).is_integer():
      self.line(f'steps {self._since} to {step}: {self.in_a_row} updates in a row were skipped')
    return True

  @property
  def _smaller_updates(self) -> str:
    """Advice on how to make updates smaller, for messages."""
    clip = f'task.train.learner.clip_gradient_norm_to_value{f", which is {self.clip:g}" if self.clip else ""}'
    return f'lower task.train.learner.{self.rate_field}, or {"lower" if self.clip else "set"} {clip}'

  @property
  def _since(self) -> int:
    """The number of the first of the steps skipped in a row."""
    return self._step - self.in_a_row + 1

  def error(self, hints: Hints) -> NonFiniteError:
    """Returns the error that ends the run once its state is saved; `hints` are about the cause."""
    since, untrained = self._since, self._since == 1
    labels = f'labels out of range of the classes (the last batch has {hints.integers}), ' if hints.integers else ''
    if untrained:
      kept = 'the variables are still those that the run started from'
      likely = f'{labels}data that is not finite, or a loss that is not finite for it'
    else:
      kept = f'the variables are still those of step {since - 1}'
      likely = f'a learning rate that is too high, {labels}or data that is not finite'
    smaller = f'{self._smaller_updates}; to begin anew, name another --job_log_dir'
    remedy = 'correct the data or the loss' if untrained else smaller
    return NonFiniteError(
      f'from step {since} on, the loss or a gradient was not finite{self._cause}, so all {self.in_a_row} updates '
      f'up to step {self._step} were skipped. {hints.found or f"Likely causes: {likely}"}. What to do: {remedy}. '
      f'Step {self._step} is saved, and {kept}. {_LIMIT} = {self.limit} says how many steps in a row may be skipped; '
      'None allows any number'
    )


def _not_finite(metrics: DeviceMetrics) -> Iterator[str]:
  """Yields the losses and norms of a step that are not finite, with their values."""
  for name in ('loss', *sorted(n for n in metrics if n.startswith('aux/')), 'grad_norm'):
    if name in metrics and not np.isfinite(value := np.asarray(metrics[name][0], np.float64)).all():
      yield f'{name} {float(np.ravel(value)[0])}' if value.ndim == 0 else name


def hints_in(batch: NestedDict, data: BaseInput, model: BaseModel) -> Hints:
  """Returns hints about what is wrong with the batch of a step that was not finite; the batch is on the host."""
  arrays = {path_name(path): np.asarray(x) for path, x in leaves(batch).items()}
  if bad := [name for name, x in arrays.items() if x.dtype.kind == 'f' and not np.isfinite(x).all()]:
    return Hints(f'The last batch has values in {", ".join(map(repr, bad))} that are not finite')
  try:
    model.check_input(data, jax.tree.map(np.asarray, batch))
  except UserError as error:
    return Hints(f'The last batch does not fit the model: {error}')
  except Exception:  # A check in the user's code has failed. Its error is less useful than the error that ends the run.
    pass
  integers = {name: x for name, x in arrays.items() if x.dtype.kind in 'iu' and x.size}
  labels = labels_in(batch)
  # Labels are checked against the classifier layer with the most classes.
  given = {layer.path_name: getattr(layer, 'num_classes', None) for layer in model.descendants()}
  classes = {name: n for name, n in given.items() if isinstance(n, int)}
  if not (classes and labels):
    return Hints(integers=', '.join(_range(name, x) for name, x in integers.items()))
  where = max(classes, key=lambda name: classes[name])
  for name, x in labels.items():
    if not (x.min() >= 0 and x.max() < classes[where]):
      has = f'{where} has {number_of(classes[where], "class")}, 0 to {classes[where] - 1}'
      return Hints(f'The last batch has {_range(name, x)}, and {has}')
  return Hints()


def _range(name: str, x: np.ndarray) -> str:
  return f'{name!r} from {x.min()} to {x.max()}'
