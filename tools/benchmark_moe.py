"""Measures mixtures of experts: the time of their products and layers, and the memory that expert parallelism saves.

  python tools/benchmark_moe.py

Products: the time of `grouped_matmul` of rows in groups of random sizes, forward and backward, divided by the time of
one batched product of groups of equal size, which does the same useful work. The ratio should be at most 1.5, and grow
by at most a factor of 1.2 from 8 to 256 groups.

Layers: the time of a dropless layer with top-2 of 8 or of 64 experts, forward and backward, divided by the time of one
with capacities. A capacity factor of 1 gives as many slots as there are choices, so some choices are dropped.

Times are CPU time. Both contestants are compiled in one process and take turns, and a ratio is the median over pairs of
neighbouring runs. Simulated devices would share the cores and make copies slower, so this process has one device.

Memory: bytes of a train step's arguments and temporaries on each device, as the compiler reports them, with experts
over 1 to 8 simulated devices.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from praxis_lite.common.devices import simulate_cpu_devices
from praxis_lite.common.figures import format_bytes
from tools.timing import measure_in_turn, median_ratio, seconds

LIMIT, GROWTH = 1.5, 1.2
CAPACITIES = 1.0, 1.25, 2.0


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--pairs', type=int, default=20, help='pairs of runs')
  parser.add_argument('--rows', type=int, default=4096, help='rows of all groups, and choices of all tokens')
  parser.add_argument('--model_dims', type=int, default=256)
  parser.add_argument('--hidden_dims', type=int, default=512)
  parser.add_argument('--memory', action=argparse.BooleanOptionalAction, default=True)
  args = parser.parse_args()
  sizes = args.rows, args.model_dims, args.hidden_dims
  ratios = {}
  print(f'products of {args.rows:,} rows, {args.model_dims} x {args.hidden_dims}, over the useful work')
  for groups in (1, 8, 64, 256):
    ratios[groups] = measure_products(groups, *sizes, args.pairs)
    print(f'  {groups:3} groups    {ratios[groups]:.2f} (at most {LIMIT})', flush=True)
  print(f'layers, dropless over capacities of {", ".join(map(str, CAPACITIES))}')
  for experts in (8, 64):
    found = (f'{measure_layers(experts, *sizes, factor, args.pairs):.2f}' for factor in CAPACITIES)
    print(f'  {experts:3} experts  ', *found, flush=True)
  if args.memory:
    simulating = multiprocessing.get_context('spawn').Process(target=print_memory)
    simulating.start()
    simulating.join()
  return int(max(ratios.values()) > LIMIT or ratios[256] > GROWTH * ratios[8])


def measure_products(groups: int, rows: int, model_dims: int, hidden_dims: int, pairs: int) -> float:
  """Returns the median ratio of the times of a grouped and a batched product, with gradients."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from praxis_lite.layers.grouped_matmul import grouped_matmul

  rng = np.random.default_rng(0)
  of_groups = jnp.asarray(rng.multinomial(rows, rng.dirichlet(np.full(groups, 4))), jnp.int32)
  x = jnp.asarray(rng.standard_normal((rows, model_dims)), jnp.float32)
  w = jnp.asarray(rng.standard_normal((groups, model_dims, hidden_dims)), jnp.float32)

  def multiply_batch(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum('gmk,gkn->gmn', x.reshape(groups, rows // groups, model_dims), w)

  def step(fn: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., object]:
    return partial(jax.jit(jax.grad(lambda x, w: jnp.sum(fn(x, w) ** 2), (0, 1))), x, w)

  return _ratio(step(lambda x, w: grouped_matmul(x, w, of_groups)), step(multiply_batch), pairs)


def measure_layers(
  experts: int, choices: int, model_dims: int, hidden_dims: int, capacity_factor: float, pairs: int
) -> float:
  """Returns the median ratio of the times of a dropless layer and of one with capacities, with gradients."""
  import jax
  import jax.numpy as jnp

  from praxis_lite.common.config import Config
  from praxis_lite.common.trees import NestedDict
  from praxis_lite.layers import MoeFeedForward

  config = Config(MoeFeedForward, input_dims=model_dims, hidden_dims=hidden_dims, num_experts=experts)
  x = jax.random.normal(jax.random.key(1), (1, choices // 2, model_dims))
  variables = config.instantiate().init(jax.random.key(0))

  def step(dispatch: str) -> Callable[..., object]:
    layer = config.clone(dispatch=dispatch, capacity_factor=capacity_factor).instantiate()

    def loss(variables: NestedDict, x: jax.Array) -> jax.Array:
      return jnp.mean(layer.apply(variables, x)[0] ** 2)

    return partial(jax.jit(jax.grad(loss, (0, 1))), variables, x)

  return _ratio(step('dropless'), step('capacity'), pairs)


def _ratio(ours: Callable[..., object], baseline: Callable[..., object], pairs: int) -> float:
  return median_ratio(*measure_in_turn([partial(seconds, fn, time.process_time) for fn in (ours, baseline)], pairs))


def print_memory() -> None:
  """Prints, for experts over 1, 2, 4 and 8 devices, the bytes of a train step and of its parameters on each device."""
  simulate_cpu_devices(8)
  import jax
  import numpy as np

  from praxis_lite.common.config import Config
  from praxis_lite.instruments.testing import collectives
  from praxis_lite.layers import MoeFeedForward
  from praxis_lite.models import set_sharding, transformer_lm
  from praxis_lite.training import PartitionedTask
  from praxis_lite.training.task import SingleTask

  batch = {name: np.ones((32, 64), np.int32) for name in ('ids', 'labels')} | {'weights': np.ones((32, 64), np.float32)}
  print('experts over   parameters and slots   temporaries   all-to-alls')
  for parts in (1, 2, 4, 8):
    experts = Config(MoeFeedForward, num_experts=16, dispatch='capacity')
    model = transformer_lm(vocab_size=512, model_dims=64, num_layers=2, num_heads=4, hidden_dims=256, experts=experts)
    model = set_sharding(model, batch_axes=('data', 'expert'), data_axis=None, mdl_axis=None, expert_axis='expert')
    mesh = {'mesh_axis_names': ('data', 'expert'), 'ici_mesh_shape': (8 // parts, parts)}
    task = Config(SingleTask, model=model.set(packed=False), **mesh)
    task.train.inputs_split_mapping = {'map_2d': (('data', 'expert'), None)}
    compiled = PartitionedTask(task.instantiate(), jax.eval_shape(lambda: batch)).train_step.compiled
    sizes = compiled.memory_analysis()
    if sizes is None:
      raise RuntimeError('the compiler does not say how much memory the step takes')
    state, temporary = (format_bytes(b) for b in (sizes.argument_size_in_bytes, sizes.temp_size_in_bytes))
    exchanges = collectives(compiled)['all-to-all'].count // 2
    print(f'{parts:<15}{state:<23}{temporary:<14}{exchanges} a layer')


if __name__ == '__main__':
  sys.exit(main())
