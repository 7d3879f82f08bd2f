"""Prints memory and work of a training step for each rematerialisation policy, as XLA reports them.

  python tools/benchmark_remat.py
  python tools/benchmark_remat.py --layers=16 --tokens=1024

A policy that keeps less of the forward pass recomputes more of it. The memory that a policy keeps for each layer is the
difference between the temporaries of its step and of the step that keeps only inputs, without the state.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from praxis_lite.common.devices import simulate_cpu_devices

# Policies with the tags that each keeps in addition, from the one that keeps most to the one that keeps least.
POLICIES: dict[str, tuple[str, tuple[str, ...]]] = {
  'none': ('none', ()),
  'products': ('products', ()),
  'dots_saveable': ('dots_saveable', ()),
  'dots_with_no_batch_dims_saveable': ('dots_with_no_batch_dims_saveable', ()),
  'save_names: context, ffn_up': ('save_names', ('context', 'ffn_up')),
  'full': ('full', ()),
}


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--layers', type=int, default=8)
  parser.add_argument('--dims', type=int, default=128)
  parser.add_argument('--tokens', type=int, default=256, help='in each of 4 rows')
  args = parser.parse_args()
  simulate_cpu_devices(1)

  import jax

  from praxis_lite.common.config import Config
  from praxis_lite.inputs import SyntheticLMInput
  from praxis_lite.models import transformer_lm
  from praxis_lite.training.partitioned_task import PartitionedTask
  from praxis_lite.training.task import SingleTask

  jax.config.update('jax_enable_compilation_cache', False)
  data = Config(SyntheticLMInput, seq_len=args.tokens, vocab_size=256, batch_size=4, is_training=True).instantiate()
  found: dict[str, tuple[float, float]] = {}
  for name, (policy, names) in POLICIES.items():
    sizes = {'vocab_size': 256, 'model_dims': args.dims, 'num_layers': args.layers, 'num_heads': 4}
    model = transformer_lm(**sizes, remat=policy)
    model.lm_tpl.transformer_tpl.remat_save_names = names
    model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl.implementation = 'dense'
    step = PartitionedTask(Config(SingleTask, model=model).instantiate(), data.batch_struct()).train_step
    step.compile()
    cost, memory = step.compiled.cost_analysis(), step.compiled.memory_analysis()
    assert cost and memory
    found[name] = memory.temp_size_in_bytes / 2**20, cost['flops']

  least, most_work = found['full'][0], found['none'][1]
  print(f'{args.layers} layers of {args.dims} dims, 4 x {args.tokens} tokens, dense attention, 1 CPU device\n')
  print(f'{"policy":34} {"temporaries MiB":>15} {"kept MiB a layer":>17} {"work":>6}')
  for name, (kept, flops) in found.items():
    print(f'{name:34} {kept:15.1f} {(kept - least) / args.layers:17.2f} {flops / most_work:6.2f}')
  memories = [kept for kept, _ in found.values()]
  ordered = all(a >= b for a, b in itertools.pairwise(memories))
  print('\nin the order that theory says' if ordered else '\nNOT in the order that theory says')
  return not ordered


if __name__ == '__main__':
  sys.exit(main())
