"""Draws schedules of pipelines as an SVG file: a row for each stage, a column for each tick.

python tools/draw_pipeline.py docs/assets/pipeline-schedule.svg
"""

from __future__ import annotations

import pathlib
import sys

from praxis_lite.layers.pipeline_schedule import PipelineSchedule

CELL, ROW, LEFT, HEAD = 36, 26, 66, 40
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f; text-anchor: middle; dominant-baseline: central }
text.head, text.stage { text-anchor: start } text.head { font-weight: 600 }
rect { stroke: #ffffff; stroke-width: 2 } .wait { fill: #eaeef2 } .r0 { fill: #b6d8f2 } .r1 { fill: #f5c98b }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } rect { stroke: #0d1117 } .wait { fill: #21262d } .r0 { fill: #1f5a8a } .r1 { fill: #8a5a14 }
}
</style>"""
SCHEDULES = (PipelineSchedule(4, 8), PipelineSchedule(4, 8, rounds=2))


def draw_schedule() -> str:
  """Returns the SVG of `SCHEDULES`, one below the other."""
  lines, top = [], 0
  for schedule in SCHEDULES:
    S, M, R = schedule
    title = f'{S} stages, {M} microbatches' + (f', circular_repeat = {R}' if R > 1 else '')
    share = f'{schedule.num_ticks} ticks, bubble {schedule.bubble_fraction:.0%}'
    lines.append(f'<text class="head" x="0" y="{top + HEAD / 2}">{title}: {share}</text>')
    for stage, row in enumerate(schedule.table()):
      y = top + HEAD + stage * ROW
      lines.append(f'<text class="stage" x="0" y="{y + ROW / 2}">stage {stage}</text>')
      for tick, entry in enumerate(row):
        # With R rounds, a tick computes 1 / R of the layers in 1 / R of the time, so it is drawn narrower.
        x, kind = LEFT + tick * CELL / R, 'wait' if entry is None else f'r{entry[1]}'
        lines.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{CELL / R}" height="{ROW}" rx="4"/>')
        if entry is not None:
          lines.append(f'<text x="{x + CELL / R / 2}" y="{y + ROW / 2}">{entry[0]}</text>')
    top += HEAD + S * ROW + 12
  width = LEFT + CELL * max(schedule.num_ticks / schedule.rounds for schedule in SCHEDULES)
  size = f'width="{width}" height="{top}" viewBox="0 0 {width} {top}"'
  return '\n'.join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', STYLE, *lines, '</svg>\n'])


if __name__ == '__main__':
  pathlib.Path(sys.argv[1]).write_text(draw_schedule())
