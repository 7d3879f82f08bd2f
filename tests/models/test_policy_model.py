"""The loss of rewarded answers against NumPy and the numbers of TRL, sampling, references, and steps on any mesh."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from drawn_state import drawn_state, drawn_variables
from model_steps import assert_close, take_a_step

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import ChatInput, RewardedInput
from praxis_lite.inputs.rewarded import group_advantages
from praxis_lite.layers import Lora
from praxis_lite.models import Grpo, set_sharding, transformer_lm
from praxis_lite.models.decoding import BeamSearch, Sampler
from praxis_lite.models.policy_losses import PolicyTokens, estimate_divergence
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.records.run_inputs import build_datasets
from praxis_lite.training import train_adapters, train_policy
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

V, P, M, G = 256, 4, 5, 3
T = P + M
EXAMPLES = [{'prompt': text, 'number': i} for i, text in enumerate(['a', 'bc', 'defg'])]
STOP = tuple(range(0, V, 5))


# ------------------------------------------------------------------ losses by hand


def drawn_tokens(seed=0, rows=6, empty=1):
  """Log-probabilities of answers of different lengths; the last `empty` rows have none."""
  rng = np.random.default_rng(seed)
  log_probs, reference, old = -rng.uniform(0.1, 4, (3, rows, T))
  old = log_probs + rng.uniform(-0.5, 0.5, old.shape)
  ends = rng.integers(P + 1, T + 1, rows)
  places = np.arange(T)
  weights = ((places >= P - 1) & (places < ends[:, None])).astype(float)
  weights[rows - empty :] = 0
  return log_probs, reference, old, weights, rng.standard_normal(rows)


def loss_by_hand(log_probs, reference, old, weights, advantages, *, low, high, beta, ratio, mean):
  """The loss and the share of clipped tokens, float64, a token at a time, as the papers write it."""
  of_rows, clipped, num_tokens = [], 0, 0
  for row in range(len(weights)):
    places = np.flatnonzero(weights[row])
    if not len(places):
      continue
    changes = {t: log_probs[row, t] - old[row, t] for t in places}
    whole = np.mean(list(changes.values()))
    losses = []
    for t in places:
      r, a = np.exp(whole if ratio == 'answer' else changes[t]), advantages[row]
      kl = np.exp(reference[row, t] - log_probs[row, t]) - (reference[row, t] - log_probs[row, t]) - 1
      losses.append(-min(r * a, min(max(r, 1 - low), 1 + high) * a) + beta * kl)
      clipped += (r < 1 - low and a < 0) or (r > 1 + high and a > 0)
    of_rows.append(losses)
    num_tokens += len(places)
  total = sum(map(sum, of_rows))
  loss = {
    'answers': np.mean([np.mean(losses) for losses in of_rows]),
    'tokens': total / num_tokens,
    'constant': total / (M * len(of_rows)),
  }[mean]
  return loss, clipped / num_tokens


@pytest.mark.parametrize('ratio', ['token', 'answer'])
@pytest.mark.parametrize('mean', ['answers', 'tokens', 'constant'])
@pytest.mark.parametrize('beta', [0.0, 0.3])
def test_losses_are_those_of_the_papers(mean, ratio, beta):
  drawn = drawn_tokens()
  tokens = PolicyTokens(*(jax.numpy.asarray(x, jax.numpy.float32) for x in drawn))
  loss = Config(Grpo, clip_low=0.2, clip_high=0.25, kl_weight=beta, ratio=ratio, mean=mean).instantiate()
  terms = loss.terms(tokens)
  found, weight = loss.average(terms.loss, tokens, M)
  expected, clipped = loss_by_hand(*drawn, low=0.2, high=0.25, beta=beta, ratio=ratio, mean=mean)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  assert weight == (drawn[3].sum() if mean == 'tokens' else 5)
  assert 0 < clipped < 1 or ratio == 'answer'
  np.testing.assert_allclose((terms.is_clipped * tokens.weights).sum() / tokens.weights.sum(), clipped, rtol=1e-6)


def test_the_divergence_is_one_on_average():
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
  found = estimate_divergence(*map(np.log, (p, q)))
  assert (found >= 0).all() and estimate_divergence(np.log(p), np.log(p)) == pytest.approx([0, 0, 0], abs=1e-12)
  np.testing.assert_allclose((p * found).sum(), (p * np.log(p / q)).sum(), rtol=1e-5)


def test_advantages_compare_the_answers_of_a_group():
  rewards = np.float32([1, 0, 0, 2, 2, 2, 0, 1, 5])
  found, is_equal = group_advantages(rewards, 3, 'group')
  for start in range(0, 9, 3):
    group = rewards[start : start + 3].astype(float)
    np.testing.assert_allclose(found[start : start + 3], (group - group.mean()) / (group.std(ddof=1) + 1e-4), rtol=1e-5)
  assert is_equal.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0] and found.dtype == np.float32
  centred = rewards - np.repeat(rewards.reshape(3, 3).mean(1), 3)
  np.testing.assert_allclose(group_advantages(rewards, 3, 'none')[0], centred, atol=1e-6)
  np.testing.assert_allclose(
    group_advantages(rewards, 3, 'batch')[0], centred / (rewards.std(ddof=1) + 1e-4), rtol=1e-5, atol=1e-6
  )
  assert group_advantages(rewards, 1, 'group')[0].tolist() == [0] * 9
  assert group_advantages(rewards[:1], 1, 'batch')[0].tolist() == [0]
  assert group_advantages(rewards[:0], 3, 'batch')[0].shape == (0,)
  tenths = np.float32([0.1] * 3)
  assert group_advantages(tenths, 3, 'group')[0].tolist() == [0, 0, 0]


# What GRPOTrainer._compute_loss of TRL 1.16 returns in float64 for the first five rows of `drawn_tokens`, with beta
# 0.3, epsilon 0.2 and 0.25, and max_completion_length 5: the loss, and the norm of its gradient by log-probabilities.
OF_TRL = {
  ('answers', 'token'): (1.001120962862621, 0.35832907414919384),  # loss_type 'grpo'
  ('answers', 'answer'): (0.9836660693527435, 0.350801371423053),
  ('tokens', 'token'): (1.0923077721868517, 0.4481981074017661),  # 'dapo' and 'bnpo'
  ('tokens', 'answer'): (1.0761814462773143, 0.4402958375631145),
  ('constant', 'token'): (1.0049231504119036, 0.41234225880962483),  # 'dr_grpo'
  ('constant', 'answer'): (0.9900869305751292, 0.40507217055806544),
}


@pytest.mark.parametrize('mean, ratio', OF_TRL)
def test_losses_and_gradients_are_those_of_trl(mean, ratio):
  tokens = PolicyTokens(*(jax.numpy.asarray(x[:5], jax.numpy.float32) for x in drawn_tokens()))
  loss = Config(Grpo, clip_low=0.2, clip_high=0.25, kl_weight=0.3, ratio=ratio, mean=mean).instantiate()

  def total(log_probs):
    replaced = tokens._replace(log_probs=log_probs)
    return loss.average(loss.terms(replaced).loss, replaced, M)[0]

  found, gradient = jax.value_and_grad(total)(tokens.log_probs)
  np.testing.assert_allclose([found, np.linalg.norm(gradient)], OF_TRL[mean, ratio], rtol=2e-6)
  divergence = loss.terms(tokens).divergence
  np.testing.assert_allclose((divergence * tokens.weights).sum() / tokens.weights.sum(), 2.9086810666117118, rtol=1e-6)


# ------------------------------------------------------------------ models


def reward_length(prompt, answer, example):
  return len(answer) + example['number'] - len(prompt)


def reward_letters(prompt, answer, example):
  return float(sum(map(ord, answer)) % 3)


def lm(**fields):
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_layers': 2, 'num_heads': 3, 'num_kv_heads': 1, 'hidden_dims': 10}
  model = transformer_lm(**sizes, **fields)
  model.decoder_tpl.set(max_decode_steps=M, stop_ids=STOP)
  return set_sharding(model)


LOSS = Config(Grpo, kl_weight=0.3, clip_high=0.3)


def task_of(kind):
  task = Config(SingleTask, model=lm())
  if kind == 'adapters':
    train_adapters(task, Config(Lora, rank=2))
  return train_policy(task, Config(Grpo, mean='tokens') if kind == 'without' else LOSS)


def data(examples=EXAMPLES, **fields):
  fields = {
    'rewards': {'length': reward_length, 'letters': reward_letters},
    'num_answers': G,
    'batch_size': 12,
  } | fields
  fields = {'seq_len': T, 'answer_length': M, 'is_training': True, 'shuffle': False} | fields
  return Config(RewardedInput, examples=examples, **fields).instantiate()


def completed(kind, mesh=None, given=None):
  """Three prompts with three answers each, in 12 rows, of which the last three are fillers; sampled on a mesh."""
  task = task_of(kind).set(mesh_axis_names=('spare', 'replica', 'data', 'mdl'), ici_mesh_shape=mesh).instantiate()
  tasks, given = TaskOnMesh(task, task.create_mesh()), given or data(reward_weights={'letters': 0.5})
  partitioned = tasks.taking(given)
  answers, state = tasks.answering(given, jax.random.key(5), partitioned.train_step), drawn_state(partitioned)
  found = jax.device_get(answers.complete(state.mdl_vars, state.step, next(given)))
  return jax.tree.map(lambda x: x[:12], found)


batch_of = functools.cache(completed)


@functools.cache
def made(kind):
  model = task_of(kind).model.instantiate()
  return model, drawn_variables(model.abstract_init())


@functools.cache
def tokens_of(kind):
  """What the loss reads of the completed batch, in training."""
  model, variables = made(kind)
  return jax.jit(lambda b: model.apply(variables, b, method='compute_predictions')[0])(batch_of(kind))


def test_a_batch_has_answers_and_their_rewards():
  batch, prompts = batch_of('copy'), [e['prompt'] for e in EXAMPLES]
  lengths = batch['weights'].sum(1).astype(int)
  assert lengths[9:].tolist() == [0, 0, 0] and lengths[:9].min() >= 1 and len({*lengths[:9]}) > 1
  for row in range(9):
    given, prompt = batch['num_given'][row], prompts[row // G]
    assert given == len(prompt) and bytes(batch['ids'][row, :given].tolist()).decode() == prompt
    places = np.arange(given - 1, given - 1 + lengths[row])
    assert batch['weights'][row].nonzero()[0].tolist() == places.tolist()
    ids = batch['ids'][row, places + 1]
    assert batch['labels'][row, places].tolist() == ids.tolist()
    assert lengths[row] == M or ids[-1] in STOP
    assert not np.isin(ids[:-1], STOP).any()
    answer = bytes(int(i) for i in ids if i).decode(errors='replace')
    one, other = reward_length(prompt, answer, EXAMPLES[row // G]), reward_letters(prompt, answer, {})
    assert (batch['rewards']['length'][row], batch['rewards']['letters'][row]) == (one, other)
    assert batch['reward'][row] == one + other / 2
    assert (batch['segment_ids'][row] > 0).sum() == given + lengths[row]
  advantages, is_equal = group_advantages(batch['reward'][:9], G, 'group')
  np.testing.assert_allclose(batch['advantages'], [*advantages, 0, 0, 0])
  np.testing.assert_array_equal(batch['is_equal'], [*is_equal, 0, 0, 0])
  answers = {tuple(x) for x in batch['labels'][:9] * (batch['weights'][:9] > 0)}
  assert len(answers) > 6


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', ['copy', 'adapters'])
def test_log_probabilities_of_sampling_are_those_of_training(kind):
  tokens, batch = tokens_of(kind), batch_of(kind)
  assert (batch['old_log_probs'] < 0).sum() == batch['weights'].sum()
  np.testing.assert_allclose(tokens.log_probs, batch['old_log_probs'], atol=2e-5)


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind, mesh', [('copy', (1, 1, 3, 2)), ('adapters', (1, 2, 2, 2)), ('copy', (2, 1, 2, 1))])
def test_answers_do_not_depend_on_the_mesh(kind, mesh):
  one, found = batch_of(kind), completed(kind, mesh)
  for name in ('ids', 'labels', 'weights', 'reward'):
    np.testing.assert_array_equal(found[name], one[name])
  np.testing.assert_allclose(found['old_log_probs'], one['old_log_probs'], atol=2e-5)


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', ['copy', 'adapters', 'without'])
def test_metrics_of_a_batch_are_those_by_hand(kind):
  """Ratios are not 1: the answers were sampled by another model."""
  model, variables = made(kind)
  batch, rng = jax.tree.map(np.copy, batch_of(kind)), np.random.default_rng(1)
  batch['old_log_probs'] += 0.4 * rng.standard_normal(batch['weights'].shape).astype(np.float32) * batch['weights']
  metrics, per_example = jax.jit(lambda b: model.apply(variables, b)[0])(batch)
  tokens = jax.tree.map(lambda x: np.asarray(x, np.float64), tokens_of(kind))
  beta, high, mean = (0.0, 0.2, 'tokens') if kind == 'without' else (0.3, 0.3, 'answers')
  arguments = tokens.log_probs, tokens.reference, batch['old_log_probs'], batch['weights'], batch['advantages']
  loss, clipped = loss_by_hand(*arguments, low=0.2, high=high, beta=beta, ratio='token', mean=mean)
  count = batch['weights'].sum()
  np.testing.assert_allclose(metrics['loss'], [loss, count if mean == 'tokens' else 9], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(metrics['clipped'], [clipped, count], rtol=1e-6)
  np.testing.assert_allclose(metrics['reward'], [batch['reward'][:9].mean(), 9], rtol=1e-6)
  np.testing.assert_allclose(metrics['reward/letters'], [batch['rewards']['letters'][:9].mean(), 9], rtol=1e-6)
  np.testing.assert_allclose(metrics['answer_length'][0], count / 9, rtol=1e-6)
  np.testing.assert_allclose(metrics['entropy'][0], -batch['old_log_probs'].sum() / count, rtol=1e-5)
  ends = [np.isin(row[w > 0], STOP).any() for row, w in zip(batch['labels'][:9], batch['weights'])]
  np.testing.assert_allclose(metrics['finished'][0], np.mean(ends), rtol=1e-6)
  assert per_example['loss'].shape == (12,) and not per_example['loss'][9:].any()
  if kind == 'without':
    assert 'divergence' not in metrics and not any('reference' in path for path in made(kind)[0].abstract_init())
    return
  change = tokens.reference - tokens.log_probs
  divergence = ((np.exp(change) - change - 1) * batch['weights']).sum() / count
  np.testing.assert_allclose(metrics['divergence'][0], divergence, rtol=1e-4)
  plain = {'lm': variables.get('reference')}
  if kind == 'adapters':  # The reference is the model without adapters.
    plain = jax.tree_util.tree_map_with_path(lambda p, x: x * 0 if 'lora' in str(p) else x, variables)
  expected = model.lm.apply(plain['lm'], batch['ids'], do_eval=True, method='logits')[0]
  expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(expected)), batch['labels'][..., None], -1)[..., 0]
  np.testing.assert_allclose(tokens.reference, expected * batch['weights'], atol=2e-5)
  assert np.abs(change).max() > 1e-3


def after_a_step(kind, mesh=None, microbatches=1, **fields):
  task = task_of(kind)
  learner = task.train.learner
  fields['trained'], fields['frozen'] = learner.bprop_variable_inclusion, learner.bprop_variable_exclusion
  if microbatches > 1:
    fields['train'] = task.train.clone(learner=learner.clone(num_microbatches=microbatches))
  return take_a_step(task.model, batch_of(kind), mesh, **fields)


on_one_device = functools.cache(after_a_step)


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind, mesh, fields',
  [
    ('copy', (1, 1, 3, 2), {'microbatches': 2}),
    ('adapters', (1, 2, 2, 2), {}),
    ('without', (2, 1, 2, 1), {'microbatches': 3}),
    ('copy', (1, 1, 3, 1), {'partitioning': 'shard_map'}),
  ],
)
def test_a_step_on_a_mesh_is_that_of_one_device(kind, mesh, fields):
  (loss, variables), (expected, one) = after_a_step(kind, mesh, **fields), on_one_device(kind)
  np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
  assert_close(variables, one, 1e-5)
  before = drawn_variables(made(kind)[0].abstract_init())
  moved = {path[0] for path, x in one.items() if np.any(x != functools.reduce(dict.__getitem__, path, before))}
  assert moved == {'lm'}


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'batch_size': 8}, 'batch_size: 8 answers are no whole groups of num_answers = 3; set it to a multiple of 3'),
    ({'batch_size': 9, 'num_hosts': 2}, 'on each of 2 hosts; set it to a multiple of 6'),
    ({'answer_length': T}, 'leave no room for a prompt'),
    ({'rewards': {}}, 'rewards: expected functions by name'),
    ({'rewards': {'a': 3}}, r"rewards\['a'\]: expected a function"),
    ({'reward_weights': {'letter': 1.0}}, "reward_weights: .*Did you mean 'letters'"),
    ({'scale_rewards': 'groups'}, "scale_rewards: .*Did you mean 'group'"),
    ({'packed': True}, 'packed: each row has one prompt'),
    ({'steps_per_batch': 0}, 'steps_per_batch'),
    ({'num_answers': 1}, 'num_answers: .* at least 2 in training'),
    ({'rewards': {'letters': len}, 'reward_weights': {'x': 1.0}}, "reward_weights: expected 'letters', got 'x'"),
    ({'reward_weights': {'letters': 1e39}}, r"reward_weights\['letters'\]: expected a finite number, got 1e"),
    ({'reward_weights': {'letters': float('nan')}}, r"reward_weights\['letters'\]: expected a finite number, got nan"),
  ],
)
def test_an_input_that_cannot_be(fields, message):
  with pytest.raises(ConfigError, match=message):
    data(**fields)


def test_examples_that_cannot_be():
  for examples, message in (
    ([{'prompt': 'abcdef'}], 'prompt has 6 tokens, and seq_len - answer_length = 4'),
    ([{'prompt': ''}], 'no tokens'),
    ([{'text': 'a'}], "neither a text nor messages 'prompt'"),
    ([{'prompt': [{'role': 'user', 'content': 'a'}]}], 'no chat template'),
  ):
    with pytest.raises((ConfigError, DataError), match=message):
      next(data(examples))
  assert next(data([{'prompt': 'abcdef'}], truncate=True))['num_given'].tolist() == [P] * 3 + [0] * 9


ODD = [
  None,
  float('nan'),
  'yes',
  np.str_('1'),
  float('inf'),
  1e39,
  -1e39,
  10**400,
  1j,
  np.complex64(1),
  np.float64(1e39),
]


@pytest.mark.parametrize('value', ODD)
def test_a_reward_is_a_finite_number(value):
  found = data(rewards={'odd': lambda prompt, answer, example: value})
  answers = {'ids': np.zeros((12, M), np.int32), 'lengths': np.ones(12, np.int32), 'log_probs': np.zeros((12, M))}
  with pytest.raises(
    DataError, match=r"rewards\['odd'\]: expected a finite number in float32 for the answer '' to 'a', got"
  ):
    found.complete(next(found), answers)


ANSWERS = {'ids': np.zeros((12, M), np.int32), 'lengths': np.ones(12, np.int32), 'log_probs': np.zeros((12, M))}


@pytest.mark.parametrize('value', [True, 1, 1.0, np.True_, np.int8(1), np.float16(1), np.float64(1)])
def test_kinds_of_numbers_are_rewards(value):
  found = data(rewards={'one': lambda prompt, answer, example: value}, reward_weights={'one': 2})
  assert found.complete(next(found), ANSWERS)['reward'][:9].tolist() == [2.0] * 9


def test_a_weighted_reward_is_finite():
  found = data(rewards={'large': lambda prompt, answer, example: 1e30}, reward_weights={'large': 1e30})
  with pytest.raises(
    DataError, match=r"reward_weights: the weighted sum .* '' to 'a' is 1.0.*e\+60, and must be a finite"
  ):
    found.complete(next(found), ANSWERS)


def test_advantages_are_finite():
  given = iter([3e38] * 2 + [-3e38] + [0.0] * 6)
  found = data(rewards={'large': lambda prompt, answer, example: next(given)}, scale_rewards='none')
  with pytest.raises(DataError, match='so large that their differences are not finite'):
    found.complete(next(found), ANSWERS)


def test_prompts_that_are_rewarded_cannot_be_decoded_as_a_data_set():
  given = Config(RewardedInput, examples=EXAMPLES, rewards={'length': reward_length}, num_answers=G, batch_size=12)
  given.set(seq_len=T, answer_length=M, is_training=False)
  with pytest.raises(ConfigError, match=r'decode_datasets\[0\]: a RewardedInput is for training and evaluation'):
    build_datasets([given], 'decode_datasets')


def test_evaluation_divides_by_the_length_of_its_own_answers():
  task = task_of('without')
  task.model.loss_tpl = Config(Grpo, mean='constant')
  task.model.decoder_tpl.max_decode_steps = 2 * M
  model = task.model.instantiate()
  batch, variables = batch_of('without'), made('without')[1]
  losses = {}
  for do_eval in (False, True):
    (metrics, _), _ = jax.jit(functools.partial(model.apply, do_eval=do_eval))(variables, batch)
    losses[do_eval] = float(metrics['loss'][0])
  assert losses[True] and losses[True] == pytest.approx(losses[False] / 2, rel=1e-5)


def test_a_reward_that_fails_is_named():
  found = data(rewards={'odd': lambda prompt, answer, example: example['missing']})
  answers = {'ids': np.zeros((12, M), np.int32), 'lengths': np.ones(12, np.int32), 'log_probs': np.zeros((12, M))}
  with pytest.raises(KeyError) as error:
    found.complete(next(found), answers)
  assert "rewards['odd'] was given the answer '' to 'a'" in error.value.__notes__[0]


def test_groups_stay_together_when_they_are_shuffled():
  found = data(shuffle=True, batch_size=3, num_epochs=2)
  prompts = [next(found)['example'].tolist() for _ in range(6)]
  assert all(len({*group}) == 1 for group in prompts)
  assert sorted(group[0] for group in prompts[:3]) == [0, 1, 2] == sorted(group[0] for group in prompts[3:])


def test_a_model_that_cannot_be():
  task = task_of('without')
  for change, message in (
    ({'sampler_tpl': Config(Sampler, temperature=0.5)}, 'sampler_tpl.temperature: .* must be 1.0, got 0.5'),
    ({'sampler_tpl': Config(Sampler, top_k=4)}, 'sampler_tpl.top_k: '),
    ({'decoder_tpl': Config(BeamSearch)}, 'decoder_tpl: .* needs a Sampler'),
    ({'loss_tpl': Config(Sampler)}, 'loss_tpl: expected the config of a loss'),
    ({'model_type': 'prefix'}, "model_type: rewarded answers need 'causal'"),
  ):
    with pytest.raises(ConfigError, match=message):
      task.model.clone(**change).instantiate()
  model = task.model.instantiate()
  chats = Config(ChatInput, examples=[{'prompt': 'a', 'completion': 'b'}], seq_len=T, batch_size=2).instantiate()
  with pytest.raises(ConfigError, match='needs a RewardedInput, got ChatInput'):
    model.check_input(chats, next(chats))
  with pytest.raises(
    ConfigError, match=r'LanguageModel samples no answers in training; set .*or in Python call train_p'
  ):
    lm().instantiate().check_input(given := data(), next(given))
  short = data(answer_length=M - 1, seq_len=T)
  with pytest.raises(ConfigError, match=r'answer_length: 4 tokens, but task.model.sampler_tpl.max_decode_steps = 5'):
    model.check_input(short, next(short))
