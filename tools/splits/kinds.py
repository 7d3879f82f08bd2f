"""The kinds of operations whose splits are enumerated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tools.splits import calls, images, lookups, parts, products, reductions, reshapes, reshards
from tools.splits.batches import Program

KINDS: dict[str, Callable[[], Iterator[Program]]] = {
  'products': products.product_programs,
  'transposes': products.transposes,
  'convolutions': images.convolutions,
  'grouped convolutions': images.grouped_convolutions,
  'windows': images.windows,
  'gradients of windows': images.window_gradients,
  'pads': images.pads,
  'reshapes': reshapes.reshape_programs,
  'reshards': reshards.reshard_programs,
  'gathers': lookups.gathers,
  'scatters': lookups.scatters,
  'functions of lookups': lookups.lookup_functions,
  'dynamic slices': lookups.dynamic_slices,
  'slices': parts.static_slices,
  'concatenations': parts.concatenations,
  'reversals': parts.reversals,
  'functions of slices': parts.slice_functions,
  'reductions': reductions.reductions,
  'cumulative operations': reductions.cumulative,
  'largest entries': reductions.largest,
  'sorts': calls.sorts,
  'transforms': calls.transforms,
  'factorizations': calls.factorizations,
}
