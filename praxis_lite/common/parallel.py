"""Calls a function for many items at once, in threads."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

S = TypeVar('S')
T = TypeVar('T')


def call_in_parallel(call: Callable[[S], T], items: Collection[S], most: int = 4) -> list[T]:
  """Returns the results of `call` for each item, `most` at a time; after the first error, starts no further calls."""
  with ThreadPoolExecutor(most) as pool:
    try:
      return list(pool.map(call, items))
    except BaseException:
      pool.shutdown(cancel_futures=True)
      raise
