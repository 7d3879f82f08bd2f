"""Measures mixtures of experts: the overhead of the layer, and the memory that expert parallelism saves.

  python tools/benchmark_moe.py

Speed: top-2 of 8 experts, dropless, forward and backward, compared with the plain JAX below. Both are compiled in one
process and run in turn. The median ratio of neighbouring runs should be at most 1.15.

Memory: bytes of a train step's arguments and temporaries on each device, as the compiler reports them, with experts
over 1 to 8 simulated devices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from praxis_lite.common.devices import simulate_cpu_devices
from praxis_lite.common.figures import format_bytes
from tools.timing import measure_in_turn, median_ratio, seconds

LIMIT = 1.15


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--pairs', type=int, default=40, help='pairs of runs')
  parser.add_argument('--tokens', type=int, default=2048)
  parser.add_argument('--model_dims', type=int, default=256)
  parser.add_argument('--hidden_dims', type=int, default=512)
  parser.add_argument('--memory', action=argparse.BooleanOptionalAction, default=True)
  args = parser.parse_args()
  simulate_cpu_devices(8)
  ratio = speed(args.tokens, args.model_dims, args.hidden_dims, args.pairs)
  print(f'dropless, top-2 of 8: {ratio:.3f} times the step by hand (at most {LIMIT})')
  if args.memory:
    memory()
  return int(ratio > LIMIT)


def speed(tokens: int, model_dims: int, hidden_dims: int, pairs: int) -> float:
  """Returns the median ratio of the layer's time to that of plain JAX, forward and backward."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from praxis_lite.common.config import Config
  from praxis_lite.common.trees import NestedDict
  from praxis_lite.layers import MoeFeedForward

  layer = Config(MoeFeedForward, input_dims=model_dims, hidden_dims=hidden_dims, num_experts=8).instantiate()
  variables = layer.init(jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (8, tokens // 8, model_dims))

  def handwritten(v: NestedDict, x: jax.Array) -> jax.Array:
    rows = x.reshape(-1, model_dims)
    gates, experts = jax.lax.top_k(jax.nn.softmax(rows @ v['router']['w']), 2)
    gates /= gates.sum(-1, keepdims=True)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=8)
    chosen = rows[order // 2]
    hidden = jax.nn.silu(jax.lax.ragged_dot(chosen, v['gate'], sizes)) * jax.lax.ragged_dot(chosen, v['up'], sizes)
    out = jax.lax.ragged_dot(hidden, v['down'], sizes)[jnp.argsort(order)]
    return (out.reshape(-1, 2, model_dims) * gates[..., None]).sum(1).reshape(x.shape)

  def step(fn: Callable[[NestedDict, jax.Array], jax.Array]) -> Callable[..., object]:
    return jax.jit(jax.value_and_grad(lambda v, x: jnp.mean(fn(v, x) ** 2), argnums=(0, 1)))

  steps = step(lambda v, x: layer.apply(v, x)[0]), step(handwritten)
  ours, theirs = (fn(variables, x) for fn in steps)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)

  return median_ratio(*measure_in_turn([partial(seconds, partial(fn, variables, x)) for fn in steps], pairs))


def memory() -> None:
  """Prints, for experts over 1, 2, 4 and 8 devices, the bytes of a train step and of its parameters on each device."""
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
