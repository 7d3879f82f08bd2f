"""T5X's API: partitioners, meshes for a number of model partitions, host chunks and data layout."""

from praxis_lite.bridges.t5x.axis_names import AxisNames as AxisNames
from praxis_lite.bridges.t5x.chunks import (
  DataLayout as DataLayout,
  LocalChunker as LocalChunker,
  LocalChunkInfo as LocalChunkInfo,
)
from praxis_lite.bridges.t5x.meshes import (
  bounds_from_last_device as bounds_from_last_device,
  default_mesh as default_mesh,
  get_coords as get_coords,
  get_cpu_mesh as get_cpu_mesh,
  get_gpu_mesh as get_gpu_mesh,
  get_mesh as get_mesh,
)
from praxis_lite.bridges.t5x.moe import (
  MoePjitPartitioner as MoePjitPartitioner,
  data_partition_spec as data_partition_spec,
)
from praxis_lite.bridges.t5x.moe_rules import default_moe_mesh as default_moe_mesh
from praxis_lite.bridges.t5x.partitioners import (
  BasePartitioner as BasePartitioner,
  BasePjitPartitioner as BasePjitPartitioner,
  PjitPartitioner as PjitPartitioner,
  PjittedFnWithContext as PjittedFnWithContext,
)
