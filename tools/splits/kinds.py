"""The kinds of operations whose splits are enumerated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tools.splits import calls, images, lookups, products, reshapes, reshards
from tools.splits.batches import Program

KINDS: dict[str, Callable[[], Iterator[Program]]] = {
  'products': products.programs,
  'transposes': products.transposes,
  'convolutions': images.convolutions,
  'grouped convolutions': images.grouped_convolutions,
  'windows': images.windows,
  'gradients of windows': images.window_gradients,
  'pads': images.pads,
  'reshapes': reshapes.programs,
  'reshards': reshards.programs,
  'gathers': lookups.gathers,
  'scatters': lookups.scatters,
  'slices': lookups.slices,
  'sorts': calls.sorts,
  'transforms': calls.transforms,
  'factorizations': calls.factorizations,
}
