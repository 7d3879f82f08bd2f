"""Which processes a run has, from flags and the variables of each cluster."""

from __future__ import annotations

import json
import re
import resource
import socket
import threading

import pytest

from praxis_lite.common.errors import ConfigError, LostHostError
from praxis_lite.runs.cluster.clusters import Job, find_job, resolve_job
from praxis_lite.runs.cluster.rendezvous import meet

SLURM = {
  **{'SLURM_JOB_ID': '4242', 'SLURM_STEP_NODELIST': 'n[07-08,12]', 'SLURM_NTASKS': '4'},
  **{'SLURM_PROCID': '3', 'SLURM_LOCALID': '1'},
}
OPEN_MPI = {
  **{'OMPI_COMM_WORLD_SIZE': '2', 'OMPI_COMM_WORLD_RANK': '1', 'OMPI_COMM_WORLD_LOCAL_RANK': '1'},
  'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://10.96.0.1,10.148.0.1:34911',
}
JOBSET = {
  **{'JAX_COORDINATOR_ADDRESS': 'lm-hosts-0-0.lm:8476', 'JAX_NUM_PROCESSES': '2', 'JOB_COMPLETION_INDEX': '1'},
  'KUBERNETES_SERVICE_HOST': '10.0.0.1',
}
TPU = {'TPU_WORKER_HOSTNAMES': 't0,t1,t2,t3', 'TPU_WORKER_ID': '2'}
TWO_SLICES = {**TPU, 'MEGASCALE_NUM_SLICES': '2', 'MEGASCALE_SLICE_ID': '1'}
SKYPILOT = {
  **{'SKYPILOT_NODE_IPS': '10.0.0.7\n10.0.0.8\n10.0.0.9', 'SKYPILOT_NUM_NODES': '3', 'SKYPILOT_NODE_RANK': '2'},
}
LAUNCHED = {
  **{'JAX_COORDINATOR_ADDRESS': 'localhost:1', 'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '0'},
  'PRAXIS_LITE_LAUNCHER': '17',
}


@pytest.mark.parametrize(
  'environ, job',
  [
    ({}, None),
    (SLURM, Job('Slurm job 4242', 4, 3, method='slurm')),
    ({**SLURM, 'SLURM_NTASKS': '1', 'SLURM_PROCID': '0'}, None),
    ({k: v for k, v in SLURM.items() if k != 'SLURM_STEP_NODELIST'}, None),  # a batch script, outside of srun
    (OPEN_MPI, Job('Open MPI', 2, 1, method='ompi')),
    ({**OPEN_MPI, 'OMPI_COMM_WORLD_SIZE': '1', 'OMPI_COMM_WORLD_RANK': '0'}, None),
    (
      JOBSET,
      Job('coordinator_address, num_processes, and a Kubernetes job', 2, 1, JOBSET['JAX_COORDINATOR_ADDRESS']),
    ),
    (TPU, Job('Cloud TPU', 4, 2, method='gketpu')),
    (TWO_SLICES, Job('Cloud TPU', 8, 6, method='gketpu')),
    ({'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0'}, None),
    (SKYPILOT, Job('SkyPilot', 3, 2, '10.0.0.7:8476')),
    ({**SKYPILOT, 'SKYPILOT_NUM_NODES': '1', 'SKYPILOT_NODE_RANK': '0'}, None),
    (LAUNCHED, Job('praxis-lite launch', 2, 0, 'localhost:1')),
  ],
)
def test_each_cluster_is_found_by_its_variables(environ, job):
  assert find_job(environ=environ) == job


def test_flags_come_first_and_the_cluster_says_the_rest():
  assert find_job('a:1', 2, 0, environ=SLURM) == Job('flags or variables', 2, 0, 'a:1')
  assert find_job('a:1', environ=SLURM) == Job('coordinator_address, and Slurm job 4242', 4, 3, 'a:1')
  assert find_job('auto', environ=SLURM) == find_job(environ=SLURM)


@pytest.mark.parametrize(
  'flags, environ, message',
  [
    (('auto',), {}, 'coordinator_address=auto: this process runs in no known cluster'),
    ((None, 2, 0), {}, 'to run on several hosts, coordinator_address must be set too'),
    (('a:1', 2, 2), {}, 'process_id = 2: expected 0 to num_processes - 1'),
    (('a', 2, 1), {}, "coordinator_address = 'a': expected host:port"),
    ((), {**SLURM, 'SLURM_PROCID': 'x'}, "SLURM_PROCID = 'x': expected a number"),
    ((), {k: v for k, v in OPEN_MPI.items() if 'uri' not in k}, 'this version of Open MPI does not say where'),
  ],
)
def test_what_is_missing_or_wrong_is_named(flags, environ, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    find_job(*flags, environ=environ)


@pytest.mark.parametrize('environ, host', [(SLURM, 'n07'), (OPEN_MPI, '10.96.0.1')])
def test_jax_knows_where_process_0_is(monkeypatch, environ, host):
  for name, value in environ.items():
    monkeypatch.setenv(name, value)
  job, address = resolve_job(find_job(), 1)
  assert job == find_job() and re.fullmatch(rf'{re.escape(host)}:\d+', address)


# ---- meeting


@pytest.fixture
def address():
  with socket.socket() as free:
    free.bind(('localhost', 0))
    return f'localhost:{free.getsockname()[1]}'


def job(index, count):
  return Job('a test', count, index)


def test_all_who_come_know_each_other_whoever_else_connects(address):
  met = {}
  threads = [
    threading.Thread(target=lambda i=i: met.update({i: meet(job(i, 3), address, 20, f'n{i}')})) for i in (2, 1, 0)
  ]
  for thread in threads:
    thread.start()
  with socket.socket() as stranger:
    stranger.connect_ex(('localhost', int(address.split(':')[1])))
  for thread in threads:
    thread.join()
  assert {i: each.names for i, each in met.items()} == {i: ['n0', 'n1', 'n2'] for i in range(3)}
  assert {i: sorted(each.connections) for i, each in met.items()} == {0: [1, 2], 1: [0], 2: [0]}
  met[2].connections[0].sendall(b'from 2')  # The connections stay open, also after the port is closed.
  assert met[0].connections[2].recv(100) == b'from 2'
  with pytest.raises(OSError):
    socket.create_connection(('localhost', int(address.split(':')[1]))).close()
  for each in met.values():
    for connection in each.connections.values():
      connection.close()


def test_host_0_keeps_no_connection_if_it_may_not_have_so_many_files(address, monkeypatch):
  monkeypatch.setattr(resource, 'getrlimit', lambda which: (300, 300))
  met = []
  thread = threading.Thread(target=lambda: met.append(meet(job(1, 2), address, 20, 'n1')))
  thread.start()
  assert meet(job(0, 2), address, 20, 'n0') == (['n0', 'n1'], {})
  thread.join()
  (connection,) = met[0].connections.values()
  assert connection.recv(1) == b''
  connection.close()


def test_those_who_do_not_come_are_named(address):
  with pytest.raises(LostHostError, match=r'host 1 has not joined the 2 of a test within 0\.2 s') as error:
    meet(job(0, 2), address, 0.2, 'n0')
  assert error.value.exit_code == 75
  with pytest.raises(
    LostHostError, match=r'host 0 did not answer at localhost:\d+ within 0\.2 s .*this is host 1 of 2'
  ):
    meet(job(1, 2), address, 0.2, 'n1')


def test_a_stranger_at_the_port_is_not_taken_for_host_0(address):
  with socket.create_server(('localhost', int(address.split(':')[1]))) as server:
    server.settimeout(5)

    def answer():
      connection, _ = server.accept()
      connection.recv(100)
      connection.sendall(b'SSH-2.0\n')
      connection.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(LostHostError, match='host 0 did not answer'):
      meet(job(1, 2), address, 0.2, json.dumps('n1'))
    thread.join()
