"""What `predict` and `tokenize` have in common: flags, and the processes that compute parts of the work, the shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.cli.command_flags import CommandFlags
from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import is_url

if TYPE_CHECKING:
  from praxis_lite.runs.bulk.ledger import Ledger
  from praxis_lite.runs.bulk.output_folder import OutputFolder


def add_process_flags(values: CommandFlags) -> None:
  """Adds the flags that say which processes compute."""
  values.add_integer('processes', 'Number of processes on this machine, or with --ray of actors.', 4, 1, least=1)
  values.add_integer('process_index', 'Only do the part of this process, from 0, of the --processes.', 0, least=0)
  values.add_switch('ray', 'Compute with actors of Ray Data.')


def check_process_flags(values: CommandFlags) -> None:
  """Raises UserError if the flags for inputs, the output and the processes do not fit together."""
  if not values.input or not values.output:
    raise UserError('--input and --output belong together, as in --input=data/*.jsonl --output=predicted')
  if values.process_index is not None and values.process_index >= values.processes:
    raise UserError(f'--process_index={values.process_index}: expected less than --processes={values.processes}')
  if values.ray and values.process_index is not None:
    raise UserError('--process_index is for processes that are started one by one; with --ray, leave it out')


def output_folder(output: str) -> OutputFolder:
  """Returns the folder of --output, on disk or in an object store."""
  from praxis_lite.runs.bulk.output_folder import LocalFolder, StoredFolder
  from praxis_lite.runs.cluster.object_store import ObjectStore

  return StoredFolder(ObjectStore(output, '--output')) if is_url(output) else LocalFolder(output)


def compute_shards(
  command: str,
  values: CommandFlags,
  ledger: Ledger,
  run: Callable[[Sequence[int], Callable[[], object]], None],
  make_worker: Callable[[], Callable[[int], None]],
  *,
  uses_gpus: bool,
) -> bool:
  """Computes the shards that are left, here, in other processes, or by actors of Ray.

  Args:
    command, values: the name of the command, and its flags, which other processes get too.
    run: computes shards in this process. The first argument has the numbers of the shards. The second is a function
      that `run` calls repeatedly; it ends the process if the parent process has ended.
    make_worker: returns a function that computes a shard; called in each actor of Ray, so it must be picklable.
    uses_gpus: whether each process or actor needs a GPU of its own, if there are GPUs.

  Returns:
    False if --process_index is set, because this process then computes only its part of the shards; otherwise True.
  """
  from praxis_lite.runs.bulk.processes import end_without_parent, run_processes

  left = ledger.remaining_shards()
  done = len(ledger.plan.shards) - len(left)
  if done and values.process_index is None:
    print(f'{done} of {number_of(len(ledger.plan.shards), "shard")} are finished; going on with the rest', flush=True)
  if left and values.ray:
    from praxis_lite.runs.bulk.on_ray import run_on_ray

    run_on_ray(make_worker, left, values.processes, uses_gpus=uses_gpus)
  elif left and values.processes > 1 and values.process_index is None:
    indices = sorted({number % values.processes for number in left})
    run_processes([command, *command_line(values)], indices, uses_gpus=uses_gpus)
  elif own := [number for number in left if number % values.processes == (values.process_index or 0)]:
    run(own, end_without_parent)
  return values.process_index is None


def command_line(values: CommandFlags) -> list[str]:
  """Returns the flags that were given, as arguments of another process."""
  found = list[str]()
  for flag in values.list_flags():
    if flag.present and isinstance(flag, flags.BooleanFlag):
      found.append(f'--{"" if flag.value else "no"}{flag.name}')
    elif flag.present:
      found += [f'--{flag.name}={value}' for value in (flag.value if isinstance(flag.value, list) else [flag.value])]
  return found
