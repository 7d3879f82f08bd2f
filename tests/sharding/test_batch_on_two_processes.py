"""Two processes on this machine form one mesh; each feeds its share of the batch, and may keep variables in memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from quick_xla import xla_flags
from warm_python import WarmPopen

_WORKER = """
import sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from praxis_lite.partitioning import DataLayout, LocalChunker, PjitPartitioner, TrainState, create_device_mesh
from praxis_lite.partitioning import get_cpu_mesh, get_input_partition_specs, pad_batch, put_on_mesh
from praxis_lite.sharding.weights import WeightHParams

mesh = get_cpu_mesh()
assert [[d.process_index for d in row] for row in mesh.devices] == [[0] * 3, [1] * 3]
assert LocalChunker(mesh).chunk_ids == {'data': jax.process_index(), 'model': 0}
layout = PjitPartitioner(3).get_data_layout(12)
assert layout == DataLayout(12, jax.process_index(), 2, True)

mesh = create_device_mesh((1, 3, 2))
local = pad_batch({'x': np.arange(5.0)[:, None] + 10 * layout.shard_id}, multiple=3)
batch = put_on_mesh(local, mesh, get_input_partition_specs(mesh.axis_names, local))
assert batch['x'].shape == (12, 1)
whole = NamedSharding(mesh, PartitionSpec())
total = jax.jit(lambda b: (b['x'][:, 0] * b['weights']).sum(), out_shardings=whole)(batch)

partitioner = PjitPartitioner(3, params_on_devices=False)
w = WeightHParams((5, 3), tensor_split_dims_mapping=('batch', 'mlp'))
true = np.arange(15.0, dtype=np.float32).reshape(5, 3)
declared = TrainState(jax.ShapeDtypeStruct((), np.int32), {'w': w}, ())
state = partitioner.initialize(lambda: TrainState(jax.numpy.int32(0), {'w': true}, ()), declared)
np.testing.assert_array_equal(state.mdl_vars['w'], true)
moved = partitioner.move_params_to_devices(state, partitioner.get_mesh_axes(declared)).mdl_vars['w']
assert moved.shape == (6, 3) and not moved.is_fully_addressable
print('total', float(total))
"""


def test_hosts_feed_their_shares_of_a_batch() -> None:
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': xla_flags(devices=3)}
  workers = [
    WarmPopen(
      [sys.executable, '-c', _WORKER, address, str(i)],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  try:
    for worker in workers:
      out, err = worker.communicate(timeout=600)
      assert worker.returncode == 0, err[-2000:]
      assert 'total 70.0' in out  # 0 + 1 + 2 + 3 + 4 from one host, 10 more each from the other
  finally:
    for worker in workers:
      worker.kill()
