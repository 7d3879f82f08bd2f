"""Access to the parts of JAX and jaxlib that change between releases; no other package accesses them.

    programs      equations of a traced program: parameters of loops, binding an operation again; the running trace
    devices       the platform of a mesh without devices; whether backends have started
    flags         which XLA flags this jaxlib knows: an unknown one ends the process
    threads       enough threads for simulated devices
    mlir          jaxlib's bindings of MLIR: operations, attributes, passes
    lowering      lowers programs for devices that do not exist
    splash        the kernels of splash attention, forward and backward apart
    processes     the service that connects the processes of a run, and the clusters that JAX knows

Each function supports the forms in all supported releases, and raises `UnknownJax` if JAX has an unknown form, lacks
what is needed, or rejects the program. Code that only advises or explains catches that error by `unless_unknown`, so a
new release may cost an explanation, but not a training run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TypeVar

from praxis_lite.common.errors import UserError, error_summary

T = TypeVar('T')


class UnknownJax(UserError):
  """A part of JAX has a form that differs from all supported releases; `what` says which part."""

  def __init__(self, what: str):
    super().__init__(f'JAX {metadata.version("jax")} is not as praxis_lite knows it: {what}')


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
  """Raises `UnknownJax` if the code inside fails because `what` is not as in the supported releases."""
  try:
    yield
  except UserError:
    raise
  except Exception as error:
    raise UnknownJax(f'{what}: {error_summary(error)}') from error


def unless_unknown(consequence: str, read: Callable[[], T], otherwise: T) -> T:
  """Returns `read()`; if that raises `UnknownJax`, tells the user once, and returns `otherwise`.

  `consequence` is the message for the user, such as 'no advice on products of matrices'; each is printed once.
  """
  try:
    return read()
  except UnknownJax as error:
    tell_once(consequence, f' ({error})')
    return otherwise


def tell_once(message: str, detail: str = '') -> None:
  """Prints a message and its detail, unless this process has already printed the message."""
  if message not in told:
    told.append(message)
    print(f'{message}{detail}', flush=True)


# Messages that this process has printed.
told: list[str] = []
