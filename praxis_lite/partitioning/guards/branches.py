"""Branches in which the CPU would wait forever."""

from __future__ import annotations

from praxis_lite.errors import ConfigError
from praxis_lite.jax_internals.mlir import ir
from praxis_lite.partitioning.propagation import callee, functions_of, operations


def refuse_lapack_in_branches(module: ir.Operation) -> None:
  """Refuses programs in which the CPU would wait forever.

  XLA's CPU runtime does so where several calls of LAPACK, such as `jnp.linalg.eigh`, stand in one branch, as in an
  optimizer such as Shampoo under "skip steps that are not finite". Test: `test_several_eigh_in_a_branch`.
  """
  functions = functions_of(module)

  def calls(root: ir.Operation) -> int:
    custom = [
      ir.StringAttr(op.attributes['call_target_name']).value for op in operations(root, {'stablehlo.custom_call'})
    ]
    inside = operations(root, {'func.call'})
    return sum(name.startswith('lapack_') for name in custom) + sum(calls(functions[callee(call)]) for call in inside)

  for branch in operations(module, {'stablehlo.case'}):
    if (number := calls(branch)) > 1:
      raise ConfigError(
        f'{number} calls of LAPACK, such as eigh, stand in one branch, and the CPU would wait forever. If an optimizer '
        "makes them, set task.train.learner.on_nonfinite to 'ignore'; in a layer, use jnp.where in place of lax.cond"
      )
