"""The forward passes in NumPy, which tests of several families use, compute what `transformers` computes.

And `transformers` loads our exports of these families, which compute the same as what was imported.
"""

from __future__ import annotations

import bart_by_hand
import bert_by_hand
import numpy as np
import pytest
import resnet_by_hand
import t5_by_hand
import test_bart as bart
import test_bert as bert
import test_clip as clip
import test_resnet as resnet
import test_t5 as t5
import test_vit as vit
import test_vit_mae as vit_mae
import test_whisper as whisper
import towers_by_hand
import vit_by_hand
import vit_mae_by_hand
import whisper_by_hand
from on_meshes import load

torch = pytest.importorskip('torch', reason='needs PyTorch: pip install praxis_lite[hf-oracle]')
transformers = pytest.importorskip('transformers', reason='needs transformers: pip install praxis_lite[hf-oracle]')

pytestmark = pytest.mark.slow


def loaded(folder, architecture, without=()):
  """The model, with the tensors of the checkpoint and no others."""
  model, report = getattr(transformers, architecture).from_pretrained(
    folder, attn_implementation='eager', dtype=torch.float64, output_loading_info=True
  )
  # A head of its own has a bias of its own, and the other one is not used.
  assert report['missing_keys'] <= {'cls.predictions.bias', *without} and not report['unexpected_keys'], report
  return model.eval()


def tensor(x):
  return torch.tensor(np.asarray(x), dtype=torch.long)


def bert_outputs(case, folder):
  """The logits or states, float64, and the pooled states, or None; with the config and the tensors."""
  folder, config, tensors = bert.make(folder, case, pad_token_id=1)
  pooler = ('pooler.dense.weight', 'pooler.dense.bias')  # What transformers makes anew if a checkpoint has none.
  without = () if pooler[0] in tensors else pooler
  model, types = loaded(folder, config['architectures'][0], without), bert.batch_of(config)['token_type_ids']
  with torch.no_grad():
    out = model(tensor(bert.IDS), tensor(bert.IS_TOKEN), token_type_ids=tensor(types))
  return (out.logits if 'logits' in out else out.last_hidden_state).numpy(), out, config, tensors


def bart_logits(case, folder):
  folder, config, tensors = bart.make(folder, case)
  return _of_sources(loaded(folder, 'BartForConditionalGeneration'), bart), config, tensors


def t5_logits(case, folder):
  folder, config, tensors = t5.make(folder, case)
  model = loaded(folder, 'MT5ForConditionalGeneration' if case == 'mt5' else 'T5ForConditionalGeneration')
  return _of_sources(model, t5), config, tensors


def _of_sources(model, family):
  with torch.no_grad():
    sources, is_source, ids = (tensor(x) for x in (family.SOURCES, family.IS_SOURCE, family.IDS))
    return model(sources, attention_mask=is_source, decoder_input_ids=ids).logits.numpy()


@pytest.mark.parametrize('case', bert.CASES)
def test_bert_is_that_of_transformers(case, tmp_path):
  found, out, config, tensors = bert_outputs(case, tmp_path)
  types = bert.batch_of(config)['token_type_ids']
  expected = bert_by_hand.logits(config, tensors, bert.IDS, bert.IS_TOKEN, types)
  bert.assert_close(found, expected)
  if 'pooler.dense.weight' in tensors:
    np.testing.assert_allclose(out.pooler_output.numpy(), bert_by_hand.pooled(tensors, expected), rtol=1e-6)


@pytest.mark.parametrize('case', bart.CASES)
def test_bart_is_that_of_transformers(case, tmp_path):
  found, config, tensors = bart_logits(case, tmp_path)
  expected = bart_by_hand.logits(config, tensors, bart.SOURCES, bart.IS_SOURCE, bart.IDS)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('case', t5.CASES)
def test_t5_is_that_of_transformers(case, tmp_path):
  found, config, tensors = t5_logits(case, tmp_path)
  expected = t5_by_hand.logits(config, tensors, t5.SOURCES, t5.IS_SOURCE, t5.IDS)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('case', vit.CASES)
def test_vit_is_that_of_transformers(case, tmp_path):
  folder, config, tensors = vit.make(tmp_path, case)
  model = loaded(folder, config['architectures'][0])
  with torch.no_grad():
    found = model(torch.tensor(vit.IMAGES.transpose(0, 3, 1, 2), dtype=torch.float64))
  found = found.logits if 'num_labels' in config else found.pooler_output
  np.testing.assert_allclose(found.numpy(), vit_by_hand.outputs(config, tensors, vit.IMAGES), rtol=1e-5, atol=1e-5)


def test_vit_mae_is_that_of_transformers(tmp_path):
  folder, config, tensors = vit_mae.make(tmp_path, image_size=9)  # It takes no pixels that fill no patch.
  model = loaded(folder, 'ViTMAEForPreTraining')
  with torch.no_grad():
    pixels = torch.tensor(vit_mae.IMAGES[:, :9, :9].transpose(0, 3, 1, 2), dtype=torch.float64)
    found = model(pixels, noise=torch.tensor(vit_mae.NOISE))
  expected = vit_mae_by_hand.outputs(config, tensors, vit_mae.IMAGES, vit_mae.NOISE)
  np.testing.assert_allclose(found.logits.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('case', resnet.CASES)
def test_resnet_bit_and_convnext_are_those_of_transformers(case, tmp_path):
  folder, config, tensors = resnet.make(tmp_path, case)
  norms = {name.rpartition('.')[0] for name in tensors if name.endswith('running_mean')}
  counters = [f'{norm}.num_batches_tracked' for norm in norms]  # Logits do not depend on them.
  model = loaded(folder, config['architectures'][0], counters)
  with torch.no_grad():
    found = model(torch.tensor(resnet.IMAGES.transpose(0, 3, 1, 2), dtype=torch.float64)).logits.numpy()
  np.testing.assert_allclose(found, resnet_by_hand.outputs(config, tensors, resnet.IMAGES), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('case', clip.CASES)
def test_clip_and_siglip_are_those_of_transformers(case, tmp_path):
  square = clip.CASES[case]['vision_config'] | {'image_size': 8, 'patch_size': 3}  # It has no other form there.
  folder, config, tensors = clip.make(tmp_path, case, vision_config=square)
  model, images = loaded(folder, config['architectures'][0]), clip.IMAGES[:, :, :8]
  with torch.no_grad():
    pixels = torch.tensor(images.transpose(0, 3, 1, 2), dtype=torch.float64)
    found = model(input_ids=tensor(clip.IDS), pixel_values=pixels)
  expected = towers_by_hand.embeddings(config, tensors, images, clip.IDS)
  for one, other in zip((found.image_embeds, found.text_embeds, found.logits_per_text), expected):
    np.testing.assert_allclose(one.numpy(), other, rtol=1e-5, atol=1e-5)


def test_whisper_is_that_of_transformers(tmp_path):
  """Features of recordings, logits, and the tokens that `generate` writes with its forced and suppressed tokens."""
  extractor = transformers.WhisperFeatureExtractor(feature_size=whisper.M, chunk_length=1)
  features = extractor(list(whisper.AUDIO), sampling_rate=16_000, return_tensors='np').input_features
  expected = whisper_by_hand.features(whisper.AUDIO, whisper.M, whisper.WINDOW)
  np.testing.assert_allclose(features.transpose(0, 2, 1), expected, atol=2e-5)
  folder, config, tensors = whisper.make(tmp_path)
  model = loaded(folder, 'WhisperForConditionalGeneration')
  with torch.no_grad():
    x = torch.tensor(expected.transpose(0, 2, 1))
    found = model(x, decoder_input_ids=tensor(whisper.IDS)).logits.numpy()
    tokens = model.generate(x, language='en', task='transcribe', max_new_tokens=5, do_sample=False).numpy()
  np.testing.assert_allclose(
    found, whisper_by_hand.logits(config, tensors, expected, whisper.IDS), rtol=1e-5, atol=1e-5
  )
  given = np.tile([whisper.START, 33, 34, 36], (2, 1))
  written = whisper_by_hand.greedy(config, tensors, expected, given, 5, (4, 9, 11), (7, whisper.END))
  assert len(tokens) == 2
  for row, ids in zip(written, tokens):
    ids = [i for i in ids.tolist() if i not in given[0]]
    assert row.tolist()[: len(ids)] == ids


def pixels(images):
  return torch.tensor(images.transpose(0, 3, 1, 2), dtype=torch.float64)


def sound():
  shape = 2, whisper.M, 2 * whisper.S
  return torch.linspace(-1, 1, 2 * whisper.M * 2 * whisper.S, dtype=torch.float64).reshape(shape)


def make_clip(folder, case):
  square = clip.CASES[case]['vision_config'] | {'image_size': 8, 'patch_size': 3}
  return clip.make(folder, case, vision_config=square)


# Of each family, what makes a checkpoint of a case, and what transformers computes.
EXPORTS = {
  'bert': (bert, bert.make, lambda model: model(tensor(bert.IDS), tensor(bert.IS_TOKEN))[0]),
  'bart': (bart, bart.make, lambda model: _of_sources(model, bart)),
  't5': (t5, t5.make, lambda model: _of_sources(model, t5)),
  'vit': (vit, vit.make, lambda model: model(pixels(vit.IMAGES))[-1]),
  'resnet': (resnet, resnet.make, lambda model: model(pixels(resnet.IMAGES))[0]),
  'vit_mae': (
    vit_mae,
    lambda folder, _: vit_mae.make(folder, image_size=9),
    lambda model: model(pixels(vit_mae.IMAGES[:, :9, :9]), noise=torch.tensor(vit_mae.NOISE)).logits,
  ),
  'clip': (
    clip,
    make_clip,
    lambda model: model(input_ids=tensor(clip.IDS), pixel_values=pixels(clip.IMAGES[:, :, :8])).logits_per_text,
  ),
  'whisper': (
    whisper,
    lambda folder, _: whisper.make(folder),
    lambda model: model(sound(), decoder_input_ids=tensor(whisper.IDS)).logits,
  ),
}
_CASES = [(name, case) for name, (family, *_) in EXPORTS.items() for case in getattr(family, 'CASES', (name,))]
_WITHOUT = {'mt5': 'MT5ForConditionalGeneration', 't5': 'T5ForConditionalGeneration'}
_WITHOUT |= {'bart': 'BartForConditionalGeneration', 'vit_mae': 'ViTMAEForPreTraining'}
_WITHOUT |= {'whisper': 'WhisperForConditionalGeneration'}


@pytest.mark.parametrize('name, case', _CASES)
def test_an_export_computes_in_transformers_what_was_imported(name, case, tmp_path):
  _, make, run = EXPORTS[name]
  (tmp_path / 'theirs').mkdir()
  folder, config, _ = make(tmp_path / 'theirs', case)
  exported = load(folder).write(tmp_path / 'ours')
  architecture = config['architectures'][0] if 'architectures' in config else _WITHOUT[config['model_type']]

  def computed(folder):
    torch.manual_seed(0)  # Of a pooler that the checkpoint lacks.
    model = getattr(transformers, architecture)
    loaded = model.from_pretrained(folder, attn_implementation='eager', dtype=torch.float64).eval()
    with torch.no_grad():
      return np.asarray(run(loaded))

  expected = computed(folder)
  assert np.abs(expected).max() > 1e-3
  np.testing.assert_allclose(computed(exported), expected, rtol=1e-6, atol=1e-7)
