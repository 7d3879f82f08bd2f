"""BERT and RoBERTa: logits are those of a forward pass in NumPy, on meshes; tensors are written as they were read."""

from __future__ import annotations

import json
import math

import bert_by_hand
import jax
import numpy as np
import pytest
from checkpoints import assert_same_tensors, golden, tensors_of, weight, write
from on_meshes import MESHES, load

from praxis_lite.bridges.hf import read_model, write_model
from praxis_lite.bridges.hf.sizes import training_experiment
from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.inputs import ByteTokenizer
from praxis_lite.models import MaskedLanguageModel, SequenceClassifier, masked_language_model, sequence_classifier
from praxis_lite.runs import open_run, run_train
from praxis_lite.runs.records.record import read_record
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.mesh import bind_mesh

pytestmark = pytest.mark.usefixtures('shared_programs')

V, D, F, N, P, C = 37, 18, 20, 3, 16, 3
_SIZES = {
  'vocab_size': V,
  'hidden_size': D,
  'intermediate_size': F,
  'num_hidden_layers': 2,
  'num_attention_heads': N,
  'max_position_embeddings': P,
  'layer_norm_eps': 1e-5,
  'hidden_act': 'gelu',
}
_BERT = {'model_type': 'bert', 'type_vocab_size': 2, **_SIZES}
_ROBERTA = {'model_type': 'roberta', 'type_vocab_size': 1, 'pad_token_id': 1, **_SIZES}
CASES = {
  'bert': _BERT | {'architectures': ['BertForMaskedLM'], 'hidden_act': 'relu'},
  'bert_untied': _BERT | {'architectures': ['BertForMaskedLM'], 'tie_word_embeddings': False},
  'bert_classes': _BERT | {'architectures': ['BertForSequenceClassification'], 'num_labels': C},
  'roberta': _ROBERTA | {'architectures': ['RobertaForMaskedLM'], 'hidden_act': 'relu'},
  'roberta_classes': _ROBERTA | {'architectures': ['RobertaForSequenceClassification'], 'num_labels': C},
  'bert_bare': _BERT | {'architectures': ['BertModel']},
  'roberta_bare': _ROBERTA | {'architectures': ['RobertaModel'], 'add_pooling_layer': False},
}
every_case = pytest.mark.parametrize('case', CASES)
RNG = np.random.default_rng(0)
IDS = RNG.integers(2, V, (2, 11)).astype(np.int32)
IS_TOKEN = (np.arange(11) < np.array([[11], [7]])).astype(np.int32)
TYPES = np.where(np.arange(11) < 5, 0, IS_TOKEN).astype(np.int32)


def shapes_of(config):
  """The names and shapes of the tensors of a checkpoint, as transformers writes them."""
  kind, D, F = config['model_type'], config['hidden_size'], config['intermediate_size']

  def linear(name, out, inward):
    return {f'{name}.weight': (out, inward), f'{name}.bias': (out,)}

  def norm(name):
    return {f'{name}.weight': (D,), f'{name}.bias': (D,)}

  tables = {'word': config['vocab_size'], 'position': config['max_position_embeddings']}
  tables['token_type'] = config['type_vocab_size']
  prefix = bert_by_hand.prefix_of(config)
  shapes = {f'{prefix}embeddings.{name}_embeddings.weight': (size, D) for name, size in tables.items()}
  shapes |= norm(f'{prefix}embeddings.LayerNorm')
  for i in range(config['num_hidden_layers']):
    layer = f'{prefix}encoder.layer.{i}.'
    for name in ('self.query', 'self.key', 'self.value', 'output.dense'):
      shapes |= linear(f'{layer}attention.{name}', D, D)
    shapes |= norm(f'{layer}attention.output.LayerNorm') | norm(f'{layer}output.LayerNorm')
    shapes |= linear(f'{layer}intermediate.dense', F, D) | linear(f'{layer}output.dense', D, F)
  if not prefix:
    return shapes | (linear('pooler.dense', D, D) if config.get('add_pooling_layer', True) else {})
  if 'num_labels' in config:
    pooler, head = ('bert.pooler.dense', 'classifier')
    if kind == 'roberta':
      pooler, head = 'classifier.dense', 'classifier.out_proj'
    return shapes | linear(pooler, D, D) | linear(head, config['num_labels'], D)
  head, softmax = ('lm_head.', 'lm_head.') if kind == 'roberta' else ('cls.predictions.transform.', 'cls.predictions.')
  shapes |= linear(f'{head}dense', D, D) | norm(f'{head}{"layer_norm" if kind == "roberta" else "LayerNorm"}')
  if not config.get('tie_word_embeddings', True):
    return shapes | linear(f'{softmax}decoder', config['vocab_size'], D)
  return shapes | {f'{softmax}bias': (config['vocab_size'],)}


def make(folder, case, **changes):
  """Writes a checkpoint; returns its folder, config and tensors."""
  config = {**CASES[case], **changes}
  shapes = shapes_of(config)
  write(folder, config, shapes)
  return folder, config, {name: weight(name, shape, config['model_type']) for name, shape in shapes.items()}


def batch_of(config):
  types = TYPES if config['type_vocab_size'] > 1 else np.zeros_like(TYPES)
  return {'ids': IDS, 'segment_ids': IS_TOKEN, 'token_type_ids': types, 'weights': np.ones(2, np.float32)}


def outputs_of(there, batch):
  """The logits of tokens, log probabilities of classes, or states."""

  def run(variables):
    out, _ = there.model.apply(there.layout.unpad(variables), batch, method='predict', do_eval=True)
    if 'states' in out:
      return out['states']
    return out['logits'] if 'logits' in out else jax.numpy.log(out['probabilities'])

  return np.asarray(GuardedJit(bind_mesh(run, there.layout.mesh))(there.variables))


def expected_of(config, tensors):
  batch = batch_of(config)
  found = bert_by_hand.logits(config, tensors, IDS, IS_TOKEN, batch['token_type_ids'])
  if found.ndim == 2:
    found = found - np.log(np.exp(found).sum(-1, keepdims=True))
  assert np.abs(np.diff(found, axis=0)).max() > 0.03
  return found


def assert_close(found, expected):
  real = IS_TOKEN > 0 if found.ndim == 3 else np.ones(2, bool)
  np.testing.assert_allclose(found[real], expected[real], rtol=1e-5, atol=2e-5)


@every_case
def test_the_pass_in_numpy_gives_what_transformers_gave(case, tmp_path):
  _, config, tensors = make(tmp_path, case, pad_token_id=1)
  found = bert_by_hand.logits(config, tensors, IDS, IS_TOKEN, batch_of(config)['token_type_ids'])
  real = IS_TOKEN > 0 if found.ndim == 3 else np.ones(2, bool)
  np.testing.assert_allclose(found[real], np.array(golden('bert')[case])[real], rtol=1e-6, atol=1e-6)


@pytest.mark.slow_cases
@pytest.mark.parametrize('mesh', MESHES, ids=str)
@every_case
def test_logits_are_those_of_numpy_on_every_mesh_and_tensors_are_written_as_they_were(case, mesh, tmp_path):
  folder, config, tensors = make(tmp_path / 'source', case)
  there = load(folder, mesh)
  assert_close(outputs_of(there, batch_of(config)), expected_of(config, tensors))
  assert_same_tensors(there.write(tmp_path / 'out', max_file_bytes=5000), tensors)
  assert json.loads((tmp_path / 'out' / 'config.json').read_text()).items() >= config.items()


def test_checkpoints_of_2018_have_other_names_copies_and_parts_that_are_not_used(tmp_path):
  """As google-bert/bert-base-uncased: gamma and beta, a pooler, a head for pairs, and the table of the softmax."""
  folder, config, tensors = make(tmp_path / 'plain', 'bert')
  plain = read_model(folder)
  old = {
    name.replace('LayerNorm.weight', 'LayerNorm.gamma').replace('LayerNorm.bias', 'LayerNorm.beta'): x
    for name, x in tensors.items()
  }
  old['cls.predictions.decoder.weight'] = tensors['bert.embeddings.word_embeddings.weight']
  old['cls.predictions.decoder.bias'] = tensors['cls.predictions.bias']
  left_out = ('bert.pooler.dense.weight', 'cls.seq_relationship.weight', 'cls.seq_relationship.bias')
  old |= dict.fromkeys(left_out, np.ones((2, D), np.float32))
  config |= {'architectures': ['BertForPreTraining']}
  write(tmp_path / 'old', config, {}, **old)
  jax.tree.map(np.testing.assert_array_equal, read_model(tmp_path / 'old').variables, plain.variables)
  note = load(tmp_path / 'old').checkpoint.notes
  assert len(note) == 1 and all(name in note[0] for name in left_out)
  other = {**old, 'cls.predictions.decoder.weight': old['cls.predictions.decoder.weight'] + 1}
  write(tmp_path / 'other', config, {}, **other)
  untied = load(tmp_path / 'other')
  assert 'they are not tied' in untied.checkpoint.notes[1] and 'softmax' in untied.variables


def test_a_checkpoint_of_roberta_may_have_copies_a_buffer_and_a_pooler(tmp_path):
  folder, config, tensors = make(tmp_path / 'plain', 'roberta')
  more = {
    'lm_head.decoder.weight': tensors['roberta.embeddings.word_embeddings.weight'],
    'lm_head.decoder.bias': tensors['lm_head.bias'],
    'roberta.embeddings.position_ids': np.arange(P, dtype=np.uint8)[None],
    'roberta.pooler.dense.weight': np.ones((D, D), np.float32),
  }
  write(tmp_path / 'more', config, {}, **tensors, **more)
  found = load(tmp_path / 'more')
  jax.tree.map(np.testing.assert_array_equal, found.true_variables, load(folder).true_variables)
  assert [note.split('left out ')[1] for note in found.checkpoint.notes] == [
    'roberta.pooler.dense.weight, which the architecture of config.json does not have'
  ]


@pytest.mark.slow
def test_an_imported_run_trains_predicts_and_is_exported(tmp_path, capsys):
  folder, _, tensors = make(tmp_path / 'source', 'bert', vocab_size=300)
  run = tmp_path / 'run'
  assert main(['import-hf', str(folder), f'--job_log_dir={run}', '--set', 'task.ici_mesh_shape=(1,2,1)']) == 0
  assert 'bert, ' in capsys.readouterr().out
  assert main(['export-hf', f'--job_log_dir={run}', f'--out={tmp_path / "out"}', '--max_file_gb=0.000008']) == 0
  assert_same_tensors(tmp_path / 'out', tensors)

  (tmp_path / 'text.txt').write_text('a quick brown fox. ' * 40)
  recorded = read_record(run).config
  for data in recorded.datasets:
    assert data.seq_len == P - 2
    data.set(path=str(tmp_path / 'text.txt'), batch_size=2)
    data.tokenizer_tpl = Config(ByteTokenizer, bos_id=256, eos_id=257, pad_id=258)
  recorded.task.train.set(num_train_steps=2, save_interval_steps=1, eval_interval_steps=None)
  assert run_train(recorded, run).step == 2
  assert open_run(run).load().predict({'ids': IDS, 'segment_ids': IS_TOKEN})['logits'].shape == (2, 11, 300)


def test_without_a_tokenizer_an_encoder_says_what_it_needs_and_that_it_does_not_decode(tmp_path, capsys):
  folder, _, _ = make(tmp_path / 'source', 'bert', vocab_size=256)
  run = f'--job_log_dir={tmp_path / "run"}'
  (tmp_path / 'text.txt').write_text('a quick brown fox. ' * 40)
  text = ['--set', f'datasets[*].path={tmp_path / "text.txt"}']
  byte_tokens = ['--set', 'datasets[*].tokenizer_tpl=praxis_lite.inputs.ByteTokenizer']
  assert main(['import-hf', str(folder), run]) == 0
  assert main(['decode', run, '--prompt=a']) == 2
  assert 'needs a language model; the model of this experiment is of class Masked' in capsys.readouterr().err
  assert main(['train', run, *text]) == 2
  assert 'datasets[0].tokenizer_tpl.path: a value is required but not set' in (said := capsys.readouterr().err)
  assert 'name the folder of a tokenizer, or take bytes as tokens' in said
  assert main(['train', run, *text, *byte_tokens]) == 2
  assert 'at least 257, or set its mask_id, which is 256 now, to an id below 256 that no' in capsys.readouterr().err


@pytest.mark.slow
def test_an_imported_classifier_trains_on_labelled_texts(tmp_path):
  folder, _, _ = make(tmp_path / 'source', 'roberta_classes', vocab_size=300, id2label={'0': 'a', '1': 'b', '2': 'c'})
  run = tmp_path / 'run'
  assert main(['import-hf', str(folder), f'--job_log_dir={run}']) == 0
  (tmp_path / 'a.tsv').write_text('good\t1\nbad\t0\nso so\t2\n')
  recorded = read_record(run).config
  for data in recorded.datasets:
    assert (data.seq_len, data.pair_style) == (P - 2, 'roberta')
    data.set(path=str(tmp_path / 'a.tsv'), batch_size=3, tokenizer_tpl=Config(ByteTokenizer, bos_id=256, eos_id=257))
  recorded.task.train.set(num_train_steps=1, save_interval_steps=1, eval_interval_steps=None)
  assert run_train(recorded, run).step == 1
  assert main(['export-hf', f'--job_log_dir={run}', f'--out={tmp_path / "out"}']) == 0
  written = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert written['num_labels'] == 3 and written['id2label']['2'] == 'c'
  assert not (tmp_path / 'out' / 'generation_config.json').exists()
  assert read_model(tmp_path / 'out').model.num_classes == 3


@pytest.mark.slow
def test_an_imported_model_without_a_head_predicts_features_and_is_exported(tmp_path, capsys):
  folder, config, tensors = make(tmp_path / 'source', 'bert_bare')
  run = tmp_path / 'run'
  assert main(['import-hf', str(folder), f'--job_log_dir={run}']) == 0
  found = (
    open_run(run).load().predict({name: batch_of(config)[name] for name in ('ids', 'segment_ids', 'token_type_ids')})
  )
  states = expected_of(config, tensors)
  assert_close(found['states'], states)
  np.testing.assert_allclose(found['pooled'], bert_by_hand.pooled(tensors, states), rtol=1e-5, atol=1e-5)
  one_row = open_run(run).load().predict({'ids': IDS[:1, :5], 'token_type_ids': TYPES[:1, :5]})
  alone = bert_by_hand.logits(config, tensors, IDS[:1, :5], np.ones((1, 5)), TYPES[:1, :5])
  np.testing.assert_allclose(one_row['states'], alone, rtol=1e-5, atol=2e-5)
  assert main(['export-hf', f'--job_log_dir={run}', f'--out={tmp_path / "out"}']) == 0
  assert_same_tensors(tmp_path / 'out', tensors)
  assert json.loads((tmp_path / 'out' / 'config.json').read_text())['architectures'] == ['BertModel']
  capsys.readouterr()
  assert main(['train', f'--job_log_dir={run}']) != 0  # There is nothing to train on, and no loss.
  model = read_model(folder)
  with pytest.raises(ConfigError, match=r'a TextEncoder has no loss.*init_from'):
    model.model.apply(model.variables, batch_of(config))


def test_a_model_without_a_head_may_lack_its_pooler_have_other_names_or_something_else(tmp_path):
  _, config, tensors = make(tmp_path / 'plain', 'bert_bare')
  plain = read_model(tmp_path / 'plain')
  write(tmp_path / 'prefixed', config, {}, **{f'bert.{name}': x for name, x in tensors.items()})
  jax.tree.map(np.testing.assert_array_equal, read_model(tmp_path / 'prefixed').variables, plain.variables)
  states = {name: x for name, x in tensors.items() if 'pooler' not in name}
  buffer = np.arange(P, dtype=np.uint8)[None]
  write(tmp_path / 'states', config, {}, **states, **{'embeddings.position_ids': buffer})
  found = read_model(tmp_path / 'states')
  assert 'pooler' in plain.variables and 'pooler' not in found.variables and found.model.pooler_tpl is None
  write_model(tmp_path / 'again', found.model, found.variables)
  assert_same_tensors(tmp_path / 'again', states)
  assert json.loads((tmp_path / 'again' / 'config.json').read_text())['add_pooling_layer'] is False
  for name in ('cls.predictions.bias', 'classifier.weight', 'encoder.layer.0.extra'):
    write(tmp_path / name, config, {}, **tensors, **{name: np.ones(V, np.float32)})
    with pytest.raises(CheckpointError, match=f'does not account for: {name}$'):
      read_model(tmp_path / name)
  write(tmp_path / 'half', config, {}, **{name: x for name, x in tensors.items() if name != 'pooler.dense.bias'})
  with pytest.raises(CheckpointError, match=r'lacks pooler\.dense\.bias$'):
    read_model(tmp_path / 'half')


@pytest.mark.slow
@pytest.mark.parametrize('repeat', [True, False])
def test_models_of_ours_are_written_and_read_again(repeat, tmp_path):
  sizes = {'vocab_size': 11, 'model_dims': 8, 'num_layers': 2, 'num_heads': 2, 'hidden_dims': 12, 'repeat': repeat}
  masked = masked_language_model(**sizes)
  offset = masked.clone()
  offset.encoder_tpl.first_position = 3
  classes = sequence_classifier(num_classes=4, **sizes)
  for name, config, kind, cls in (
    ('bert', masked, 'bert', MaskedLanguageModel),
    ('offset', offset, 'roberta', MaskedLanguageModel),
    ('classes', classes, 'bert', SequenceClassifier),
  ):
    model = config.instantiate()
    variables = model.init(jax.random.key(0))
    write_model(tmp_path / name, model, variables)
    assert json.loads((tmp_path / name / 'config.json').read_text())['model_type'] == kind
    found = read_model(tmp_path / name)
    assert type(found.model) is cls and found.model.encoder.first_position == (3 if name == 'offset' else 0)
    write_model(tmp_path / f'{name} again', found.model, found.variables)
    assert_same_tensors(tmp_path / f'{name} again', tensors_of(tmp_path / name))


@pytest.mark.parametrize(
  'change, says',
  [
    (lambda p: p.set(pooling='mean'), r"differs from bert, the nearest, in .*pooling, which is 'mean' here"),
    (lambda p: p.set(pooler_tpl=None), r'belongs to none of the families bert, roberta'),
    (lambda p: p.encoder_tpl.set(embedding_norm_tpl=None), 'learned positions, and a norm after the embeddings'),
    (lambda p: p.encoder_tpl.set(token_type_tpl=None), r'belongs to none of the families'),
    (lambda p: setattr(p.encoder_tpl.transformer_tpl.layers_tpl.ff_tpl, 'activation', 'softplus'), 'softplus'),
    (lambda p: setattr(p.encoder_tpl.transformer_tpl.layers_tpl, 'norm_policy', 'pre'), 'norm_policy'),
  ],
)
def test_a_model_of_no_family_is_told_why(change, says, tmp_path):
  config = sequence_classifier(num_classes=4, vocab_size=11, model_dims=8, num_layers=2, num_heads=2)
  change(config)
  model = config.instantiate()
  with pytest.raises(ConfigError, match=says):
    write_model(tmp_path, model, jax.eval_shape(model.init, jax.random.key(0)))


@pytest.mark.parametrize(
  'case, changes, says',
  [
    ('bert', {'position_embedding_type': 'relative_key'}, 'position_embedding_type = "relative_key" is not supported'),
    ('bert', {'is_decoder': True}, 'is_decoder = true is not supported'),
    ('bert', {'hidden_act': 'softer'}, "hidden_act = 'softer' is not supported"),
    ('bert', {'hidden_size': 0}, 'hidden_size = 0; expected an integer of at least 1'),
    ('bert', {'architectures': ['BertForQuestionAnswering']}, 'of bert, BertForMaskedLM, BertForSequenceClassif'),
    (
      'bert',
      {'architectures': ['BertLMHeadModel']},
      r'\["BertLMHeadModel"\] is not supported; of bert.* and BertModel',
    ),
    ('roberta', {'architectures': ['RobertaForCausalLM']}, 'of roberta, RobertaForMaskedLM, RobertaForSeq'),
    ('bert_classes', {'problem_type': 'multi_label_classification'}, 'problem_type = "multi_label_class'),
    ('bert_classes', {'id2label': {'0': 'score'}}, 'a head with 1 label computes a number'),
    ('roberta', {'pad_token_id': P}, 'pad_token_id'),
  ],
)
def test_a_config_that_is_not_supported_is_named(case, changes, says, tmp_path):
  write(tmp_path, CASES[case] | changes, shapes_of(CASES[case]))
  with pytest.raises(ConfigError, match=says):
    read_model(tmp_path)


def test_missing_and_other_tensors_are_named(tmp_path):
  _, config, tensors = make(tmp_path / 'a', 'bert')
  left = {name: x for name, x in tensors.items() if name != 'cls.predictions.bias'}
  write(tmp_path / 'b', config, {}, **left)
  with pytest.raises(CheckpointError, match=r'lacks cls\.predictions\.bias$'):
    read_model(tmp_path / 'b')
  write(tmp_path / 'c', config, {}, **tensors, **{'bert.extra.weight': np.ones(2, np.float32)})
  with pytest.raises(CheckpointError, match=r'does not account for: bert\.extra\.weight'):
    read_model(tmp_path / 'c')
  write(tmp_path / 'd', config, {}, **{name.removeprefix('bert.'): x for name, x in left.items() if 'cls' not in name})
  with pytest.raises(CheckpointError, match=r'lacks cls\.predictions\.'):  # A model without its head.
    read_model(tmp_path / 'd')


def test_an_experiment_of_published_sizes_from_its_config():
  found = training_experiment({'model_type': 'bert', 'architectures': ['BertForMaskedLM']})
  weights = found.task.instantiate().model.abstract_init()
  # BERT base without pooler and next sentence head: 109,514,298 parameters with the tied table once.
  assert sum(math.prod(w.full_shape) for w in jax.tree.leaves(weights)) == 109_514_298
  assert found.task.model.encoder_tpl.transformer_tpl.remat == 'full'
  assert {data.row_len for data in (d.clone(path='x').instantiate() for d in _byte_datasets(found))} == {512}


def _byte_datasets(experiment):
  return [data.clone(tokenizer_tpl=Config(ByteTokenizer)) for data in experiment.datasets]
