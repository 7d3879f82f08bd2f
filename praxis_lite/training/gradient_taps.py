"""Gradients of activations, as arrays or statistics, which a step computes in its backward pass.

A probe is an array of zeros among the variables of a layer. The gradient with respect to it is what a tap asks for: an
array, or a part of a statistic; see `layers/base/taps.py`. Each layer of a stack and each call of a layer has its own
probe. This file makes the probes, and computes these gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.trees import NestedDict, Path, insert, node_at
from praxis_lite.layers.base.call import Summary
from praxis_lite.layers.base.taps import probe_name, read_raw_name
from praxis_lite.training.microbatches import GradientFn, LossOutput


class Probes(NamedTuple):
  """The probes for gradients that are tapped."""

  arrays: NestedDict  # Zeros, in a tree like the variables.
  paths: dict[str, Path]  # For each summary, by its name, the path of its probe in `arrays`.
  share: jax.Array  # See `Taps`.


def make_probes(output: LossOutput, probed: dict[str, Path], root: Path, num_losses: int = 1) -> Probes:
  """Returns the probes of a step.

  `output` has the shapes of what the loss function returns when it is called without probes, and `probed` is what that
  call has collected, see `Taps`. `root` is the path of the model. `num_losses` is the number of devices whose losses
  are averaged.
  """
  arrays, paths = dict[str, Any](), dict[str, Path]()
  for name, summary in output.summaries.items():
    part, _, point = read_raw_name(name) or ('', (), '')
    if point in probed:
      paths[name] = (*probed[point][len(root) :], probe_name(point), part)
      arrays = insert(arrays, paths[name], jnp.zeros(summary.value.shape, jnp.float32))
  return Probes(arrays, paths, jnp.float32(1 / num_losses))


def watch_gradients(loss_fn: Callable[..., Any], probes: Probes) -> Callable[[jax.Array], GradientFn]:
  """Returns the argument `watch` that makes `value_and_grad` also compute gradients with respect to the probes.

  `loss_fn` is a loss function with an argument `probes`.
  """

  def watch(share: jax.Array) -> GradientFn:
    shared = probes._replace(share=probes.share * share)

    def loss_of_both(both: tuple[Any, NestedDict], others: NestedDict, key: jax.Array, batch: Any) -> Any:
      return loss_fn(both[0], others, key, batch, probes=shared._replace(arrays=both[1]))

    def gradients(trained: Any, others: NestedDict, key: jax.Array, batch: Any) -> Any:
      of_both = jax.value_and_grad(loss_of_both, has_aux=True)
      (loss, output), (found, by_probes) = of_both((trained, probes.arrays), others, key, batch)
      summaries = output.summaries
      tapped = {name: Summary(node_at(by_probes, path), summaries[name].kind) for name, path in probes.paths.items()}
      return (loss, output._replace(summaries={**summaries, **tapped})), found

    return gradients

  return watch
