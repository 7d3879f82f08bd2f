"""jaxlib's bindings of MLIR: StableHLO and Shardy as Python objects, and Shardy's passes.

ir, sdy, stablehlo     operations, attributes and types, as in jaxlib
run_passes             runs a pipeline of passes by name
collective_groups      which devices take part in a collective
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np
from jaxlib.mlir import ir as ir
from jaxlib.mlir.dialects import sdy as sdy, stablehlo as stablehlo
from jaxlib.mlir.passmanager import PassManager

from praxis_lite.common.jax_internals import UnknownJax, reading


def run_passes(pipeline: str, root: ir.Operation) -> None:
  """Runs passes on a program, in its context."""
  with reading(f'the passes {pipeline}'):
    passes = PassManager.parse(pipeline)
    passes.enable_verifier(False)  # Verifying the program after each pass takes longer than the passes.
  try:
    root.verify()
    passes.run(root)
  except ir.MLIRError as error:
    raise UnknownJax(f'the passes {pipeline} refuse this program: {error}') from error


def collective_groups(collective: ir.Operation, mesh: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
  """Returns the groups of devices in which a collective of StableHLO exchanges data; for a permute, (from, to) pairs.

  JAX up to 0.11 writes the numbers of the devices. From 0.12 on, it writes the axes of the mesh that the devices of a
  group differ in. `mesh` maps each axis to its size; devices are numbered in the order of its axes.
  """
  names = [name for name in ('replica_groups', 'source_target_pairs') if name in collective.attributes]
  with reading('the groups of a collective'):
    attribute = collective.attributes[names[0]]
  axes = re.findall(r'axis_ref<name = "([^"]+)"(.*?)>', text) if 'mesh_axes' in (text := str(attribute)) else []
  if not axes:
    with reading('the groups of a collective'):
      return tuple(map(tuple, np.array(ir.DenseIntElementsAttr(attribute)).tolist()))
  if any(part for _, part in axes) or not {name for name, _ in axes} <= set(mesh):
    raise UnknownJax(f'a collective has the groups {text}, and the mesh has the axes {", ".join(mesh)}')
  inside = [list(mesh).index(name) for name, _ in axes]
  devices = np.arange(math.prod(mesh.values())).reshape([*mesh.values()])
  in_groups = np.moveaxis(devices, inside, range(-len(inside), 0))
  return tuple(map(tuple, in_groups.reshape(-1, math.prod(in_groups.shape[-len(inside) :])).tolist()))
