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

T = TypeVar('T')


class UnknownJax(Exception):
  """JAX has another shape here than any release that is supported."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
  """Raises `UnknownJax` where the code inside finds that `what` of JAX is not as it was."""
  try:
    yield
  except UnknownJax:
    raise
  except (ImportError, AttributeError, LookupError, TypeError, ValueError) as error:
    raise UnknownJax(f'{what} of JAX {metadata.version("jax")}: {type(error).__name__}: {error}') from error


_told: set[str] = set()


def unless_unknown(what: str, read: Callable[[], T], otherwise: T) -> T:
  """Returns `read()`; where it meets an unknown shape of JAX, prints one line for each `what`, and returns `otherwise`.

  Args:
    what: what there is not, as the line begins: 'no advice on products'.
    read, otherwise: see above.
  """
  try:
    return read()
  except UnknownJax as error:
    if what not in _told:
      _told.add(what)
      print(f'{what}: this release of JAX is not known to praxis_lite ({error})', flush=True)
    return otherwise
