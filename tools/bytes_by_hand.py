"""Compares the bytes that the 8B model sends on 64 H100 with those of the step of `handwritten_lm.py`.

  python tools/bytes_by_hand.py

It compiles both steps on both meshes, with the packages of `praxis_lite[plan]`, and runs nothing. The step by hand has
whole logits and the same rematerialization, and is compiled with the same flags. The exit code is 1 if our step sends
more, in collectives of 1 KiB or more. Smaller ones are for losses, which our step also returns for each row.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from praxis_lite.cli.plan_flags import cache_of_plans, prepare
from praxis_lite.instruments.plan import parse_topology, plan
from praxis_lite.instruments.plan.cost import Cost

TOPOLOGY = 'h100:8x8'
CASES = (((1, 64, 1), 64), ((1, 16, 4), 128))  # The mesh (replica, data, mdl), and the rows of a batch.


class Sent(NamedTuple):
  """What a step sends, and the memory that it needs, on each device."""

  bytes: float
  collectives: float
  flops: float
  memory: float

  @classmethod
  def add_up(cls, cost: Cost, memory: float) -> Sent:
    counted = [c for c in cost.collectives if c.sent_bytes >= 1024]
    return cls(sum(c.count * c.sent_bytes for c in counted), sum(c.count for c in counted), cost.flops, memory)

  def __str__(self) -> str:
    return f'{self.bytes / 2**20:>10,.0f} {self.collectives:>12.0f} {self.flops:>11.4e} {self.memory / 2**30:>9.2f}'


def ours(mesh: tuple[int, int, int], rows: int) -> Sent:
  from praxis_lite.experiments.lm_sizes import Llama8B
  from praxis_lite.training.experiment import configure

  config = configure(Llama8B)
  config.task.ici_mesh_shape = mesh
  for dataset in config.datasets:
    dataset.batch_size = rows
  found = plan(config, None, TOPOLOGY, cache=cache_of_plans())
  return Sent.add_up(found.cost, found.memory.peak)


def compile_by_hand(mesh: tuple[int, int, int], rows: int, exchange: bool) -> Sent:
  import jax
  import jax.numpy as jnp
  import optax
  from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

  from praxis_lite.instruments.plan.compilers import devices_of, places_of, pretend_cudnn_for_plans
  from praxis_lite.instruments.plan.cost import cost_of
  from praxis_lite.instruments.plan.hlo import parse
  from praxis_lite.instruments.plan.layer_names import HiddenWork, LayerNames
  from praxis_lite.instruments.plan.links import Links
  from praxis_lite.sharding.xla_flags import DEFAULTS, XlaFlags
  from tools.handwritten_lm import Size, Tuning, init_params, make_optimizer, make_step, sharding_specs

  size = Size(rows, 8192, 4096, 32, 32, 14336, 128256, num_kv_heads=8)
  tuning = Tuning(dtype=jnp.bfloat16, attention='cudnn', remat='full', exchange=exchange)
  topology = parse_topology(TOPOLOGY)
  devices = jax.make_mesh(mesh[1:], ('data', 'mdl'), axis_types=(AxisType.Auto,) * 2, devices=devices_of(topology))
  params = jax.eval_shape(lambda: init_params(size, jax.random.key(0)))
  tx = make_optimizer(3e-4, {name: 'norm' not in name for name in params})
  state = jax.eval_shape(tx.init, params)
  by_name = {name: NamedSharding(devices, spec) for name, spec in sharding_specs().items()}
  whole = NamedSharding(devices, P())
  of_state = optax.tree_utils.tree_map_params(
    tx, lambda _, sharding: sharding, state, by_name, transform_non_params=lambda _: whole
  )
  dtypes = {'ids': jnp.int32, 'labels': jnp.int32, 'weights': jnp.float32}
  batch = {name: jax.ShapeDtypeStruct((rows, 8192), dtype) for name, dtype in dtypes.items()}
  of_batch = {name: NamedSharding(devices, P(('data', 'mdl'), None)) for name in batch}
  jitted = jax.jit(
    make_step(size, tx, devices, tuning),
    in_shardings=(by_name, of_state, of_batch),
    out_shardings=(by_name, of_state, whole),
    donate_argnums=(0, 1),
  )
  with pretend_cudnn_for_plans():
    lowered = jitted.lower(params, state, batch)
  compiled = XlaFlags(DEFAULTS['gpu']).compile(lowered)
  program, memory = parse(compiled.as_text() or ''), compiled.memory_analysis()
  links = Links(topology, places_of(topology, list(devices.devices.flat)))
  sizes = dict(devices.shape)
  cost = cost_of(program, topology.target, links, mesh=sizes, layers=LayerNames([]), hidden=HiddenWork())
  assert memory is not None
  taken = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
  return Sent.add_up(cost, taken - memory.alias_size_in_bytes)


def main() -> int:
  argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
  prepare(parse_topology(TOPOLOGY))
  print(f'{"mesh":<12} {"step":<36} {"MiB sent":>10} {"collectives":>12} {"FLOPs":>11} {"peak GiB":>9}')
  worse = False
  for mesh, rows in CASES:
    own = ours(mesh, rows)
    print(f'{mesh!s:<12} {"ours":<36} {own}', flush=True)
    hands = []
    for exchange in (False, True):
      hands.append(compile_by_hand(mesh, rows, exchange))
      name = f'by hand, {"vectors exchanged" if exchange else "lookup left to XLA"}'
      print(f'{mesh!s:<12} {name:<36} {hands[-1]}', flush=True)
    worse |= any(own.bytes > hand.bytes + 1024 or own.collectives > hand.collectives for hand in hands)
  return int(worse)


if __name__ == '__main__':
  sys.exit(main())
