"""The step of `handwritten_lm.py` in the GPU benchmark."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tools.gpu import case as shared
from tools.gpu.case import ModelCase
from tools.gpu.jax_side import JaxSide, first_params, set_up
from tools.gpu.turn import Options, main
from tools.handwritten_lm import Size, Tuning, make_step


class ByHand(JaxSide):
  """Its options are the fields of `Tuning`, except for the dtype."""

  def prepare(self, case: ModelCase, batch: int, options: Options) -> None:
    shapes = self.shapes(case, batch)
    sizes = (case.model_dims, case.num_layers, case.num_heads, case.hidden_dims, case.vocab)
    size = Size(batch, case.length, *sizes, tied=True)
    decayed = {name: 'norm' not in name for name in case.shapes}
    b1, b2 = shared.BETAS
    tx = optax.adamw(
      shared.LEARNING_RATE, b1=b1, b2=b2, eps=shared.EPSILON, weight_decay=shared.WEIGHT_DECAY, mask=decayed
    )
    attention = 'cudnn' if jax.default_backend() == 'gpu' and case.compute != 'float32' else None
    chosen: Options = {'dtype': case.compute, 'attention': attention} | options
    step = make_step(size, tx, tuning=Tuning(**chosen))
    jitted: Any = jax.jit(step, donate_argnums=(0, 1))
    params = {name: jax.ShapeDtypeStruct(shape, case.state) for name, shape in case.shapes.items()}
    self._compiled = jitted.lower(params, jax.eval_shape(tx.init, params), shapes).compile()
    weights = first_params(case)
    self._state = weights, jax.jit(tx.init)(weights)

  def take(self, inputs: dict[str, np.ndarray]) -> jax.Array:
    assert self._compiled is not None
    params, opt_state, metrics = self._compiled(*self._state, jax.device_put(inputs))
    self._state = params, opt_state
    loss: jax.Array = metrics['loss']
    return loss


if __name__ == '__main__':
  set_up()
  main(ByHand())
