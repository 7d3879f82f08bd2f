"""T5X's API: partitioners, meshes for a number of model partitions, host chunks and data layout."""

from praxis_lite.bridges.t5x.axis_names import AxisNames
from praxis_lite.bridges.t5x.chunks import DataLayout, LocalChunker, LocalChunkInfo
from praxis_lite.bridges.t5x.meshes import (
  bounds_from_last_device,
  default_mesh,
  get_coords,
  get_cpu_mesh,
  get_gpu_mesh,
  get_mesh,
)
from praxis_lite.bridges.t5x.moe import MoePjitPartitioner, data_partition_spec
from praxis_lite.bridges.t5x.moe_rules import default_moe_mesh
from praxis_lite.bridges.t5x.partitioners import (
  BasePartitioner,
  BasePjitPartitioner,
  PjitPartitioner,
  PjittedFnWithContext,
)

__all__ = [
  'AxisNames',
  'BasePartitioner',
  'BasePjitPartitioner',
  'DataLayout',
  'LocalChunkInfo',
  'LocalChunker',
  'MoePjitPartitioner',
  'PjitPartitioner',
  'PjittedFnWithContext',
  'bounds_from_last_device',
  'data_partition_spec',
  'default_mesh',
  'default_moe_mesh',
  'get_coords',
  'get_cpu_mesh',
  'get_gpu_mesh',
  'get_mesh',
]
