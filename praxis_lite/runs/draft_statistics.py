"""DraftStatistics: how many tokens speculative decoding guessed, and how many of them were right."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass
class DraftStatistics:
  """Counts over all rows and calls that `TrainedModel.decode` was given it for.

  Attributes:
    tokens: tokens of the continuations, including any after a stop text.
    passes: passes of the model, each over one row, that made them.
    drafted: tokens that were guessed.
    accepted: those of them that are in the continuations.
  """

  tokens: int = 0
  passes: int = 0
  drafted: int = 0
  accepted: int = 0

  @property
  def acceptance_rate(self) -> float:
    """The fraction of guesses that were right; 0 without any."""
    return self.accepted / max(self.drafted, 1)

  @property
  def tokens_per_pass(self) -> float:
    """How many tokens a pass of the model made on average; 1 without speculation."""
    return self.tokens / max(self.passes, 1)

  def add(self, decoded: Mapping[str, Any]) -> None:
    """Adds the counts of what was decoded.

    Args:
      decoded: arrays by name, [rows] each. If `num_passes` is missing, nothing was guessed, so each token took a pass.
    """
    self.tokens += int(np.sum(decoded['lengths']))
    self.passes += int(np.sum(decoded.get('num_passes', decoded['lengths'])))
    self.drafted += int(np.sum(decoded.get('num_drafted', 0)))
    self.accepted += int(np.sum(decoded.get('num_accepted', 0)))

  def __str__(self) -> str:
    of_drafts = f'{self.acceptance_rate:.0%} of {self.drafted:,} guessed tokens were right'
    return f'{self.tokens_per_pass:.2f} tokens in each pass of the model; {of_drafts}'
