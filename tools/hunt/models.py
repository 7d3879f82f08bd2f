"""x."""
import numpy as np
from tools.hunt.cases import Case
def draw(rng: np.random.Generator) -> Case: ...
