"""Both ways with `transformers` itself, where it is installed: logits and greedy tokens, on meshes."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from checkpoints import CASES, IDS
from on_meshes import MESHES, load

import praxis_lite
from praxis_lite.bridges.hf import export_run, import_run, write_model
from praxis_lite.inputs import HfTokenizer
from praxis_lite.models import transformer_lm
from praxis_lite.runs.records.record import read_record

torch = pytest.importorskip('torch', reason='needs PyTorch: pip install praxis_lite[hf-oracle]')
transformers = pytest.importorskip('transformers', reason='needs transformers: pip install praxis_lite[hf-oracle]')
from theirs import greedy_of, loaded, logits_of  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('shared_programs')]


def random_model(case):
  """A model with weights as transformers draws them, but larger, so that logits differ."""
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**CASES[case]))
  with torch.no_grad():
    for parameter in model.parameters():
      parameter += 0.2 * torch.randn_like(parameter)
  return model


@pytest.mark.parametrize('mesh', MESHES, ids=str)
@pytest.mark.parametrize('case', CASES)
def test_there_and_back(case, mesh, tmp_path):
  random_model(case).save_pretrained(tmp_path / 'theirs', max_shard_size='8KB')
  theirs = loaded(tmp_path / 'theirs')
  expected, tokens = logits_of(theirs), greedy_of(theirs, 6)

  ours = load(tmp_path / 'theirs', mesh, new_tokens=6)
  np.testing.assert_allclose(ours.logits(IDS), expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(ours.greedy(IDS, 6), tokens)

  back = loaded(ours.write(tmp_path / 'ours', max_file_bytes=8000))
  np.testing.assert_allclose(logits_of(back), expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(greedy_of(back, 6), tokens)
  state, original = back.state_dict(), theirs.state_dict()
  assert state.keys() == original.keys()
  for name, tensor in original.items():
    assert torch.equal(state[name], tensor), name


def test_16_bits_there_and_back(tmp_path):
  random_model('llama').to(torch.bfloat16).save_pretrained(tmp_path / 'theirs')
  import_run(tmp_path / 'theirs', tmp_path / 'run')
  export_run(read_record(tmp_path / 'run').config, tmp_path / 'run', tmp_path / 'ours')
  theirs, ours = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ('theirs', 'ours'))
  assert ours.dtype == torch.bfloat16
  for name, tensor in theirs.state_dict().items():
    assert torch.equal(ours.state_dict()[name], tensor), name


def chat_tokenizer():
  """A tokenizer of transformers with a chat template."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  trainer = trainers.BpeTrainer(special_tokens=['<s>', '</s>', '<|user|>', '<|assistant|>'], show_progress=False)
  tokenizer.train_from_iterator(['the cat sat on the mat'] * 9, trainer)
  tokenizer.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 0)])
  theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token='<s>', eos_token='</s>')
  theirs.chat_template = (
    "{{- bos_token }}\n{%- for m in messages %}\n  {{- '<|' + m.role + '|>' + m['content'] | trim + eos_token }}\n"
    '{%- endfor %}\n{%- if add_generation_prompt %}<|assistant|>{% endif %}'
  )
  return theirs


def test_an_export_generates_the_same_with_its_tokenizer_and_settings(tmp_path):
  """As a server that loads the folder would: tokens of a chat, stop token, penalties."""
  tokenizer = chat_tokenizer()
  model = transformer_lm(vocab_size=len(tokenizer), model_dims=18, num_layers=2, num_heads=3).instantiate()
  rng = np.random.default_rng(0)
  variables = jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape, np.float32), model.init(jax.random.key(0)))
  write_model(tmp_path / 'source', model, variables)
  tokenizer.save_pretrained(tmp_path / 'source')
  says = {'repetition_penalty': 1.3, 'no_repeat_ngram_size': 3, 'max_new_tokens': 20, 'eos_token_id': 1}
  (tmp_path / 'source' / 'generation_config.json').write_text(json.dumps(says))
  import_run(tmp_path / 'source', tmp_path / 'run')
  export_run(read_record(tmp_path / 'run').config, tmp_path / 'run', tmp_path / 'out')

  theirs, tokenizer = loaded(tmp_path / 'out'), transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
  run = praxis_lite.open_run(tmp_path / 'run').load()
  messages = [{'role': 'user', 'content': 'the cat'}]
  ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors='pt', return_dict=True)
  assert ids['input_ids'][0].tolist() == run.tokenizer.chat_ids(messages)
  expected = theirs.generate(**ids, pad_token_id=0)[0, ids['input_ids'].shape[1] :].tolist()
  assert run.decode([run.tokenizer.chat_ids(messages)]) == [expected]
  assert expected != run.decode([run.tokenizer.chat_ids(messages)], repetition_penalty=1.0)[0]


@pytest.mark.parametrize('penalty', [0.0, 1.5])
def test_beams_of_an_import_are_those_of_transformers(penalty, tmp_path):
  """With 'never', both end the search only when nothing better can be found."""
  random_model('llama').save_pretrained(tmp_path / 'theirs')
  says = {'num_beams': 3, 'length_penalty': penalty, 'early_stopping': 'never', 'max_new_tokens': 8, 'eos_token_id': 5}
  (tmp_path / 'theirs' / 'generation_config.json').write_text(json.dumps(says))
  import_run(tmp_path / 'theirs', tmp_path / 'run')
  run, theirs = praxis_lite.open_run(tmp_path / 'run').load(), loaded(tmp_path / 'theirs')
  for prompt in IDS[:, :4].tolist():
    ids = torch.tensor([prompt])
    found = theirs.generate(ids, attention_mask=torch.ones_like(ids), num_return_sequences=2, pad_token_id=0)
    expected = [row[: row.index(5) + 1] if 5 in row else row for row in found[:, 4:].tolist()]
    assert run.decode([prompt], num_best=2) == expected


def test_a_tokenizer_and_its_chats_are_those_of_transformers(tmp_path):
  theirs = chat_tokenizer()
  theirs.save_pretrained(tmp_path)
  ours = HfTokenizer(path=str(tmp_path))
  messages = [{'role': 'user', 'content': ' the cat\n'}]
  assert ours.special_ids == (0, 1, 1)
  assert ours.prompt_ids('the mat') == theirs('the mat')['input_ids']
  assert ours.decode([0, 4, 5, 6, 1]) == theirs.decode([0, 4, 5, 6, 1], skip_special_tokens=True)
  expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
  assert ours.chat_prompt(messages) == expected == '<s><|user|>the cat</s><|assistant|>'
  assert ours.chat_ids(messages) == theirs(expected, add_special_tokens=False)['input_ids']


@pytest.mark.parametrize('style', ['llama', 'gpt2'])
def test_a_model_that_was_trained_here_is_loaded(style, tmp_path):
  model = transformer_lm(vocab_size=37, model_dims=18, num_layers=2, num_heads=3, style=style).instantiate()
  rng = np.random.default_rng(0)
  variables = jax.tree.map(lambda x: x + 0.2 * rng.standard_normal(x.shape, np.float32), model.init(jax.random.key(0)))
  write_model(tmp_path, model, variables)
  expected, _ = model.lm.apply(variables['lm'], IDS, method='logits')
  np.testing.assert_allclose(logits_of(loaded(tmp_path)), expected, rtol=1e-5, atol=1e-5)
