"""The manifests of a JobSet and of a SkyPilot task: what each requires, and that the processes find each other."""

from __future__ import annotations

import json
import pathlib
import shlex

import jsonschema
import pytest

from praxis_lite.cli.main import main
from praxis_lite.common.errors import LostHostError, UserError
from praxis_lite.runs.cluster.clusters import find_job
from praxis_lite.runs.cluster.jobset import jobset, parse_resources
from praxis_lite.runs.cluster.skypilot import skypilot_task

EXPERIMENT = pathlib.Path(__file__).parents[1] / 'cli' / 'tiny_experiment.py'
TRAIN = ['train', f'--exp={EXPERIMENT}:Tiny', '--job_log_dir=/runs/1', '--grace_s=25']
FLAGS = ['--processes=4', '--jobset', '--image=lm:1', '--resource=nvidia.com/gpu=8', '--volume_claim=runs']

SKY = ['--processes=4', '--skypilot', '--image=lm:1', '--spot', '--volume=runs', '--accelerators=H100:8']


def test_the_manifest_has_what_kubernetes_requires_and_restarts_all_but_mistakes(capsys):
  assert main(['launch', *FLAGS, '--', *TRAIN]) == 0
  manifest = json.loads(capsys.readouterr().out)
  assert (manifest['apiVersion'], manifest['kind']) == ('jobset.x-k8s.io/v1alpha2', 'JobSet')
  assert manifest['metadata']['name'] == 'tiny'
  (group,) = manifest['spec']['replicatedJobs']
  job = group['template']['spec']
  assert job['completions'] == job['parallelism'] == 4 and job['completionMode'] == 'Indexed'
  pod = job['template']['spec']
  (container,) = pod['containers']
  assert container['command'] == ['praxis-lite', *TRAIN] and container['image'] == 'lm:1'
  assert container['resources']['limits'] == {'nvidia.com/gpu': '8'}
  assert pod['terminationGracePeriodSeconds'] == 30  # More than train takes at most after SIGTERM.
  # A Job with a podFailurePolicy must not restart its pods itself, and names its container.
  assert pod['restartPolicy'] == 'Never' and job['backoffLimit'] == 0
  (rule,) = job['podFailurePolicy']['rules']
  assert rule['onExitCodes'] == {'containerName': container['name'], 'operator': 'In', 'values': [2]}
  failures = manifest['spec']['failurePolicy']
  assert failures['maxRestarts'] == 3 and failures['rules'][0]['onJobFailureReasons'] == ['PodFailurePolicy']
  assert pod['volumes'][0]['name'] == container['volumeMounts'][0]['name']

  # As the pod with index 2 sees it.
  environ = {e['name']: e['value'] for e in container['env']} | {'JOB_COMPLETION_INDEX': '2'}
  found = find_job(environ=environ)
  assert (found.num_processes, found.process_id) == (4, 2)
  host = found.coordinator_address.split(':')[0]
  name = manifest['metadata']['name']
  assert host == f'{name}-{group["name"]}-0-0.{manifest["spec"]["network"]["subdomain"]}'


def print_task(capsys):
  assert main(['launch', *SKY, '--', *TRAIN]) == 0
  return json.loads(capsys.readouterr().out)


def test_the_task_of_skypilot_runs_the_command_on_each_node(capsys):
  task = print_task(capsys)
  assert (task['name'], task['num_nodes'], task['volumes']) == ('tiny', 4, {'/runs': 'runs'})
  assert shlex.split(task['run']) == ['praxis-lite', *TRAIN]
  resources = task['resources']
  assert (resources['image_id'], resources['accelerators'], resources['use_spot']) == ('docker:lm:1', 'H100:8', True)
  recovery = resources['job_recovery']
  assert recovery == {'max_restarts_on_errors': 3, 'recover_on_exit_codes': [LostHostError.exit_code, 143]}
  plain = skypilot_task('lm', 'lm:1', ['a b'], 1, max_restarts=0)
  assert plain['run'] == "'a b'\n" and 'volumes' not in plain and {*plain['resources']} == {'image_id', 'job_recovery'}


def test_skypilot_accepts_the_task(capsys):
  schemas = pytest.importorskip('sky.utils.schemas', reason='needs SkyPilot: pip install skypilot')
  task = print_task(capsys)
  jsonschema.validate(task, schemas.get_task_schema())
  jsonschema.validate(task['resources'], schemas.get_resources_schema())


@pytest.mark.parametrize(
  'flags, train, message',
  [
    ([], TRAIN, '--processes is missing'),
    (['--processes=2', '--min_processes=3'], TRAIN, '--min_processes=3 is more than --processes=2'),
    (['--processes=2', '--jobset'], TRAIN, '--image is missing'),
    ([*FLAGS, '--name=Lm'], TRAIN, '--name=Lm: expected'),
    ([*FLAGS, '--resource=gpu'], TRAIN, '--resource=gpu: expected a name and an amount'),
    ([*FLAGS, '--skypilot'], TRAIN, '--jobset and --skypilot: give one of them'),
    ([*FLAGS, '--spot'], TRAIN, '--spot is not for --jobset'),
    ([*SKY, '--resource=a=1'], TRAIN, '--resource is not for --skypilot'),
    ([*SKY[:-1], '--accelerators=H100'], TRAIN, '--accelerators=H100: expected a name and a number'),
    ([*SKY, '--name=Lm'], TRAIN, '--name=Lm: expected'),
    (['--processes=2', '--volume=runs'], TRAIN, '--volume needs --jobset or --skypilot'),
    (FLAGS, TRAIN[:2], '--job_log_dir is missing after --'),
    (FLAGS, [*TRAIN, '--set', 'task.nonsense=1'], 'nonsense'),
    (FLAGS, [*TRAIN, 'more'], "unexpected argument 'more'"),
    (['--processes=2'], ['eval'], "got 'eval'"),
  ],
)
def test_mistakes_are_found_before_anything_starts(capsys, flags, train, message):
  assert main(['launch', *flags, '--', *train]) == 2
  assert message in capsys.readouterr().err


def test_names_are_of_a_length_that_leaves_room_for_those_of_pods():
  with pytest.raises(UserError, match='at most'):
    jobset('a' * 60, 'lm:1', [], 1, max_restarts=0, grace_s=1)
  assert parse_resources(['a=1', 'b/c=2']) == {'a': '1', 'b/c': '2'}
