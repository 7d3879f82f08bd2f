"""What starts a run on a cluster: the fields that its system requires, and what is started again after which end."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import shutil
import subprocess

import pytest

from praxis_lite.cli.launch import _ON_THIS_MACHINE, _RECIPES, COMMAND, _name_of
from praxis_lite.cli.main import main
from praxis_lite.runs.cluster.clusters import find_job
from praxis_lite.runs.cluster.jobset import jobset
from praxis_lite.runs.cluster.recipe import ClusterJob, parse_resources
from praxis_lite.runs.cluster.slurm import slurm_script

EXPERIMENT = pathlib.Path(__file__).parents[1] / 'cli' / 'tiny_experiment.py'
TRAIN = ['train', f'--exp={EXPERIMENT}:Tiny', '--job_log_dir=/runs/1', '--grace_s=25']
FLAGS = ['--processes=4', '--jobset', '--image=lm:1', '--resource=nvidia.com/gpu=8', '--volume_claim=runs']


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


@pytest.mark.parametrize(
  'flags, train, message',
  [
    ([], TRAIN, '--processes is missing'),
    (['--processes=2', '--min_processes=3'], TRAIN, '--min_processes=3 is more than --processes=2'),
    (['--processes=2', '--jobset'], TRAIN, '--image is missing'),
    ([*FLAGS, '--name=Lm'], TRAIN, '--name=Lm: expected'),
    ([*FLAGS, '--slices=2'], TRAIN, '--slices=2: expected a number that divides --processes=4, and --tpu'),
    ([*FLAGS, '--slices=3', '--tpu=v:2x2'], TRAIN, '--slices=3: expected a number that divides'),
    ([*FLAGS, '--tpu=v5:2x2', '--spares=1'], TRAIN, '--spares and --tpu: Google Cloud replaces a slice as a whole'),
    ([*FLAGS, '--tpu=v5'], TRAIN, '--tpu=v5: expected a kind and a topology'),
    ([*FLAGS, '--resource=gpu'], TRAIN, '--resource=gpu: expected a name and an amount'),
    (FLAGS, TRAIN[:2], '--job_log_dir is missing after --'),
    (FLAGS, [*TRAIN, '--set', 'task.nonsense=1'], 'nonsense'),
    (FLAGS, [*TRAIN, 'more'], "unexpected argument 'more'"),
    (['--processes=2'], ['eval'], "got 'eval'"),
    ([*FLAGS, '--slurm'], TRAIN, '--jobset and --slurm are given: choose one'),
    (['--processes=3', '--slurm', '--processes_per_node=2'], TRAIN, 'is not a multiple of --processes_per_node=2'),
    (['--processes=2', '--slurm', '--resource=gpu'], TRAIN, '--resource=gpu: expected an option of sbatch'),
    (['--processes=2', '--slurm', '--resource=time=1\n#SBATCH --x'], TRAIN, 'expected an option of sbatch'),
    (['--processes=2', '--skypilot', '--image=lm:1'], TRAIN, '--volume_claim is missing: the 2 instances share'),
    (['--processes=1', '--skypilot', '--image=lm:1', '--spares=1'], TRAIN, '--spares has no effect with --skypilot'),
    (['--processes=1', '--skypilot', '--tpu=x:1'], TRAIN, '--tpu has no effect with --skypilot'),
    (['--processes=1', '--skypilot', '--slices=1'], TRAIN, '--slices has no effect with --skypilot'),
    (['--processes=2', '--slurm', '--image=i'], TRAIN, '--image has no effect with --slurm'),
    (['--processes=2', '--slurm', '--volume_claim=v'], TRAIN, '--volume_claim has no effect with --slurm'),
    (['--processes=2', '--slurm', '--min_processes=1'], TRAIN, '--min_processes has no effect with --slurm'),
    ([*FLAGS, '--devices=2'], TRAIN, '--devices has no effect with --jobset'),
    ([*FLAGS, '--processes_per_node=2'], TRAIN, 'flags with an effect there are --name, --resource, --spares, --image'),
    (['--processes=2', '--name=x'], TRAIN, '--name has no effect on this machine'),
    (['--processes=2', '--slurm', '--name=my run'], TRAIN, '--name=my run: expected'),
    (['--processes=1', '--skypilot', '--image=i', '--name=Lm'], TRAIN, '--name=Lm: expected'),
    ([*FLAGS, f'--name={"a" * 51}'], TRAIN, 'expected at most 50 lower-case letters'),
    (['--processes=1', '--skypilot', '--image=i', '--resource=image_id=x'], TRAIN, '--resource=image_id=x: leave it'),
    (['--processes=1', '--skypilot'], TRAIN, '--image is missing'),
  ],
)
def test_mistakes_are_found_before_anything_starts(capsys, flags, train, message):
  assert main(['launch', *flags, '--', *train]) == 2
  assert message in capsys.readouterr().err


def test_every_flag_has_an_effect_somewhere_and_names_made_from_experiments_are_valid():
  own = {flag.name for flag in COMMAND.flags.list_flags()} - {
    'train',
    'processes',
    'max_restarts',
    'traceback',
    *_RECIPES,
  }
  assert own == {*_ON_THIS_MACHINE, *itertools.chain(*_RECIPES.values())}
  names = {'lm.StdlibLm': 'stdlib-lm', '/runs/1': 'run-1', 'a/exp.py:Ω': 'run', 'x' * 60: 'x' * 48}
  assert {given: _name_of(given) for given in names} == names
  assert parse_resources(['a=1', 'b/c=2']) == {'a': '1', 'b/c': '2'}


def test_spare_pods_of_a_jobset_have_a_lower_priority_and_decide_nothing(capsys):
  assert main(['launch', *FLAGS, '--spares=2', '--', *TRAIN]) == 0
  listed = json.loads(capsys.readouterr().out)
  assert (listed['apiVersion'], listed['kind']) == ('v1', 'List')
  priority, manifest = listed['items']
  assert priority['kind'] == 'PriorityClass' and priority['value'] < 0 and priority['preemptionPolicy'] == 'Never'
  hosts, spares = manifest['spec']['replicatedJobs']
  alone = jobset(ClusterJob('tiny', ['x'], 4, max_restarts=3, grace_s=30, image='lm:1'))
  assert (alone['kind'], len(alone['spec']['replicatedJobs'])) == ('JobSet', 1)
  assert manifest['spec']['successPolicy'] == {'operator': 'All', 'targetReplicatedJobs': [hosts['name']]}
  job = spares['template']['spec']
  assert job['parallelism'] == job['completions'] == 2 and job['backoffLimit'] > 1000
  (rule,) = job['podFailurePolicy']['rules']
  assert rule['action'] == 'Ignore' and rule['onPodConditions'] == [{'type': 'DisruptionTarget', 'status': 'True'}]
  pod = job['template']['spec']
  assert pod['priorityClassName'] == priority['metadata']['name'] and pod['restartPolicy'] == 'Never'
  (container,), (training,) = pod['containers'], hosts['template']['spec']['template']['spec']['containers']
  assert container['resources'] == training['resources']  # A spare node is one on which a pod of the run fits.
  assert 'priorityClassName' not in hosts['template']['spec']['template']['spec']


def test_a_jobset_of_slices_leaves_it_to_google_cloud_how_processes_find_each_other(capsys):
  flags = ['--slices=2', '--tpu=tpu-v5-lite-podslice:4x8', '--resource=google.com/tpu=4']
  assert main(['launch', '--processes=16', '--jobset', '--image=lm:1', *flags, '--', *TRAIN]) == 0
  manifest = json.loads(capsys.readouterr().out)
  (pools,) = manifest['metadata']['annotations'].values()
  assert pools == 'cloud.google.com/gke-nodepool'
  hosts = manifest['spec']['replicatedJobs'][0]
  job = hosts['template']['spec']
  assert hosts['replicas'] == 2 and job['completions'] == job['parallelism'] == 8
  pod = job['template']['spec']
  assert 'env' not in pod['containers'][0]
  assert pod['nodeSelector'] == {
    'cloud.google.com/gke-tpu-accelerator': 'tpu-v5-lite-podslice',
    'cloud.google.com/gke-tpu-topology': '4x8',
  }
  # As the third pod of the second slice sees it.
  environ = {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '2', 'TPU_WORKER_ID': '2'}
  environ |= {'TPU_WORKER_HOSTNAMES': ','.join(f'h{i}' for i in range(8))}
  found = find_job(environ=environ | {'MEGASCALE_NUM_SLICES': '2', 'MEGASCALE_SLICE_ID': '1'})
  assert (found.num_processes, found.process_id, found.method) == (16, 10, 'gketpu')
  assert find_job(environ=environ)[1:3] == (8, 2)


# ---- Slurm

# Each call of one of Slurm's commands is a line of `calls`. A step ends with the next of the codes; 'limit' means that
# the time limit comes.
SRUN = """#!/bin/bash
echo "srun $*" >> calls
code=$(head -n 1 codes)
sed -i 1d codes
if [[ $code == limit ]]; then
  kill -USR1 "$PPID"
  until [[ -e terminated ]]; do sleep 0.02; done
  sleep 0.2
  code=143
fi
exit "$code"
"""
OTHERS = {
  'sinfo': 'for node in $(cat down); do echo $node; done',
  'scancel': 'echo "scancel $*" >> calls; touch terminated',
  'scontrol': 'echo "scontrol $*" >> calls',
}
SLURM = ['--processes=4', '--processes_per_node=2', '--spares=1', '--max_restarts=2', '--slurm']


@pytest.mark.skipif(not shutil.which('bash'), reason='the script is for bash')
@pytest.mark.parametrize(
  'codes, down, end, steps, last',
  [
    (['0'], '', 0, 1, 'srun'),
    (['2'], '', 2, 1, 'srun'),  # A mistake.
    (['75', '137', '0'], '', 0, 3, 'srun'),
    (['75', '75', '75', '0'], '', 75, 3, 'srun'),
    (['143'], '', 143, 1, 'srun'),  # Someone has ended the step.
    (
      ['75', '0'],
      'n3',
      0,
      2,
      'srun --nodes=2 --ntasks=4 --kill-on-bad-exit=0 --wait=60 --exclude=n3 praxis-lite train',
    ),
    (['75'], 'n3 n1 n3', 0, 0, 'scontrol requeue 17'),  # More than one spare can replace.
    (['137', 'limit'], '', 0, 2, 'scontrol requeue 17'),
  ],
)
def test_a_slurm_script_starts_the_processes_again_after_a_loss_only(tmp_path, capsys, codes, down, end, steps, last):
  for name, text in {'srun': SRUN, **{name: f'#!/bin/bash\n{text}\n' for name, text in OTHERS.items()}}.items():
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
  (tmp_path / 'codes').write_text('\n'.join(codes) + '\n')
  (tmp_path / 'down').write_text(down)
  assert main(['launch', *SLURM, '--', *TRAIN]) == 0
  (tmp_path / 'job.sh').write_text(capsys.readouterr().out)
  env = {'PATH': f'{tmp_path}{os.pathsep}{os.environ["PATH"]}', 'SLURM_JOB_ID': '17', 'SLURM_JOB_NODELIST': 'n[1-3]'}
  ended = subprocess.run(['bash', 'job.sh'], cwd=tmp_path, env=env, timeout=60, check=False)
  calls = (tmp_path / 'calls').read_text().splitlines()
  assert ended.returncode == end and sum(call.startswith('srun ') for call in calls) == steps
  assert calls[-1].startswith(last)
  assert ('scancel --signal=TERM 17' in calls) == ('limit' in codes)


def test_a_slurm_script_asks_for_the_nodes_of_its_processes_and_spares(capsys):
  flags = ['--resource=gpus-per-node=8', '--resource=time=24:00:00']
  assert main(['launch', *SLURM, *flags, '--', *TRAIN]) == 0
  script = capsys.readouterr().out
  asked = [line.removeprefix('#SBATCH --') for line in script.splitlines() if line.startswith('#SBATCH')]
  assert asked[:5] == ['job-name=tiny', 'nodes=3', 'ntasks-per-node=2', 'gpus-per-node=8', 'time=24:00:00']
  assert {'requeue', 'no-kill', 'signal=B:USR1@35'} <= {*asked}  # Ten seconds more than --grace_s.
  assert (
    slurm_script(ClusterJob('x', ['a b', "it's"], 1, max_restarts=0, grace_s=1))
    .splitlines()
    .count("""command=('a b' 'it'"'"'s')""")
    == 1
  )


# ---- SkyPilot

SKY = ['--processes=2', '--skypilot', '--image=lm:1', '--resource=accelerators=H100:8', '--volume_claim=runs']


def test_a_skypilot_task_names_its_processes_and_what_is_run_again(capsys, tmp_path):
  assert main(['launch', *SKY, '--', *TRAIN]) == 0
  task = json.loads(capsys.readouterr().out)
  recovery = task['resources']['job_recovery']
  assert recovery['max_restarts_on_errors'] == 3
  assert 75 in recovery['recover_on_exit_codes'] and not {0, 2, 76, 143} & {*recovery['recover_on_exit_codes']}
  assert task['volumes'] == {'/runs': 'runs'} and task['resources']['accelerators'] == 'H100:8'
  # As SkyPilot runs it on the second instance.
  (tmp_path / 'praxis-lite').write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
  (tmp_path / 'praxis-lite').chmod(0o755)
  env = {'PATH': f'{tmp_path}{os.pathsep}{os.environ["PATH"]}', 'SKYPILOT_NODE_IPS': '10.0.0.7\n10.0.0.8'}
  env |= {'SKYPILOT_NUM_NODES': '2', 'SKYPILOT_NODE_RANK': '1'}
  output = subprocess.run(['bash', '-c', task['run']], env=env, capture_output=True, text=True, check=True).stdout
  assert output.splitlines() == TRAIN
  assert find_job(environ=env)[1:4] == (2, 1, '10.0.0.7:8476')
  assert task['resources']['use_spot'] is True
  assert main(['launch', '--processes=1', *SKY[1:-1], '--resource=use_spot=false', '--', *TRAIN]) == 0
  alone = json.loads(capsys.readouterr().out)
  assert alone['resources']['use_spot'] is False
  assert alone['run'].endswith('--grace_s=25') and 'volumes' not in alone


def test_skypilot_accepts_the_task(capsys):
  sky = pytest.importorskip('sky')
  assert main(['launch', *SKY, '--', *TRAIN]) == 0
  task = sky.Task.from_yaml_config(json.loads(capsys.readouterr().out))
  (resources,) = task.resources
  assert task.num_nodes == 2 and resources.use_spot and resources.accelerators == {'H100': 8}
