"""The schedule of a pipeline: which microbatch each stage works on, tick by tick, and how long stages wait.

Microbatches are processed in blocks of S. The first stage takes the microbatches of a block one by one. If stages have
R > 1 groups of layers, it then takes them again from the last stage, for rounds 1, 2, ..., R - 1. Then it takes the
next block. Stage s is s ticks behind the first. With u = tick - s:

    microbatch  S (u // R S) + u mod S          which is u if R = 1
    round       (u mod R S) // S

S = 3 stages, M = 3 microbatches, R = 2 rounds ('2b' is microbatch 2 in round 1, '.' is a bubble):

    tick      0  1  2  3  4  5  6  7
    stage 0  0a 1a 2a 0b 1b 2b  .  .
    stage 1   . 0a 1a 2a 0b 1b 2b  .
    stage 2   .  . 0a 1a 2a 0b 1b 2b

S stages, M microbatches, R rounds.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import numpy as np

IntT = TypeVar('IntT', int, np.ndarray, jax.Array)


class PipelineSchedule(NamedTuple):
  """Which microbatch each stage works on in each tick.

  Attributes:
    num_stages: S.
    num_microbatches: M.
    rounds: R, the number of times that a microbatch passes each stage.
  """

  num_stages: int
  num_microbatches: int
  rounds: int = 1

  @property
  def num_ticks(self) -> int:
    """Ticks until the last microbatch is done: M + S - 1 for R = 1, and R M + S - 1 if S divides M."""
    blocks = -(-self.num_microbatches // self.num_stages)
    before_last = self.num_microbatches - (blocks - 1) * self.num_stages
    start_of_last_round = (self.rounds * blocks - 1) * self.num_stages
    return start_of_last_round + before_last + self.num_stages - 1

  @property
  def bubble_fraction(self) -> float:
    """Share of ticks in which a stage waits; (S - 1) / (R M + S - 1) if R = 1 or S divides M."""
    return 1 - self.rounds * self.num_microbatches / self.num_ticks

  def microbatch(self, tick: IntT, stage: IntT | int) -> IntT:
    """Returns the number of the microbatch of a stage in a tick; it is not in [0, M) if the stage waits."""
    behind = tick - stage
    return self.num_stages * (behind // (self.rounds * self.num_stages)) + behind % self.num_stages

  def round(self, tick: IntT, stage: IntT | int) -> IntT:
    """Returns the round, 0 to R - 1, of the microbatch of a stage: how often that stage has computed it before."""
    return (tick - stage) % (self.rounds * self.num_stages) // self.num_stages

  def work(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns what stages do in each tick, [ticks, S]: the microbatch, outside of [0, M) in a bubble, and the round."""
    ticks, stages = np.arange(self.num_ticks)[:, None], np.arange(self.num_stages)[None]
    return self.microbatch(ticks, stages), self.round(ticks, stages)

  def table(self) -> list[list[tuple[int, int] | None]]:
    """Returns (microbatch, round) for each stage and tick, or None if the stage waits."""
    microbatches_ST, rounds_ST = (x.T.tolist() for x in self.work())
    return [
      [(m, r) if 0 <= m < self.num_microbatches else None for m, r in zip(*of_stage)]
      for of_stage in zip(microbatches_ST, rounds_ST)
    ]

  def __str__(self) -> str:
    """Returns one line of text for each stage, as at the top of this file."""
    rows = [
      ['.' if e is None else f'{e[0]}{chr(97 + e[1]) if self.rounds > 1 else ""}' for e in r] for r in self.table()
    ]
    width = max(len(text) for row in [*rows, [str(self.num_ticks - 1)]] for text in row)
    heads = ['tick', *(f'stage {stage}' for stage in range(self.num_stages))]
    lines = [[str(tick) for tick in range(self.num_ticks)], *rows]
    first = max(map(len, heads))
    return '\n'.join(f'{head:<{first}}  {" ".join(f"{x:>{width}}" for x in line)}' for head, line in zip(heads, lines))
