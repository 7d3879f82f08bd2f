"""Measures the memory that cross entropy over chunks of classes saves, and its time compared with whole logits.

  python tools/benchmark_loss.py
  python tools/benchmark_loss.py --devices=8 --dtype=bfloat16

The step is a language model's head: the loss, and the gradients of its input and weights. Memory is the size of
temporary arrays on one device in XLA's analysis of the compiled program, without input, weights and their gradients.
Times are medians over pairs of runs in one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from praxis_lite.common.devices import simulate_cpu_devices
from tools.timing import measure_in_turn, median_ratio, seconds

if TYPE_CHECKING:  # They import JAX, whose devices are simulated first.
  import jax

  from praxis_lite.layers.base import Layer

VOCABULARIES = (8_192, 32_000, 50_257, 128_256)
# At the largest vocabulary, chunks reduce temporaries at least by this factor.
LEAST_SAVED = 5.0
AXES = ('data', 'mdl')


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--devices', type=int, default=1, choices=[1, 8], help='8: simulated, data x mdl = 2 x 4')
  parser.add_argument('--tokens', type=int, default=512, help='in each of two rows')
  parser.add_argument('--dims', type=int, default=256)
  parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'])
  parser.add_argument('--pairs', type=int, default=5, help='pairs of steps')
  args = parser.parse_args()
  simulate_cpu_devices(args.devices)

  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding, PartitionSpec

  from praxis_lite.common.config import Config
  from praxis_lite.layers import FullSoftmax
  from praxis_lite.layers.chunked_loss import usual_chunk_size

  mesh = jax.make_mesh((args.devices // 4 or 1, min(args.devices, 4)), AXES, axis_types=(AxisType.Auto,) * 2)

  def place(x: jax.Array, *spec: str | None) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

  def step_of(vocabulary: int, chunk_size: int | None) -> tuple[Layer, Any]:
    config = Config(FullSoftmax, input_dims=args.dims, num_classes=vocabulary, chunk_size=chunk_size)
    config.set(mesh_axis_names=AXES, fprop_dtype=args.dtype)
    config.weight_split_dims_mapping.wt = (None, 'mdl')
    config.activation_split_dims_mapping.out = ('data', None, 'mdl')
    layer = config.instantiate()

    def loss(variables: dict[str, jax.Array], x: jax.Array, labels: jax.Array) -> jax.Array:
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jnp.mean(layer.apply(variables, x, labels)[0].xent)

    return layer, jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

  print(f'2 x {args.tokens} tokens, {args.dims} dims, {args.dtype}, {args.devices} device(s)\n')
  print('vocabulary   chunk   logits MiB   whole MiB   chunks MiB   saved   time: whole s   chunks s   ratio')
  for vocabulary in VOCABULARIES:
    vocabulary -= vocabulary % mesh.shape['mdl']
    chunk_size = usual_chunk_size(vocabulary // mesh.shape['mdl'])
    steps = []
    for size in (None, chunk_size):
      layer, step = step_of(vocabulary, size)
      variables = {'w': place(layer.init(jax.random.key(0))['w'], None, 'mdl')}
      x = place(jax.random.normal(jax.random.key(1), (2, args.tokens, args.dims), args.dtype), 'data')
      labels = place(jax.random.randint(jax.random.key(2), (2, args.tokens), 0, vocabulary), 'data')
      steps.append(step.lower(variables, x, labels).compile())
    measures = [partial(seconds, partial(step, variables, x, labels)) for step in steps]
    of_whole, of_chunks = measure_in_turn(measures, args.pairs)
    whole, chunks = (step.memory_analysis().temp_size_in_bytes / 2**20 for step in steps)
    logits = 2 * args.tokens * vocabulary * 4 / 2**20 / args.devices
    ratio = median_ratio(of_chunks, of_whole)
    print(
      f'{vocabulary:10,} {chunk_size:7,} {logits:12,.1f} {whole:11,.1f} {chunks:12,.1f} {whole / chunks:6.1f}x '
      f'{statistics.median(of_whole):15.3f} {statistics.median(of_chunks):10.3f} {ratio:7.2f}'
    )
  print(f'\nlimit: at the largest vocabulary, at least {LEAST_SAVED:.0f}x')
  return whole < LEAST_SAVED * chunks


if __name__ == '__main__':
  sys.exit(main())
