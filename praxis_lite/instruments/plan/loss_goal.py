"""The number of tokens after which a model reaches a loss, by a scaling law that is fitted to finished runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import short_number
from praxis_lite.instruments.plan.scaling_law import FittedLaw

_FARTHER = 1.05  # A size counts as extrapolated only if it exceeds those of the runs by more than this factor.


class LossGoal(NamedTuple):
  """A loss to reach, and the number of tokens after which, by the law, the model reaches it."""

  loss: float
  tokens: float
  least: float  # The range of the number of tokens, from fits to resampled losses.
  most: float  # May be infinite.
  notes: tuple[str, ...] = ()  # Lines about the law, and how far it is extrapolated.


def tokens_to_reach(loss: float, parameters: float, fitted: FittedLaw) -> LossGoal:
  """Returns the number of tokens after which a model with this many active parameters reaches a loss.

  Raises:
    UserError: by the law, no model reaches the loss, or no model of this size does.
  """
  law = fitted.law
  if loss <= law.irreducible:
    low, high = fitted.interval(lambda sample: sample.irreducible)
    raise UserError(
      f'--loss={loss:g}: by the law of these runs, no model goes below {law.irreducible:.4g} ({low:.4g} to '
      f'{high:.4g}), however large; name a higher loss'
    )
  limit = law.limit(parameters)
  if loss <= limit:
    raise UserError(
      f'--loss={loss:g}: by the law of these runs, a model of {short_number(parameters)} parameters does not go below '
      f'{limit:.4g}, however many tokens it is trained on; name a higher loss, or plan a model of more than '
      f'{short_number(law.parameters_for(loss))} parameters'
    )
  least, most = fitted.interval(lambda sample: sample.tokens_for(loss, parameters))
  tokens = law.tokens_for(loss, parameters)
  needed = LossGoal(loss, tokens, min(least, tokens), max(most, tokens))
  return needed._replace(notes=tuple(_notes(needed, parameters, fitted)))


def format_tokens(needed: LossGoal) -> str:
  """Returns the range of the number of tokens as text."""
  least = short_number(needed.least)
  return f'{least} or more' if needed.most == float('inf') else f'{least} to {short_number(needed.most)}'


def format_law(fitted: FittedLaw) -> str:
  """Returns a law with its constants and the runs that it was fitted to, as text."""
  law, runs = fitted.law, fitted.runs
  formula = f'L = {law.irreducible:.4g} + {law.a:.4g} / N^{law.alpha:.3g} + {law.b:.4g} / D^{law.beta:.3g}'
  n, d = (f'{short_number(min(v))} to {short_number(max(v))}' for v in list(zip(*runs))[:2])
  return f'the law of {len(runs)} runs of {n} parameters N and {d} tokens D, off by {fitted.error:.2%}: {formula}'


def _notes(needed: LossGoal, parameters: float, fitted: FittedLaw) -> Iterator[str]:
  yield format_law(fitted)
  size, tokens = short_number(parameters), short_number(needed.tokens)
  text = f'by it, {size} parameters have a loss of {needed.loss:g} after {tokens} tokens'
  yield f'{text}; 90 % of fits to resampled losses say {format_tokens(needed)}'
  if needed.most == float('inf'):
    share = sum(sample.limit(parameters) >= needed.loss for sample in fitted.samples) / len(fitted.samples)
    yield f'it may not be reached at all: {share:.0%} of these fits say that this model does not go below it'
  farther = []
  for what, value in (('parameters', parameters), ('tokens', needed.tokens)):
    sizes = [getattr(run, what) for run in fitted.runs]
    if value > _FARTHER * max(sizes):
      farther.append(f'{value / max(sizes):.3g} times the most {what} of the runs')
    elif value < min(sizes) / _FARTHER:
      farther.append(f'{value / min(sizes):.2g} of the least {what} of the runs')
  if farther:
    lowest = min(run.loss for run in fitted.runs)
    below = f', and a loss below their lowest, {lowest:.4g}' if needed.loss < lowest else ''
    stretched = f'this is extrapolated: {" and ".join(farther)}{below}'
    yield f'{stretched}; the range does not include that the law may not hold there'
