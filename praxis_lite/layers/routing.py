"""Routing: which experts a token goes to, and with what weight.

    logits = x W_router, float32
    scores = softmax(logits) or sigmoid(logits)

    token choice     a token takes the k experts with the highest scores (Shazeer et al., 2017)
    expert choice    an expert takes the C tokens of a row with the highest scores (Zhou et al., 2022)

The functions are pure. A padding token takes no slot of an expert, and counts in no statistic.

B batch, T length, D model dims, E experts, K experts per token, C capacity: number of tokens of a row that an expert
takes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.base import ActivationSplit, Layer, WeightSplit
from praxis_lite.layers.linears import bias_weight
from praxis_lite.sharding.weights import WeightHParams, WeightHParamsCollection, WeightInit

SCORES = ('softmax', 'sigmoid')
CHOICES = ('token', 'expert')


class TokenChoice(NamedTuple):
  """The experts of each token."""

  experts: jax.Array  # [..., K] int32, best first; E means no expert, as for padding.
  weights: jax.Array  # [..., K] float32, weights of these experts in the sum of their outputs; 0 for no expert.


class ExpertChoice(NamedTuple):
  """The tokens of each expert in a row."""

  tokens: jax.Array  # [..., E, C] int32, best first; T means no token, as in rows with less than C tokens.
  weights: jax.Array  # [..., E, C] float32, weight of this expert in the token's sum of outputs; 0 for no token.


def router_scores(logits: jax.Array, score: str) -> jax.Array:
  """Returns scores [..., E] in [0, 1], float32, for logits [..., E]."""
  logits = logits.astype(jnp.float32)
  return jax.nn.softmax(logits, axis=-1) if score == 'softmax' else jax.nn.sigmoid(logits)


def choose_experts(
  scores: jax.Array,
  real: jax.Array,
  num_experts_per_token: int,
  *,
  bias: jax.Array | None = None,
  groups: tuple[int, int] = (1, 1),
  renormalize: bool = True,
  weight_scale: float = 1.0,
) -> TokenChoice:
  """Returns the K experts of each token.

  Args:
    scores: [..., E].
    real: [...] bool, False for padding.
    num_experts_per_token: K.
    bias: [E], added to the scores for the choice, but not for the weights (Wang et al., 2024); None adds nothing.
    groups: number of groups of consecutive experts, and how many of them a token may use. It uses the groups whose two
      best experts have the highest sum of scores (DeepSeek-V3, 2024).
    renormalize: whether the weights of a token's experts are divided by their sum.
    weight_scale: factor of the weights.
  """
  by = scores if bias is None else scores + bias
  _, experts = jax.lax.top_k(_keep_groups(jax.lax.stop_gradient(by), *groups), num_experts_per_token)
  weights = jnp.take_along_axis(scores, experts, axis=-1)
  if renormalize:
    weights /= _sum_of_scores(weights)
  real = real[..., None]
  return TokenChoice(jnp.where(real, experts, scores.shape[-1]), jnp.where(real, weight_scale * weights, 0.0))


def _keep_groups(scores: jax.Array, num_groups: int, num_kept: int) -> jax.Array:
  """Returns scores [..., E], -inf for experts outside of the `num_kept` best groups."""
  if num_kept == num_groups:
    return scores
  by_group = scores.reshape(*scores.shape[:-1], num_groups, -1)
  best, _ = jax.lax.top_k(by_group, min(2, by_group.shape[-1]))
  _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), num_kept)
  is_kept = jnp.any(kept[..., None] == jnp.arange(num_groups), axis=-2)
  return jnp.where(is_kept[..., None], by_group, -jnp.inf).reshape(scores.shape)


def choose_tokens(scores: jax.Array, real: jax.Array, capacity: int, weight_scale: float = 1.0) -> ExpertChoice:
  """Returns the C = `capacity` tokens of each expert, for scores [..., T, E]; `real` [..., T] is False for padding."""
  scores = jnp.where(real[..., None], scores, -1.0)  # Less than any score, so padding is chosen last.
  weights, tokens = jax.lax.top_k(jnp.swapaxes(scores, -1, -2), capacity)
  chosen = weights >= 0
  return ExpertChoice(jnp.where(chosen, tokens, scores.shape[-2]), jnp.where(chosen, weight_scale * weights, 0.0))


def expert_capacity(capacity_factor: float, num_tokens: int, num_experts_per_token: int, num_experts: int) -> int:
  """Returns C = capacity_factor * K * T / E, rounded up, but at least 1 and at most T."""
  slots = math.ceil(capacity_factor * num_experts_per_token * num_tokens / num_experts - 1e-6)
  return min(max(slots, 1), num_tokens)


class RouterActivationSplit(ActivationSplit):
  """`out`: the logits, [B, T, E]."""


class Router(Layer):
  """Computes logits over experts, and the losses or biases that keep experts equally loaded.

      z_loss         = mean_t logsumexp(logits_t)^2                                     (Zoph et al., 2022)
      load_balance   = E sum_e f_e P_e, 1 if balanced                                   (Fedus et al., 2022)
      bias_e        += bias_update_rate * sign(mean load - load_e), after each step     (Wang et al., 2024)

  f_e is the share of expert e in all choices. P_e is the mean over tokens of its share of a token's scores. All means
  are over the tokens of all rows on all devices, without padding. With several microbatches, they are over one
  microbatch, and the losses of the microbatches are averaged.

  Attributes:
    input_dims: D.
    num_experts: E.
    choice: 'token': tokens choose experts. 'expert': experts choose tokens, including later ones of a sequence, so this
      is not for causal models.
    score: 'softmax' or 'sigmoid', of the logits.
    use_bias: whether the logits have a learned bias, the variable `b` [E] (GPT-OSS).
    num_groups, num_groups_per_token: groups of consecutive experts, and how many of them a token may use, so that its
      experts are on few devices (DeepSeek-V3); see `choose_experts`. Not with expert choice.
    renormalize: whether the weights of a token's experts are divided by their sum. Not with expert choice.
    weight_scale: factor of the weights.
    jitter: in training, router inputs are multiplied by numbers in [1 - jitter, 1 + jitter] (Fedus et al., 2022).
    z_loss_weight, load_balance_loss_weight: weights of the auxiliary losses; 0 disables a loss.
    load_balance_scope: 'batch': one loss for the tokens of all rows. 'row': the mean of one loss per row (DeepSeek-AI,
      2024), so that a row's loss does not depend on the other rows.
    bias_update_rate: change of the biases of the choice in a step. These biases keep experts equally loaded without an
      auxiliary loss; 0 disables them.
    weight_split_dims_mapping: `wt`, [D, E].
  """

  input_dims: int = REQUIRED
  num_experts: int = REQUIRED
  choice: str = 'token'
  score: str = 'softmax'
  use_bias: bool = False
  num_groups: int = 1
  num_groups_per_token: int = 1
  renormalize: bool = True
  weight_scale: float = 1.0
  jitter: float = 0.0
  z_loss_weight: float = 0.0
  load_balance_loss_weight: float = 0.0
  load_balance_scope: str = 'batch'
  bias_update_rate: float = 0.0
  weight_split_dims_mapping: Config = template(WeightSplit)
  activation_split_dims_mapping: Config = template(RouterActivationSplit)

  def setup(self) -> None:
    check_choice(f'{self.path_name}.choice', self.choice, CHOICES)
    check_choice(f'{self.path_name}.score', self.score, SCORES)
    check_choice(f'{self.path_name}.load_balance_scope', self.load_balance_scope, ('batch', 'row'))
    self._check_range('jitter', least=0, below=1)
    self._check_range('bias_update_rate', least=0)
    for field in ('load_balance_loss_weight', 'bias_update_rate'):
      if self.choice == 'expert' and getattr(self, field):
        raise ConfigError(f"{self.path_name}.{field}: with choice='expert' all experts take as many tokens; leave it 0")
    D, E, wt = self.input_dims, self.num_experts, self.weight_split_dims_mapping.wt
    self._check_range('num_groups', least=1)
    self._check_range('num_groups_per_token', least=1, below=self.num_groups + 1)
    if E % self.num_groups:
      raise ConfigError(f'{self.path_name}.num_groups: {self.num_groups} does not divide num_experts, {E}')
    if self.choice == 'expert' and self.num_groups > 1:
      raise ConfigError(f"{self.path_name}.num_groups: with choice='expert' tokens choose no groups; leave it 1")
    # Lower precision would change choices (Fedus et al., 2022).
    kept = frozenset({WeightHParamsCollection.KEEP_FLOAT32})
    self.create_variable('w', WeightHParams((D, E), tensor_split_dims_mapping=wt, collections=kept))
    if self.use_bias:
      bias = bias_weight(E, None if wt is None else wt[-1:])
      self.create_variable('b', dataclasses.replace(bias, collections=bias.collections | kept))
    if self.bias_update_rate:
      bias = WeightHParams((E,), WeightInit.Constant(0.0), 'float32', collections=kept)
      self.create_variable('bias', bias, trainable=False)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns float32 logits [..., E] for x [..., D]."""
    x = x.astype(jnp.float32)
    if self.jitter and not self.do_eval:
      x *= jax.random.uniform(self.next_prng_key(), x.shape, jnp.float32, 1 - self.jitter, 1 + self.jitter)
    logits = jnp.dot(x, self.theta.w, precision=jax.lax.Precision.HIGHEST)
    return self.shard(logits + self.theta.b if self.use_bias else logits)

  @property
  def selection_bias(self) -> jax.Array | None:
    """In a call: the bias, [E] float32, that is added to the scores for the choice; None without `bias_update_rate`."""
    return self.theta.bias if self.bias_update_rate else None

  def record_choices(self, logits: jax.Array, real: jax.Array, load: jax.Array, dropped: jax.Array) -> None:
    """In a call: adds auxiliary losses and summaries of the choices, and in training updates the biases.

    The summaries are `fraction_dropped`, the share of choices without a slot or, if experts choose, of tokens that no
    expert chose; `entropy`, the mean entropy of a token's scores, in nats; `load`, the load of each expert divided by
    the mean load; and `max_load`, the largest of these.

    Args:
      logits: [B, T, E].
      real: [B, T] bool, False for padding.
      load: [B, parts, E] float32, the number of tokens of each expert in each part of a row.
      dropped: [B, parts] float32, the number of choices without a slot or, if experts choose, of tokens that no expert
        chose.
    """
    E, total = self.num_experts, self.surroundings.sum_over_rows
    scores = router_scores(logits, self.score)
    share = scores / _sum_of_scores(scores)
    entropy = jax.lax.stop_gradient(-jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1))
    z = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    num_tokens = total(jnp.sum(real, dtype=jnp.float32))
    load_BE = jax.lax.stop_gradient(jnp.sum(load, axis=1))
    load_E = total(jnp.sum(load_BE, axis=0))
    num_choices = jnp.sum(load_E)

    def mean(values: jax.Array) -> jax.Array:
      """Returns the mean of values [B, T] or [B, T, E] over the real tokens of all devices."""
      mask = real.reshape(*real.shape, *(1,) * (values.ndim - 2))
      return total(jnp.sum(jnp.where(mask, values, 0.0), axis=(0, 1))) / jnp.maximum(num_tokens, 1.0)

    relative_E = load_E * E / jnp.maximum(num_choices, 1.0)
    if self.z_loss_weight:
      self.add_aux_loss('z_loss', mean(z), weight=self.z_loss_weight)
    if self.load_balance_loss_weight:
      of_token = relative_E
      if self.load_balance_scope == 'row':
        of_token = (load_BE * E / jnp.maximum(jnp.sum(load_BE, axis=1, keepdims=True), 1.0))[:, None]
      balance = mean(jnp.sum(of_token * share, axis=-1))
      self.add_aux_loss('load_balance', balance, weight=self.load_balance_loss_weight)
    if self.bias_update_rate and not self.do_eval:
      below_mean = jnp.sign(num_choices - E * load_E)  # Exactly 0 for the mean load, because both terms are integers.
      self.update_var('bias', self.theta.bias + self.bias_update_rate * below_mean)
    offered = num_choices if self.choice == 'token' else num_tokens
    self.add_summary('fraction_dropped', total(jnp.sum(dropped)) / jnp.maximum(offered, 1.0))
    self.add_summary('entropy', mean(entropy))
    self.add_summary('max_load', jnp.max(relative_E))
    self.add_summary('load', relative_E, kind='histogram')


def _sum_of_scores(scores: jax.Array) -> jax.Array:
  """Returns the sum of the scores, which is positive even if all sigmoid scores underflow."""
  return jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
