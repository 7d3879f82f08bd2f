"""Finds how the compiler split each activation. `explain` shows this next to the declared split.

An activation is found in the program by its layer and its shape. The candidates are the shapes of arrays that the
layer and its children compute in the forward pass, if a split of the activation can give such a shape. If one is the
declared shape on each device, the activation is split as declared. Otherwise, the candidate whose arrays have the most
bytes in total is taken.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from praxis_lite.instruments.explain.explanation import Explanation, format_shape
from praxis_lite.instruments.plan.declared import is_below, parts_of
from praxis_lite.instruments.plan.hlo import CompiledProgram
from praxis_lite.instruments.plan.layer_names import LayerNames

LocalShape = tuple[int, ...]


def explain_compiled(
  activations: Iterable[Explanation], program: CompiledProgram, names: LayerNames
) -> list[Explanation]:
  """Returns the activations, each with the shape that a device holds in the compiled program.

  An activation is returned unchanged if the program has no shape that fits it.
  """
  results: dict[str, collections.Counter[LocalShape]] = {}
  for computation in program.computations.values():
    for instruction in computation.instructions:
      name = instruction.op_name
      if not name or names.phase(name) not in ('forward', 'recomputed'):
        continue
      for layer in names.layers(name):
        seen = results.setdefault(layer, collections.Counter())
        for array in instruction.arrays:
          seen[tuple(d for d in array.dims if d != 1)] += array.bytes
  return [_found(e, results) for e in activations]


def _found(e: Explanation, results: dict[str, collections.Counter[LocalShape]]) -> Explanation:
  if e.per_device or e.of_weight or not e.shape:
    return e
  seen, layer = collections.Counter[LocalShape](), e.layer
  for path, counted in results.items():
    if is_below(path, layer):
      seen.update(counted)
  sizes, dims = tuple(n for n in e.mesh_sizes.values() if n > 1), [d for d in e.dims if d.size != 1]
  parts = [parts_of(d.size, sizes) for d in dims]
  fitting = [s for s in seen if len(s) == len(dims) and all(size in fits for size, fits in zip(s, parts))]
  as_declared = [s for s in fitting if all(d.free or size == d.local for size, d in zip(s, dims))]
  if not fitting:
    return e
  found = max(as_declared or fitting, key=lambda s: (seen[s], s))
  part = iter(found)
  compiled = tuple(1 if d.size == 1 else next(part) for d in e.dims)
  if as_declared:
    return dataclasses.replace(e, compiled=compiled)
  remark = f'the compiler has {format_shape(compiled)} on each device where {format_shape(e.local_shape)} is declared'
  return dataclasses.replace(e, compiled=compiled, remarks=(*e.remarks, remark))
