"""jaxlib's bindings of MLIR: StableHLO and Shardy as Python objects, and Shardy's passes.

ir, sdy, stablehlo     operations, attributes and types, as in jaxlib
run_passes             runs a pipeline of passes by name
"""

from __future__ import annotations

from jaxlib.mlir import ir as ir
from jaxlib.mlir.dialects import sdy as sdy, stablehlo as stablehlo
from jaxlib.mlir.passmanager import PassManager

from praxis_lite.common.jax_internals import UnknownJax, reading


def run_passes(pipeline: str, root: ir.Operation) -> None:
  """Runs passes on a program, in its context.

  Raises:
    UnknownJax: this jaxlib lacks the passes, or they reject the program.
  """
  with reading(f'the passes {pipeline}'):
    passes = PassManager.parse(pipeline)
    passes.enable_verifier(False)  # It verifies the program after each pass, which takes longer than the passes.
  try:
    root.verify()
    passes.run(root)
  except ir.MLIRError as error:
    raise UnknownJax(f'the passes {pipeline} refuse this program: {error}') from error
