"""Plans count the blocks that meet in a ring, whose number depends on the device, against a formula by hand."""

from __future__ import annotations

import pytest

from praxis_lite.instruments.plan import plan
from praxis_lite.layers.block_pairs import count_pairs
from praxis_lite.layers.masks import Band, Causal, SlidingWindow
from praxis_lite.layers.sequence_parts import SequencePlan, SequenceSplit
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

CONTEXT = 2
ATTENTION = 'lm.transformer.layers.attention'


def attention_flops(found, phase):
  return sum(op.count * op.flops for op in found.cost.operations if op.layer == ATTENTION and op.phase == phase)


@pytest.mark.slow
@pytest.mark.parametrize('compile', [False, True])
def test_the_attention_of_a_ring_has_the_flops_of_the_blocks_that_meet(compile, tmp_path):
  config = configure(registry.get('long_context.RingLmTiny'))
  found = plan(config, None, 'cpu:8', compile=compile, cache=tmp_path)
  # A device has 2 of 3 rows, padded to 4, 2 of 3 heads, padded too, and 2 of the 4 halves of 45 tokens, as blocks.
  layers, rows, heads, dims, halves, size = 2, 2, 2, 6, 4, 12
  met = layers * halves * (halves + 1) / 2 / CONTEXT
  product = 2 * rows * heads * size**2 * dims
  assert found.is_time_known
  assert attention_flops(found, 'forward') == pytest.approx(met * 2 * product)
  assert attention_flops(found, 'backward') == pytest.approx(met * 5 * product)


@pytest.mark.slow
def test_attention_to_128k_tokens_has_the_flops_of_the_formula():
  found = plan(configure(registry.get('long_context.Llama8B128k')), None, 'h100:32x8', compile=False)
  length, layers, rows, dims, devices = 131_072, 32, 32, 4096, 256
  product = layers * rows * 2 * length**2 / 2 * dims / devices  # A token attends to half of them.
  assert found.is_time_known
  for phase, products in {'forward': 2, 'recomputed': 2, 'backward': 5}.items():
    assert attention_flops(found, phase) == pytest.approx(products * product, rel=0.01)


@pytest.mark.parametrize('mask', [Band(), Causal(), SlidingWindow(5) & Causal(), Causal() & SlidingWindow(30)])
@pytest.mark.parametrize('length', [1, 15, 96])
def test_the_mean_number_of_pairs_is_that_of_all_devices(mask, length):
  sequence = SequencePlan(SequenceSplit('context'), length, length, 4, 4, isinstance(mask, Causal), 0, 3)
  indices = [sequence.indices(length, device) for device in range(4)]
  assert sorted(i for block in indices for i in block.ravel() if i >= 0) == list(range(length))
  total = sum(count_pairs(mask, queries, keys) for queries in indices for keys in indices)
  assert sequence.mean_pairs(mask) == pytest.approx(total / 16)
