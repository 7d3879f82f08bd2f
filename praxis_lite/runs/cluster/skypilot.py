"""Makes a SkyPilot task of a run: one node for each process, on any cloud that SkyPilot knows.

    exit code of `train`           what a managed job does
    0 on all nodes                 it is finished
    75 or 143, or a lost node      it begins again on all nodes, from the last checkpoint
    any other                      it begins again, at most `max_restarts` times

`find_job` in `clusters.py` reads the variables that SkyPilot sets on each node. The directory of the run must be on a
volume that all nodes see.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from praxis_lite.common.errors import UserError
from praxis_lite.runs.cluster.jobset import JsonObject

_LOST, _PREEMPTED = 75, 143
_MOST_NAME = 48


def skypilot_task(
  name: str,
  image: str,
  command: Sequence[str],
  processes: int,
  *,
  max_restarts: int,
  accelerators: str | None = None,
  spot: bool = False,
  volume: str | None = None,
  mount_path: str = '/runs',
) -> JsonObject:
  """Returns the task, for `sky jobs launch`, which reads JSON as YAML.

  Args:
    name: the name of the task.
    image: a container image that has praxis_lite and the experiment.
    command: the command line of each process.
    processes: number of nodes.
    max_restarts: how often the job is restarted after errors.
    accelerators: what each node has, such as 'H100:8'.
    spot: whether to take nodes that the cloud may take back.
    volume: name of a SkyPilot volume for the directory of the run, which is mounted at `mount_path`.

  Raises:
    UserError: a name or `accelerators` is not valid.
  """
  if not re.fullmatch(r'[a-z]([-a-z0-9]*[a-z0-9])?', name) or len(name) > _MOST_NAME:
    raise UserError(
      f'--name={name}: expected at most {_MOST_NAME} lower-case letters, digits and hyphens, beginning with a letter'
    )
  if accelerators is not None and not re.fullmatch(r'[A-Za-z][\w-]*:[1-9]\d*', accelerators):
    raise UserError(f'--accelerators={accelerators}: expected a name and a number, as in --accelerators=H100:8')
  resources: JsonObject = {
    'image_id': f'docker:{image}',
    'job_recovery': {'max_restarts_on_errors': max_restarts, 'recover_on_exit_codes': [_LOST, _PREEMPTED]},
  }
  if accelerators is not None:
    resources['accelerators'] = accelerators
  if spot:
    resources['use_spot'] = True
  task: JsonObject = {
    'name': name,
    'num_nodes': processes,
    'resources': resources,
    'run': f'{shlex.join(command)}\n',
  }
  if volume is not None:
    task['volumes'] = {mount_path: volume}
  return task
