"""Makes a task of a run for SkyPilot, which rents spot instances, and rents others when they are taken away.

    the instances are taken away          SkyPilot rents others, possibly in another region, and runs the command again
    exit code 75, or a signal             SkyPilot runs the command again, at most `max_restarts` times
    any other exit code, such as 2        the job has failed

The directory of the run must outlive the instances, on a volume or by `task.train.mirror`.
"""

from __future__ import annotations

import shlex

from praxis_lite.common.errors import LostHostError, UserError
from praxis_lite.runs.cluster.recipe import MOUNT_PATH, ClusterJob, JsonObject, parse_resources

_SIGNALS = (134, 135, 137, 139)  # What a shell reports for SIGABRT, SIGBUS, SIGKILL and SIGSEGV.


def skypilot_task(job: ClusterJob) -> JsonObject:
  """Returns a task for `sky jobs launch`, which reads it as YAML.

  Each instance runs one process. 'true' and 'false' in `resources` are booleans. Instances that are taken away do not
  count as restarts.

  Raises:
    UserError: several instances have no volume that they share, or `resources` has a field that this task sets.
  """
  resources = parse_resources(job.resources)
  if job.processes > 1 and job.volume is None:
    raise UserError(
      f'--volume_claim is missing: the {job.processes} instances share the directory of the run, on a volume that '
      '`sky volumes` names; one instance needs only task.train.mirror'
    )
  for field in {'image_id', 'job_recovery'} & {*resources}:
    raise UserError(f'--resource={field}={resources[field]}: leave it out, because --image and --max_restarts set it')
  recovery = {
    'strategy': 'EAGER_NEXT_REGION',
    'max_restarts_on_errors': job.max_restarts,
    'recover_on_exit_codes': [LostHostError.exit_code, *_SIGNALS],
  }
  fields = {field: {'true': True, 'false': False}.get(value.lower(), value) for field, value in resources.items()}
  asked: JsonObject = {'use_spot': True, **fields, 'image_id': f'docker:{job.image}', 'job_recovery': recovery}
  task: JsonObject = {'name': job.name, 'num_nodes': job.processes, 'resources': asked, 'run': shlex.join(job.command)}
  return task if job.volume is None else {**task, 'volumes': {MOUNT_PATH: job.volume}}
