"""A plot of a scaling law: the losses of runs by their compute, and the least loss that the law predicts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from praxis_lite.common.figures import short_number
from praxis_lite.instruments.plan.scaling_law import BestSize, FittedLaw

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _EDGE = 760, 460, 70, 50, 20
_POINTS = 60
_COLORS = ('#2563eb', '#059669', '#d97706', '#dc2626', '#7c3aed', '#0891b2', '#65a30d', '#db2777')


def draw_scaling(fitted: FittedLaw, proposed: Sequence[BestSize]) -> str:
  """Returns an SVG: a line for each number of parameters, the runs as points, and the proposed sizes as rings."""
  runs = fitted.runs
  budgets = [*(run.flops for run in runs), *(size.flops for size in proposed)]
  losses = [*(run.loss for run in runs), *(size.loss for size in proposed)]
  x0, x1 = math.log10(min(budgets)) - 0.2, math.log10(max(budgets)) + 0.2
  y0, y1 = math.log(min(losses)) - 0.03, math.log(max(losses)) + 0.03

  def x(flops: float) -> float:
    return _LEFT + (math.log10(flops) - x0) / (x1 - x0) * (_WIDTH - _LEFT - _EDGE)

  def y(loss: float) -> float:
    return _HEIGHT - _BOTTOM - (math.log(loss) - y0) / (y1 - y0) * (_HEIGHT - _BOTTOM - _EDGE)

  def text(at_x: float, at_y: float, words: str, anchor: str = 'middle') -> str:
    return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'

  grid = [10 ** (x0 + (x1 - x0) * i / _POINTS) for i in range(_POINTS + 1)]
  least = [(x(c), y(fitted.law.best_size(c)[2])) for c in grid]
  line = ' '.join(f'{at_x:.1f},{at_y:.1f}' for at_x, at_y in least if at_y >= 0)
  parts = [f'<polyline points="{line}" fill="none" stroke="#111" stroke-width="2" stroke-dasharray="6 4"/>']
  for power in range(math.ceil(x0), math.floor(x1) + 1):
    parts += [text(x(10.0**power), _HEIGHT - _BOTTOM + 20, f'1e{power}')]
  for i in range(5):
    loss = math.exp(y0 + (y1 - y0) * i / 4)
    parts += [text(_LEFT - 8, y(loss) + 4, f'{loss:.3g}', 'end')]
  sizes = sorted({run.parameters for run in runs})
  for i, parameters in enumerate(sizes):
    color = _COLORS[i % len(_COLORS)]
    own = sorted((run for run in runs if run.parameters == parameters), key=lambda run: run.tokens)
    curve = ' '.join(f'{x(run.flops):.1f},{y(fitted.law.loss(*run[:2])):.1f}' for run in own)
    parts.append(f'<polyline points="{curve}" fill="none" stroke="{color}"/>')
    for run in own:
      title = html.escape(f'{run.name}: {short_number(run.tokens)} tokens, loss {run.loss:.4g}')
      circle = f'<circle cx="{x(run.flops):.1f}" cy="{y(run.loss):.1f}" r="4" fill="{color}">'
      parts.append(f'{circle}<title>{title}</title></circle>')
    label = text(_WIDTH - _EDGE, _EDGE + 16 * i, f'{short_number(parameters)} parameters', 'end')
    parts.append(f'<g fill="{color}">{label}</g>')
  for size in proposed:
    title = f'{short_number(size.parameters)} parameters, {short_number(size.tokens)} tokens, loss {size.loss:.4g}'
    ring = f'<circle cx="{x(size.flops):.1f}" cy="{y(size.loss):.1f}" r="6" fill="none" stroke="#111">'
    parts.append(f'{ring}<title>{title}</title></circle>')
  parts.append(text((_LEFT + _WIDTH) / 2, _HEIGHT - 10, 'operations of training; dashed: the least loss by the law'))
  parts.append(text(_LEFT, _EDGE - 6, 'loss'))
  box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12"'
  return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n' + '\n'.join(parts) + '\n</svg>\n'
