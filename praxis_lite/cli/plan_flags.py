"""The flags of `praxis-lite plan`, which of them go together, and how JAX is prepared to plan."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.cli.command_flags import CommandFlags, add_devices, experiment_flags
from praxis_lite.common.errors import UserError
from praxis_lite.common.files import cache_folder
from praxis_lite.common.native_log import collected_log

if TYPE_CHECKING:
  from praxis_lite.instruments.plan import Topology

# The requests of --inference, and their defaults.
OF_DECODING = {'rows': 8, 'prompt_length': 1024, 'max_tokens': 128}
_OF_TRAINING = ('search', 'what_if', 'compare', 'tokens', 'why', 'snapshot', 'check', 'write_experiment', 'figures')
_OF_CHEAPEST = ('prices', 'chips', 'budget', 'deadline', 'loss', 'runs', 'metric')
_NOT_OF_CHEAPEST = (
  *('topology', 'price_per_chip_hour', 'search', 'inference', 'what_if', 'compare', 'why', 'snapshot', 'check'),
  *('measured', 'write_experiment', 'batch_sizes', 'figures'),
)


def check_measured(values: flags.FlagValues) -> None:
  """Raises UserError if --measured has no run to compare, or is combined with flags that change the recorded run.

  Without flags that name something to plan, --measured needs no run: it prints the corrections from earlier runs.
  """
  if not values.measured:
    return
  if not values.job_log_dir and any(values[name].value for name in ('exp', 'hf', 'topology', 'set')):
    raise UserError('--measured needs --job_log_dir, the directory of a run that has trained')
  for name in ('exp', 'hf', 'set', 'search', 'inference') if values.job_log_dir else ():
    if values[name].value:
      raise UserError(f'--measured compares a run as it was recorded; leave out --{name}')


def check_flags(values: flags.FlagValues) -> None:
  """Raises UserError if flags cannot be combined, or one is missing."""
  if values.loss == 0:
    raise UserError('--loss=0: expected a loss of more than 0')
  for name in _NOT_OF_CHEAPEST if values.cheapest else _OF_CHEAPEST:
    if values[name].value:
      what = 'is for a plan of given chips; leave it out, or --cheapest' if values.cheapest else 'needs --cheapest'
      raise UserError(f'--{name} {what}')
  for name in _OF_TRAINING if values.inference else OF_DECODING:
    if values[name].value:
      what = 'is about train steps; leave it out, or --inference' if values.inference else 'needs --inference'
      raise UserError(f'--{name} {what}')
  if values.html == '':
    raise UserError('--html is empty: name a file, as in --html=plan.html')
  if values.html and os.path.isdir(values.html):
    file = os.path.join(values.html, 'plan.html')
    raise UserError(f'--html={values.html} is a directory: name a file, as in --html={file}')
  if values.hf and values.exp:
    raise UserError('--hf and --exp both name a model; use one of them')
  if values.write_experiment and not values.hf:
    raise UserError('--write_experiment needs --hf, a config.json; other experiments have their file already')
  if values.write_experiment and os.path.exists(values.write_experiment):
    raise UserError(f'--write_experiment={values.write_experiment} exists; name another file')
  if values.html and values.search:
    raise UserError('--html shows one plan, and --search compares many; search first, then --set what it found')
  if values.cheapest:
    return
  if not values.topology and values.devices is not None:
    raise UserError(
      '--devices: plan uses no devices of this machine; --topology names the chips, as in '
      f'--topology=cpu:{values.devices}'
    )
  if not values.topology:
    raise UserError('--topology is missing: name the chips, as in --topology=v5p:4x4x4 or --topology=h100:8x8')


def import_jax() -> None:
  """Imports JAX and hides the messages of its plugins about missing drivers. Call it before other imports of JAX."""
  with collected_log():
    importlib.import_module('jax')


def prepare(*topologies: Topology) -> None:
  """Prepares JAX to plan for some chips. Call it before anything uses a device."""
  import jax

  from praxis_lite.common.devices import leave_accelerators_alone, simulate_cpu_devices

  if os.environ.get('TF_CPP_MIN_LOG_LEVEL') == '2':
    os.environ['TF_CPP_MIN_LOG_LEVEL'] = '1'  # Enables warnings of XLA's partitioner, which the plan explains.
  simulated = [topology.num_devices for topology in topologies if topology.target.kind == 'cpu']
  if simulated:
    simulate_cpu_devices(max(simulated))
  else:
    leave_accelerators_alone()
    with collected_log():
      jax.devices()


def cache_of_plans() -> Path:
  """Returns the directory of compiled programs."""
  return cache_folder() / 'plans'


def plan_flags() -> CommandFlags:
  values = experiment_flags()
  chips = 'Chips to plan for: v5p:8x16x16 (a torus), v5e:16x16:2 (slices), h100:512x8 (hosts x GPUs), cpu:64.'
  values.add_text('topology', chips, 'h100:8x8')
  add_devices(values, 'Only checked to be enough for the mesh; --topology gives the number of chips.')
  hugging_face = 'Plan to train a model of Hugging Face by its config.json, without its weights, in place of --exp.'
  values.add_text('hf', hugging_face, 'llama/config.json')
  written = 'With --hf: also write a file with the planned experiment, or with the best one that --search found.'
  values.add_text('write_experiment', written, 'my_llama.py')
  values.add_switch('compile', "Use the chips' compiler; --nocompile uses only formulas.", default=True)
  values.add_switch('calibrate', 'Measure how fast programs run on the devices of this machine, for all later plans.')
  page = 'Also write an HTML page: memory, the step over time, the roofline and collectives.'
  values.add_text('html', page, 'plan.html')
  values.add_switch('cache', 'Keep compiled programs in ~/.cache/praxis_lite/plans.', default=True)
  _add_flags_of_changes(values)
  _add_flags_of_cheapest(values)
  values.add_switch('inference', 'Plan decoding instead of a train step: prompts are read, then tokens are drawn.')
  for name, does in (
    ('rows', 'how many prompts are decoded together'),
    ('prompt_length', 'tokens of each prompt'),
    ('max_tokens', 'tokens after each prompt'),
  ):
    default = OF_DECODING[name]
    values.add_integer(name, f'With --inference: {does}; {default} by default.', 4 * default, least=1)
  measured = (
    'Compare the run in --job_log_dir with its plan, and correct later plans by it. Alone: print the corrections.'
  )
  values.add_switch('measured', measured)
  figures = 'Also write the predictions for a step to a file, for `train --plan`, which compares a run with them.'
  values.add_text('figures', figures, 'plan.json')
  values.add_switch('why', 'Print the cause of each collective, and all surprises.')
  values.add_text('snapshot', 'Write weights, memory and collectives to a file, for --check.', 'plans/8b.txt')
  check = 'Exit with 1 if the step is worse than in a snapshot, which also gives the default experiment and chips.'
  values.add_text('check', check, 'plans/8b.txt')
  return values


def _add_flags_of_changes(values: CommandFlags) -> None:
  search = 'Search for the best mesh, rematerialization and microbatches, and compile the most promising settings.'
  values.add_switch('search', search)
  values.add_integer('verify', 'With --search or --cheapest: how many settings to compile.', 10, 6, least=0)
  values.add_integer('search_seconds', 'With --search or --cheapest: about how long it may take.', 1800, 480, least=1)
  sizes = 'With --search: batch sizes to try too, although they change the training itself.'
  values.add_list('batch_sizes', sizes, '128,256')
  compare = 'Also plan it with these overrides, side by side; topology= and exp= name other chips or experiments.'
  values.add_texts('compare', compare, "'task.ici_mesh_shape=(1,64,1)'")
  what_if = 'Print the memory that other optimizer moments would save, and the largest batch and length that fit.'
  values.add_switch('what_if', what_if)
  tokens = 'Tokens to train on, for the cost of training; by default 20 for each parameter.'
  values.add_number('tokens', tokens, '1e12', least=1)
  for name, does, example in (
    ('failures_per_chip_day', 'failures per chip and day; by default those of Llama 3 405B. 0 for none.', '0.0005'),
    ('restart_seconds', 'seconds from a failure to the next step; 300 by default.', '600'),
    ('save_seconds', 'seconds that a save stalls the run; by default they follow from the size of the state.', '3'),
    (
      'input_wait_share',
      'time that a run waits for inputs, as a share of the time of its steps; 0 by default.',
      '0.02',
    ),
  ):
    values.add_number(name, f'For the cost of training: {does}', example, least=0)
  gigabits = 'Gigabits per second of all network adapters of a host, such as 8 x 400; by default the published figure.'
  values.add_number('host_gigabits', gigabits, '3200', least=1)
  less = 'Bandwidth of the adapters divided by that of the switches between hosts; 2 is 2:1.'
  values.add_number('oversubscription', less, '2', 1, least=1)
  values.add_number('price_per_chip_hour', 'Price of a chip per hour, for the cost of training.', '2.5', least=0)


def _add_flags_of_cheapest(values: CommandFlags) -> None:
  values.add_switch('cheapest', 'Search for the chips and settings that train on --tokens at the lowest price.')
  values.add_list('prices', 'With --cheapest: price per hour of each kind of chip to consider.', 'h100=2.5,v5p=4')
  numbers = 'With --cheapest: numbers of chips to consider; by default all powers of two on which it fits.'
  values.add_list('chips', numbers, '64,128,256')
  values.add_number('budget', 'With --cheapest: the most that the run may cost.', '50000', least=0)
  values.add_number('loss', 'With --cheapest: a loss to reach, by the scaling law of --runs.', '2.5', least=0)
  values.add_text('runs', 'With --loss: the folder of finished runs of several sizes.', 'runs/sizes')
  metric = 'With --loss: the metric to use as the loss; by default the evaluation loss, or else the training loss.'
  values.add_text('metric', metric, 'eval/validation/loss')
  values.add_text(
    'deadline', 'With --cheapest: the latest end of the run, in days or hours from now, or as a date.', '30d'
  )
