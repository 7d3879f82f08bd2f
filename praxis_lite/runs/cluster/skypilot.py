"""Makes a task of a run for SkyPilot, which rents spot instances, and rents others when they are taken away.

    the instances are taken away          SkyPilot rents others, possibly in another region, and runs the command again
    exit code 75, or a signal             SkyPilot runs the command again, at most `max_restarts` times
    any other exit code, such as 2        the job has failed

The directory of the run must outlive the instances, on a volume or by `task.train.mirror`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from praxis_lite.common.errors import LostHostError, UserError
from praxis_lite.runs.cluster.jobset import JsonObject

_SIGNALS = (134, 135, 137, 139)  # What a shell reports for SIGABRT, SIGBUS, SIGKILL and SIGSEGV.


def skypilot_task(
  name: str,
  image: str,
  command: Sequence[str],
  processes: int,
  *,
  max_restarts: int,
  resources: Mapping[str, str],
  volume: str | None = None,
  mount_path: str = '/runs',
) -> JsonObject:
  """Returns a task for `sky jobs launch`, which reads it as YAML.

  Args:
    name, image: the name of the job, and a container image that has praxis_lite and the experiment.
    command: the command line of each process; the processes find each other through SkyPilot's variables.
    processes: the number of instances; each runs one process.
    max_restarts: how often the command is run again after a failure; instances that are taken away do not count.
    resources: fields of SkyPilot's `resources`, such as {'accelerators': 'H100:8'}; 'true' and 'false' are booleans.
    volume: a volume of SkyPilot for the directory of the run, which is mounted at `mount_path`.

  Raises:
    UserError: several instances have no volume that they share, or `resources` has a field that this task sets.
  """
  if processes > 1 and volume is None:
    raise UserError(
      f'--volume_claim is missing: the {processes} instances share the directory of the run, on a volume that '
      '`sky volumes` names; one instance needs only task.train.mirror'
    )
  for field in {'image_id', 'job_recovery'} & {*resources}:
    raise UserError(f'--resource={field}={resources[field]}: leave it out, because --image and --max_restarts set it')
  recovery = {
    'strategy': 'EAGER_NEXT_REGION',
    'max_restarts_on_errors': max_restarts,
    'recover_on_exit_codes': [LostHostError.exit_code, *_SIGNALS],
  }
  fields = {field: {'true': True, 'false': False}.get(value.lower(), value) for field, value in resources.items()}
  asked: JsonObject = {'use_spot': True, **fields, 'image_id': f'docker:{image}', 'job_recovery': recovery}
  task: JsonObject = {'name': name, 'num_nodes': processes, 'resources': asked, 'run': shlex.join(command)}
  return task if volume is None else {**task, 'volumes': {mount_path: volume}}
