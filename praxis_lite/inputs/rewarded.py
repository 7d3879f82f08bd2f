"""RewardedInput: prompts to which a model samples answers, which are rewarded and become training batches.

    prompts      p0 p0 p0 p0 | p1 p1 p1 p1        each prompt is in G consecutive rows, a group
    the model    answers all rows
    rewards      1  0  0  1  |  0  0  0  0        by the user's functions, on the host
    advantages   +  -  -  +  |  0  0  0  0        relative to the other answers of the group

The input yields batches without answers. The code that runs the model calls `complete` with the model's answers.

B batch, T length, G answers in a group, M largest number of tokens in an answer, P largest number in a prompt.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError, DataError, check_choice
from praxis_lite.inputs.answers import AnswersInput, Said, fill_segment, messages_of
from praxis_lite.inputs.random_access import permutation
from praxis_lite.inputs.rows import Rows, Struct, token_struct
from praxis_lite.inputs.tokenizers import ChatTokens

Reward = Callable[[Any, str, dict[str, Any]], float]  # A function (prompt, answer, the whole example) -> reward.

SCALES = ('group', 'batch', 'none')
_LEAST_SPREAD = 1e-4  # Added to standard deviations of rewards, as in TRL.


class _Prompt(NamedTuple):
  """A prompt, its tokens, and the example that contains it."""

  said: Said
  ids: np.ndarray
  example: dict[str, Any]


class RewardedInput(AnswersInput):
  """Prompts, and functions that reward answers to them.

  A line has an object with a prompt, which is a text or messages, and any other values that the functions need; a TSV
  file has the columns prompt and answer.

      def is_right(prompt: str, answer: str, example: dict) -> float:
        return float(answer == example['answer'])

      Config(RewardedInput, path='problems.jsonl', rewards={'right': is_right}, num_answers=8, batch_size=64, ...)

  Attributes: the same as for `AnswersInput`, where `batch_size` counts answers, and
    rewards: functions of prompt, answer and example, or configs of such functions, by name. They must return the same
      number for the same arguments, or a resumed run will differ.
    reward_weights: the weights of rewards in their sum, by name; the weight of other rewards is 1.
    num_answers: G, the number of answers to each prompt, which divides `batch_size`; in training at least 2.
    answer_length: M; prompts may have at most seq_len - M tokens.
    scale_rewards: 'group' divides advantages by the standard deviation of the rewards in their group, and 'batch' by
      the standard deviation in this host's whole batch; 'none' does not divide.
    steps_per_batch: number of training steps that use each batch of answers. From the second step on, the model differs
      from the one that sampled the answers; the probability ratios in the loss correct for this.

  Raises (when the data is first needed):
    DataError: a path does not exist or cannot be read, or there are no prompts. Unless `on_bad_record` is 'skip', also
      if a line has no prompt or one that is too long.
  """

  rewards: dict[str, Reward | Config] = REQUIRED
  reward_weights: dict[str, float] = dataclasses.field(default_factory=dict)
  num_answers: int = 8
  answer_length: int = REQUIRED
  scale_rewards: Literal['group', 'batch', 'none'] = 'group'
  steps_per_batch: int = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    self.check_at_least(num_answers=1, answer_length=1, steps_per_batch=1)
    if self.is_training and self.num_answers < 2:
      raise ConfigError(
        f'{self.label}.num_answers: an answer is compared with the others of its prompt, so one alone teaches nothing; '
        'set it to at least 2 in training'
      )
    check_choice(f'{self.label}.scale_rewards', self.scale_rewards, SCALES)
    if self.packed:
      raise ConfigError(f'{self.label}.packed: each row has one prompt and its answer; set it to False')
    if self.answer_length >= self.seq_len:
      raise ConfigError(
        f'{self.label}.answer_length: {self.answer_length} tokens leave no room for a prompt in seq_len = '
        f'{self.seq_len}; set a larger seq_len'
      )
    if self.batch_size % (self.num_answers * self.num_hosts):
      hosts = f' on each of {self.num_hosts} hosts' if self.num_hosts > 1 else ''
      raise ConfigError(
        f'{self.label}.batch_size: {self.batch_size} answers are no whole groups of num_answers = '
        f'{self.num_answers}{hosts}; set it to a multiple of {self.num_answers * self.num_hosts}'
      )
    if not isinstance(self.rewards, Mapping) or not self.rewards:
      raise ConfigError(f"{self.label}.rewards: expected functions by name, as in {{'right': is_right}}")
    self._rewards: dict[str, Reward] = {
      name: given.instantiate() if isinstance(given, Config) else given for name, given in self.rewards.items()
    }
    for name, reward in self._rewards.items():
      if not callable(reward):
        raise ConfigError(f'{self.label}.rewards[{name!r}]: expected a function of prompt, answer and example')
    for name, weight in self.reward_weights.items():
      check_choice(f'{self.label}.reward_weights', name, tuple(self._rewards))
      if not _is_finite(weight):
        raise ConfigError(f'{self.label}.reward_weights[{name!r}]: expected a finite number, got {weight!r}')

  @property
  def num_examples(self) -> int:
    return len(self._prompts) * self.num_answers

  @property
  def prompt_length(self) -> int:
    """The largest number of tokens of a prompt."""
    return self.seq_len - self.answer_length

  def example_struct(self) -> Struct:
    number, count = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((), np.int32)
    return {
      **token_struct(self.seq_len, 'old_log_probs'),
      'example': count,
      'num_given': count,
      'advantages': number,
      'reward': number,
      'is_equal': number,
      'rewards': dict.fromkeys(self._rewards, number),
    }

  def identity(self) -> dict[str, Any]:
    return {**super().identity(), 'num_answers': self.num_answers}

  def rows(self, indices: np.ndarray) -> Rows:
    batch = self.blank_rows(len(indices))
    for row, index in enumerate(indices):
      number = index // self.num_answers
      ids = self._prompts[number].ids
      fill_segment(batch, row, 0, ChatTokens(ids, np.zeros(len(ids), bool)), 1)
      batch['example'][row], batch['num_given'][row] = number, len(ids)
    return batch

  def new_order(self, epoch: int) -> np.ndarray:
    of_prompts, group = permutation(len(self._prompts), self.seed, epoch), self.num_answers
    return np.ravel(of_prompts[:, None] * group + np.arange(group))

  def prompts(self, batch: Rows) -> Rows:
    """Returns the batch to decode: `ids` [B, P] and `prompt_lengths` [B], where rows of padding have length 0."""
    return {'ids': batch['ids'][:, : self.prompt_length], 'prompt_lengths': batch['num_given']}

  def complete(self, batch: Rows, answers: Rows) -> Rows:
    """Returns a batch with a model's answers, their rewards and advantages.

    Args:
      batch: this host's batch, as this input has yielded it.
      answers: `ids` [B, M] int32, `lengths` [B] int32 and `log_probs` [B, M] float32, see `Decoded`.

    Raises:
      DataError: a reward, the weighted sum of rewards or an advantage is not a finite number in float32.
    """
    batch = jax.tree.map(np.copy, batch)
    is_row = batch['num_given'] > 0
    for row in np.flatnonzero(is_row).tolist():
      given, count = int(batch['num_given'][row]), int(answers['lengths'][row])
      ids = np.concatenate([batch['ids'][row, :given], answers['ids'][row, :count]])
      fill_segment(batch, row, 0, ChatTokens(ids, np.arange(len(ids)) >= given), 1)
      batch['old_log_probs'][row, given - 1 : given + count - 1] = answers['log_probs'][row, :count]
      prompt, answer = self._prompts[batch['example'][row]], self.tokenizer.decode(answers['ids'][row, :count])
      for name in self._rewards:
        batch['rewards'][name][row] = self._reward(name, prompt, answer)
      total = sum(float(self.reward_weights.get(name, 1.0)) * float(x[row]) for name, x in batch['rewards'].items())
      if not _is_finite(total):
        raise DataError(
          f'{self.label}.reward_weights: the weighted sum of the rewards of the answer {answer!r} to {prompt.said!r} '
          f'is {total}, and must be a finite number in float32'
        )
      batch['reward'][row] = total
    advantages, is_equal = group_advantages(batch['reward'][is_row], self.num_answers, self.scale_rewards)
    if not np.isfinite(advantages).all():
      raise DataError(f'{self.label}.rewards: they are so large that their differences are not finite in float32')
    batch['advantages'][is_row], batch['is_equal'][is_row] = advantages, is_equal
    return batch

  def _reward(self, name: str, prompt: _Prompt, answer: str) -> float:
    try:
      found = self._rewards[name](prompt.said, answer, dict(prompt.example))
    except Exception as error:
      error.add_note(f'praxis_lite: {self.label}.rewards[{name!r}] was given the answer {answer!r} to {prompt.said!r}')
      raise
    if not _is_finite(found):
      shown = 'an integer that is too large' if isinstance(found, int) else repr(found)
      raise DataError(
        f'{self.label}.rewards[{name!r}]: expected a finite number in float32 for the answer {answer!r} to '
        f'{prompt.said!r}, got {shown}'
      )
    return float(found)

  @functools.cached_property
  def _prompts(self) -> list[_Prompt]:
    return self._encode_objects(('prompt', 'answer'), self._encode)

  def _encode(self, values: dict[str, Any]) -> _Prompt:
    said = values.get('prompt')
    if isinstance(said, str):
      ids = self.tokenizer.prompt_ids(said)
    elif isinstance(said, list):
      ids = self.tokenizer.chat_ids(messages_of(said, 'prompt'))
    else:
      raise ValueError(f"has neither a text nor messages 'prompt'; its fields: {', '.join(map(str, values)) or 'none'}")
    if not ids:
      raise ValueError("its 'prompt' has no tokens")
    if len(ids) > self.prompt_length and not self.truncate:
      raise ValueError(
        f'its prompt has {len(ids)} tokens, and seq_len - answer_length = {self.prompt_length}; set a larger seq_len, '
        'or truncate=True'
      )
    return _Prompt(said, np.asarray(ids[: self.prompt_length], np.int32), values)


def _is_finite(x: object) -> bool:
  """Whether x is a real number, and finite in float32."""
  if not isinstance(x, int | float | np.integer | np.floating | np.bool_):
    return False
  try:
    with np.errstate(over='ignore'):
      return bool(np.isfinite(np.float32(x)))
  except OverflowError:  # An integer that is too large for any float.
    return False


def group_advantages(rewards: np.ndarray, group: int, scale: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns a pair of float32 arrays [n], with an entry for each answer: its advantage, and whether its group is equal.

  The second entry is 1 if all rewards of the answer's group are equal; then the advantage is 0. Otherwise it is 0, and

      advantage = (reward - mean of the group) / (standard deviation + 1e-4)

  Args:
    rewards: [n], the rewards of one group after the other.
    group: G, the number of answers in a group, a divisor of n.
    scale: 'group', 'batch' or 'none', see `RewardedInput.scale_rewards`. The standard deviation of k rewards divides by
      k - 1.
  """
  by_group = rewards.astype(np.float64).reshape(-1, group)
  advantages = by_group - by_group.mean(axis=1, keepdims=True)
  is_equal = np.broadcast_to(np.ptp(by_group, axis=1, keepdims=True) == 0, by_group.shape)
  if scale == 'group' and group > 1:
    advantages = advantages / (by_group.std(axis=1, ddof=1, keepdims=True) + _LEAST_SPREAD)
  elif scale == 'batch' and by_group.size > 1:
    advantages = advantages / (by_group.std(ddof=1) + _LEAST_SPREAD)
  advantages = np.where(is_equal, 0, advantages)
  with np.errstate(over='ignore'):
    advantages = advantages.astype(np.float32)
  return advantages.reshape(-1), is_equal.reshape(-1).astype(np.float32)
