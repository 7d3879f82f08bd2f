"""Makes a batch script of a run for Slurm. It starts all processes; if one is lost, it starts all again on good nodes.

    exit code of the step         what the script does
    0                             it ends
    75, or a signal               starts all processes again, at most `max_restarts` times, without nodes that are down
    any other                     ends with this code: another attempt would make the mistake again
    USR1 before the time limit    all processes save and end, and the job is queued again
    more nodes down than spares   the job is queued again, and gets other nodes

The job asks for `spares` more nodes than a step uses. `--no-kill` keeps the other nodes when one fails.
"""

from __future__ import annotations

import re
import shlex

from praxis_lite.common.errors import LostHostError, UserError
from praxis_lite.runs.cluster.recipe import ClusterJob

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


def slurm_script(job: ClusterJob) -> str:
  """Returns a script for `sbatch`.

  Raises:
    UserError: the number of processes is no multiple of the number on a node, or an option is not of the form
      NAME=VALUE.
  """
  nodes, rest = divmod(job.processes, job.processes_per_node)
  if rest:
    raise UserError(f'--processes={job.processes} is not a multiple of --processes_per_node={job.processes_per_node}')
  for option in job.resources:
    if not re.fullmatch(r'[a-z][a-z-]*=[\w.,:*/@%+=-]+', option):
      raise UserError(f'--resource={option}: expected an option of sbatch, as in --resource=gpus-per-node=8')
  lines = [f'job-name={job.name}', f'nodes={nodes + job.spares}', f'ntasks-per-node={job.processes_per_node}']
  lines += [*job.resources, 'requeue', 'no-kill', 'open-mode=append', f'signal=B:USR1@{job.grace_s + _ROOM_S}']
  return _SCRIPT.format(
    options='\n'.join(f'#SBATCH --{line}' for line in lines),
    command=shlex.join(job.command),
    nodes=nodes,
    processes=job.processes,
    spares=job.spares,
    max_restarts=job.max_restarts,
    lost=LostHostError.exit_code,
  )
