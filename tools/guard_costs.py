# ruff: noqa: E402
"""Prints the cost of the guards in `praxis_lite/sharding/guards/`, read from compiled train steps; it runs no step.

  python tools/guard_costs.py                      all registered experiments, on several meshes of 8 devices
  python tools/guard_costs.py --match=lm.          some of them
  python tools/guard_costs.py --layouts            layouts of a small language model that need guards

If the guards do not change a step, they cost nothing. If they do, it compiles the step with and without them, and
compares collectives, bytes and temporary memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from praxis_lite.common.devices import simulate_cpu_devices

simulate_cpu_devices(8)  # Before JAX is imported.

import jax
import numpy as np

from praxis_lite.common.config import Config
from praxis_lite.common.errors import UserError
from praxis_lite.common.trees import NestedDict
from praxis_lite.instruments.explain.report import task_and_inputs
from praxis_lite.instruments.testing import collectives
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.sharding.guards import guard
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

# By an experiment's number of mesh axes.
MESHES: dict[int, list[tuple[int, ...]]] = {1: [(8,)], 2: [(8, 1), (2, 4)], 3: [(8, 1, 1), (1, 8, 1), (2, 2, 2)]}
AXES = ('replica', 'data', 'mdl')


class StepCost(NamedTuple):
  """Per device: collectives by kind, the MiB that they move, and the MiB of temporaries."""

  counts: dict[str, int]
  moved: float
  temporaries: float


def step_cost(lowered: jax.stages.Lowered) -> StepCost:
  compiled = lowered.compile()
  found = {kind: c for kind, c in collectives(compiled).items() if c.count}
  moved = sum(c.bytes for c in found.values()) / 2**20
  memory = compiled.memory_analysis()
  assert memory is not None  # XLA reports it on CPUs.
  return StepCost({kind: c.count for kind, c in found.items()}, moved, memory.temp_size_in_bytes / 2**20)


def compare(name: str, task: SingleTask, inputs: NestedDict) -> bool:
  """Prints a line about a step, and returns whether the guards add a cost."""
  # Two tasks, because JAX would return the cached program when it lowers the same function again.
  steps = [PartitionedTask(task, inputs).train_step for _ in range(2)]
  plain, guarded = (step.jitted.lower(*step.arguments) for step in steps)
  before, start = guarded.as_text(), time.perf_counter()
  changed = guard(guarded)
  seconds = time.perf_counter() - start
  if guarded.as_text() == before:
    print(f'{name:<44} the same program ({seconds:.2f} s)', flush=True)
    return False
  old, new = step_cost(plain), step_cost(guarded)
  if old == new:
    print(f'{name:<44} the same collectives, bytes and temporaries ({seconds:.2f} s)', flush=True)
    return False
  print(f'{name:<44} {len(changed)} operations guarded ({seconds:.2f} s)')
  for what, cost in (('without', old), ('with', new)):
    print(f'{what:>44} {cost.temporaries:8.2f} MiB temporaries, {cost.moved:8.2f} MiB moved  {cost.counts}', flush=True)
  return True


def experiments(match: str) -> Iterator[tuple[str, SingleTask, NestedDict]]:
  """Yields the registered experiments that have mesh axes, on meshes of 8 devices."""
  registry.load_all()
  for name in registry.names():
    short = registry.short_name(name)
    if match not in short:
      continue
    experiment = configure(registry.get(name))
    axes = experiment.task.mesh_axis_names or ()
    for shape in MESHES.get(len(axes), ()):
      experiment.task.ici_mesh_shape = shape
      task, inputs = task_and_inputs(experiment)
      if inputs is None:
        print(f'{short:<44} its batches are known only with its data')
        break
      yield f'{short} {shape}', task, {**inputs}


def layouts() -> Iterator[tuple[str, SingleTask, NestedDict]]:
  """Yields a language model of 4 layers on a mesh of 2 x 2 x 2, with layouts that need guards."""
  ids = np.zeros((8, 64), np.int32)
  batch = {'ids': ids, 'labels': ids, 'weights': ids.astype(np.float32)}
  for name, rows, time_axes, model_axes in (
    ('rows over replica, data; D whole', ('replica', 'data'), None, None),
    ('rows over replica, data; D over mdl', ('replica', 'data'), None, 'mdl'),
    ('rows over data, replica; D over mdl', ('data', 'replica'), None, 'mdl'),
    ('rows over data, time over replica, D over mdl', 'data', 'replica', 'mdl'),
    ('time over replica, data; D over mdl', None, ('replica', 'data'), 'mdl'),
  ):
    model = transformer_lm(vocab_size=256, model_dims=128, num_layers=4, num_heads=4, hidden_dims=512)
    set_sharding(model, batch_axes=rows)
    lm = model.lm_tpl
    block = lm.transformer_tpl.layers_tpl
    for layer in (lm, block, block.attention_tpl, block.ff_tpl, lm.embedding_tpl):
      layer.activation_split_dims_mapping.out = (rows, time_axes, model_axes)
    task = Config(SingleTask, model=model, mesh_axis_names=AXES, ici_mesh_shape=(2, 2, 2))
    task.train.inputs_split_mapping = {'map_2d': (rows, time_axes)}
    yield name, task.instantiate(), jax.eval_shape(lambda: batch)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--match', default='', help='only experiments with this in their name')
  parser.add_argument('--layouts', action='store_true', help='layouts of a small language model instead')
  args = parser.parse_args()
  costly = 0
  for name, task, inputs in layouts() if args.layouts else experiments(args.match):
    try:
      costly += compare(name, task, inputs)
    except UserError as error:
      print(f'{name:<44} refused: {str(error)[:120]}')
  return 0 if args.layouts else int(costly > 0)


if __name__ == '__main__':
  sys.exit(main())
