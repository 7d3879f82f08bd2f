"""Vector quantizers: each vector is replaced by one of a finite number of vectors, whose index is its code.

    code = argmin_v |z - codebook_v|^2,  y = codebook_code

Rounding has no gradient, so the gradient with respect to y is passed to z unchanged (straight-through, Bengio et al.,
2013). Sums over vectors are over all rows of the batch, on all devices, and leave out padding.
`scalar_quantizers.py` has quantizers without a codebook.

B batch, D input dims, G groups, E = D / G dims of a code, V number of codes.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.base import Layer, WeightSplit
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.normalizations import to_units
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.sharding.weights import NO_DECAY_FLOAT32, WeightHParams, WeightInit

UPDATES = ('ema', 'gradient')
_HIGHEST = jax.lax.Precision.HIGHEST
_LEAST_COUNT = 1e-12  # The sum of the vectors of a code is divided by at least this number.
_MOST_COUNTED = 1 << 16  # With more codes than this, the usage of codes is not counted.


class QuantizedVectors(NamedTuple):
  """What a quantizer returns.

  Attributes:
    vectors: [..., D], the vectors of the codes.
    codes: [..., G] int32, the codes.
  """

  vectors: jax.Array
  codes: jax.Array


class Quantizer(Layer):
  """Base of the quantizers.

  In each call it logs two summaries, each a mean over the groups. `perplexity` is the exponential of the entropy of the
  codes, so V if all are equally frequent. `usage` is the fraction of the codes that occur.

  Attributes:
    activation_split_dims_mapping: `out`, [..., D].
  """

  takes_paddings: ClassVar[bool] = True

  @property
  def latent_dims(self) -> int:
    """D, the size of the last dimension of the input."""
    raise NotImplementedError

  @property
  def num_codes_per_group(self) -> int:
    """V, the number of codes of a group."""
    raise NotImplementedError

  def __call__(self, z: jax.Array, paddings: jax.Array | None = None) -> QuantizedVectors:
    """Returns the codes of z, and their vectors, whose gradients flow to z.

    Args:
      z: [B, ..., D].
      paddings: [B], or any leading dimensions of z: nonzero for vectors that do not count. None means all count.

    Raises:
      ConfigError: the last dimension of z is not D.
    """
    if z.shape[-1] != self.latent_dims:
      raise ConfigError(
        f'{self.path_name}: quantizes vectors of {self.latent_dims} dims, and an input of shape {z.shape} has '
        f'{z.shape[-1]}'
      )
    real = self._real(z, paddings)
    z32 = jnp.where(real[..., None], to_sum_dtype(z), 0)
    vectors, codes = self._quantize(z32, real)
    self._record_usage(codes, real)
    return QuantizedVectors(self.shard(vectors.astype(self.fprop_dtype)), codes)

  def lookup(self, codes: jax.Array) -> jax.Array:
    """Returns the vectors [..., D] of codes, [..., G] from 0 to V - 1."""
    raise NotImplementedError

  def perplexity(self, codes: jax.Array, paddings: jax.Array | None = None) -> jax.Array | None:
    """Returns the perplexity of the codes of a batch, [B, ..., G]: a scalar from 1 to V. None if V is above 2^16.

    For `paddings`, see `__call__`.
    """
    return _perplexity(self._count_codes(codes, self._real(codes, paddings))) if self._counts else None

  @property
  def _counts(self) -> bool:
    """Whether the usage of the codes is counted."""
    return self.num_codes_per_group <= _MOST_COUNTED

  def _quantize(self, z: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns vectors [..., D] and codes [..., G] int32; `real` [...] is False for padding."""
    raise NotImplementedError

  def _real(self, z: jax.Array, paddings: jax.Array | None) -> jax.Array:
    """Returns [...] bool for z [..., D]: False for padding, and for rows that fill up a microbatch."""
    shape = z.shape[:-1]
    if paddings is not None:
      paddings = jnp.broadcast_to(paddings.reshape(*paddings.shape, *(1,) * (len(shape) - paddings.ndim)), shape)
    marked = self.mark_filler_rows(paddings, shape)
    return jnp.ones(shape, bool) if marked is None else marked == 0

  def _mean(self, values: jax.Array, real: jax.Array) -> jax.Array:
    """Returns the mean, [*rest], of `values` [..., *rest] over all rows, where `real` [...] is True."""
    axes = tuple(range(real.ndim))
    mask = real.reshape(*real.shape, *(1,) * (values.ndim - real.ndim))
    total = self.surroundings.sum_over_rows(jnp.sum(jnp.where(mask, values, 0), axis=axes))
    count = self.surroundings.sum_over_rows(jnp.sum(real, dtype=values.dtype))
    return total / jnp.maximum(count, 1)

  def _count_codes(self, codes: jax.Array, real: jax.Array) -> jax.Array:
    """Returns how often each code occurs in all rows, [G, V] float32."""
    codes_NG, real_N1 = codes.reshape(-1, codes.shape[-1]), real.reshape(-1, 1)
    G = codes_NG.shape[1]
    counts_GV = jnp.zeros((G, self.num_codes_per_group), jnp.float32)
    return self.surroundings.sum_over_rows(counts_GV.at[jnp.arange(G), codes_NG].add(real_N1.astype(jnp.float32)))

  def _record_usage(self, codes: jax.Array, real: jax.Array) -> None:
    if not self._counts:
      return
    counts_GV = self._count_codes(codes, real)
    self.add_summary('perplexity', _perplexity(counts_GV))
    self.add_summary('usage', jnp.mean(counts_GV > 0, dtype=jnp.float32))


def _perplexity(counts_GV: jax.Array) -> jax.Array:
  share_GV = counts_GV / jnp.maximum(jnp.sum(counts_GV, axis=-1, keepdims=True), 1)
  return jnp.mean(jnp.exp(-jnp.sum(jax.scipy.special.xlogy(share_GV, share_GV), axis=-1)))


class _CodebookQuantizer(Quantizer):
  """Base of the quantizers with a codebook, the variable `codebook` [G, V, E].

  Attributes:
    input_dims: D.
    num_codes: V.
    num_groups: G, parts of a vector that are quantized separately, each with its own codebook.
    weight_split_dims_mapping: `wt`, [G, V, E], of the codebook.
  """

  input_dims: int = REQUIRED
  num_codes: int = REQUIRED
  num_groups: int = 1
  weight_split_dims_mapping: Config = template(WeightSplit)

  def _declare_codebook(self, code_dims: int, *, trainable: bool) -> None:
    """Declares a codebook whose entries, [E], have a squared length of about 1."""
    self._check_range('num_codes', least=2)
    shape, wt = (self.num_groups, self.num_codes, code_dims), self.weight_split_dims_mapping.wt
    init, dtype = WeightInit.Gaussian(code_dims**-0.5), None if trainable else 'float32'
    self.create_variable('codebook', WeightHParams(shape, init, dtype, wt, collections=NO_DECAY_FLOAT32), trainable)

  def _group_dims(self) -> int:
    """Returns E, the dims of a code; raises ConfigError if the groups do not divide the input dims."""
    self._check_range('num_groups', 'input_dims', least=1)
    if self.input_dims % self.num_groups:
      raise ConfigError(f'{self.path_name}.num_groups: {self.num_groups} does not divide input_dims, {self.input_dims}')
    return self.input_dims // self.num_groups

  @property
  def latent_dims(self) -> int:
    return self.input_dims

  @property
  def num_codes_per_group(self) -> int:
    return self.num_codes

  def lookup(self, codes: jax.Array) -> jax.Array:
    """Returns the vectors of codes, [..., D] for [..., G]."""
    vectors = vectors_of_codes(codes, self._codebook())
    joined = vectors.reshape(*codes.shape[:-1], vectors.shape[-2] * vectors.shape[-1])
    return self.shard(joined.astype(self.fprop_dtype))

  def _codebook(self) -> jax.Array:
    """Returns the codebook, [G, V, E], in the form in which it is compared with vectors."""
    return self.theta.codebook


def nearest_codes(z: jax.Array, codebook_GVE: jax.Array) -> jax.Array:
  """Returns the code nearest to each vector of z [..., G, E], int32 [..., G]; the lowest of equally near ones."""
  products = jnp.einsum('...ge,gve->...gv', z, codebook_GVE, precision=_HIGHEST)
  distances = jnp.sum(jnp.square(codebook_GVE), axis=-1) - 2 * products
  return jnp.argmin(distances, axis=-1).astype(jnp.int32)


def vectors_of_codes(codes: jax.Array, codebook_GVE: jax.Array) -> jax.Array:
  """Returns the entries of the codebook, [..., G, E], of codes [..., G]."""
  # A product with one-hot rows at the highest precision copies entries exactly, however the codebook is split.
  one_hot = jax.nn.one_hot(codes, codebook_GVE.shape[1], dtype=codebook_GVE.dtype)
  return jnp.einsum('...gv,gve->...ge', one_hot, codebook_GVE, precision=_HIGHEST)


def pass_gradient(z: jax.Array, quantized: jax.Array) -> jax.Array:
  """Returns `quantized`; its gradient goes to z unchanged (straight-through)."""
  return z + jax.lax.stop_gradient(quantized - z)


class VectorQuantizer(_CodebookQuantizer):
  """Quantizes to the nearest entry of a codebook (VQ-VAE, van den Oord et al., 2017).

      commitment = mean_n |z_n - y_n|^2 / D, with gradients for z only
      counts_v   = decay * counts_v + (1 - decay) * n_v
      codebook_v = codebook_v + (1 - decay) * (s_v - n_v codebook_v) / counts_v

  n_v and s_v are the number and the sum of the vectors with code v in the batch. So with 'ema', each entry becomes the
  moving average of its vectors; an entry without vectors stays. With 'gradient', the codebook is trained by the loss
  mean_n |z_n - y_n|^2 / D, with gradients for y only.

  Attributes:
    update: 'ema' or 'gradient'.
    decay: decay of the averages, see above.
    restart_share: with 'ema', an entry whose average count is below this share of the mean count becomes a slightly
      moved copy of one of the most used entries. Each of the two gets half of that entry's count. So all codes are
      used. 0 disables it.
    commitment_weight: weight of the auxiliary loss `commitment` (beta).
    normalize: whether vectors and entries of each group are scaled to length 1 before they are compared and returned
      (Yu et al., 2022).
  """

  update: str = 'ema'
  decay: float = 0.99
  restart_share: float = 0.0
  commitment_weight: float = 0.25
  normalize: bool = False

  def setup(self) -> None:
    check_choice(f'{self.path_name}.update', self.update, UPDATES)
    self._check_range('decay', least=0, below=1)
    self._check_range('restart_share', least=0, below=1)
    self._declare_codebook(self._group_dims(), trainable=self.update == 'gradient')
    if self.update == 'ema':
      shape, wt = (self.num_groups, self.num_codes), self.weight_split_dims_mapping.wt
      init, split = WeightInit.Constant(1.0), None if wt is None else wt[:2]
      counts = WeightHParams(shape, init, 'float32', split, collections=NO_DECAY_FLOAT32)
      self.create_variable('counts', counts, trainable=False)

  def _codebook(self) -> jax.Array:
    codebook = super()._codebook()
    if self.update == 'ema':
      codebook = jax.lax.stop_gradient(codebook)
    return to_units(codebook) if self.normalize else codebook

  def _quantize(self, z: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    grouped = z.reshape(*z.shape[:-1], self.num_groups, self.input_dims // self.num_groups)
    if self.normalize:
      grouped = to_units(grouped)
    codebook_GVE = self._codebook().astype(z.dtype)
    codes = nearest_codes(jax.lax.stop_gradient(grouped), jax.lax.stop_gradient(codebook_GVE))
    vectors = vectors_of_codes(codes, codebook_GVE)
    fixed, fixed_z = jax.lax.stop_gradient((vectors, grouped))
    if self.commitment_weight:
      losses = jnp.mean(jnp.square(grouped - fixed), axis=(-1, -2))
      self.add_aux_loss('commitment', self._mean(losses, real), self.commitment_weight)
    if self.update == 'gradient':
      losses = jnp.mean(jnp.square(vectors - fixed_z), axis=(-1, -2))
      self.add_aux_loss('codebook', self._mean(losses, real))
    elif not self.do_eval:
      self._update_codebook(fixed_z, codes, real)
    return pass_gradient(grouped, fixed).reshape(z.shape), codes

  def _update_codebook(self, z: jax.Array, codes: jax.Array, real: jax.Array) -> None:
    """Moves the entries of the codebook towards the means of their vectors in z, [..., G, E]."""
    total, new = self.surroundings.sum_over_rows, 1 - self.decay
    one_hot = jax.nn.one_hot(codes, self.num_codes, dtype=z.dtype) * real[..., None, None]
    one_hot_NGV, z_NGE = (x.reshape(-1, *x.shape[-2:]) for x in (one_hot, z))
    n_GV = total(jnp.sum(one_hot_NGV, axis=0))
    s_GVE = total(jnp.einsum('ngv,nge->gve', one_hot_NGV, z_NGE, precision=_HIGHEST))
    old_GV, book_GVE = jax.lax.stop_gradient((self.theta.counts, self._codebook()))
    counts_GV = jnp.where(jnp.sum(n_GV) > 0, self.decay * old_GV + new * n_GV, old_GV)
    moved = new * (s_GVE - n_GV[..., None] * book_GVE) / jnp.maximum(counts_GV, _LEAST_COUNT)[..., None]
    book_GVE = book_GVE + moved
    if self.restart_share:
      counts_GV, book_GVE = split_codes(counts_GV, book_GVE, self.restart_share)
    self.update_var('counts', counts_GV)
    self.update_var('codebook', book_GVE)


def split_codes(counts_GV: jax.Array, codebook_GVE: jax.Array, share: float) -> tuple[jax.Array, jax.Array]:
  """Returns counts and codebook in which the least used codes are near copies of the most used ones.

  Codes are paired: the least used with the most used, the second least used with the second most used, and so on. A
  pair changes if only the count of its rarer code is below `share` times the mean count. Then the rarer code becomes a
  near copy of the other, and each gets half of the other's count.
  """
  V, E = codebook_GVE.shape[1:]
  by_count = jnp.argsort(-counts_GV, axis=-1)
  rank_GV = jnp.argsort(by_count, axis=-1)  # 0 for the most used code.
  partner_GV = jnp.take_along_axis(by_count, V - 1 - rank_GV, axis=-1)
  few_GV = counts_GV < share * jnp.mean(counts_GV, axis=-1, keepdims=True)
  partner_is_few_GV = jnp.take_along_axis(few_GV, partner_GV, axis=-1)
  of_partner_GV = jnp.take_along_axis(counts_GV, partner_GV, axis=-1)
  copied = vectors_of_codes(jnp.swapaxes(partner_GV, 0, 1), codebook_GVE)  # [V, G, E]
  # The same directions in each step and on each device.
  directions_VE = np.random.Generator(np.random.PCG64(0)).standard_normal((V, E)).astype(np.float32)
  sizes = jnp.sqrt(jnp.mean(jnp.square(codebook_GVE), axis=(-1, -2), keepdims=True))
  near_GVE = jnp.swapaxes(copied, 0, 1) + 0.01 * sizes * directions_VE
  restarts, is_split = few_GV & ~partner_is_few_GV, ~few_GV & partner_is_few_GV
  counts = jnp.where(restarts, of_partner_GV / 2, jnp.where(is_split, counts_GV / 2, counts_GV))
  return counts, jnp.where(restarts[..., None], near_GVE, codebook_GVE)


class RandomVectorQuantizer(_CodebookQuantizer):
  """Codes of a random projection and a random codebook, never trained: labels of BEST-RQ (Chiu et al., 2022).

      code = argmax_v  unit(z W_g) . unit(codebook_gv)

  There is no gradient. The returned vectors are entries of the codebook, so `QuantizedVectors.vectors` is
  [..., G * E], not [..., D].

  Attributes:
    code_dims: E; each group projects all D dims to E.
    weight_split_dims_mapping: `wt`, [G, V, E], of the codebook; dims G and E of the projection, [G, D, E], are split in
      the same way, and D is not split.
  """

  code_dims: int = REQUIRED

  def setup(self) -> None:
    self._check_range('num_groups', 'code_dims', least=1)
    self._declare_codebook(self.code_dims, trainable=False)
    shape, wt = (self.num_groups, self.input_dims, self.code_dims), self.weight_split_dims_mapping.wt
    init, split = WeightInit.Gaussian(self.input_dims**-0.5), None if wt is None else (wt[0], None, wt[2])
    projection = WeightHParams(shape, init, 'float32', split, collections=NO_DECAY_FLOAT32)
    self.create_variable('projection', projection, trainable=False)

  def _codebook(self) -> jax.Array:
    return jax.lax.stop_gradient(to_units(super()._codebook()))

  def _quantize(self, z: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    projection_GDE, codebook_GVE = self.theta.projection.astype(z.dtype), self._codebook().astype(z.dtype)
    projected = jnp.einsum('...d,gde->...ge', z, projection_GDE, precision=_HIGHEST)
    codes = nearest_codes(jax.lax.stop_gradient(projected), codebook_GVE)
    vectors = vectors_of_codes(codes, codebook_GVE)
    return vectors.reshape(*z.shape[:-1], self.num_groups * self.code_dims), codes


class GumbelQuantizer(_CodebookQuantizer):
  """Draws codes with probabilities that a linear layer computes, and gives them gradients (Jang et al., 2017).

      logits = z W + b,  soft = softmax((logits + gumbel noise) / temperature),  y = one_hot(argmax soft) codebook

  The one-hot vector has the gradient of `soft`. In evaluation there is no noise.

      diversity = 1 - mean_g exp(H(p_g)) / V, with p_g the mean probabilities of the batch   (Baevski et al., 2020)
      kl        = mean_n sum_g KL(p_ng || uniform), in nats                                  (Ramesh et al., 2021)

  Attributes:
    temperature: above 0; with a lower temperature, `soft` is closer to one-hot vectors.
    noise: factor of the noise; 0 disables it.
    diversity_weight, kl_weight: weights of the auxiliary losses `diversity` and `kl`; 0 disables a loss.
    linear_tpl: template of the child `linear`, from D to G * V.
  """

  noise_fields: ClassVar[tuple[str, ...]] = ('noise',)

  temperature: float = 1.0
  noise: float = 1.0
  diversity_weight: float = 0.0
  kl_weight: float = 0.0
  linear_tpl: Config = template(Linear, use_bias=True)

  linear: Linear = child()

  def setup(self) -> None:
    self._check_range('temperature', above=0)
    self._check_range('noise', least=0)
    self._declare_codebook(self._group_dims(), trainable=True)
    outputs = self.num_groups * self.num_codes
    self.create_child('linear', self.linear_tpl.clone(input_dims=self.input_dims, output_dims=outputs))

  def _quantize(self, z: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = to_sum_dtype(self.linear(z)).reshape(*z.shape[:-1], self.num_groups, self.num_codes)
    self._add_losses(jax.nn.log_softmax(logits), real)
    if self.noise and not self.do_eval:
      logits += self.noise * jax.random.gumbel(self.next_prng_key(), logits.shape, logits.dtype)
    soft = jax.nn.softmax(logits / self.temperature)
    codes = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    chosen = pass_gradient(soft, jax.nn.one_hot(codes, self.num_codes, dtype=soft.dtype))
    codebook_GVE = self._codebook().astype(soft.dtype)
    return jnp.einsum('...gv,gve->...ge', chosen, codebook_GVE, precision=_HIGHEST).reshape(z.shape), codes

  def _add_losses(self, log_p: jax.Array, real: jax.Array) -> None:
    p = jnp.exp(log_p)
    if self.diversity_weight:
      mean_GV = self._mean(p, real)
      perplexity_G = jnp.exp(-jnp.sum(jax.scipy.special.xlogy(mean_GV, mean_GV), axis=-1))
      self.add_aux_loss('diversity', 1 - jnp.mean(perplexity_G) / self.num_codes, self.diversity_weight)
    if self.kl_weight:
      divergence = jnp.sum(p * (log_p + np.log(self.num_codes)), axis=(-1, -2))
      self.add_aux_loss('kl', self._mean(divergence, real), self.kl_weight)
