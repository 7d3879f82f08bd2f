"""The kinds of operations whose splits are enumerated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tools.splits import products, reshards
from tools.splits.batches import Program

KINDS: dict[str, Callable[[], Iterator[Program]]] = {
  'products': products.programs,
  'transposes': products.transposes,
  'reshards': reshards.programs,
}
