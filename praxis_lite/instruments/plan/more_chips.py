"""Finds how many chips a step needs if it does not fit: tries twice as many chips, then twice as many again."""

from __future__ import annotations

from collections.abc import Iterator

from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import format_bytes, number_of
from praxis_lite.instruments.plan.fitting import made_to_fit
from praxis_lite.instruments.plan.knobs import Configured
from praxis_lite.instruments.plan.planning import Plan, plan
from praxis_lite.instruments.plan.topology import Topology

_MOST_CHIPS = 4096


def plan_on_more_chips(config: Configured, topology: Topology) -> Plan | None:
  """Returns the plan, by formulas, on the fewest chips on which a step fits; None if it fits on none.

  It tries twice as many chips each time. The axis that splits the batch takes the additional devices.
  """
  for larger in _larger(topology):
    fitted, _ = made_to_fit(config.task, larger)
    try:
      changed = config.change(fitted)
      found = plan(changed.explained, changed.inputs, larger, compile=False)
    except UserError:  # The batch has fewer rows than there are devices, or an axis does not fit.
      return None
    if found.fits:
      return found
  return None


def format_more_chips(found: Plan) -> str:
  """Returns how many chips suffice, and the flags to plan for them, as text."""
  mesh = tuple(found.mesh.values())
  return (
    f'by formulas, it fits on {number_of(found.topology.num_chips, "chip")}: {format_bytes(found.memory.peak)} '
    'on each device. '
    f"To plan that: --topology={found.topology.name} --set 'task.ici_mesh_shape={mesh}'"
  )


def _larger(topology: Topology) -> Iterator[Topology]:
  """Yields topologies of the same kind of chip, each with twice the chips of the one before."""
  chips = topology.num_chips
  while (chips := 2 * chips) <= _MOST_CHIPS:
    if larger := topology.change_chips(chips):
      yield larger
