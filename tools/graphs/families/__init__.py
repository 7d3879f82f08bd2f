"""The operations of random graphs."""

from __future__ import annotations

from tools.graphs.families import dimensions, entries, images, lookups, order, products, reals, regions
from tools.graphs.families.register import Families

# The order matters: results of seeds depend on it.
FAMILIES: Families = {
  **products.FAMILIES,
  **images.FAMILIES,
  **lookups.FAMILIES,
  **order.FAMILIES,
  **dimensions.FAMILIES,
  **entries.FAMILIES,
  **reals.FAMILIES,
  **regions.FAMILIES,
}
