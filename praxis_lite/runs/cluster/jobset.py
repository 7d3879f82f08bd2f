"""Makes a Kubernetes JobSet of a run: one pod for each process. The pods find each other, and are restarted together.

    exit code of a pod             what Kubernetes does
    0 in all of them               the JobSet is complete
    2, a mistake                   the JobSet fails: another attempt would make the mistake again
    any other, or a lost node      all pods are restarted, at most `max_restarts` times, from the last checkpoint

With `spares`, as many more pods hold nodes, and do nothing. Kubernetes evicts one, whose priority is lower, when a pod
of the run needs its node after a restart. So a lost node costs no wait for a new one.

The pods, and their hosts in the network, are named NAME-hosts-0-0, NAME-hosts-0-1, ...; the first has process 0.
The directory of the run must be on a volume that all of them see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from praxis_lite.common.errors import UserError
from praxis_lite.runs.cluster.clusters import COORDINATOR_PORT

_GROUP = 'hosts'
_CONTAINER = 'train'
# Kubernetes appends '-hosts-0-' and an index to the name, and limits the result, a host name, to 63 characters.
MOST_NAME = 63 - len(f'-{_GROUP}-0-9999')
_VOLUME = 'runs'
_SPARES, _SPARE_PRIORITY = 'spares', 'praxis-lite-spare'
# A slice of TPUs is a node pool, and each group of pods gets one of its own.
_EXCLUSIVE, _NODE_POOL = 'alpha.jobset.sigs.k8s.io/exclusive-topology', 'cloud.google.com/gke-nodepool'

JsonObject = dict[str, object]

_PRIORITY_OF_SPARES: JsonObject = {
  'apiVersion': 'scheduling.k8s.io/v1',
  'kind': 'PriorityClass',
  'metadata': {'name': _SPARE_PRIORITY},
  'value': -100,
  'preemptionPolicy': 'Never',
  'description': 'Pods that hold spare nodes for runs of praxis_lite.',
}


def jobset(
  name: str,
  image: str,
  command: Sequence[str],
  processes: int,
  *,
  max_restarts: int,
  grace_s: int,
  spares: int = 0,
  slices: int = 1,
  tpu: str | None = None,
  resources: Mapping[str, str] | None = None,
  volume_claim: str | None = None,
  mount_path: str = '/runs',
) -> JsonObject:
  """Returns the manifest, for `kubectl apply`, which reads it as JSON.

  Args:
    name: the name of the JobSet: at most `MOST_NAME` lower-case letters, digits and hyphens, beginning with a letter.
    image, command: a container image that has praxis_lite and the experiment, and the command line of each process.
    processes, max_restarts: the number of pods, and how often all of them are restarted.
    grace_s: seconds from SIGTERM to SIGKILL; `train --grace_s` should be a little less.
    spares: number of pods that hold spare nodes. Then the manifest is a list, with the class of their priority.
    slices: number of groups of pods; each is on one slice of TPUs.
    tpu: the kind of TPU and its topology as Google Cloud names them, such as 'tpu-v5-lite-podslice:4x8'; None for other
      nodes.
    resources: what each pod needs, such as {'nvidia.com/gpu': '8'}.
    volume_claim: name of a PersistentVolumeClaim for the directory of the run, which is mounted at `mount_path`.

  Raises:
    UserError: the processes cannot be divided by the slices, or `tpu` is not of this form.
  """
  if processes % slices or (slices > 1 and tpu is None):
    raise UserError(
      f'--slices={slices}: expected a number that divides --processes={processes}, and --tpu with the kind of slices'
    )
  if tpu is not None and spares:
    raise UserError('--spares and --tpu: Google Cloud replaces a slice as a whole, so pods cannot hold parts of it')
  container: JsonObject = {
    'name': _CONTAINER,
    'image': image,
    'command': list(command),
    'ports': [{'containerPort': COORDINATOR_PORT}],
    'resources': {'limits': dict(resources or {})},
  }
  pod: JsonObject = {'restartPolicy': 'Never', 'terminationGracePeriodSeconds': grace_s, 'containers': [container]}
  if tpu is not None:  # Google Cloud sets variables from which the processes find each other.
    pod['nodeSelector'] = _nodes_of_slices(tpu)
  else:
    variables = {'JAX_COORDINATOR_ADDRESS': f'{name}-{_GROUP}-0-0.{name}:{COORDINATOR_PORT}'}
    variables['JAX_NUM_PROCESSES'] = str(processes)
    container['env'] = [{'name': variable, 'value': value} for variable, value in variables.items()]
  if volume_claim is not None:
    container['volumeMounts'] = [{'name': _VOLUME, 'mountPath': mount_path}]
    pod['volumes'] = [{'name': _VOLUME, 'persistentVolumeClaim': {'claimName': volume_claim}}]
  groups = [{'name': _GROUP, 'replicas': slices, 'template': {'spec': _job(pod, processes // slices)}}]
  if spares:
    groups.append({'name': _SPARES, 'replicas': 1, 'template': {'spec': _spare_job(image, spares, resources or {})}})
  mistake = {'name': 'mistake', 'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}
  manifest: JsonObject = {
    'apiVersion': 'jobset.x-k8s.io/v1alpha2',
    'kind': 'JobSet',
    'metadata': {'name': name, **({} if tpu is None else {'annotations': {_EXCLUSIVE: _NODE_POOL}})},
    'spec': {
      'network': {'enableDNSHostnames': True, 'subdomain': name},
      'successPolicy': {'operator': 'All', 'targetReplicatedJobs': [_GROUP]},
      'failurePolicy': {'maxRestarts': max_restarts, 'rules': [{**mistake, 'targetReplicatedJobs': [_GROUP]}]},
      'replicatedJobs': groups,
    },
  }
  return {'apiVersion': 'v1', 'kind': 'List', 'items': [_PRIORITY_OF_SPARES, manifest]} if spares else manifest


def _nodes_of_slices(tpu: str) -> dict[str, str]:
  """Returns the labels of nodes in slices of TPUs."""
  accelerator, is_given, topology = tpu.partition(':')
  if not is_given:
    raise UserError(f'--tpu={tpu}: expected a kind and a topology, as in --tpu=tpu-v5-lite-podslice:4x8')
  return {'cloud.google.com/gke-tpu-accelerator': accelerator, 'cloud.google.com/gke-tpu-topology': topology}


def _job(pod: JsonObject, pods: int) -> JsonObject:
  """Returns a job of pods that are numbered, and are not started again one by one."""
  mistake = {'containerName': _CONTAINER, 'operator': 'In', 'values': [UserError.exit_code]}
  return {
    'parallelism': pods,
    'completions': pods,
    'completionMode': 'Indexed',  # Each pod has its number in JOB_COMPLETION_INDEX.
    'backoffLimit': 0,
    'podFailurePolicy': {'rules': [{'action': 'FailJob', 'onExitCodes': mistake, 'onPodConditions': []}]},
    'template': {'spec': pod},
  }


def _spare_job(image: str, spares: int, resources: Mapping[str, str]) -> JsonObject:
  """Returns a job of pods that do nothing until they are evicted; then others wait for a node in their place."""
  container = {'name': _SPARES, 'image': image, 'command': ['sleep', 'infinity'], 'resources': {'limits': resources}}
  evicted = {'action': 'Ignore', 'onPodConditions': [{'type': 'DisruptionTarget', 'status': 'True'}]}
  pod = {
    'restartPolicy': 'Never',
    'terminationGracePeriodSeconds': 0,
    'priorityClassName': _SPARE_PRIORITY,
    'containers': [container],
  }
  return {
    'parallelism': spares,
    'completions': spares,
    'backoffLimit': 1_000_000,
    'podFailurePolicy': {'rules': [evicted]},
    'template': {'spec': pod},
  }


def parse_resources(values: Sequence[str]) -> dict[str, str]:
  """Returns names and amounts of flags such as 'nvidia.com/gpu=8'; raises UserError if one is not of this form."""
  parsed = {}
  for value in values:
    resource, is_given, amount = value.partition('=')
    if not is_given or not resource or not amount:
      raise UserError(f'--resource={value}: expected a name and an amount, as in --resource=nvidia.com/gpu=8')
    parsed[resource] = amount
  return parsed
