"""`praxis-lite list`: prints the registered experiments, each in one line with its summary."""

from __future__ import annotations

import shutil
import sys

from absl import flags

from praxis_lite.cli.command import Command
from praxis_lite.cli.command_flags import CommandFlags


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.training import registry

  by_name, problems = registry.summaries()
  wanted = values.match.lower()
  rows = [row for row in by_name.items() if wanted in ' '.join(row).lower()]
  width = max((len(name) for name, _ in rows), default=0)
  for name, summary in rows:
    print(_cut(f'{name:<{width}}  {summary}'))
  if not rows and wanted:
    print(f'no experiment matches {values.match!r}')
  for problem in problems:
    print(f'not listed: {problem}', file=sys.stderr)
  return 0


def _cut(line: str) -> str:
  """Shortens a line to the width of the terminal; returns it unchanged if the output is not a terminal."""
  columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else len(line)
  return line if len(line) <= columns else f'{line[: columns - 1].rstrip()}…'


def _flags() -> CommandFlags:
  values = CommandFlags()
  values.add_text('match', 'Only list experiments whose name or summary contains this text.', 'lm', '')
  return values


_DOES = 'list the registered experiments'
COMMAND = Command(
  'list', _DOES, f'{_DOES}.', 'praxis-lite list --match=lm', _flags(), _run, bare='match', usage='[TEXT]'
)
