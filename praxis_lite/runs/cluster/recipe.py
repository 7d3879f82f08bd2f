"""ClusterJob: what a recipe for a cluster says about a run; `jobset.py`, `slurm.py` and `skypilot.py` write recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from praxis_lite.common.errors import UserError

JsonObject = dict[str, object]
MOUNT_PATH = '/runs'  # Where the volume for the directories of runs is.


class ClusterJob(NamedTuple):
  """The processes of a run on a cluster. Each recipe uses the attributes that its system has.

  Attributes:
    name, command: the name of the job, and the command line of each process.
    processes: the number of processes.
    max_restarts: how often all processes are started again after a loss.
    grace_s: seconds that the processes have to save and end.
    image: a container image that has praxis_lite and the experiment.
    resources: what each process needs: resources of a pod, such as 'nvidia.com/gpu=8'; options of sbatch, such as
      'gpus-per-node=8'; or fields of SkyPilot's `resources`, such as 'accelerators=H100:8'.
    volume: the PersistentVolumeClaim, or the volume of SkyPilot, for the directory of the run.
    spares: how many more nodes the job asks for than its processes need.
    processes_per_node: the number of processes of each node.
    slices, tpu: the number of slices of TPUs; and their kind and topology as Google Cloud names them, such as
      'tpu-v5-lite-podslice:4x8', None for other nodes.
  """

  name: str
  command: Sequence[str]
  processes: int
  max_restarts: int
  grace_s: int
  image: str = ''
  resources: Sequence[str] = ()
  volume: str | None = None
  spares: int = 0
  processes_per_node: int = 1
  slices: int = 1
  tpu: str | None = None


def parse_resources(values: Sequence[str]) -> dict[str, str]:
  """Returns names and amounts of flags such as 'nvidia.com/gpu=8'; raises UserError if one is not of this form."""
  parsed = {}
  for value in values:
    resource, is_given, amount = value.partition('=')
    if not is_given or not resource or not amount:
      raise UserError(f'--resource={value}: expected a name and an amount, as in --resource=nvidia.com/gpu=8')
    parsed[resource] = amount
  return parsed
