"""DraftStatistics: how many tokens speculative decoding drafted, and how many of them were accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass
class DraftStatistics:
  """Counts over all rows and all calls of `TrainedModel.decode` that got this object.

  Attributes:
    tokens: the number of tokens in the continuations, including those after a stop text.
    passes: the number of passes of the model that made them; a pass over several rows counts once for each row.
    drafted: the number of tokens that were guessed.
    accepted: how many of the guessed tokens are in the continuations.
  """

  tokens: int = 0
  passes: int = 0
  drafted: int = 0
  accepted: int = 0

  @property
  def acceptance_rate(self) -> float:
    """The fraction of guesses that were right; 0 without guesses."""
    return self.accepted / max(self.drafted, 1)

  @property
  def tokens_per_pass(self) -> float:
    """The average number of tokens that a pass of the model made; 1 without speculation."""
    return self.tokens / max(self.passes, 1)

  def add(self, decoded: Mapping[str, Any]) -> None:
    """Adds the counts of decoded rows, which are arrays by name; without `num_passes`, each token counts as a pass."""
    self.tokens += int(np.sum(decoded['lengths']))
    self.passes += int(np.sum(decoded.get('num_passes', decoded['lengths'])))
    self.drafted += int(np.sum(decoded.get('num_drafted', 0)))
    self.accepted += int(np.sum(decoded.get('num_accepted', 0)))

  def __str__(self) -> str:
    of_drafts = f'{self.acceptance_rate:.0%} of {self.drafted:,} guessed tokens were right'
    return f'{self.tokens_per_pass:.2f} tokens in each pass of the model; {of_drafts}'
