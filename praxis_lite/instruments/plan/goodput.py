"""The time of a long run with failures: how often it should save, and the share of the time that is useful work.

Failures are independent and equally likely at any moment, so the time to the next one is exponential with mean M. A run
saves after each T seconds of work, and a save stalls it for D seconds. A failure costs a restart of R seconds and the
work since the last save. Then the expected time for T seconds of saved work is (Daly, 2006, equation 20)

    M exp(R / M) (exp((T + D) / M) - 1)

and the best T, with x = D / (2 M) and D < 2 M, is (Daly's equation 37; Young, 1974, has only the first factor)

    sqrt(2 D M) (1 + sqrt(x) / 3 + x / 9) - D
"""

from __future__ import annotations

import dataclasses
import math

# Bytes per second that a device copies to its host while a save stalls the run; an assumption, half of PCIe 4.0 x16.
TO_HOST = 12e9
# A save stalls a run for at least this many seconds, while hosts wait for each other and start to copy; an assumption.
_LEAST_STALL = 1.0
_DAY = 86400.0
# The best interval between saves is advised if the current one gives at least 1 % less useful work.
_FAR = 0.01


@dataclasses.dataclass(frozen=True)
class Interruptions:
  """What interrupts a run.

  Attributes:
    failures_per_chip_day: failures per chip and day. They include failures of hosts and networks, divided by the number
      of chips. The default is from the training of Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100
      (arXiv:2407.21783, table 5).
    restart_seconds: seconds from a failure to the first new step.
    save_seconds: seconds that a save stalls the run; None derives it from the state on a device.
    input_wait_share: waits for inputs, as a share of the time of the steps.
  """

  failures_per_chip_day: float = 419 / 54 / 16384
  restart_seconds: float = 300.0
  save_seconds: float | None = None
  input_wait_share: float = 0.0


EXPECTED = Interruptions()


@dataclasses.dataclass(frozen=True)
class ExpectedGoodput:
  """The effect of interruptions on a run.

  Attributes:
    seconds_to_failure: mean time between failures of any of the chips.
    save_seconds: seconds that a save stalls the run.
    save_interval: the best interval between saves, in seconds of work.
    share: expected share of the time that is useful work, with this interval.
  """

  seconds_to_failure: float
  save_seconds: float
  save_interval: float
  share: float


def goodput(chips: int, bytes_to_save: float, interruptions: Interruptions = EXPECTED) -> ExpectedGoodput:
  """Returns the effect of interruptions on a run. A failure of any chip stops the run.

  `bytes_to_save` are the bytes of the state on one device.
  """
  save = interruptions.save_seconds
  save = _LEAST_STALL + bytes_to_save / TO_HOST if save is None else save
  working = 1 / (1 + interruptions.input_wait_share)
  if interruptions.failures_per_chip_day <= 0:
    return ExpectedGoodput(math.inf, save, math.inf, working)
  mean = _DAY / (interruptions.failures_per_chip_day * chips)
  interval = best_interval(save, mean)
  share = useful_share(interval, save, mean, interruptions.restart_seconds)
  return ExpectedGoodput(mean, save, interval, working * share)


def best_interval(save_seconds: float, mean: float) -> float:
  """Returns the best interval between saves, in seconds of work; `mean` is the mean time between failures."""
  if save_seconds >= 2 * mean:
    return mean
  x = save_seconds / (2 * mean)
  return math.sqrt(2 * save_seconds * mean) * (1 + math.sqrt(x) / 3 + x / 9) - save_seconds


def useful_share(interval: float, save_seconds: float, mean: float, restart_seconds: float) -> float:
  """Returns the expected share of the time that is useful work, which no failure loses."""
  if interval + save_seconds + restart_seconds > 600 * mean:  # With failures, this takes exp(600) times as long.
    return 0.0
  if interval + save_seconds == 0:
    return math.exp(-restart_seconds / mean)
  wall = mean * math.exp(restart_seconds / mean) * math.expm1((interval + save_seconds) / mean)
  return interval / wall


def advise_interval(found: ExpectedGoodput, seconds: float, restart_seconds: float) -> str:
  """Returns a sentence if saving every `seconds` of work is clearly worse than the best interval; otherwise ''."""
  best = found.save_interval
  if math.isinf(best):
    return ''
  failures = found.save_seconds, found.seconds_to_failure, restart_seconds
  most, share = (useful_share(interval, *failures) for interval in (best, seconds))
  if most - share < _FAR * most or most < _FAR:  # A run that makes hardly any progress needs other advice.
    return ''
  what = 'too rare: a failure loses more work' if seconds > best else 'too frequent: saves stall the run more'
  kept = f'{share:.1%} of the time would be work that is kept, and {most:.1%} with the best interval'
  return f'{what} than needed; {kept}'
