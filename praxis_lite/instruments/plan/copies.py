"""What emergency copies of a planned run take: time of devices, memory of hosts, and the network between them."""

from __future__ import annotations

from praxis_lite.common.figures import format_bytes, format_seconds, number_of
from praxis_lite.instruments.plan.goodput import TO_HOST
from praxis_lite.instruments.plan.planning import Plan
from praxis_lite.training.task import EmergencyCopiesParams, copies_kept


def format_copies(plan: Plan, copies: EmergencyCopiesParams) -> str:
  """Returns a line about the emergency copies of a run; '' if it makes none, or if the time of its steps is unknown.

  A device copies its part of the state to the host while the step waits. If several devices of a host have the same
  part, it is counted for each of them, so the bytes of a host are an upper bound.
  """
  if copies.every_n_steps is None or not plan.is_time_known:
    return ''
  topology, target = plan.topology, plan.topology.target
  part = plan.memory.state.total - plan.memory.state.inputs
  chips = min(target.chips_per_host, topology.num_chips)
  on_host = part * chips * target.devices_per_chip
  # Only the first folder holds the parts of peers.
  kept = copies_kept(copies.peers) * (1 + copies.peers) + copies_kept(0) * (len(copies.directories) - 1)
  interval, stall = copies.every_n_steps * plan.step_seconds, part / TO_HOST
  line = (
    f'emergency copies every {number_of(copies.every_n_steps, "step")}, {format_seconds(interval)}: each stalls the '
    f'run for about {format_seconds(stall)}, {stall / (interval + stall):.1%} of the time; a host keeps up to '
    f'{format_bytes(kept * on_host)} in its folders'
  )
  if not copies.peers:
    return line
  if chips == topology.num_chips:
    return f'{line}; peers need more hosts than these {number_of(chips, "chip")} have'
  sent = copies.peers * on_host
  seconds = sent / (target.network * chips)
  late = '; this is longer than the time between copies, so the run waits' if seconds > interval else ''
  return (
    f'{line}; it sends {format_bytes(sent)} to its peers at each copy, for at least {format_seconds(seconds)}{late}'
  )
