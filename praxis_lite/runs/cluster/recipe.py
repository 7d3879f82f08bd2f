"""ClusterJob: what a recipe for a cluster says about a run; `jobset.py`, `slurm.py` and `skypilot.py` write recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from praxis_lite.common.errors import UserError

JsonObject = dict[str, object]
MOUNT_PATH = '/runs'  # Where the volume for the directories of runs is.


class ClusterJob(NamedTuple):
  """The processes of a run on a cluster. A recipe ignores the attributes that its cluster system does not know."""

  name: str
  command: Sequence[str]  # The command line of each process.
  processes: int
  max_restarts: int  # How often all processes are started again after a loss.
  grace_s: int  # Seconds that the processes have to save and end.
  image: str = ''  # A container image that has praxis_lite and the experiment.
  # What each process needs: resources of a pod, such as 'nvidia.com/gpu=8'; options of sbatch, such as
  # 'gpus-per-node=8'; or fields of SkyPilot's `resources`, such as 'accelerators=H100:8'.
  resources: Sequence[str] = ()
  volume: str | None = None  # The PersistentVolumeClaim, or SkyPilot's volume, for the directory of the run.
  spares: int = 0  # How many more nodes the job asks for than its processes need.
  processes_per_node: int = 1
  slices: int = 1  # The number of slices of TPUs.
  tpu: str | None = None  # Their kind and topology as Google Cloud names them: 'tpu-v5-lite-podslice:4x8'.


def parse_resources(values: Sequence[str]) -> dict[str, str]:
  """Returns names and amounts of flags such as 'nvidia.com/gpu=8'; raises UserError if one is not of this form."""
  parsed = {}
  for value in values:
    resource, is_given, amount = value.partition('=')
    if not is_given or not resource or not amount:
      raise UserError(f'--resource={value}: expected a name and an amount, as in --resource=nvidia.com/gpu=8')
    parsed[resource] = amount
  return parsed
