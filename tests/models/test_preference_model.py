"""Preference losses against NumPy and the numbers of TRL, packing, references, padding, and steps on any mesh."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from drawn_state import drawn_variables
from model_steps import assert_close, loss_and_gradients, take_a_step

from praxis_lite.bridges.hf.families import describe_model
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves, path_name
from praxis_lite.inputs import PreferenceInput
from praxis_lite.layers import Lora
from praxis_lite.models import (
  Dpo,
  Ipo,
  Kto,
  Orpo,
  RewardModel,
  SimPo,
  encoder_decoder,
  set_sharding,
  transformer_encoder,
  transformer_lm,
)
from praxis_lite.models.preference_losses import AnswerScores, PairScores
from praxis_lite.runs.nonfinite import hints_in
from praxis_lite.training import train_adapters, train_preferences, train_rewards
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

V, T = 259, 14
EXAMPLES = [
  {'prompt': 'ab', 'chosen': 'cde', 'rejected': 'f'},
  {'prompt': 'g', 'chosen': 'h', 'rejected': 'ijk'},
  {'prompt': 'lmn', 'chosen': 'op', 'rejected': 'qr'},
  {'prompt': 's', 'chosen': 'tuv', 'rejected': 'wx'},
  {'prompt': 'yz', 'chosen': 'A', 'rejected': 'B'},
]


# ------------------------------------------------------------------ losses by hand


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def logit(p):
  return np.log(p / (1 - p))


def by_hand(loss, c, r, c0, r0, nc, nr, z):
  """The loss of each pair, float64, as the papers write it."""
  if loss is Dpo:
    h = 0.3 * ((c - c0) - (r - r0))
    return -0.9 * np.log(sigmoid(h)) - 0.1 * np.log(sigmoid(-h))
  if loss is Ipo:
    return ((c - c0) / nc - (r - r0) / nr - 1 / (2 * 0.3)) ** 2
  if loss is Kto:
    z = max(z, 0)
    return np.stack([1.5 * (1 - sigmoid(0.3 * (c - c0 - z))), 0.7 * (1 - sigmoid(0.3 * (z - r + r0)))])
  if loss is Orpo:
    return -c / nc - 0.3 * np.log(sigmoid(logit(np.exp(c / nc)) - logit(np.exp(r / nr))))
  return -np.log(sigmoid(1.7 * (c / nc - r / nr) - 0.4))


LOSSES = {
  Dpo: Config(Dpo, beta=0.3, label_smoothing=0.1),
  Ipo: Config(Ipo, beta=0.3),
  Kto: Config(Kto, beta=0.3, desirable_weight=1.5, undesirable_weight=0.7),
  Orpo: Config(Orpo, weight=0.3),
  SimPo: Config(SimPo, beta=1.7, margin=0.4),
}


@pytest.mark.parametrize('z', [-0.5, 0.8])
@pytest.mark.parametrize('loss', LOSSES)
def test_losses_are_those_of_the_papers(loss, z):
  rng = np.random.default_rng(0)
  c, r, c0, r0 = -rng.uniform(0.05, 6, (4, 7))
  nc, nr = rng.integers(1, 5, (2, 7)).astype(float)
  pairs = PairScores(
    AnswerScores(*np.float32([c, c0, nc])),
    AnswerScores(*np.float32([r, r0, nr])),
    np.ones(7, np.float32),
    np.float32(z),
  )
  values, weights = LOSSES[loss].instantiate().terms(jax.tree.map(jax.numpy.asarray, pairs))
  expected = by_hand(loss, c, r, c0, r0, nc, nr, z)
  np.testing.assert_allclose(values.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
  assert (weights == 1).all() and weights.shape == values.shape


def test_sums_and_label_smoothing_are_options():
  one, zero = np.ones(3, np.float32), np.zeros(3, np.float32)
  chosen, rejected = np.float32([[-0.2, -1.5, -3.0], [-0.9, -1.0, -0.01]])
  pairs = PairScores(AnswerScores(chosen, zero, one), AnswerScores(rejected, zero, one), one, zero[0])
  values, _ = Config(SimPo, beta=2.0, margin=0.6, label_smoothing=0.1).instantiate().terms(pairs)
  margin = 2 * (chosen - rejected) - 0.6
  expected = -0.9 * np.log(sigmoid(margin)) - 0.1 * np.log(sigmoid(-margin))
  np.testing.assert_allclose(values[0], expected, rtol=1e-5)
  pairs = PairScores(AnswerScores(chosen, rejected, 3 * one), AnswerScores(rejected, chosen, one), one, zero[0])
  values, _ = Config(Ipo, beta=0.5, per_token=False).instantiate().terms(pairs)
  np.testing.assert_allclose(values[0], (2 * (chosen - rejected) - 1) ** 2, rtol=1e-5)


@pytest.mark.parametrize('loss', LOSSES)
def test_gradients_are_finite_for_probabilities_of_0_and_1_and_answers_that_are_missing(loss):
  def total(log_prob):
    zero, tokens = jax.numpy.zeros(4), jax.numpy.array([0.0, 1, 1, 2])
    answers = AnswerScores(log_prob, zero, tokens)
    pairs = PairScores(answers, answers._replace(log_prob=log_prob[::-1]), tokens, zero[0])
    values, weights = LOSSES[loss].instantiate().terms(pairs)
    return (values * weights).sum()

  assert np.isfinite(jax.grad(total)(jax.numpy.array([0.0, 0.0, -1e-9, -90.0]))).all()


# ------------------------------------------------------------------ models


def lm(**fields):
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_layers': 2, 'num_heads': 3, 'num_kv_heads': 1, 'hidden_dims': 10}
  return transformer_lm(**sizes, **fields)


def task_of(kind, **fields):
  task = Config(SingleTask, model=set_sharding(lm()), **fields)
  if kind == 'rewards':
    return train_rewards(task)
  if kind == 'adapters':
    return train_preferences(train_adapters(task, Config(Lora, rank=2)), LOSSES[Dpo])
  return train_preferences(task, LOSSES[kind])


def data(examples=EXAMPLES, packed=False, **fields):
  return Config(
    PreferenceInput, examples=examples, seq_len=T, batch_size=6, packed=packed, max_pairs=3, mismatched=True, **fields
  ).instantiate()


@functools.cache
def batch_of(packed=False):
  """Five pairs in six rows, the last a filler; or all in fewer rows."""
  batch = next(data(packed=packed))
  assert batch['weights'].sum() == 5 and (batch['weights'].reshape(6, -1).sum(1) == 0).any()
  return batch


@functools.cache
def made(kind):
  model = task_of(kind).model.instantiate()
  return model, drawn_variables(model.abstract_init())


@functools.cache
def evaluate(kind):
  model, _ = made(kind)
  return jax.jit(lambda v, b: model.apply(v, b, do_eval=True)[0])


def log_probs_by_hand(kind, texts, network='lm', off=False):
  """The log-probability of each text after its prompt, and its number of tokens, one at a time, from the logits."""
  variables = made(kind)[1][network]
  if off:
    variables = jax.tree_util.tree_map_with_path(lambda p, x: x * 0 if 'lora' in str(p) else x, variables)
  found = []
  for prompt, text in texts:
    ids = np.frombuffer(prompt.encode() + text.encode() + b'\0', np.uint8).astype(np.int32)
    padded = np.pad(ids, (0, T - len(ids)))[None]
    logits = np.asarray(jitted_logits(kind, network)(variables, padded))[0].astype(np.float64)
    normal = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found.append(sum(normal[i, ids[i + 1]] for i in range(len(prompt) - 1, len(ids) - 1)))
  return np.array(found), np.array([len(text) + 1 for _, text in texts])


@functools.cache
def jitted_logits(kind, network):
  layer = getattr(made(kind)[0], network)
  return jax.jit(lambda v, ids: layer.apply(v, ids, do_eval=True, method='logits')[0])


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', [Dpo, 'adapters', Kto, Ipo, Orpo, SimPo])
def test_metrics_of_a_batch_are_those_of_its_pairs_one_by_one(kind):
  """Padded and packed; the last example, with single letters, shows a loss that is not that of others."""
  loss = Dpo if kind == 'adapters' else kind
  chosen, rejected = ([(e['prompt'], e[side]) for e in EXAMPLES] for side in ('chosen', 'rejected'))
  (c, nc), (r, nr) = (log_probs_by_hand(kind, texts) for texts in (chosen, rejected))
  c0 = r0 = z = 0
  if LOSSES[loss].instantiate().needs_reference:
    reference = {'off': True} if kind == 'adapters' else {'network': 'reference'}
    (c0, _), (r0, _) = (log_probs_by_hand(kind, texts, **reference) for texts in (chosen, rejected))
    assert abs(c - c0).max() > 1e-3
  if loss is Kto:
    others = [
      (e['prompt'], (n['rejected'] if i % 2 else n['chosen']))
      for i, (e, n) in enumerate(zip(EXAMPLES, EXAMPLES[1:] + EXAMPLES[:1]))
    ]
    z = np.mean(log_probs_by_hand(kind, others)[0] - log_probs_by_hand(kind, others, network='reference')[0])
  expected = by_hand(loss, c, r, c0, r0, nc, nr, z).mean()
  for packed in (False, True):
    metrics, per_example = jax.tree.map(np.asarray, evaluate(kind)(made(kind)[1], batch_of(packed)))
    np.testing.assert_allclose(metrics['loss'], [expected, 10 if loss is Kto else 5], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(metrics['log_prob_chosen'][0], c.mean(), rtol=1e-5)
    rewards = {Dpo: 0.3 * (c - c0), Kto: 0.3 * (c - c0), Ipo: 0.3 * (c - c0) / nc, Orpo: c / nc, SimPo: 1.7 * c / nc}
    of_rejected = {
      Dpo: 0.3 * (r - r0),
      Kto: 0.3 * (r - r0),
      Ipo: 0.3 * (r - r0) / nr,
      Orpo: r / nr,
      SimPo: 1.7 * r / nr,
    }
    margin = rewards[loss] - of_rejected[loss]
    np.testing.assert_allclose(metrics['reward_chosen'][0], rewards[loss].mean(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics['margin'], [margin.mean(), 5], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics['accuracy'], [(margin > 0).mean(), 5])
    assert per_example['loss'].shape == (6,) and per_example['loss'][-1] == 0
    if loss is Kto:
      np.testing.assert_allclose(metrics['divergence'][0], z, rtol=1e-4, atol=1e-6)


def after_a_step(kind, mesh=None, packed=False, **fields):
  task = task_of(kind)
  learner = task.train.learner
  return take_a_step(
    task.model,
    batch_of(packed),
    mesh,
    trained=learner.bprop_variable_inclusion,
    frozen=learner.bprop_variable_exclusion,
    **fields,
  )


on_one_device = functools.cache(after_a_step)
STEPS = [
  *((Dpo, False, mesh) for mesh in [(1, 2, 2, 2), (1, 1, 3, 2), (2, 1, 2, 1)]),
  ('adapters', True, (1, 2, 2, 2)),
  (Kto, True, (1, 1, 3, 2)),
  ('rewards', True, (1, 1, 3, 2)),
  ('rewards', True, (1, 2, 2, 2)),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind, packed, mesh', STEPS)
def test_a_step_on_a_mesh_is_that_of_one_device(kind, packed, mesh):
  (loss, variables), (expected, one) = after_a_step(kind, mesh, packed), on_one_device(kind, packed=packed)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert_close(variables, one, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('kind', [Kto, 'adapters'])
def test_explicit_collectives(kind):
  (loss, variables), (expected, one) = after_a_step(kind, (1, 1, 3, 1), partitioning='shard_map'), on_one_device(kind)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert_close(variables, one, 1e-5)


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', [Dpo, 'adapters'])
def test_no_gradient_flows_through_the_reference(kind):
  model, variables = made(kind)
  _, gradients = loss_and_gradients(model, variables, batch_of())
  changed = {path for path, value in leaves(gradients).items() if np.any(value)}
  assert changed and not any(path[0] == 'reference' for path in changed)
  if kind == 'adapters':  # Gradients of the base are those through the model with adapters alone.
    assert any('lora' in path_name(path) for path in changed)
  else:
    assert {path for path in leaves(gradients) if path[0] == 'lm'} == changed
  _, after = on_one_device(kind, packed=kind == 'adapters')
  moved = {path for path, value in after.items() if np.any(value != leaves(variables)[path])}
  assert moved and all('lora' in path_name(path) if kind == 'adapters' else path[0] == 'lm' for path in moved)


@pytest.mark.parametrize(
  'kind, field, variable, value',
  [(Dpo, 'exclusion', r'reference\.', r'reference'), ('adapters', 'inclusion', r'lm\.', r'\.\*.*lora')],
)
def test_a_learner_that_would_change_the_reference_is_an_error(kind, field, variable, value):
  model = task_of(kind).model
  message = rf"task.train.learner.bprop_variable_{field}: {variable}.* would be trained, but .*; set it to \('{value}"
  with pytest.raises(ConfigError, match=message):
    Config(SingleTask, model=model).instantiate()
  task_of(kind).instantiate()
  Config(SingleTask, model=task_of(Orpo).model).instantiate()


def test_padding_may_hold_anything():
  batch = jax.tree.map(np.copy, batch_of())
  bad = jax.tree.map(np.copy, batch)
  for side in ('chosen', 'rejected', 'mismatched'):
    unused = bad[side]['segment_ids'] == 0
    bad[side]['ids'][unused] = bad[side]['labels'][unused] = -7
  one, other = (evaluate(Kto)(made(Kto)[1], b) for b in (batch, bad))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), one, other)


def test_single_answers_for_kto():
  singles = [
    {'prompt': e['prompt'], 'completion': e[side], 'label': side == 'chosen'}
    for e in EXAMPLES[:3]
    for side in ('chosen', 'rejected')
  ]
  found = data(singles)
  made(Kto)[0].check_input(found, batch := next(found))
  metrics, _ = evaluate(Kto)(made(Kto)[1], batch)
  assert metrics['loss'][1] == 6 and metrics['reward_chosen'][1] == 3 and metrics['margin'][1] == 0
  (c, _), (c0, _) = (
    log_probs_by_hand(Kto, [(e['prompt'], e['chosen']) for e in EXAMPLES[:3]], n) for n in ('lm', 'reference')
  )
  np.testing.assert_allclose(metrics['reward_chosen'][0], 0.3 * (c - c0).mean(), rtol=1e-4)
  with pytest.raises(ConfigError, match=r'one answer and a label, which .* Dpo cannot learn from; set loss_tpl='):
    made(Dpo)[0].check_input(found, batch)
  with pytest.raises(ConfigError, match='rewards are learnt from pairs'):
    made('rewards')[0].check_input(found, batch)


def test_a_reward_is_that_of_the_last_token():
  model, variables = made('rewards')
  assert isinstance(model, RewardModel)
  chosen, rejected = (
    np.array(
      [np.frombuffer(f'{e["prompt"]}{e[side]}\0'.encode().ljust(T, b'\1'), np.uint8) for e in EXAMPLES], np.int32
    )
    for side in ('chosen', 'rejected')
  )
  lengths = [np.array([len(e['prompt'] + e[side]) + 1 for e in EXAMPLES]) for side in ('chosen', 'rejected')]
  predict = jax.jit(lambda b: model.apply(variables, b, do_eval=True, method='predict')[0])
  rewards = [
    predict({'ids': ids, 'segment_ids': (np.arange(T) < n[:, None]).astype(np.int32)})['reward']
    for ids, n in zip((chosen, rejected), lengths)
  ]
  hidden = [
    jax.jit(lambda ids: model.lm.apply(variables['lm'], ids, do_eval=True, method='encode')[0])(ids)
    for ids in (chosen, rejected)
  ]
  for found, states, n in zip(rewards, hidden, lengths):
    np.testing.assert_allclose(
      found, (states[np.arange(5), n - 1] @ variables['head']['w'])[:, 0], rtol=1e-4, atol=1e-6
    )
  margin = rewards[0] - rewards[1]
  for packed in (False, True):
    metrics, _ = evaluate('rewards')(variables, batch_of(packed))
    np.testing.assert_allclose(metrics['loss'], [-np.log(sigmoid(margin)).mean(), 5], rtol=1e-5)
    np.testing.assert_allclose(metrics['accuracy'][0], (margin > 0).mean())
  centered = made('rewards')[0]
  of_pairs = predict(batch_of())
  np.testing.assert_allclose(of_pairs['reward_chosen'][:5], rewards[0], rtol=1e-5)
  rows = batch_of()['chosen']
  of_rows = predict({name: rows[name] for name in ('ids', 'segment_ids', 'weights')})
  np.testing.assert_allclose(of_rows['reward'][:5], of_pairs['reward_chosen'][:5], rtol=1e-5)
  with pytest.raises(ConfigError, match=r'weights \[B, T\] belong to labels.*; give segment_ids'):
    predict({'ids': rows['ids'], 'weights': rows['weights']})
  whole = predict({'ids': chosen[:, : lengths[0][0]], 'weights': np.ones(5, np.float32)})
  np.testing.assert_allclose(whole['reward'][0], rewards[0][0], rtol=1e-5)
  assert centered.center_weight == 0


def test_mistakes_are_named():
  config = task_of(Dpo).model
  model = made(Dpo)[0]
  for change, message in (
    ({'model_type': 'prefix'}, "model_type: pairs of answers need 'causal'"),
    ({'loss_tpl': Config(Lora)}, 'loss_tpl: expected the config of a loss'),
    ({'loss_tpl': Config(Dpo, beta=0.0)}, r'beta'),
    ({'loss_tpl': Config(SimPo, label_smoothing=0.5)}, r'label_smoothing'),
  ):
    with pytest.raises(ConfigError, match=message):
      config.clone().set(**change).instantiate()
  smooth = config.clone()
  smooth.lm_tpl.softmax_tpl.label_smoothing = 0.1
  with pytest.raises(ConfigError, match=r'softmax.label_smoothing: the losses of pairs of answers need'):
    smooth.instantiate()
  batch = batch_of()
  rows = data()
  with pytest.raises(
    ConfigError, match=r'reads chosen, rejected, mismatched, and a batch has .*; set its mismatched=True'
  ):
    made(Kto)[0].check_input(rows, {name: x for name, x in batch.items() if name != 'mismatched'})
  with pytest.raises(ConfigError, match='a PreferenceInput makes such batches'):
    model.check_input(rows, {'ids': batch['chosen']['ids'], 'weights': batch['weights']})
  bad = {**batch, 'rejected': {**batch['rejected'], 'ids': batch['rejected']['ids'] + V}}
  with pytest.raises(ConfigError, match=r"in 'rejected.ids', but task.model.vocab_size is 259"):
    model.check_input(rows, bad)
  rows_of_prompt = {**batch['rejected'], 'ids': batch['rejected']['ids'].copy()}
  assert rows_of_prompt['weights'][0, 0] == 0  # A token of a prompt.
  rows_of_prompt['ids'][0, 0] = V + 1
  with pytest.raises(ConfigError, match=r"found 260 in 'rejected.ids', but task.model.vocab_size is 259"):
    model.check_input(rows, {**batch, 'rejected': rows_of_prompt})
  small = config.clone()
  small.vocab_size = 128  # All ids of the first batch are smaller.
  with pytest.raises(ConfigError, match=r'ids go up to 255, but task.model.vocab_size is 128; it must be at least 256'):
    small.instantiate().check_input(rows, batch)
  with pytest.raises(
    ConfigError, match=r'pairs of answers, which a LanguageModel .*PreferenceModel.*train_preferences'
  ):
    lm().instantiate().check_input(rows, batch)
  with pytest.raises(ConfigError, match=r'rows have several pairs, and task.model.packed is False'):
    config.clone().set(packed=False).instantiate().check_input(rows, batch_of(True))
  with pytest.raises(ConfigError, match='a RewardModel is not exported'):
    describe_model(made('rewards')[0])
  encoder = transformer_encoder(vocab_size=V, model_dims=9, max_len=T, num_layers=1, num_heads=3, hidden_dims=10)
  with pytest.raises(ConfigError, match=r'task.model: expected a LanguageModel, got TransformerEncoder'):
    train_preferences(Config(SingleTask, model=encoder))


TWO_NETWORKS = encoder_decoder(vocab_size=V, model_dims=12, num_layers=1, num_heads=3, start_id=3)


@pytest.mark.parametrize(
  'model, train, message',
  [
    (lm().set(model_type='prefix'), train_rewards, r"task.model.model_type: a RewardModel has no such .*to 'causal'"),
    (TWO_NETWORKS, train_preferences, r'task.model.start_id: a PreferenceModel has no such'),
    (
      train_preferences(Config(SingleTask, model=lm()), Config(Ipo)).model,
      train_rewards,
      r'task.model.loss_tpl: a Rew',
    ),
  ],
  ids=['prefix', 'encoder-decoder', 'loss'],
)
def test_no_field_is_lost_silently(model, train, message):
  with pytest.raises(ConfigError, match=message):
    train(Config(SingleTask, model=model))


def test_fields_that_have_no_effect_on_rewards_may_be_lost():
  model = lm().set(tokens_are_bytes=True)
  model.decoder_tpl.max_decode_steps = 3
  assert train_rewards(Config(SingleTask, model=model)).model.instantiate().lm.vocab_size == V


def test_a_batch_of_pairs_that_fits_is_not_blamed_for_a_loss_that_is_not_finite():
  hints = hints_in(batch_of(), data(), made(Dpo)[0])
  assert not hints.found
