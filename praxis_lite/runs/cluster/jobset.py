"""Makes a Kubernetes JobSet of a run: one pod for each process. The pods find each other, and are restarted together.

    exit code of a pod             what Kubernetes does
    0 in all of them               the JobSet is complete
    2, a mistake                   the JobSet fails: another attempt would make the mistake again
    any other, or a lost node      all pods are restarted, at most `max_restarts` times, from the last checkpoint

With `spares`, this number of further pods hold nodes, and do nothing. Their priority is lower than that of the run, so
Kubernetes evicts one when a pod of the run needs a node after a restart. So a lost node costs no wait for a new one.

The pods, and their hosts in the network, are named NAME-hosts-0-0, NAME-hosts-0-1, ...; the first has process 0.
The directory of the run must be on a volume that all of them see.
"""

from __future__ import annotations

from collections.abc import Mapping

from praxis_lite.common.errors import UserError
from praxis_lite.runs.cluster.clusters import COORDINATOR_PORT
from praxis_lite.runs.cluster.recipe import MOUNT_PATH, ClusterJob, JsonObject, parse_resources

_GROUP = 'hosts'
_CONTAINER = 'train'
# Kubernetes appends '-hosts-0-' and an index to the name, and limits the result, a host name, to 63 characters.
MOST_NAME = 63 - len(f'-{_GROUP}-0-9999')
_VOLUME = 'runs'
_SPARES, _SPARE_PRIORITY = 'spares', 'praxis-lite-spare'
# A slice of TPUs is a node pool, and each group of pods gets one of its own.
_EXCLUSIVE, _NODE_POOL = 'alpha.jobset.sigs.k8s.io/exclusive-topology', 'cloud.google.com/gke-nodepool'

_PRIORITY_OF_SPARES: JsonObject = {
  'apiVersion': 'scheduling.k8s.io/v1',
  'kind': 'PriorityClass',
  'metadata': {'name': _SPARE_PRIORITY},
  'value': -100,
  'preemptionPolicy': 'Never',
  'description': 'Pods that hold spare nodes for runs of praxis_lite.',
}


def jobset(job: ClusterJob) -> JsonObject:
  """Returns the manifest, which `kubectl apply` reads as JSON.

  With spare pods, it is a list that also defines their priority.

  The name has at most `MOST_NAME` lower-case letters, digits and hyphens, and begins with a letter.

  Raises:
    UserError: the number of processes is no multiple of the slices, several slices have no TPU, TPUs have spares, or
      the name of the TPU or a resource is not valid.
  """
  slices, tpu, spares = job.slices, job.tpu, job.spares
  if job.processes % slices or (slices > 1 and tpu is None):
    divisor = f'expected a number that divides --processes={job.processes}, and --tpu with the kind of slices'
    raise UserError(f'--slices={slices}: {divisor}')
  if tpu is not None and spares:
    raise UserError('--spares and --tpu: Google Cloud replaces a slice as a whole, so pods cannot hold parts of it')
  resources = parse_resources(job.resources)
  container: JsonObject = {
    'name': _CONTAINER,
    'image': job.image,
    'command': list(job.command),
    'ports': [{'containerPort': COORDINATOR_PORT}],
    'resources': {'limits': resources},
  }
  # Kubernetes kills a pod a little after `train --grace_s` is over.
  pod: JsonObject = {
    'restartPolicy': 'Never',
    'terminationGracePeriodSeconds': job.grace_s + 5,
    'containers': [container],
  }
  if tpu is not None:  # Google Cloud sets variables from which the processes find each other.
    pod['nodeSelector'] = _nodes_of_slices(tpu)
  else:
    variables = {'JAX_COORDINATOR_ADDRESS': f'{job.name}-{_GROUP}-0-0.{job.name}:{COORDINATOR_PORT}'}
    variables['JAX_NUM_PROCESSES'] = str(job.processes)
    container['env'] = [{'name': variable, 'value': value} for variable, value in variables.items()]
  if job.volume is not None:
    container['volumeMounts'] = [{'name': _VOLUME, 'mountPath': MOUNT_PATH}]
    pod['volumes'] = [{'name': _VOLUME, 'persistentVolumeClaim': {'claimName': job.volume}}]
  groups = [{'name': _GROUP, 'replicas': slices, 'template': {'spec': _job(pod, job.processes // slices)}}]
  if spares:
    groups.append({'name': _SPARES, 'replicas': 1, 'template': {'spec': _spare_job(job.image, spares, resources)}})
  mistake = {'name': 'mistake', 'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}
  manifest: JsonObject = {
    'apiVersion': 'jobset.x-k8s.io/v1alpha2',
    'kind': 'JobSet',
    'metadata': {'name': job.name, **({} if tpu is None else {'annotations': {_EXCLUSIVE: _NODE_POOL}})},
    'spec': {
      'network': {'enableDNSHostnames': True, 'subdomain': job.name},
      'successPolicy': {'operator': 'All', 'targetReplicatedJobs': [_GROUP]},
      'failurePolicy': {'maxRestarts': job.max_restarts, 'rules': [{**mistake, 'targetReplicatedJobs': [_GROUP]}]},
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
  """Returns a job of pods that do nothing. When one is evicted, another takes its place, and waits for a node."""
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
