"""Registers a family of operations, under the name of the function that draws one."""

from __future__ import annotations

from collections.abc import Callable

from tools.graphs.drawing import DrawnOperation, Graph, NotDrawn

DrawOperation = Callable[[Graph], DrawnOperation]
# The weight of each family, and the function that draws an operation.
Families = dict[str, tuple[float, DrawOperation]]


def family(families: Families, weight: float = 1.0, smooth: bool = False) -> Callable[[DrawOperation], DrawOperation]:
  """Registers a family with its weight. A family with non-integer results is drawn only for smooth programs."""

  def register(draw: DrawOperation) -> DrawOperation:
    def draw_or_reject(g: Graph) -> DrawnOperation:
      if smooth and g.is_exact:
        raise NotDrawn
      return draw(g)

    families[draw.__name__.strip('_')] = weight, draw_or_reject
    return draw

  return register


def letters(g: Graph, n: int, used: str = '') -> str:
  """Returns this number of unused letters."""
  rest = [c for c in 'abcdefghijklmnop' if c not in used]
  return ''.join(rest[i] for i in g.rng.permutation(len(rest))[:n])


def shuffle(g: Graph, text: str) -> str:
  return ''.join(text[i] for i in g.rng.permutation(len(text)))
