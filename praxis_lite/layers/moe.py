"""MoeFeedForward: a feed-forward layer with many experts; each token uses only a few of them.

    y_t = sum_k weight_tk expert_tk(x_t)  (+ shared(x_t), or sigmoid(x_t . w) shared(x_t))
    expert(x) = (f(x W_gate) * (x W_up)) W_down                      `expert_mlp.py`

Dispatch, from tokens to experts:

    dropless    tokens are sorted by expert; `grouped_matmul` multiplies each group by the weights of its expert
    capacity    each expert has C slots for the tokens of a row; tokens beyond that skip the expert

Expert parallelism: experts are split over a mesh axis, and tokens are exchanged by all-to-alls, in a `shard_map` over
the axes that split tokens and weights:

    capacity    [E, n, D] of this device's tokens  ->  [E / P, P n, D] of all devices' tokens, for this device's experts
    dropless    [P, n, D], rows for each device    ->  [P, n, D], rows from each device, then sorted by expert
    experts, all-to-all back, combine

The other dims of the weights may be split too. If F is split, each device computes its part of the hidden layer, and
outputs are summed. Weights are gathered before their use if D is split, or if an axis that splits tokens splits any of
their dims.

B batch, T length, D model dims, F hidden dims, E experts, K experts per token, C capacity, P parts of the expert axis,
n slots on one device, of an expert (capacity) or for a device (dropless).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.common.figures import number_of
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base import ActivationSplit, Layer
from praxis_lite.layers.base.facts import Exchange, LayerProblem, TokenFlops
from praxis_lite.layers.dispatch import DispatchPlan, capacity_plan, plan_of_rows
from praxis_lite.layers.expert_mlp import ExpertMlp
from praxis_lite.layers.experts import (
  DeviceExperts,
  ExpertSplit,
  batched_product,
  dropless,
  keep_on_first,
  pad_for_shard_map,
  run_with_capacity,
  sum_outputs,
)
from praxis_lite.layers.feedforward import FeedForward, FeedForwardWeightSplit, GatedFeedForward
from praxis_lite.layers.grouped_matmul import IMPLEMENTATIONS, ProductCase, choose_grouped_matmul
from praxis_lite.layers.int8 import MOST_SUMMED
from praxis_lite.layers.linears import Linear, bias_weight
from praxis_lite.layers.routing import (
  Router,
  TokenChoice,
  choose_experts,
  choose_tokens,
  expert_capacity,
  router_scores,
)
from praxis_lite.layers.stages import surrounding_stages
from praxis_lite.sharding.constraints import unmapped_axes
from praxis_lite.sharding.mesh import platform
from praxis_lite.sharding.padding import pad_to, padded_shape
from praxis_lite.sharding.specs import axes_to_entry, complete_spec, spec_axes
from praxis_lite.sharding.weights import DeclaredSplit, WeightHParams, WeightInit

# Names of points for taps: the inputs of all experts' products, [B, T, E, ...].
ROWS, HIDDEN_ROWS = 'rows_of_experts', 'hidden_rows_of_experts'
# The exchange has slots for at least this number of rows for each device, because fewer slots would save little.
_FEW_ROWS = 128
# With at least this many devices, an exchange with slots for all tokens costs more than it gains.
_MANY_DEVICES = 4


class ExpertOutputs(NamedTuple):
  """The results of experts for this device's tokens."""

  y: jax.Array  # [B, T, D].
  load: jax.Array  # [B, 1, E] float32, number of the row's tokens that chose the expert, or that the expert chose.
  dropped: jax.Array  # [B, 1] float32, number of tokens' choices without a slot, or of tokens that no expert chose.


class MoeWeightSplit(FeedForwardWeightSplit):
  """`wt`: weights into the hidden layer, [E, D, F]; `down`: the weight out of it, [E, F, D].

  By default, `down` splits the dimensions like `wt`.
  """


class MoeFeedForward(Layer):
  """A mixture of experts: see the top of this file.

  Attributes:
    input_dims: D, also of the output.
    hidden_dims: F, the hidden dims of one expert.
    num_experts: E.
    num_experts_per_token: K; with expert choice, the mean number of experts that choose a token.
    gated: whether experts are gated, like `GatedFeedForward`; otherwise they are f(x W_up) W_down.
    activation: name of f; see `activations.py`.
    use_bias: whether the products of experts have biases, the variables `gate_bias` and `up_bias`, [E, F], and
      `down_bias`, [E, D]. They are split like the same dimensions of the weights.
    hidden_limit: with gates, the limit at which the input of f is clipped from above, and x W_up on both sides
      (GPT-OSS); None disables it.
    up_offset: with gates, a constant that is added to x W_up after clipping; 1 in GPT-OSS.
    router_tpl: template of the child `router`, which computes scores, chooses, and balances the load.
    dispatch: 'dropless' or 'capacity'.
    capacity_factor: with 'capacity', C = capacity_factor * K * T / E.
    expert_axis: mesh or logical axis, or several, over which tokens are exchanged, and which splits E: each device
      along it computes its own experts. A `weight_split_dims_mapping` must split E over the same axis. With None, each
      device computes all experts for its own tokens, and gathers their weights if they are split.
    exchange_factor: for 'dropless' with an `expert_axis`. An all-to-all has a fixed size. With None, it has room even
      if all tokens choose the same device, so that no token is dropped. With a factor, it has room for the factor times
      the mean. Choices beyond that are dropped, the last ones first. There is room for at least 128 rows to each
      device, so that no choice is dropped when small batches are decoded.
    grouped_matmul: for 'dropless': how the rows of experts are multiplied, 'auto', 'blocks', 'triton' or
      'xla'; see `choose_grouped_matmul`.
    matmul: how experts multiply: 'fprop', or 'int8', with rows and weights rounded to int8; see `int8.py`. The shared
      experts have the `matmul` of their own linear layers.
    num_shared_experts: hidden dims of the child `shared`, which all tokens use, in multiples of F; 0 disables it.
    shared_tpl: template of the child `shared`.
    shared_expert_gate: whether the output of the shared experts is multiplied by a sigmoid for each token, computed by
      the child `shared_gate`, [D, 1] (Qwen2-MoE).
    out_init: initializer of the weight out of the hidden layer; None uses that of the other weights.
    activation_split_dims_mapping: `out`, [B, T, D]: how tokens are split, also inside the layer.
  """

  takes_paddings: ClassVar[bool] = True
  product_weights: ClassVar[Mapping[str, str]] = {'gate': ROWS, 'up': ROWS, 'down': HIDDEN_ROWS}

  input_dims: int = REQUIRED
  hidden_dims: int = REQUIRED
  num_experts: int = REQUIRED
  num_experts_per_token: int = 2
  gated: bool = True
  activation: str = 'silu'
  use_bias: bool = False
  hidden_limit: float | None = None
  up_offset: float = 0.0
  router_tpl: Config = template(Router)
  dispatch: str = 'dropless'
  capacity_factor: float = 1.25
  expert_axis: str | tuple[str, ...] | None = None
  exchange_factor: float | None = None
  grouped_matmul: str = 'auto'
  matmul: str = 'fprop'
  num_shared_experts: int = 0
  shared_tpl: Config = template(GatedFeedForward)
  shared_expert_gate: bool = False
  out_init: WeightInit | None = None
  weight_split_dims_mapping: Config = template(MoeWeightSplit)
  activation_split_dims_mapping: Config = template(ActivationSplit)

  router: Router = child()
  shared: FeedForward = child()
  shared_gate: Linear = child()

  def setup(self) -> None:
    self._check()
    self._stages = surrounding_stages()
    D, F, E = self.input_dims, self.hidden_dims, self.num_experts
    self.create_child('router', self.router_tpl.clone(input_dims=D, num_experts=E))
    if self.router.choice == 'expert' and self.dispatch != 'capacity':
      raise ConfigError(
        f"{self.path_name}.dispatch: with router_tpl.choice='expert', capacity_factor sets the number of tokens of an "
        "expert; set dispatch='capacity'"
      )
    usable = self.num_experts // self.router.num_groups * self.router.num_groups_per_token
    if self.num_experts_per_token > usable:
      raise ConfigError(
        f'{self.path_name}.num_experts_per_token: {self.num_experts_per_token}, and the groups that a token may use '
        f'have {number_of(usable, "expert")}; raise router_tpl.num_groups_per_token'
      )
    wt, down = self._weight_splits()
    share = self.num_experts_per_token / E
    weight = functools.partial(WeightHParams, fan_in_axes=(1,), fan_out_axes=(2,), active_share=share)
    for name in self._inward:
      self.create_variable(name, weight((E, D, F), tensor_split_dims_mapping=wt))
    self.create_variable('down', weight((E, F, D), self.out_init, tensor_split_dims_mapping=down))
    for name in (*self._inward, 'down') if self.use_bias else ():
      dims, split = (D, down) if name == 'down' else (F, wt)
      bias = bias_weight((E, dims), None if split is None else split.pick(0, 2))
      self.create_variable(f'{name}_bias', dataclasses.replace(bias, active_share=share))
    if self.num_shared_experts:
      shared = self.shared_tpl.clone(input_dims=D, hidden_dims=self.num_shared_experts * F)
      self.create_child('shared', shared)
    if self.shared_expert_gate:
      self.create_child('shared_gate', Config(Linear, input_dims=D, output_dims=1))

  def __call__(self, x_BTD: jax.Array, paddings: jax.Array | None = None) -> jax.Array:
    """Returns [B, T, D].

    Args:
      x_BTD: the tokens; a capacity applies to the T tokens of a row.
      paddings: [B, T], nonzero for padding tokens, which take no slot and get 0 from experts; None means no padding.
    """
    paddings = self.mark_filler_rows(paddings, x_BTD.shape[:2])
    real_BT = jnp.ones(x_BTD.shape[:2], bool) if paddings is None else paddings == 0
    x_BTD = self.shard(x_BTD.astype(self.fprop_dtype))
    logits_BTE = checkpoint_name(self.router(x_BTD), 'router_logits')
    self.add_tap(ROWS, lambda: self._rows(x_BTD, logits_BTE, real_BT))
    self.add_tap(HIDDEN_ROWS, lambda: self._hidden_rows(x_BTD, logits_BTE, real_BT))
    out = self._experts(x_BTD, logits_BTE, real_BT)
    self.router.record_choices(logits_BTE, real_BT, out.load, out.dropped)
    y_BTD = out.y
    if self.num_shared_experts:
      shared_BTD = self.shared(x_BTD)
      y_BTD += jax.nn.sigmoid(self.shared_gate(x_BTD)) * shared_BTD if self.shared_expert_gate else shared_BTD
    return checkpoint_name(self.shard(y_BTD), 'ffn_out')

  def expert_parts(self, sizes: Mapping[str, int]) -> tuple[int, bool]:
    """Returns the number of devices that split experts on a mesh of these sizes, and whether tokens are exchanged."""
    split = self._split({axis: size for axis, size in sizes.items() if size > 1})
    parts = math.prod(sizes[axis] for axis in spec_axes(split.weights['up'][0]))
    return parts, bool(split.expert)

  # ---------------------------------------------------------------- for tools

  def exchanges(self) -> list[Exchange]:
    axes = self._resolve_axes('expert_axis')
    return [Exchange('exchange between experts', 'expert_axis', axes)] if axes else []

  def token_flops(self, length: int) -> TokenFlops:
    return TokenFlops(2.0 * sum(weight.num_active for weight in self._weights.values() if len(weight.shape) == 3))

  def implementation_of(self, length: int, packed: bool) -> str:
    if self.dispatch != 'dropless':
      return ''
    sizes = unmapped_axes()
    split_by_compiler = tuple(
      axis for axis in sizes if axis not in {*self._split(sizes).axes, *self._stage_axes(sizes)}
    )
    case = ProductCase(jnp.int8 if self.matmul == 'int8' else self.fprop_dtype, unmapped=split_by_compiler)
    name, reason = choose_grouped_matmul(self.grouped_matmul, f'{self.path_name}.grouped_matmul', case)
    return f'products of experts by {name!r} on {platform()}: {reason}'

  def problems(self, mesh_sizes: Mapping[str, int]) -> Iterator[LayerProblem]:
    parts, exchanged = self.expert_parts(mesh_sizes)
    router = self.router
    if parts > 1 and not exchanged:
      yield LayerProblem(
        'gathered experts',
        f'{self.path_name}.expert_axis',
        f'experts are split over {parts} devices, and is None: each device gathers all experts at each use',
        'name the axis that splits them, so that tokens are sent to their experts',
      )
    if exchanged and parts >= _MANY_DEVICES and self.dispatch == 'dropless' and self.exchange_factor is None:
      yield LayerProblem(
        'large exchange',
        f'{self.path_name}.exchange_factor',
        f'is None, so each device has room for {parts} times its tokens, as if all chose its experts',
        "set it to about 2, or set dispatch='capacity'",
      )
    balanced = router.load_balance_loss_weight or router.bias_update_rate or router.choice == 'expert'
    if self.num_experts > 1 and not balanced:
      yield LayerProblem(
        'unbalanced experts',
        router.path_name,
        'nothing keeps experts equally loaded, so some may end up without tokens',
        'set load_balance_loss_weight to about 0.01, or bias_update_rate to about 0.001',
      )

  # ---------------------------------------------------------------- config

  @property
  def _inward(self) -> tuple[str, ...]:
    return ('gate', 'up') if self.gated else ('up',)

  def _check(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    check_choice(f'{self.path_name}.dispatch', self.dispatch, ('dropless', 'capacity'))
    check_choice(f'{self.path_name}.grouped_matmul', self.grouped_matmul, IMPLEMENTATIONS)
    check_choice(f'{self.path_name}.matmul', self.matmul, ('fprop', 'int8'))
    E, K = self.num_experts, self.num_experts_per_token
    self._check_range('num_experts', least=1)
    if self.matmul == 'int8':
      self._check_range('input_dims', 'hidden_dims', below=MOST_SUMMED + 1)
    self._check_range('num_shared_experts', least=0)
    self._check_range('capacity_factor', 'exchange_factor', 'hidden_limit', above=0)
    for field, default in (('hidden_limit', None), ('up_offset', 0)):
      if not self.gated and getattr(self, field) != default:
        raise ConfigError(f'{self.path_name}.{field}: only gated experts have it; leave it {default}')
    if not 1 <= K <= E:
      raise ConfigError(f'{self.path_name}.num_experts_per_token: expected 1 to num_experts, which is {E}, got {K}')
    if self.shared_expert_gate and not self.num_shared_experts:
      raise ConfigError(
        f'{self.path_name}.shared_expert_gate: there are no shared experts to gate; set num_shared_experts'
      )

  def _weight_splits(self) -> tuple[DeclaredSplit | None, DeclaredSplit | None]:
    """Returns two mappings: of the weights into the hidden layer, and of the weight out of it; each may be None."""
    field, split = f'{self.path_name}.weight_split_dims_mapping', self.weight_split_dims_mapping
    wt, down = split.wt, split.down
    expert, own = None if self.expert_axis is None else (self.expert_axis,), f'{self.path_name}.expert_axis'
    exchanged = self._resolve(expert, own, rank=1)
    if expert is not None and wt is None:
      wt = DeclaredSplit.make((*expert, None, None), own)
    if wt is not None:
      self._resolve(wt, f'{field}.wt', rank=3)
      down = wt.pick(0, 2, 1) if down is None else down
    for name, mapping in (('wt', wt), ('down', down)):
      split_over = self._resolve(mapping, f'{field}.{name}', rank=3)
      if exchanged is not None and split_over is not None and split_over.spec[0] != exchanged.spec[0]:
        raise ConfigError(
          f'{field}.{name}: {tuple(mapping or ())!r} splits the experts over {split_over.spec[0]!r}, and '
          f'expert_axis={self.expert_axis!r} exchanges tokens over {exchanged.spec[0]!r}; both have to be the same'
        )
    return wt, down

  # ---------------------------------------------------------------- experts

  def _experts(self, x_BTD: jax.Array, logits_BTE: jax.Array, real_BT: jax.Array) -> ExpertOutputs:
    """Returns the result of `_run_on_device`; on a mesh, each device runs it for its part of tokens and weights."""
    theta, sizes = self.theta, unmapped_axes()
    weights = {name: getattr(theta, name) for name in self._weights}
    bias_E = self.router.selection_bias
    args = (x_BTD, logits_BTE, real_BT, bias_E, weights)
    split = self._split(sizes)
    if not split.axes:
      return self._run_on_device(split, *args)
    tokens, wide = split.tokens, PartitionSpec(*split.tokens, None)
    specs = (wide, wide, tokens, None if bias_E is None else PartitionSpec(), dict(split.weights))
    mapped = jax.shard_map(
      lambda *parts: tuple(self._run_on_device(split, *parts)),
      in_specs=specs,
      out_specs=(wide, wide, tokens),
      axis_names=split.axes,
      check_vma=False,  # The code itself ensures that values are equal where the specs say that they are replicated.
    )

    def equal_parts(spec: PartitionSpec, x: jax.Array) -> jax.Array:
      shape = padded_shape(x.shape, spec, sizes)
      return pad_for_shard_map(x, spec, shape, x.shape) if jnp.issubdtype(x.dtype, jnp.floating) else pad_to(x, shape)

    y_BTD, load, dropped = mapped(*jax.tree.map(equal_parts, specs, args))
    B, T, _ = x_BTD.shape
    return ExpertOutputs(y_BTD[:B, :T], load[:B], dropped[:B])

  def _stage_axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes that evenly split the stages of a pipeline around this layer; () if there are none."""
    return (self._stages and self._stages.even_axes(sizes)) or ()

  def _split(self, sizes: Mapping[str, int]) -> ExpertSplit:
    """Returns how tokens and weights are split over the mesh axes of these sizes."""

    def axes_of(mapping: Any, rank: int) -> list[tuple[str, ...]]:
      placement = self._resolve(mapping, self.path_name, rank=rank)
      spec = complete_spec(None if placement is None else placement.spec, rank)
      return [tuple(a for a in spec_axes(entry) if a in sizes) for entry in spec]

    weights = {name: axes_of(w.tensor_split_dims_mapping, len(w.shape)) for name, w in self._weights.items()}
    (expert,) = axes_of(None if self.expert_axis is None else (self.expert_axis,), 1)
    batch, time, _ = axes_of(self.activation_split_dims_mapping.out, 3)
    tensor = weights['up'][2]
    if tensor != weights['down'][1] or {*tensor} & {*batch, *expert}:
      tensor = ()
    # Axes that split the hidden dims never split the length. No axis splits it if experts have capacities, which apply
    # to whole rows.
    time = () if self.dispatch == 'capacity' else tuple(a for a in time if a not in tensor)
    batch += tuple(a for a in expert if a not in (*batch, *time))
    specs = {name: PartitionSpec(*map(axes_to_entry, axes)) for name, axes in weights.items()}
    return ExpertSplit(PartitionSpec(axes_to_entry(batch), axes_to_entry(time)), specs, expert, tensor)

  def _run_on_device(
    self,
    split: ExpertSplit,
    x_BTD: jax.Array,
    logits_BTE: jax.Array,
    real_BT: jax.Array,
    bias_E: jax.Array | None,
    weights: dict[str, jax.Array],
  ) -> ExpertOutputs:
    """Routes this device's tokens, and computes the outputs of experts for them."""
    weights = {name: split.gather_weight(name, w, self._weights[name].shape) for name, w in weights.items()}
    num_experts = weights['up'].shape[0] * split.parts  # Including the padding of the last device.
    scores_BTE = router_scores(logits_BTE, self.router.score)
    if split.tensor and self.use_bias:
      weights['down_bias'] = keep_on_first(weights['down_bias'], split.tensor)
    stage_axes = self._stage_axes(unmapped_axes())
    mlp = functools.partial(dataclasses.replace(self._mlp(), hidden_axes=split.tensor), weights)
    experts = DeviceExperts(mlp, num_experts, split, self.grouped_matmul, stage_axes)
    if self.router.choice == 'expert':
      out = self._expert_choice(experts, x_BTD, scores_BTE, real_BT)
    else:
      out = self._token_choice(experts, x_BTD, scores_BTE, real_BT, bias_E)
    return out._replace(y=sum_outputs(out.y, split.tensor)) if split.tensor else out

  def _mlp(self) -> ExpertMlp:
    return ExpertMlp(self.activation, self.gated, self.hidden_limit, self.up_offset, self.matmul)

  def _rows(self, x_BTD: jax.Array, logits_BTE: jax.Array, real_BT: jax.Array) -> jax.Array:
    """Returns the inputs of each expert, [B, T, E, D]: zeros for a token that the expert does not get."""
    return jnp.where(self._is_chosen(logits_BTE, real_BT)[..., None], x_BTD[:, :, None], 0)

  def _hidden_rows(self, x_BTD: jax.Array, logits_BTE: jax.Array, real_BT: jax.Array) -> jax.Array:
    """Returns the inputs of `down`, [B, T, E, F]: computed for all tokens, 0 for those that an expert does not get."""
    theta, (B, T, D) = self.theta, x_BTD.shape
    rows_END = jnp.broadcast_to(x_BTD.reshape(B * T, D), (self.num_experts, B * T, D))
    weights = {name: getattr(theta, name) for name in self._weights}
    hidden_ENF = self._mlp().compute_hidden(weights, batched_product, rows_END)
    hidden_BTEF = jnp.moveaxis(hidden_ENF, 0, 1).reshape(B, T, self.num_experts, -1)
    return jnp.where(self._is_chosen(logits_BTE, real_BT)[..., None], hidden_BTEF, 0)

  def _is_chosen(self, logits_BTE: jax.Array, real_BT: jax.Array) -> jax.Array:
    """Returns [B, T, E] bool, whether the expert is chosen for the token, as if there were room for all tokens."""
    scores_BTE, (_, T, E) = router_scores(logits_BTE, self.router.score), logits_BTE.shape
    if self.router.choice == 'expert':
      C = expert_capacity(self.capacity_factor, T, self.num_experts_per_token, E)
      chosen_BEC = choose_tokens(scores_BTE, real_BT, C).tokens
      return jnp.any(chosen_BEC[:, None] == jnp.arange(T)[:, None, None], axis=-1)
    return jnp.any(self._route(scores_BTE, real_BT, self.router.selection_bias).experts[..., None] == jnp.arange(E), 2)

  def _route(self, scores_BTE: jax.Array, real_BT: jax.Array, bias_E: jax.Array | None) -> TokenChoice:
    router = self.router
    return choose_experts(
      scores_BTE,
      real_BT,
      self.num_experts_per_token,
      bias=bias_E,
      groups=(router.num_groups, router.num_groups_per_token),
      renormalize=router.renormalize,
      weight_scale=router.weight_scale,
    )

  def _token_choice(
    self, experts: DeviceExperts, x_BTD: jax.Array, scores_BTE: jax.Array, real_BT: jax.Array, bias_E: jax.Array | None
  ) -> ExpertOutputs:
    (B, T, D), E, K = x_BTD.shape, self.num_experts, self.num_experts_per_token
    routed = self._route(scores_BTE, real_BT, bias_E)
    wanted_BTKE = routed.experts[..., None] == jnp.arange(E)
    experts_BTK = jnp.where(routed.experts < E, routed.experts, experts.num_experts)
    x_ND, weights_NK = x_BTD.reshape(-1, D), routed.weights.reshape(-1, K)
    if self.dispatch == 'capacity':
      C = expert_capacity(self.capacity_factor, T, K, E)
      plans = jax.vmap(lambda experts_TK: capacity_plan(experts_TK, experts.num_experts, C))(experts_BTK)
      plan = plan_of_rows(plans, T * K, C)
      y_ND = run_with_capacity(x_ND, plan, plan.choices_to_slots(weights_NK), experts)
    else:
      bound = B * T * K
      if self.exchange_factor is not None:
        bound = min(bound, max(math.ceil(self.exchange_factor * bound / experts.split.parts), _FEW_ROWS))
      choice = TokenChoice(experts_BTK.reshape(-1, K), weights_NK)
      y_ND, plan = dropless(x_ND, choice, experts, bound)
    dropped_BTK = real_BT[..., None] & ~plan.has_slot().reshape(B, T, K)
    return ExpertOutputs(
      y_ND.reshape(B, T, D),
      load=jnp.sum(wanted_BTKE, axis=(1, 2), dtype=jnp.float32)[:, None],
      dropped=jnp.sum(dropped_BTK, axis=(1, 2), dtype=jnp.float32)[:, None],
    )

  def _expert_choice(
    self, experts: DeviceExperts, x_BTD: jax.Array, scores_BTE: jax.Array, real_BT: jax.Array
  ) -> ExpertOutputs:
    (B, T, D), E = x_BTD.shape, self.num_experts
    C = expert_capacity(self.capacity_factor, T, self.num_experts_per_token, E)
    chosen = choose_tokens(scores_BTE, real_BT, C, self.router.weight_scale)
    filling = ((0, 0), (0, experts.num_experts - E), (0, 0))
    tokens_BEC = jnp.pad(chosen.tokens, filling, constant_values=T)
    weights_EBC = jnp.swapaxes(jnp.pad(chosen.weights, filling), 0, 1)
    plan = plan_of_rows(DispatchPlan(tokens_BEC.reshape(B, -1), None), T, C)
    y_ND = run_with_capacity(x_BTD.reshape(-1, D), plan, weights_EBC.reshape(-1), experts)
    is_chosen_BT = jax.vmap(lambda tokens: jnp.zeros(T, bool).at[tokens.reshape(-1)].set(True, mode='drop'))(tokens_BEC)
    return ExpertOutputs(
      y_ND.reshape(B, T, D),
      load=jnp.sum(chosen.tokens < T, axis=-1, dtype=jnp.float32)[:, None],
      dropped=jnp.sum(real_BT & ~is_chosen_BT, axis=1, dtype=jnp.float32)[:, None],
    )
