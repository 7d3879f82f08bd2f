"""The warnings of `check` about mixtures of experts that waste memory, communication or experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from praxis_lite.layers.base import Layer
from praxis_lite.layers.moe import MoeFeedForward
from praxis_lite.layers.transformer import TransformerBlock

# With at least this many devices, an exchange with room for all tokens wastes more than it is worth.
_MANY_DEVICES = 4


class ExpertProblem(NamedTuple):
  """A problem: its kind, the field that it is about, what was found, and what to change."""

  kind: str
  path: str
  message: str
  remedy: str


def expert_problems(model: Layer, sizes: Mapping[str, int]) -> Iterator[ExpertProblem]:
  """Yields the problems of a model's mixtures of experts on mesh axes of these sizes."""
  for layer in model.descendants():
    if isinstance(layer, MoeFeedForward):
      yield from _layer_problems(layer, sizes)
    elif (
      isinstance(layer, TransformerBlock) and _experts_choose(layer.ff) and getattr(layer.attention, 'causal', False)
    ):
      yield ExpertProblem(
        'experts see later tokens',
        f'{layer.ff.router.path_name}.choice',
        'experts choose among all tokens of a row, and the attention of this block is causal: the loss is of a model '
        'that knows what comes next, and decoding differs from training',
        "set it to 'token'",
      )


def _experts_choose(layer: Layer) -> bool:
  return isinstance(layer, MoeFeedForward) and layer.router.choice == 'expert'


def _layer_problems(layer: MoeFeedForward, sizes: Mapping[str, int]) -> Iterator[ExpertProblem]:
  parts, exchanged = layer.expert_parts(sizes)
  router = layer.router
  if parts > 1 and not exchanged:
    yield ExpertProblem(
      'gathered experts',
      f'{layer.path_name}.expert_axis',
      f'experts are split over {parts} devices, and is None: each device gathers all experts at each use',
      'name the axis that splits them, so that tokens are sent to their experts',
    )
  if exchanged and parts >= _MANY_DEVICES and layer.dispatch == 'dropless' and layer.exchange_factor is None:
    yield ExpertProblem(
      'large exchange',
      f'{layer.path_name}.exchange_factor',
      f'is None, so each device has room for {parts} times its tokens, as if all chose its experts',
      "set it to about 2, or set dispatch='capacity'",
    )
  balanced = router.load_balance_loss_weight or router.bias_update_rate or router.choice == 'expert'
  if layer.num_experts > 1 and not balanced:
    yield ExpertProblem(
      'unbalanced experts',
      router.path_name,
      'nothing keeps experts equally loaded, so some may end up without tokens',
      'set load_balance_loss_weight to about 0.01, or bias_update_rate to about 0.001',
    )
