"""Makes a batch script of a run for Slurm. It starts all processes, and starts them again after a loss, on other nodes.

    exit code of the step         what the script does
    0                             it ends
    75, or a signal               starts all processes again, at most `max_restarts` times, without nodes that are down
    any other                     ends with this code: another attempt would make the mistake again
    after the time limit's USR1   all processes save and end, and the job is queued again
    more nodes down than spares   the job is queued again, and gets other nodes

The job asks for `spares` more nodes than a step uses. `--no-kill` keeps the other nodes when one fails.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from praxis_lite.common.errors import LostHostError, UserError

# Seconds between the end of the grace period and the time limit.
_ROOM_S = 10

_SCRIPT = r"""#!/bin/bash
{options}

command=({command})
again=
trap 'again=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1  # Does not signal this script.
for attempt in {{0..{max_restarts}}}; do
  down=$(sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --states=down,drain,fail,no_respond --format=%N |
    sort -u | paste -sd,)
  if (($(wc -w <<< "${{down//,/ }}") > {spares})); then
    exec scontrol requeue "$SLURM_JOB_ID"
  fi
  srun --nodes={nodes} --ntasks={processes} --kill-on-bad-exit=0 --wait=60 \
    ${{down:+"--exclude=$down"}} "${{command[@]}}" &
  step=$!
  while :; do  # USR1 ends `wait` early.
    wait "$step"
    code=$?
    kill -0 "$step" 2> /dev/null || break
  done
  if [[ $code != 0 && $again ]]; then
    exec scontrol requeue "$SLURM_JOB_ID"
  fi
  if [[ $code != {lost} ]] && {{ ((code <= 128)) || [[ $code == 130 || $code == 143 ]]; }}; then
    break
  fi
  echo "attempt $attempt ended with $code"
done
exit "$code"
"""


def slurm_script(
  name: str,
  command: Sequence[str],
  processes: int,
  *,
  processes_per_node: int,
  spares: int,
  max_restarts: int,
  grace_s: int,
  options: Sequence[str] = (),
) -> str:
  """Returns a script for `sbatch`.

  Args:
    name, command: the name of the job, and the command line of each process.
    spares: how many more nodes the job asks for than its processes need.
    max_restarts: how often all processes are started again.
    grace_s: seconds that the processes have to save and end before the time limit.
    options: more options of sbatch, such as 'gpus-per-node=8'.

  Raises:
    UserError: the processes cannot be divided by those of a node, or an option is not of the form NAME=VALUE.
  """
  if processes % processes_per_node:
    raise UserError(f'--processes={processes} is not a multiple of --processes_per_node={processes_per_node}')
  for option in options:
    if not re.fullmatch(r'[a-z][a-z-]*=[\w.,:*/@%+=-]+', option):
      raise UserError(f'--resource={option}: expected an option of sbatch, as in --resource=gpus-per-node=8')
  nodes = processes // processes_per_node
  lines = [f'job-name={name}', f'nodes={nodes + spares}', f'ntasks-per-node={processes_per_node}', *options]
  lines += ['requeue', 'no-kill', 'open-mode=append', f'signal=B:USR1@{grace_s + _ROOM_S}']
  return _SCRIPT.format(
    options='\n'.join(f'#SBATCH --{line}' for line in lines),
    command=shlex.join(command),
    nodes=nodes,
    processes=processes,
    spares=spares,
    max_restarts=max_restarts,
    lost=LostHostError.exit_code,
  )
