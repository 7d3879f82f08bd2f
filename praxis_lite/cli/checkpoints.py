"""`praxis-lite checkpoints`: lists, shows, compares, verifies and copies the checkpoints of runs."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command
from praxis_lite.cli.command_flags import CommandFlags
from praxis_lite.common.errors import UserError, check_choice

# How many directories each action takes, at least and at most, and what they are.
_ACTIONS = {
  'list': (1, None, 'directories of runs, as in praxis-lite checkpoints list runs/1'),
  'show': (1, 1, 'one run, as in praxis-lite checkpoints show runs/1 --step=100'),
  'diff': (
    1,
    2,
    'two runs, or two steps of one, as in praxis-lite checkpoints diff runs/1 --step=100 --other_step=200',
  ),
  'verify': (1, None, 'directories of runs, as in praxis-lite checkpoints verify runs/1'),
  'copy': (2, 2, 'a run and a directory, as in praxis-lite checkpoints copy runs/1 runs/2 --nooptimizer'),
}


def _run(values: flags.FlagValues) -> int:
  check_choice('ACTION', values.action, [*_ACTIONS])
  least, most, wanted = _ACTIONS[values.action]
  if not least <= len(values.dirs) <= (most or len(values.dirs)):
    raise UserError(f'{values.action}: name {wanted}')
  from praxis_lite.cli import checkpoint_actions as actions

  action = {
    'list': actions.list_checkpoints,
    'show': actions.show_checkpoint,
    'diff': actions.compare_checkpoints,
    'verify': actions.verify_checkpoints,
    'copy': actions.copy_checkpoint,
  }
  return action[values.action](values)


def _flags() -> CommandFlags:
  values = CommandFlags()
  values.add_text('action', 'What to do: list, show, diff, verify or copy.', 'verify', 'list')
  where = 'Directory of a run, or of one of its checkpoints, or the URL of a copy.'
  values.add_texts('dirs', where, 'runs/1')
  values.add_integer('step', 'Step of the checkpoint; by default all for list and verify, the newest for others.', 100)
  values.add_integer('other_step', 'For diff: step of the second checkpoint.', 200)
  values.add_switch('optimizer', "For copy: copy the optimizer's state too.", default=True)
  return values


COMMAND = Command(
  'checkpoints',
  'list, compare, verify and copy checkpoints',
  'list the checkpoints of runs: age, size, mesh, and which is the best or damaged; show the arrays of one checkpoint; '
  'diff two by the largest difference of each array; verify all checksums, with exit code 1 if anything is damaged; '
  'copy one to another run directory. All of these except diff also take the URL of a copy in an object store, such '
  'as s3://bucket/runs/1.',
  'praxis-lite checkpoints verify runs/1',
  _flags(),
  _run,
  bare='action',
  bare_rest='dirs',
  usage='ACTION DIRECTORY ... [--flags]',
)
