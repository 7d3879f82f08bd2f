"""Draws, as an SVG file, which blocks of attention are computed, and on which device of a ring.

python tools/draw_attention.py docs/assets/attention-blocks.svg
"""

from __future__ import annotations

import pathlib
import sys

import jax.numpy as jnp
import numpy as np

from praxis_lite.layers import AttentionMask, Causal, Segments, SlidingWindow
from praxis_lite.layers.block_arrays import block_indices, key_blocks, mask_blocks, query_blocks
from praxis_lite.layers.block_pairs import needed_pairs

BLOCKS, BLOCK, CELL, GAP, HEAD, FOOT = 8, 4, 20, 30, 30, 26
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f; dominant-baseline: central }
text.head { font-weight: 600 } text.device { fill: #24292f; text-anchor: middle; font-size: 11px }
rect { stroke: #ffffff; stroke-width: 2 } .skip { fill: #eaeef2 } .used, .d0 { fill: #b6d8f2 } .d1 { fill: #f5c98b }
.d2 { fill: #bfe3b4 } .d3 { fill: #dcc3ee }
@media (prefers-color-scheme: dark) {
  text, text.device { fill: #e6edf3 } rect { stroke: #0d1117 } .skip { fill: #21262d }
  .used, .d0 { fill: #1f5a8a } .d1 { fill: #8a5a14 } .d2 { fill: #2f6b25 } .d3 { fill: #60408a }
}
</style>"""
SEGMENTS = np.repeat([1, 2, 3], [11, 9, 12]).astype(np.int32)[None]


def computed_pairs(mask: AttentionMask) -> set[tuple[int, int]]:
  """Returns the pairs (block of queries, block of keys) that attention computes under a mask."""
  x, at = jnp.zeros((1, BLOCKS * BLOCK, 1, 1)), block_indices(BLOCKS * BLOCK, BLOCK)
  mask = mask_blocks(mask, BLOCK, BLOCK)
  pairs = needed_pairs(mask, query_blocks(x, at, 1), key_blocks(x, x, at))
  table = np.asarray(pairs.table)[: int(pairs.used)]
  if pairs.flags is not None:  # Pairs that data empties are skipped in the loop.
    table = table[np.asarray(pairs.flags)[: len(table)]]
  return {(int(i), int(j)) for i, j in table}


def matrix(x: float, title: str, used: set[tuple[int, int]], devices: int = 0) -> list[str]:
  """Draws a square: rows are blocks of queries, columns blocks of keys. Colours show the devices of a ring."""
  lines = [f'<text class="head" x="{x}" y="{HEAD / 2}">{title}</text>']
  for i in range(BLOCKS):
    device = min(i, 2 * devices - 1 - i)
    for j in range(BLOCKS):
      left, top = x + j * CELL, HEAD + i * CELL
      kind = 'skip' if (i, j) not in used else f'd{device}' if devices else 'used'
      lines.append(f'<rect class="{kind}" x="{left}" y="{top}" width="{CELL}" height="{CELL}" rx="4"/>')
      if devices and (i, j) in used:
        lines.append(f'<text class="device" x="{left + CELL / 2}" y="{top + CELL / 2}">{device}</text>')
  share = f'{len(used)} of {BLOCKS**2} blocks' if not devices else 'each device: 9 blocks'
  return [*lines, f'<text x="{x}" y="{HEAD + BLOCKS * CELL + FOOT / 2}">{share}</text>']


def draw_blocks() -> str:
  """Returns the SVG: a causal mask, a window, packed segments, and which device of a ring computes which block."""
  causal, ids = computed_pairs(Causal()), jnp.asarray(SEGMENTS)
  kinds = [
    ('causal', causal, 0),
    ('sliding window', computed_pairs(Causal() & SlidingWindow(5)), 0),
    ('packed segments', computed_pairs(Causal() & Segments(ids, ids)), 0),
    ('ring of 4 devices', causal, 4),
  ]
  step = BLOCKS * CELL + GAP
  lines = [line for n, kind in enumerate(kinds) for line in matrix(n * step, *kind)]
  width, height = len(kinds) * step - GAP, HEAD + BLOCKS * CELL + FOOT
  size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
  return '\n'.join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', STYLE, *lines, '</svg>\n'])


if __name__ == '__main__':
  pathlib.Path(sys.argv[1]).write_text(draw_blocks())
