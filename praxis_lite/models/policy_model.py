"""PolicyModel: a language model that learns from the rewards of answers that it samples itself.

    a batch, as an input yields it    ids [B, T] prompts; num_given [B] their lengths; weights 0
    `sample`                          an answer to each prompt, and the log-probabilities of its tokens
    the batch after `complete`        labels, weights 1 and old_log_probs [B, T] of the answers; advantages [B];
                                      reward [B], rewards: {name: [B]}, is_equal [B]
    loss                              see `policy_losses.py`

B batch, T length, V vocabulary, P length of prompts, M largest number of tokens of an answer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import Config, build_at, config_values, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.inputs.base import BaseInput
from praxis_lite.inputs.rewarded import RewardedInput
from praxis_lite.models.cached_steps import CachedSteps
from praxis_lite.models.decoding import Sampler
from praxis_lite.models.policy_losses import Grpo, PolicyTokens
from praxis_lite.models.referenced_model import ReferencedModel
from praxis_lite.models.token_checks import check_packing, check_positions_of_input, check_vocabulary

_OF_SAMPLER = ('max_decode_steps', 'stop_ids')


class PolicyModel(ReferencedModel):
  """A language model that trains on its own rewarded answers; it decodes and is exported like any `LanguageModel`.

  In training, answers are drawn from the model's own distribution, at temperature 1, because the loss needs their
  log-probabilities under it. Evaluation uses `decoder_tpl`, which may be greedy.

  Attributes: the same as for `ReferencedModel`, and
    loss_tpl: config of the loss, a `Grpo`.
    sampler_tpl: config of the `Sampler` for training, with `max_decode_steps`, M, and `stop_ids`.
  """

  loss_tpl: Config = template(Grpo)
  sampler_tpl: Config = template(Sampler)

  _learns_from = 'rewarded answers'

  def setup(self) -> None:
    super().setup()
    loss = build_at(f'{self.path_name}.loss_tpl', self.loss_tpl)
    if not isinstance(loss, Grpo):
      raise ConfigError(f'{self.path_name}.loss_tpl: expected the config of a loss, such as Config(Grpo), got {loss!r}')
    self.policy_loss: Grpo = loss
    self.sampler: Sampler = self._build_sampler()
    if not isinstance(self.decoder, Sampler):
      raise ConfigError(
        f'{self.path_name}.decoder_tpl: evaluation rewards one answer to each prompt, so it needs a Sampler, perhaps '
        f'with temperature=0, got {type(self.decoder).__name__}'
      )
    self._create_reference()

  def _build_sampler(self) -> Sampler:
    where = f'{self.path_name}.sampler_tpl'
    sampler = build_at(where, self.sampler_tpl)
    if type(sampler) is not Sampler:
      raise ConfigError(f'{where}: expected the config of a Sampler, got {sampler!r}')
    for name, default in config_values(Config(Sampler)).items():
      if name not in _OF_SAMPLER and (value := getattr(sampler, str(name))) != default:
        raise ConfigError(
          f'{where}.{name}: training samples from the distribution of the model as it is, whose log-probabilities the '
          f'loss reads, so this must be {default!r}, got {value!r}; decoder_tpl may have it'
        )
    return sampler

  @property
  def needs_reference(self) -> bool:
    return self.policy_loss.needs_reference

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` unless an input is a `RewardedInput` whose tokens and answers fit this model."""
    if 'prompt_lengths' in batch:
      return super().check_input(data, batch)
    if not isinstance(data, RewardedInput):
      raise ConfigError(
        f'{data.label}: this model learns from rewards of its own answers, for which it needs a RewardedInput, got '
        f'{type(data).__name__}'
      )
    name, decoder = ('sampler_tpl', self.sampler) if data.is_training else ('decoder_tpl', self.decoder)
    if decoder.max_decode_steps > data.answer_length:
      raise ConfigError(
        f'{data.label}.answer_length: {data.answer_length} tokens, but task.model.{name}.max_decode_steps = '
        f'{decoder.max_decode_steps}; set both to the same number'
      )
    is_token = np.asarray(batch['segment_ids']) > 0
    check_vocabulary(data, (np.asarray(batch['ids'])[is_token],), 'task.model.vocab_size', self.lm.vocab_size)
    check_positions_of_input(self.position_limits(), data, batch)
    check_packing(data, self.packed, False, 'answers')

  def sample(self, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Draws an answer to each prompt; has the same arguments and results as `decode`."""
    prompt_ids_BP, prompt_lengths_B = batch['ids'], batch['prompt_lengths']
    decoded = self.sampler.decode(CachedSteps(self.lm, ()), prompt_ids_BP, prompt_lengths_B, self.next_prng_key())
    return decoded.metrics(prompt_lengths_B > 0), decoded._asdict()

  def compute_predictions(self, batch: NestedDict) -> PolicyTokens:  # type: ignore[override]
    """Returns the inputs of the loss: log-probabilities of the tokens of answers, and weights and advantages."""
    rows = {name: batch[name] for name in ('ids', 'labels', 'weights', 'segment_ids', 'segment_pos')}
    log_probs_BT = self.log_probs_of_labels(rows)
    reference_BT = jnp.zeros_like(log_probs_BT)
    if self.needs_reference:
      reference_BT = self._frozen_log_probs(rows, of_reference=True)
    return PolicyTokens(log_probs_BT, reference_BT, batch['old_log_probs'], batch['weights'], batch['advantages'])

  def compute_loss(self, predictions: PolicyTokens, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:  # type: ignore[override]
    """Returns metrics and per-example outputs.

    Metrics: `loss`; `reward` of an answer, the weighted sum of the rewards `reward/<name>`; `equal_groups`, the
    fraction of answers in groups with equal rewards, from which nothing is learnt; `answer_length`, tokens; `finished`,
    the fraction of answers that end with a stop token; `entropy`, estimated from the sampled tokens, nats per token;
    `clipped`, the fraction of tokens whose ratio is clipped; and, if there is a reference, `divergence`, an estimate of
    the KL divergence from it, nats per token. Per example: `loss`, the mean of a row, and `reward`.
    """
    tokens, terms = predictions, self.policy_loss.terms(predictions)
    of_tokens = {'entropy': -tokens.old, 'clipped': terms.is_clipped}
    if self.needs_reference:
      of_tokens['divergence'] = terms.divergence
    metrics = {
      'loss': self.policy_loss.average(terms.loss, tokens, self._used_sampler.max_decode_steps),
      **self._metrics_of_answers(batch),
      **{name: weighted_mean(x_BT, tokens.weights) for name, x_BT in of_tokens.items()},
    }
    loss_B, _ = weighted_mean(terms.loss, tokens.weights, axis=1)
    return metrics, {'loss': loss_B, 'reward': batch['reward']}

  @property
  def _used_sampler(self) -> Sampler:
    assert isinstance(self.decoder, Sampler)
    return self.decoder if self.do_eval else self.sampler

  def _metrics_of_answers(self, batch: NestedDict) -> WeightedScalars:
    """Returns the metrics that are means over answers; see `compute_loss`."""
    is_answer_BT = batch['weights'] > 0
    is_stop_BT = jnp.isin(batch['labels'], jnp.array(self._used_sampler.stop_ids, jnp.int32)) & is_answer_BT
    of_answers = {
      'reward': batch['reward'],
      **{f'reward/{name}': reward_B for name, reward_B in batch['rewards'].items()},
      'equal_groups': batch['is_equal'],
      'answer_length': jnp.sum(batch['weights'], axis=1),
      'finished': jnp.any(is_stop_BT, axis=1),
    }
    return {name: weighted_mean(x_B, jnp.any(is_answer_BT, axis=1)) for name, x_B in of_answers.items()}

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns `logits`, [B, T, V] float32, for the token after each of `ids`."""
    if 'num_given' in batch:  # For logits, all tokens need a weight, including prompts.
      batch = {**batch, 'weights': (batch['segment_ids'] > 0).astype(jnp.float32)}
    return super().predict(batch)
