"""The tables of the GPU benchmark: computes them from the times, and writes them to the docs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.gpu.case import ModelCase

_BEGIN, _END = '<!-- training: written by tools/benchmark_gpu.py -->', '<!-- training: end -->'


class Row(NamedTuple):
  """The measurements of one implementation in one case, over all turns.

  Attributes:
    case, side, batch: what was measured. Each implementation has its own best batch.
    step_s: seconds of a step, for all groups of all turns.
    peak_bytes: the largest memory of all turns.
    first_step_s: seconds from the start of the process to the end of the first step, for each turn.
    settings: settings that differ from the defaults, as text.
  """

  case: ModelCase
  side: str
  batch: int
  step_s: Sequence[float]
  peak_bytes: int
  first_step_s: Sequence[float]
  settings: str = ''

  @property
  def median_s(self) -> float:
    return statistics.median(self.step_s)

  @property
  def spread(self) -> float:
    """The distance between the quartiles, as a share of the median."""
    if len(self.step_s) < 2:
      return 0.0
    low, _, high = statistics.quantiles(self.step_s, n=4, method='inclusive')
    return (high - low) / self.median_s

  @property
  def tokens_per_s(self) -> float:
    return self.batch * self.case.length / self.median_s

  def utilization(self, flops_per_s: float, *, causal: bool = False) -> float:
    """Returns the model's operations per second as a share of `flops_per_s`. For the data sheet's peak, this is MFU."""
    return self.tokens_per_s * self.case.flops_of_token(causal=causal) / flops_per_s


_HEADS = (
  *('model', 'T', 'side', 'batch', 'tokens/s', 'step ms', 'spread', 'peak GiB', 'MFU', 'MFU, causal', 'of the ceiling'),
  *('to torch', 'first step s'),
)


def results_table(rows: Sequence[Row], peak: float | None, ceiling: float) -> str:
  """Returns the rows as a table in Markdown.

  Args:
    rows: the rows of one or several cases.
    peak: operations per second from the data sheet; None if it is not known.
    ceiling: operations per second of large products, measured in the same run.
  """
  torch = {(r.case.name, r.case.length): r.tokens_per_s for r in rows if r.side == 'PyTorch'}
  lines = ['| ' + ' | '.join(_HEADS) + ' |', '|' + '---|' * 3 + '---:|' * (len(_HEADS) - 3)]
  for row in rows:
    other = torch.get((row.case.name, row.case.length))
    cells = [
      row.case.name,
      f'{row.case.length:,}',
      row.side,
      str(row.batch),
      f'{row.tokens_per_s:,.0f}',
      f'{1e3 * row.median_s:,.1f}',
      f'{row.spread:.1%}',
      f'{row.peak_bytes / 2**30:.1f}' if row.peak_bytes else '-',
      *(f'{row.utilization(peak, causal=c):.1%}' if peak else '-' for c in (False, True)),
      f'{row.utilization(ceiling):.1%}',
      f'{row.tokens_per_s / other:.3f}' if other else '-',
      ', '.join(f'{s:.0f}' for s in row.first_step_s),
    ]
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def section(tables: str, facts: Mapping[str, str], settings: Sequence[Row], failed: Sequence[str]) -> str:
  """Returns the text between the markers: tables, hardware, versions, and the settings of each implementation."""
  lines = [tables, '', *(f'* {name}: {text}' for name, text in facts.items()), '']
  lines += [f'* {r.case.name}, T = {r.case.length:,}, {r.side}: {r.settings}' for r in settings if r.settings]
  lines += [f'* Not measured: {text}' for text in failed]
  return '\n'.join(lines).rstrip() + '\n'


def write_section(page: Path, text: str) -> None:
  """Replaces the text between the markers of a page.

  Raises:
    ValueError: the page does not have both markers, in order.
  """
  whole = page.read_text()
  before, begin, rest = whole.partition(_BEGIN)
  _, end, after = rest.partition(_END)
  if not begin or not end:
    raise ValueError(f'{page} lacks the lines {_BEGIN!r} and {_END!r}, between which the tables go')
  page.write_text(f'{before}{begin}\n\n{text}\n{end}{after}')
