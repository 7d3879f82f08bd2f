"""Compares the bytes that experiments of published sizes send, by cause, with the least that their layouts need.

  python tools/least_bytes.py                       prints a table for docs/planning-figures.md
  python tools/least_bytes.py lm_sizes.Llama8B      of one experiment

It compiles the steps for H100 at their own meshes, with the packages of `praxis_lite[plan]`. The least is computed from
the sizes of a model and its layout, in bfloat16, if a block keeps only its input for the backward pass:

    weights          gathered for each pass of a block, and once for tables and heads
    gradients        summed over the devices that share the batch, once
    tensor parallel  sums of the outputs of attention and feed-forward, and of the gradients of their inputs; those of
                     attention again if it is recomputed
    lookups          vectors of ids and their gradients, if they are fewer bytes than the table and its gradient
    experts          the rows that tokens choose and the outputs, and their gradients; rows again if recomputed
    sequences        keys and values to all devices of a sequence, in three passes, and their gradients
    stages           a microbatch and its gradient in each tick, and the batch to the first stage and from the last

Blocks in stages do their part in each tick, and are recomputed with their stage, and once more if `remat` says so. With
`gather_axes`, their weights are gathered once in a step.
"""

from __future__ import annotations

import argparse
import collections
import math
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from praxis_lite.cli.plan_flags import cache_of_plans, prepare
from praxis_lite.common.config import Config
from praxis_lite.instruments.explain.explanation import Explanation
from praxis_lite.instruments.plan import Plan, parse_topology, plan
from praxis_lite.sharding.specs import spec_axes
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure
from tools.plan_snapshots import TOPOLOGIES

_ITEM = 2  # Bytes of a bfloat16.
_NAMES = {  # The names above of causes in `plan --why`.
  'gather of a fully sharded weight': 'weights',
  'gradient reduction': 'gradients',
  'tensor parallel': 'tensor parallel',
  'exchange of looked-up vectors': 'lookups',
  'exchange between experts': 'experts',
  'exchange of a sequence': 'sequences',
  'pipeline stages': 'stages',
}


def sent_bytes(found: Plan) -> dict[str, float]:
  """Returns the bytes that a device sends in a step, by cause."""
  sent = collections.defaultdict[str, float](float)
  for c in found.collectives:
    sent[_NAMES.get(str(c.cause), 'other')] += c.count * c.sent_bytes
  return sent


def least_bytes(task: Config, rows: int, length: int, sizes: Mapping[str, int], found: Plan) -> dict[str, float]:
  """Returns the least bytes that a device has to send in a step, by cause.

  Args:
    task: the task of a language model of `transformer_lm`.
    rows, length: the sizes of a batch.
    sizes: the size of each mesh axis.
    found: a plan of the task, for the splits of its weights.
  """
  model, lm = task.model, task.model.lm_tpl
  stack, block = lm.transformer_tpl, lm.transformer_tpl.layers_tpl

  def parts(axes: Collection[str]) -> int:
    return math.prod(sizes[axis] for axis in axes)

  def away(axes: Collection[str]) -> float:
    return 1 - 1 / parts(axes)

  def axes_of_tokens(mapping: Config) -> set[str]:
    return {axis for entry in mapping.out[:2] for axis in spec_axes(entry)}

  inside, outside = (axes_of_tokens(layer.activation_split_dims_mapping) for layer in (block, lm))
  dims, tensor, layers = model.model_dims, sizes['mdl'], model.num_layers
  vectors, vectors_outside = (rows * length // parts(axes) * dims * _ITEM for axes in (inside, outside))

  S, R, M = (getattr(stack, name, 1) for name in ('num_stages', 'circular_repeat', 'num_microbatches'))
  ticks, blocks = R * M + S - 1, layers // (R * S)  # Without stages, one tick runs all blocks.
  passes, is_tied = 2 if S == 1 else 3, lm.embedding_tpl is None
  table = 'lm.softmax.w' if is_tied else 'lm.embedding.w'
  least = collections.defaultdict[str, float](float)

  def add_weight(weight: Explanation) -> None:
    """Adds the gather of a weight, and the sum of its gradient."""
    sharing = inside if '.transformer.' in weight.path else outside
    if weight.num_active is not None:
      sharing = sharing - {*spec_axes(block.ff_tpl.expert_axis)}
    over = sharing & {axis for dim in weight.dims for axis in dim.axes}
    part = math.prod(dim.local for dim in weight.dims) * _ITEM
    whole = part * parts(over)
    gathered, summed = whole * away(over), whole * away(over) + 2 * part * away(sharing - over)
    gathers = passes if '.transformer.' in weight.path else 1
    if weight.path == table:
      # The head gathers a tied table in any case, and both uses have one gradient.
      saved, exchanged = gathered if is_tied else gathered + summed, 2 * vectors_outside * away(over)
      if exchanged < saved:
        least['lookups'] = exchanged
        if not is_tied:
          return
      else:
        gathers += is_tied
    times = ticks / R if '.layers.' in weight.path else 1
    is_kept = '.layers.' in weight.path and getattr(stack, 'gather_axes', None)
    least['weights'] += gathered if is_kept else times * gathers * gathered
    least['gradients'] += times * summed

  for weight in found.weights:
    if weight.trainable:
      add_weight(weight)

  one_sum, one_outside = (2 * of * (1 - 1 / tensor) for of in (vectors / M, vectors_outside))
  recomputed = blocks if S == 1 else 2 * blocks - 1 if stack.remat == 'none' else 3 * blocks - 2
  least['tensor parallel'] = ticks * (4 * blocks + recomputed) * one_sum + 2 * one_outside
  if axis := getattr(block.ff_tpl, 'expert_axis', None):
    chosen = vectors * block.ff_tpl.num_experts_per_token
    least['experts'] = 5 * (layers - len(stack.first_tpl)) * chosen * away(spec_axes(axis))
  if (context := sizes.get('context', 1)) > 1:
    both = 2 * vectors * model.num_kv_heads // model.num_heads // tensor
    least['sequences'] = 4 * layers * (context - 1) * both
  if S > 1:
    least['stages'] = 2 * ticks * vectors / M + 4 * vectors * (1 - 1 / S)
  return least


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  several = {name: topology for name, topology in TOPOLOGIES.items() if parse_topology(topology).num_devices > 1}
  parser.add_argument('experiments', nargs='*', help='all by default', metavar='experiment', choices=[*several, []])
  experiments = parser.parse_args().experiments or several
  prepare(parse_topology('h100:1x1'))
  registry.load_all()
  print('| experiment, chips, mesh | cause | sent, GiB | least, GiB | sent / least |\n|---|---|---|---|---|')
  for name in experiments:
    config = configure(registry.get(name))
    found = plan(config, None, several[name], cache=cache_of_plans())
    data = config.datasets[0]
    sent, least = sent_bytes(found), least_bytes(config.task, data.batch_size, data.seq_len, found.mesh, found)
    head = f'`{name}`, `{several[name]}`, {" x ".join(map(str, found.mesh.values()))}'
    for cause in [*_NAMES.values(), 'other']:
      if max(sent[cause], least[cause]) >= 0.005 * 2**30:
        print(_row(head, cause, sent[cause], least[cause]), flush=True)
        head = ''
    print(_row('', 'all', sum(sent.values()), sum(least.values())), flush=True)
  return 0


def _row(head: str, cause: str, sent: float, least: float) -> str:
  ratio = f'{sent / least:.2f}' if least else '-'
  return f'| {head} | {cause} | {sent / 2**30:,.2f} | {least / 2**30:,.2f} | {ratio} |'


if __name__ == '__main__':
  sys.exit(main())
