"""What is read of JAX and jaxlib that they change from release to release, and the only place where it is read.

    programs      equations of a traced program: parameters of loops, binding an operation again
    devices       the platform of a mesh without devices; whether backends have started
    flags         which of XLA's flags this jaxlib knows: an unknown one ends the process
    mlir          jaxlib's bindings of MLIR: operations, attributes, passes
    lowering      a program lowered for devices that are not there
    processes     the service that connects the processes of a run, and what JAX knows of clusters

Each reader takes every shape that a supported release has, and raises `UnknownJax` for another one. Whoever only
advises or explains goes on without, by `unless_unknown`; so a new release may cost an explanation, not a training run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TypeVar

from praxis_lite.common.errors import UserError, first_line

T = TypeVar('T')


class UnknownJax(UserError):
  """JAX has another shape here than any release that is supported; `what` says where."""

  def __init__(self, what: str):
    super().__init__(f'JAX {metadata.version("jax")} is not as praxis_lite knows it: {what}')


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
  """Raises `UnknownJax` where the code inside finds that `what` is not as in the releases that are supported."""
  try:
    yield
  except UserError:
    raise
  except Exception as error:
    raise UnknownJax(f'{what}: {type(error).__name__}: {first_line(error)}') from error


def unless_unknown(consequence: str, read: Callable[[], T], otherwise: T) -> T:
  """Returns `read()`; where that meets an unknown shape of JAX, tells the user once, and returns `otherwise`.

  Args:
    consequence: what the user is told, such as 'no advice on products of matrices'; each is told once.
    read, otherwise: see above.
  """
  try:
    return read()
  except UnknownJax as error:
    tell_once(consequence, f' ({error})')
    return otherwise


def tell_once(message: str, detail: str = '') -> None:
  """Prints a message and its detail, unless the user of this process has been told the message before."""
  if message not in told:
    told.append(message)
    print(f'{message}{detail}', flush=True)


# What users of this process have been told of.
told: list[str] = []
