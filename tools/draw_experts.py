"""Draws, as an SVG file, how tokens travel to experts and back: two devices with four tokens and two experts each.

python tools/draw_experts.py docs/assets/experts.svg
"""

from __future__ import annotations

import pathlib
import sys

import jax.numpy as jnp
import numpy as np

from praxis_lite.layers.dispatch import capacity_plan

DEVICES, TOKENS, EXPERTS, CAPACITY = 2, 4, 4, 2
CELL, GAP, HEAD, BLOCK = 34, 10, 52, 150
# The experts of each token, the first choice first.
CHOICES = np.array([[[0, 2], [0, 1], [3, 0], [1, 3]], [[2, 0], [0, 3], [2, 3], [2, 1]]])
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f; text-anchor: middle; dominant-baseline: central }
text.device { text-anchor: start; font-weight: 600 } text.step { fill: #57606a }
rect { stroke: #ffffff; stroke-width: 2 } .token { fill: #d8dee4 } .empty { fill: #f3f5f7 }
.e0 { fill: #b6d8f2 } .e1 { fill: #f5c98b } .e2 { fill: #b9e0b4 } .e3 { fill: #dfc5ee }
path { stroke: #8c959f; stroke-width: 1.5; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } text.step { fill: #9198a1 } rect { stroke: #0d1117 }
  .token { fill: #30363d } .empty { fill: #161b22 }
  .e0 { fill: #1f5a8a } .e1 { fill: #8a5a14 } .e2 { fill: #2f6b2a } .e3 { fill: #68457f }
}
</style>"""


def draw_routing() -> str:
  """Returns the SVG: a row of blocks for each device, a column for each step."""
  names = np.array(['abcd', 'efgh'])
  sent = [_slots(CHOICES[d], names[d]) for d in range(DEVICES)]
  own = EXPERTS // DEVICES
  received = [[[n for s in sent for n in s[e]] for e in range(d * own, (d + 1) * own)] for d in range(DEVICES)]
  widths = (1, CAPACITY, CAPACITY * DEVICES, CAPACITY, 1)
  steps = ('tokens', 'dispatch', 'all-to-all, experts', 'all-to-all', 'combine')
  lines, x = [], 84
  for step, width in zip(steps, widths):
    lines.append(f'<text class="step" x="{x + width * CELL / 2}" y="16">{step}</text>')
    for device in range(DEVICES):
      top = HEAD + device * BLOCK
      if width == 1:
        kept = {n for expert in sent[device] for n in expert}
        for i, name in enumerate(names[device]):
          lines.append(_cell(x, top + i * (CELL - 2), 'token', name if step == 'tokens' or name in kept else ''))
      else:
        rows = sent[device] if width == CAPACITY else received[device]
        first = 0 if width == CAPACITY else device * own
        for i, row in enumerate(rows):
          for j, name in enumerate(row):
            lines.append(_cell(x + j * CELL, top + i * (CELL - 2), f'e{first + i}' if name else 'empty', name))
    x += width * CELL + 58
    if step != steps[-1]:
      for device in range(DEVICES):
        y = HEAD + device * BLOCK + 2 * (CELL - 2)
        across = HEAD + (1 - device) * BLOCK + 2 * (CELL - 2)
        ends = (y, across) if step in (steps[1], steps[2]) else (y,)
        lines += [f'<path d="M {x - 52} {y} C {x - 30} {y}, {x - 30} {end}, {x - 8} {end}"/>' for end in ends]
  for device in range(DEVICES):
    y = HEAD + device * BLOCK + 2 * (CELL - 2)
    lines.append(f'<text class="device" x="0" y="{y}">device {device}</text>')
  height, width = HEAD + DEVICES * BLOCK, x - 40
  size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
  return '\n'.join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', STYLE, *lines, '</svg>\n'])


def _slots(choices: np.ndarray, names: str) -> list[list[str]]:
  """Returns the token in each slot of each expert; '' for an empty slot."""
  plan = capacity_plan(jnp.asarray(choices), EXPERTS, CAPACITY)
  tokens = np.asarray(plan.token_of_slot).reshape(EXPERTS, CAPACITY)
  return [[names[t] if t < TOKENS else '' for t in row] for row in tokens]


def _cell(x: float, y: float, kind: str, name: str) -> str:
  box = f'<rect class="{kind}" x="{x}" y="{y}" width="{CELL}" height="{CELL - 4}" rx="4"/>'
  return box + (f'<text x="{x + CELL / 2}" y="{y + CELL / 2 - 2}">{name}</text>' if name else '')


if __name__ == '__main__':
  pathlib.Path(sys.argv[1]).write_text(draw_routing())
