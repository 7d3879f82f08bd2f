"""Wraps Orbax, which writes and reads the arrays of checkpoints, in one class: `store.OrbaxStore`.

Nothing outside this folder imports Orbax or relies on how it works; a test checks this.

    store.py           what checkpoints need of Orbax: save in the background, wait, read arrays onto a mesh
    handlers.py        classes that Orbax calls: they write arrays in parts, and return errors of reading
    save_barrier.py    how processes wait for each other during a save; Orbax calls it
    work_arounds.py    changes to Orbax itself, made once when it is imported
    on_disk.py         the files that Orbax writes, for readers that do not need Orbax

This list says what would happen without each work-around, and when it can be dropped. With Orbax 0.12.8, the test named
for a work-around fails without it:

    StreamedArrayHandler       Orbax saves only arrays that are in memory. Drop it when this changes.
    StateHandler               If reading fails in one process, the others wait for it at the next barrier. Also, all
                               chunks of a state are in memory at once. Drop it if `test_failing_host.py` passes and
                               `tools/benchmark_checkpoints.py` shows the same memory; v1 has an option for that.
    SaveBarrier                If saving fails in one process, the others wait for minutes. Drop it if
                               `test_failing_host.py` passes.
    _silence_repeated_errors   An error that is raised is also logged by each thread. Drop it if `test_disk_failures.py`
                               and `test_damage.py` pass.
    _let_the_process_end       A process whose save has failed ends ten minutes later. Drop it if
                               `test_disk_failures.py` passes.
    _find_folders_of_any_name  Checkpoints below a folder with `[`, `*` or `?` in its name are lost. Drop it if
                               `test_odd_paths.py` passes; `check_folder_is_found` stays, as it costs nothing.
    _make_folders_of_metadata  If a run is moved while it saves, its processes wait ten minutes. Drop it if
                               `test_two_processes.py` passes.
    _read_only_regular_files   Opening a run with a named pipe in it never returns. Drop it if `test_waits.py` passes.
    _write_checksums           Damage to an array is not noticed. Drop it if `test_damage.py` passes with an option of
                               Orbax; v1 has none.

Three more are outside of this folder. `Checkpointer` tries to create a file before each save, and opens a new store
after a save that failed, because Orbax's threads wait for each other after an error. `retention.py` removes old steps,
because Orbax would remove them while others read them. `files.local_path` refuses paths such as /s3/runs, which Orbax
takes for object stores.

Orbax's next API is `orbax.checkpoint.experimental.v1` today, and reads the same files. There `OrbaxStore` will hold a
`training.Checkpointer`: `save` will call `save_checkpointables_async`, and `read_arrays` `load_checkpointables`, in a
`Context` with `array.saving.use_zarr3`, `array.loading.enable_padding_and_truncation`, `pytree.loading.partial_load`.
The other methods exist there under almost the same names.
"""
