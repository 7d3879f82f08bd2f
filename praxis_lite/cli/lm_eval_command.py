"""`praxis-lite-lm-eval`: the command `lm_eval`, with runs of praxis_lite among its models.

It takes the arguments of `lm_eval`, which finds models only in its own list.
"""

from __future__ import annotations

import sys

from praxis_lite.common.errors import UserError
from praxis_lite.common.foreign_text import printable


def run_lm_eval() -> None:
  """Runs `lm_eval` with the arguments of this process; reports a mistake of the user in one line, with exit code 2."""
  try:
    from praxis_lite.bridges.lm_eval import register_with_lm_eval

    register_with_lm_eval()

    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
  except UserError as error:
    print(printable(f'praxis-lite-lm-eval: error: {error}', one_line=True), file=sys.stderr)
    sys.exit(2)


if __name__ == '__main__':
  run_lm_eval()
