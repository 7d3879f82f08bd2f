"""The executor: restore, train, evaluate, decode, checkpoint.

A run is a function of its config and its directory. However it ends, the same call continues from the newest
checkpoint, and on the same mesh ends with bitwise the same parameters: the PRNG key of a step is the run's key folded
with the step, and a checkpoint holds the position in the input at its own step.

    host     dispatch 8 | dispatch 9, read 7 | dispatch 10, read 8 | ...
    devices     step 7  |       step 8       |        step 9       |
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from praxis_lite.checkpoints import Checkpointer, OnDamage
from praxis_lite.checkpoints.emergency import EmergencyCopies
from praxis_lite.errors import ConfigError
from praxis_lite.experiment import ExperimentConfig
from praxis_lite.hosts.distributed import is_primary_process
from praxis_lite.hosts.preemption import preemptible
from praxis_lite.hosts.stop_signals import StopSignals
from praxis_lite.hosts.watchdog import doing, meet_others, watched_by_others
from praxis_lite.inputs import PrefetchIterator
from praxis_lite.inputs.rows import Struct
from praxis_lite.layers.attention import describe_attention
from praxis_lite.layers.pipeline import describe_pipelines
from praxis_lite.records.metrics import EvalResult, HostMetrics, SummaryWriter, read_results
from praxis_lite.records.record import changes_named, recorded_seed, write_record
from praxis_lite.records.run_config import (
  build_datasets,
  check_all_take_part,
  check_intervals,
  held_for_training,
  is_due,
  job_directory,
  run_keys,
)
from praxis_lite.runtime.console import TrainLog, make_console
from praxis_lite.runtime.determinism import step_twice
from praxis_lite.runtime.elastic import fitted
from praxis_lite.runtime.hooks import Hook, Hooks, Run, check_hooks
from praxis_lite.runtime.improvement import own_hooks, watched_metrics
from praxis_lite.runtime.init_from import WarmStart
from praxis_lite.runtime.mirror import Mirror
from praxis_lite.runtime.nonfinite import SKIPPED, Hints, hints_in
from praxis_lite.runtime.profiling import ProfiledSteps, ProfileOnSignal, ProfileSteps
from praxis_lite.runtime.programs import DecodeProgram, EvalProgram, Program, Programs, TaskOnMesh
from praxis_lite.runtime.replay import check_finite
from praxis_lite.runtime.saving import Saving
from praxis_lite.runtime.throughput import StartupTimes
from praxis_lite.runtime.trouble import GoBack, TroubleWatch, go_back, left_out, read_troubles
from praxis_lite.runtime.vocabulary import keep_vocabulary, with_vocabulary
from praxis_lite.runtime.watch import BadRecordLines, Watch
from praxis_lite.task import SingleTask
from praxis_lite.training.numerics import compare_gradients
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import TrainState
from praxis_lite.trees import NestedDict

# (the built task, shapes and dtypes of a training batch) -> lines to print.
Advice = Callable[[SingleTask, Struct], Iterable[str]]


class TrainResult(NamedTuple):
  """How a training run ended.

  Attributes:
    step: total number of steps taken.
    state: the last train state, on the mesh.
    metrics: metrics of the last evaluation, by split ('eval/valid') and name.
    ended_by: 'done'; 'data' if the input ended before the last step; 'stopped' if a hook stopped it, such as early
      stopping; or the name of a signal.
  """

  step: int
  state: TrainState
  metrics: dict[str, HostMetrics]
  ended_by: str


def run_train(
  config: ExperimentConfig,
  job_log_dir: str | Path,
  *,
  devices: Sequence[jax.Device] | None = None,
  seed: int | None = None,
  restore_input: bool = True,
  verify_numerics: bool = False,
  advise: Advice | None = None,
  hooks: Sequence[Hook] = (),
  profile_steps: tuple[int, int] | None = None,
  on_damage: OnDamage = 'previous',
  debug_nans: bool = False,
  check_determinism: int | None = None,
  grace_s: float | None = None,
  preemption_notice: str | None = None,
  elastic: bool = False,
) -> TrainResult:
  """Trains, or continues where an earlier run in the same directory stopped; of a finished one, returns the result.

  Args:
    config: configs of the task and its datasets, exactly one of them with `is_training=True`.
    job_log_dir: directory of checkpoints, summaries and decoded outputs.
    devices: the devices to build the mesh from; all by default.
    seed: seed of the initial values and of all random numbers in training; None: the one that the run records, or 0.
    restore_input: False starts the training data from its beginning instead of the saved position, for changed data.
    verify_numerics: compare the gradients of the first step with another computation of them, before it is taken.
    advise: returns warnings about the task, to print before anything is compiled.
    hooks: are called after steps, evaluations and checkpoints; see `praxis_lite.runtime.hooks`.
    profile_steps: the first and the last step of a trace for TensorBoard.
    on_damage: where the newest checkpoint is damaged: 'previous' keeps it aside and continues from the one before,
      'fail' raises.
    debug_nans: wait for each step, and after one that is not finite end with an error that names the layer.
    check_determinism: run each step whose number is a multiple of this twice, and compare the results bit by bit.
    grace_s, preemption_notice: see `praxis_lite.hosts.preemption`.
    elastic: with fewer devices than the mesh has, go on with a smaller one; see `praxis_lite.runtime.elastic`.

  Raises:
    DeterminismError: a step that was run twice has given different bits; nothing is saved after it.
    UserError: the config, the data, the directory or the checkpoint in it is not usable; or, at the end, what could not
      be written until then: the last checkpoint, or metrics.
    NumericsError: the gradients of the first step are wrong on these devices; nothing was trained.
    LossSpikeError: the loss has jumped and `task.train.loss_spike` is set to raise, or the run has gone back too often.
    NonFiniteError: a step was not finite and the learner is set to raise, and nothing is saved after that step; or more
      steps in a row than `max_skipped_steps`, or all steps, were not finite, and the last one is saved.
    Exception: what a hook raised, with a note that names the hook; the state has been saved. With several processes,
      the others return, with ended_by='SIGTERM'.
  """
  while True:
    try:
      return _run_train(
        config,
        job_log_dir,
        devices=devices,
        seed=seed,
        restore_input=restore_input,
        verify_numerics=verify_numerics,
        advise=advise,
        hooks=hooks,
        profile_steps=profile_steps,
        on_damage=on_damage,
        debug_nans=debug_nans,
        check_determinism=check_determinism,
        grace_s=grace_s,
        preemption_notice=preemption_notice,
        elastic=elastic,
      )
    except GoBack as error:
      directory = Path(job_log_dir).expanduser().absolute()
      with held_for_training(directory) if is_primary_process() else contextlib.nullcontext():
        trouble = go_back(directory, error.trouble, config.task.train.max_rollbacks)
      advise = None
      if is_primary_process():
        print(
          f'{trouble.what}: going back to step {trouble.back_to}, without {len(trouble.batches)} batches', flush=True
        )


def _run_train(
  config: ExperimentConfig,
  job_log_dir: str | Path,
  *,
  devices: Sequence[jax.Device] | None,
  seed: int | None,
  restore_input: bool,
  verify_numerics: bool,
  advise: Advice | None,
  hooks: Sequence[Hook],
  profile_steps: tuple[int, int] | None,
  on_damage: OnDamage,
  debug_nans: bool,
  check_determinism: int | None,
  grace_s: float | None,
  preemption_notice: str | None,
  elastic: bool,
) -> TrainResult:
  """Trains until the end, or until the run has to go back: then it raises GoBack."""
  startup = StartupTimes()
  if not isinstance(config, ExperimentConfig):
    experiment = config.__name__ if isinstance(config, type) else 'MyExperiment'
    raise ConfigError(f'run_train(config, job_log_dir): expected configure({experiment}), got {type(config).__name__}')
  with contextlib.ExitStack() as to_close:
    # ---- what is trained, where, and on which data; errors of the user are raised before anything is compiled or saved
    directory = to_close.enter_context(job_directory(job_log_dir))
    if is_primary_process():
      to_close.enter_context(held_for_training(directory))
    mirror = to_close.enter_context(contextlib.closing(Mirror(config.task.train.mirror, directory)))
    mirror.fetch(on_damage)
    seed = recorded_seed(directory) if seed is None else seed
    watch = to_close.enter_context(Watch(directory))
    config = with_vocabulary(config, directory)
    task_p, fit = fitted(config.task, len(devices or jax.devices())) if elastic else (config.task, '')
    task = task_p.instantiate()
    settings = task.train
    check_intervals(settings)
    check_hooks(hooks)
    if check_determinism is not None and check_determinism < 1:
      raise ConfigError(f'check_determinism = {check_determinism}: expected a number of steps, at least 1')
    if debug_nans and task.learner.on_nonfinite == 'ignore':
      raise ConfigError("task.train.learner.on_nonfinite = 'ignore' changes the state that debug_nans looks at")
    profiled = None if profile_steps is None else ProfiledSteps.parse(profile_steps)
    tasks = TaskOnMesh(task, task.create_mesh(devices))
    check_all_take_part(tasks.mesh)
    keys = run_keys(seed, tasks.mesh)
    startup.mark('task')
    datasets = build_datasets(config.datasets)
    train_input = datasets.the_training_input()
    decode_datasets = build_datasets(config.decode_datasets, 'decode_datasets')
    batch_struct = train_input.batch_struct()
    datasets.check([train_input, *datasets.evaluation], task.model)
    startup.mark('data')
    partitioned = tasks.taking(train_input)
    startup.mark('task')
    partitioned.train_step.trace()
    evaluation: list[Program] = [EvalProgram(tasks, i, keys.evaluate) for i in datasets.evaluation]
    decoding: list[Program] = [DecodeProgram(tasks, i, keys.evaluate, directory) for i in decode_datasets.inputs]
    watched = watched_metrics(settings, {program.split: program.metric_names() for program in evaluation})
    with contextlib.closing(Checkpointer(directory, read_only=True, on_damage=on_damage)) as saved:
      newest_checkpoint = saved.latest_step()
      is_imported = newest_checkpoint is not None and saved.has_variables_alone()
    startup.mark('trace')
    copies_every = settings.emergency_copies.every_n_steps
    copies = EmergencyCopies(
      directory,
      () if copies_every is None else settings.emergency_copies.directories,
      partitioned.state_shapes,
      partitioned.unpadded_state_shapes,
    )
    to_close.callback(copies.close)
    with watch.goodput.doing('restoring'):
      copy, about_copies = copies.newest(newest_checkpoint or 0)
    startup.mark('restore')
    is_restored = copy is not None or (newest_checkpoint is not None and not is_imported)
    init_from = settings.init_from
    if is_imported and init_from.path is None:
      init_from = dataclasses.replace(init_from, path=str(directory))
    warm_start = WarmStart(init_from, partitioned) if init_from.path and not is_restored else None
    startup.mark('trace')

    # ---- where it starts: the first of these that applies
    #   1. emergency copies that are newer than that: the state, and the input after the batch of that step
    #   2. the newest complete checkpoint in its directory: the same
    #   3. variables of another run's checkpoint, or imported ones in its directory, and the input from its beginning
    #   4. initial values from the seed, and the input from its beginning
    checkpointer = Checkpointer(
      directory,
      max_to_keep=settings.max_to_keep,
      keep_interval_steps=settings.keep_interval_steps,
      on_damage=on_damage,
    )
    to_close.callback(checkpointer.close)
    to_close.enter_context(watched_by_others(directory))
    if is_restored:
      with changes_named(directory, config), watch.goodput.doing('restoring'):
        shapes, true_shapes = partitioned.state_shapes, partitioned.unpadded_state_shapes
        if copy is not None:
          state, input_state = copy.restore(shapes), copy.input_state
        else:
          state = checkpointer.restore(shapes, true_shapes, weights=task.model.abstract_init())
          input_state = checkpointer.input_state()
      if restore_input and input_state is not None:
        train_input.set_state(input_state)
      startup.mark('restore')
    else:
      state = jax.block_until_ready((warm_start or partitioned).init_state(keys.init))
      startup.mark('init')
    first_step, total = int(state.step), settings.num_train_steps

    # ---- what it reports, evaluates and decodes
    console = make_console(total, first_step=first_step, enabled=is_primary_process())
    to_close.callback(console.close)
    results = read_results(directory, up_to_step=first_step)
    writer = SummaryWriter(directory, resumed_step=first_step, enabled=is_primary_process(), report=console.line)
    to_close.callback(writer.close)
    saving = Saving(checkpointer, partitioned.unpadded_state_shapes, console.line)
    trouble = TroubleWatch(directory, settings, task.learner.on_nonfinite, first_step, train_input.examples_at)
    log = TrainLog(
      partitioned,
      batch_struct,
      console,
      writer,
      startup,
      first_step=first_step,
      more=lambda: {**saving.figures(), **watch.figures()},
      trouble=trouble,
    )
    stop = StopSignals()
    console.line(_introduction(task.name, partitioned))
    if fit:
      console.line(fit)
    available = jax.device_count() if devices is None else len(devices)
    if available > tasks.mesh.size:
      console.line(_unused_devices(task, tasks.mesh.size, available))
    ids = batch_struct.get('ids')
    if isinstance(ids, jax.ShapeDtypeStruct) and len(ids.shape) > 1:
      for line in describe_attention(task.model, ids.shape[1], packed='segment_ids' in batch_struct):
        console.line(line)
    for line in describe_pipelines(task.model, partitioned.rows_of_microbatch):
      console.line(line)
    for line in warm_start.report() if warm_start else ():
      console.line(line)
    if advise is not None and is_primary_process():
      for line in advise(task, batch_struct):
        console.line(line)
      startup.mark('check')
    for line in (*checkpointer.notes, *filter(None, [about_copies])):
      console.line(line)
    if is_restored and first_step < total:
      where = checkpointer.directory if copy is None else 'emergency copies, newer than the checkpoints'
      console.line(f'restored step {first_step} of {total} from {where}')
    if is_primary_process():
      # A run that takes no step keeps its record: nothing in it was made with what this call asks for.
      is_finished = is_restored and first_step >= total
      for line in write_record(
        directory, config, seed=seed, mesh=tasks.mesh.shape, step=first_step, keeps_record=is_finished
      ):
        console.line(line)
    watch.begin(first_step, total, settings.slow_step_factor, console.line)

    def before_saving(*, is_copy: bool) -> None:
      doing(f'saving step {run.step}')
      log.drain()  # Raises if a step was not finite, before anything is saved.
      watch.saves(run.step, is_copy=is_copy)
      trouble.keep_losses()

    def save() -> bool:
      before_saving(is_copy=False)
      with watch.goodput.doing('saving'):
        return saving.save(run.step, run.state, batches.get_state())

    def make_copy() -> None:
      before_saving(is_copy=True)
      with watch.goodput.doing('saving'):
        said = copies.write(run.step, run.state, batches.get_state(), checkpointer.latest_step() or 0)
      if said:
        console.line(said)

    def finish() -> None:
      with watch.goodput.doing('saving'):
        saving.finish(run.step, run.state, batches.get_state())
        copies.remove()
      watch.saved(run.step)

    def evaluate(group: Sequence[Program]) -> None:
      with watch.goodput.doing('evaluating'):
        programs.run(group, run.step, run.state)

    def take_result(split: str, metrics: HostMetrics) -> None:
      run.results.append(EvalResult(run.step, split, metrics))
      all_hooks.on_eval(run, split, metrics)

    def tell_of_checkpoints() -> None:
      for saved_step, folder in saving.newly_complete():
        watch.saved(saved_step)
        all_hooks.on_checkpoint(run, saved_step, folder)

    def do_what_is_due() -> None:
      # Saving comes first: the disk writes while the devices evaluate, and a run killed in an evaluation loses no step.
      if is_due(run.step, copies_every):
        make_copy()
        log.restart_clock(run.step)
      if is_due(run.step, settings.save_interval_steps):
        save()
        log.restart_clock(run.step)
      intervals = settings.eval_interval_steps, settings.decode_interval_steps
      for group, interval in zip((evaluation, decoding), intervals):
        if is_due(run.step, interval):
          log.drain()
          evaluate(group)
          log.restart_clock(run.step)
      tell_of_checkpoints()

    run = Run(task, directory, state, results, save=save, line=console.line)
    profiler = ProfileOnSignal() if profiled is None else ProfileSteps(profiled)  # There is one profiler.
    profiling = [to_close.enter_context(profiler)]
    stop_all = stop.request_of_all if jax.process_count() > 1 else None
    all_hooks = Hooks(
      [*profiling, BadRecordLines(train_input), *own_hooks(settings, watched, checkpointer), mirror, *hooks], stop_all
    )
    programs = Programs(
      [*evaluation, *decoding], console, writer, stop, first_step=first_step, results=results, on_result=take_result
    )

    # ---- train
    ended_by = 'done'
    if is_primary_process():
      keep_vocabulary(config, directory)
    put_inputs = partitioned.train_step.put_inputs
    batches = to_close.enter_context(
      PrefetchIterator(train_input, put_inputs, left_out=left_out(read_troubles(directory)))
    )
    to_close.enter_context(stop)
    to_close.enter_context(preemptible(stop, directory, grace_s=grace_s, notice=preemption_notice))
    all_hooks.on_start(run)
    if first_step < total and run.stop_reason is None:
      with watch.goodput.doing('compiling'):
        times = partitioned.train_step.compile()
      startup.mark_parts({'lower': times.lower, 'compile': times.compile})
      meet_others()
    if is_restored:
      do_what_is_due()  # The last run may have been killed between this checkpoint and its evaluation.
    batch: NestedDict | None = None
    last: jax.Array | None = None
    watch.train()
    while run.step < total and not (stop.requested_now() or run.stop_reason or log.skipped.too_many):
      doing(f'the input of step {run.step + 1}')
      if not watch.wait_for_input(batches, last, lambda: stop.requested):
        continue
      try:
        batch = next(batches, None)
      except Exception:
        if jax.process_count() == 1:  # Saving takes all processes, and the others do not know of the error.
          save()
        raise
      if batch is None:
        ended_by = 'data'
        console.line(f'the training data is over after {run.step} of {total} steps')
        break
      if verify_numerics:
        verify_numerics = False
        console.line(_verified(partitioned, run.state, keys.train, batch))
      doing(f'step {run.step + 1}')
      with jax.profiler.StepTraceAnnotation('train', step_num=run.step + 1):
        if is_due(run.step + 1, check_determinism):
          out = step_twice(partitioned.train_step, run.state, keys.train, batch, run.step + 1)
        else:
          out = partitioned.train_step(run.state, keys.train, batch)
      if debug_nans and float(np.asarray(out.mean_metrics[SKIPPED][0])):
        check_finite(partitioned, run.step, out.state, keys.train, batch)
      run.state, run.step = out.state, run.step + 1
      last = out.weighted_loss
      trouble.took(run.step, batches.state_before)
      log.add(run.step, out)
      watch.took(run.step)
      with watch.goodput.doing('hooks'):
        all_hooks.on_step(run, out.mean_metrics)
      do_what_is_due()

    # ---- the end
    stop.requested_now()  # After the last step too: a signal that only some processes got must not part them.
    save()
    if (log.skipped.too_many or log.skipped.all_steps) and not stop.requested:
      finish()
      is_on_this_host = batch is not None and jax.process_count() == 1
      raise log.skipped.error(hints_in(jax.device_get(batch), train_input, task.model) if is_on_this_host else Hints())
    if not stop.requested:
      evaluate(evaluation)
      if settings.decode_interval_steps is not None:
        evaluate(decoding)
    finish()
    tell_of_checkpoints()
    if run.step > total:
      how_far = f'step {run.step}, past the {total} of task.train.num_train_steps, so no step was taken'
    else:
      how_far = f'step {run.step} of {total}'
    if run.step > first_step:
      console.line(watch.summary())
    all_taken = '; all steps are taken' if run.step == first_step == total else ''
    console.line(f'{how_far}: saved in {checkpointer.directory}{all_taken}')
    with watch.goodput.doing('saving'):
      mirror.finish(run)
    if all_hooks.error is not None:
      raise all_hooks.error
    if run.stop_reason is not None:
      ended_by = 'stopped'
    watch.ended_by = (stop.received if stop.requested else None) or ended_by
    return TrainResult(run.step, run.state, programs.metrics, watch.ended_by)


def _verified(partitioned: PartitionedTask, state: TrainState, key: jax.Array, batch: NestedDict) -> str:
  """Compares the gradients of the next step with another computation of them; returns a line about it."""
  try:
    compared = compare_gradients(partitioned, state, key, batch)
  except ConfigError as error:
    return f'gradients not verified: {error}'
  return (
    f'gradients verified: {compared.num_norms} norms, of each variable and layer, are those computed '
    f'{compared.reference}; largest difference {compared.worst:.1e} of the norm'
  )


def _unused_devices(task: SingleTask, used: int, available: int) -> str:
  """Returns the line that says that the mesh leaves devices idle, with a mesh of all of them."""
  names = task.mesh_axis_names or ('data',)
  axis = names.index('data') if 'data' in names else 0
  shape = ','.join(str(available if i == axis else 1) for i in range(len(names))) + ',' * (len(names) == 1)
  named = '' if task.mesh_axis_names else '--set "task.mesh_axis_names=(\'data\',)" '
  return f'{available} devices, and the mesh uses {used}: to use all, {named}--set "task.ici_mesh_shape=({shape})"'


def _introduction(name: str, partitioned: PartitionedTask) -> str:
  mesh = partitioned.mesh
  shape = ' x '.join(f'{name} {size}' for name, size in mesh.shape.items())
  total, active = partitioned.total_num_params, partitioned.active_num_params
  parameters = (
    f'{total:,} parameters' if active == total else f'{total:,} parameters ({active:,} active for each token)'
  )
  return f'{name}: {parameters}, mesh {shape} ({mesh.devices.flat[0].device_kind})'
