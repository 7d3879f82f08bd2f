"""The classes that Orbax calls to write and read arrays. Import this inside functions: it imports Orbax."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from praxis_lite.checkpoints.orbax.on_disk import STATE
from praxis_lite.checkpoints.streamed import StreamedArray, boxes, whole_box

# The number of parts that are compressed and written while the next one is read.
_IN_FLIGHT = 2
# Bytes of chunks that are read and decoded at once while a state is restored.
_RESTORED_AT_ONCE = 128 << 20


class StreamedArrayHandler(ocp.type_handlers.NumpyHandler):
  """Saves streamed arrays in the background. As with NumPy arrays, the first process writes all of them."""

  async def serialize(
    self,
    values: Sequence[StreamedArray],
    infos: Sequence[ocp.type_handlers.ParamInfo],
    args: Sequence[ocp.SaveArgs] | None = None,
  ) -> Sequence[ocp.future.Future]:
    del args  # Orbax's options in `args` only concern arrays in memory.
    return [ocp.future.CommitFutureAwaitingContractedSignals(_write(values, infos), name='streamed_arrays')]


async def _write(values: Sequence[StreamedArray], infos: Sequence[ocp.type_handlers.ParamInfo]) -> None:
  pending: deque[ts.WriteFutures] = deque()
  try:
    for value, info in zip(values, infos):
      if hasattr(info, 'await_path_creation'):  # Later versions of Orbax create the folder in the background too.
        await info.await_path_creation()
      if jax.process_index() == 0:
        await _write_parts(value, info, pending)
    while pending:
      await pending.popleft()
  finally:  # After a failed write, the other writes must end before the folder is removed.
    await asyncio.gather(*pending, return_exceptions=True)


async def _write_parts(
  value: StreamedArray, info: ocp.type_handlers.ParamInfo, pending: deque[ts.WriteFutures]
) -> None:
  part_shape = value.part_shape(value.shape)
  # Each part is a whole chunk of the file, so no chunk must be read to write a part of it.
  shapes = {'global_shape': value.shape, 'local_shape': part_shape}
  spec = ocp.type_handlers.get_json_tspec_write(info, use_ocdbt=True, dtype=value.dtype, process_index=0, **shapes)
  store = await ts.open(ts.Spec(spec), dtype=value.dtype, create=True, open=True, context=info.ts_context)
  for box in boxes(whole_box(value.shape), part_shape):
    # TensorStore need not copy the part, because nothing changes it.
    pending.append(store[box].write(value.read(box), can_reference_source_data_indefinitely=True))
    while len(pending) > _IN_FLIGHT:
      await pending.popleft()


class StateHandler(ocp.PyTreeCheckpointHandler):
  """Restores with little memory, and returns an error of reading instead of raising it.

  So all processes reach the next barrier, after which `OrbaxStore` raises the error.
  """

  def restore(self, directory: epath.Path, item: Any = None, *, args: ocp.args.PyTreeRestore) -> Any:
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(args.item)]
    # One chunk of each array must fit. Even with the padding of its mesh, a chunk is less than twice the array's size.
    in_flight = max([_RESTORED_AT_ONCE, *(2 * size for size in sizes)])
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=_types(), restore_concurrent_gb=in_flight / 1e9)
    try:
      return handler.restore(directory, item, args=args)
    except Exception as error:
      return error


def _types() -> ocp.type_handlers.TypeHandlerRegistry:
  types = ((t, ocp.type_handlers.get_type_handler(t)) for t in ocp.type_handlers.supported_types())
  return ocp.type_handlers.create_type_handler_registry((StreamedArray, StreamedArrayHandler()), *types)


def make_handlers() -> ocp.handlers.CheckpointHandlerRegistry:
  """Returns Orbax's default handlers, with a `StateHandler` for the item with the arrays."""
  handler = StateHandler(type_handler_registry=_types(), use_zarr3=True)
  handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
  handlers.add(STATE, ocp.args.PyTreeSave, handler)
  handlers.add(STATE, ocp.args.PyTreeRestore, handler)
  return handlers
