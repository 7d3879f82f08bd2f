"""BERT and RoBERTa: encoders that predict masked tokens, classify texts, or have no head."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from praxis_lite.bridges.hf.family import Values, WholeModelFamily
from praxis_lite.bridges.hf.files import StoredTensor
from praxis_lite.bridges.hf.hf_config import HfConfig, count_classes
from praxis_lite.bridges.hf.layer_pairs import block_pairs, encoder_sizes, encoder_values, linear_pairs, norm_pairs
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers.base import Layer
from praxis_lite.models import (
  BaseModel,
  MaskedLanguageModel,
  SequenceClassifier,
  TextEncoder,
  masked_language_model,
  sequence_classifier,
  text_encoder,
)


@dataclasses.dataclass(frozen=True)
class Encoder(WholeModelFamily):
  """An encoder, with a head or without; `architecture` is the name of the one that predicts masked tokens.

  Its linear layers are stored as [out, in], its tables as [ids, dims].
  """

  classifier: str = ''  # The architecture of the classifier.
  bare: str = ''  # The architecture without a head; the names of its tensors lack `prefix`.
  also_masked: tuple[str, ...] = ()  # Other architectures whose checkpoints have a masked language model.
  # Names of tensors of the head that predicts tokens: the linear layer, the norm and the softmax, each without
  # `.weight` or `.bias`, and then the full name of the softmax's bias.
  head_names: tuple[str, str, str, str] = ('', '', '', '')
  classifier_names: tuple[str, str] = ('', '')  # The names of the tensors of the classifier's pooler and softmax.
  counts_from_padding: bool = False  # Whether the first position is the padding id + 1, as in RoBERTa.

  network = (MaskedLanguageModel, SequenceClassifier, TextEncoder)
  table_path = 'encoder.embedding.w'
  own_heads = frozenset({'classifier'})

  @property
  def head(self) -> str:
    return f'{self.head_names[2]}.weight'

  def copies_in(self, hf: HfConfig) -> Mapping[str, str]:
    of_head, bias = f'{self.head_names[2]}.bias', self.head_names[3]
    return {of_head: bias} if hf['tie_word_embeddings'] else {bias: of_head}

  def network_in(self, model: BaseModel) -> Layer:
    return model

  @property
  def architectures(self) -> tuple[str, ...]:
    return self.architecture, self.classifier, self.bare

  def accepts(self, architecture: str) -> bool:
    return super().accepts(architecture) or architecture in self.also_masked

  def _model(self, hf: HfConfig) -> Config[Any]:
    hf.must_be('position_embedding_type', 'absolute')
    for name in ('is_decoder', 'add_cross_attention', 'is_encoder_decoder'):
      hf.must_be(name, False)
    hf.must_be('problem_type', None, 'single_label_classification')
    sizes: dict[str, Any] = {
      'vocab_size': hf.size('vocab_size'),
      'max_len': hf.size('max_position_embeddings'),
      'num_token_types': hf.size('type_vocab_size'),
      **encoder_sizes(hf),
    }
    model: Config[Any]
    if hf.has_architecture(self.classifier):
      model = sequence_classifier(num_classes=count_classes(hf), **sizes)
    elif hf.has_architecture(self.bare):
      model = text_encoder(pooler=hf.values.get(_POOLER, True) is not False, **sizes)
    else:
      model = masked_language_model(tie_embeddings=bool(hf['tie_word_embeddings']), **sizes)
      model.packed = False
      if self.counts_from_padding:  # RoBERTa's head has GELU, whatever config.json says.
        model.transform_tpl.activation = 'gelu'
    if self.counts_from_padding:
      padding = hf['pad_token_id']
      if type(padding) is not int or not 0 <= padding < sizes['max_len'] - 1:
        raise ConfigError(
          f'{hf.where}: pad_token_id = {padding!r}; positions begin after it, so it must be from 0 to '
          f'max_position_embeddings - 2 = {sizes["max_len"] - 2}'
        )
      model.encoder_tpl.first_position = padding + 1
    return model

  def prefix_in(self, hf: HfConfig) -> str:
    return '' if hf.has_architecture(self.bare) else self.prefix

  def to_stored(self, hf: HfConfig, names: Collection[str]) -> HfConfig:
    if hf.has_architecture(self.bare) and not any(name.startswith('pooler.') for name in names):
      return HfConfig({**hf.values, _POOLER: False}, hf.where)
    return hf

  def current_name(self, name: str) -> str:
    # Checkpoints from 2018 use the names gamma and beta.
    return re.sub(r'LayerNorm\.(gamma|beta)$', lambda m: f'LayerNorm.{_NORM[m[1]]}', name)

  def is_buffer(self, name: str, tensor: StoredTensor, hf: HfConfig) -> bool:
    return name == f'{self.prefix_in(hf)}embeddings.position_ids'

  def is_unused(self, name: str, hf: HfConfig) -> bool:
    if hf.has_architecture(self.bare):
      return False
    if hf.has_architecture(self.classifier):
      # RoBERTa's classifier has its own pooler instead of the encoder's.
      return name.startswith(f'{self.prefix}pooler.') and not self.classifier_names[0].startswith(self.prefix)
    if not hf['tie_word_embeddings'] and name == self.head_names[3]:
      return True  # A head that is not tied has a separate bias.
    return name.startswith((f'{self.prefix}pooler.', 'cls.seq_relationship.'))

  def values(self, model: MaskedLanguageModel | SequenceClassifier | TextEncoder) -> Values:
    encoder = model.encoder
    if encoder.embedding_norm_tpl is None or encoder.position_tpl is None:
      raise ConfigError(
        f'{encoder.path_name}: an encoder of transformers has learned positions, and a norm after the embeddings'
      )
    values: Values = {
      'vocab_size': encoder.vocab_size,
      'max_position_embeddings': (encoder.max_positions or 0) + encoder.first_position,
      'type_vocab_size': getattr(encoder.token_type_tpl, 'num_classes', 0),
      **encoder_values(encoder, encoder.embedding_norm.epsilon),
    }
    if self.counts_from_padding:
      values['pad_token_id'] = encoder.first_position - 1
    if isinstance(model, SequenceClassifier):
      return values | {'architectures': [self.classifier], 'num_labels': model.num_classes}
    if isinstance(model, TextEncoder):
      return values | {'architectures': [self.bare]} | ({} if model.pooler_tpl is not None else {_POOLER: False})
    return values | {'tie_word_embeddings': model.softmax_tpl is None}

  def table_of(self, weights: NestedDict) -> list[Pair]:
    if 'transform' in weights:
      return self.table('softmax' not in weights)
    if 'softmax' not in weights:
      own = linear_pairs('pooler.dense', 'pooler.linear') if 'pooler' in weights else ()
      return [*self._encoder_pairs(''), *own]
    pooler, softmax = self.classifier_names
    pairs = [*self._encoder_pairs(self.prefix), *linear_pairs(pooler, 'pooler.linear')]
    return [*pairs, *linear_pairs(softmax, 'softmax')]

  def table(self, tied: bool) -> list[Pair]:
    linear, norm, softmax, bias = self.head_names
    pairs = [
      *self._encoder_pairs(self.prefix),
      *linear_pairs(linear, 'transform.linear'),
      *norm_pairs(norm, 'transform.norm'),
    ]
    if tied:
      return [*pairs, Pair(bias, 'encoder.embedding.b')]
    return [*pairs, *linear_pairs(softmax, 'softmax')]

  def _encoder_pairs(self, prefix: str) -> Iterable[Pair]:
    theirs, ours = f'{prefix}embeddings.', 'encoder.'
    yield Pair(f'{theirs}word_embeddings.weight', f'{ours}embedding.w')
    yield Pair(f'{theirs}position_embeddings.weight', f'{ours}position.w')
    yield Pair(f'{theirs}token_type_embeddings.weight', f'{ours}token_type.w')
    yield from norm_pairs(f'{theirs}LayerNorm', f'{ours}embedding_norm')
    theirs, ours = f'{prefix}encoder.layer.{{layer}}.', 'encoder.transformer.layers.'
    yield from block_pairs(theirs, ours, 'attention.self')
    yield from norm_pairs(f'{theirs}attention.output.LayerNorm', f'{ours}attention_norm')
    yield from norm_pairs(f'{theirs}output.LayerNorm', f'{ours}ff_norm')


# Our own field of config.json: whether a model without a head has a pooler. transformers has no field for this.
_POOLER = 'add_pooling_layer'
_NORM = {'gamma': 'weight', 'beta': 'bias'}
_BERT = {
  'vocab_size': 30_522,
  'hidden_size': 768,
  'num_hidden_layers': 12,
  'num_attention_heads': 12,
  'intermediate_size': 3072,
  'hidden_act': 'gelu',
  'max_position_embeddings': 512,
  'type_vocab_size': 2,
  'layer_norm_eps': 1e-12,
  'pad_token_id': 0,
  'num_labels': 2,
  'tie_word_embeddings': True,
}
ENCODERS = (
  Encoder(
    *('bert', 'BertForMaskedLM', _BERT, 'bert.'),
    classifier='BertForSequenceClassification',
    bare='BertModel',
    also_masked=('BertForPreTraining',),
    head_names=(
      *('cls.predictions.transform.dense', 'cls.predictions.transform.LayerNorm'),
      *('cls.predictions.decoder', 'cls.predictions.bias'),
    ),
    classifier_names=('bert.pooler.dense', 'classifier'),
  ),
  Encoder(
    *('roberta', 'RobertaForMaskedLM', _BERT | {'vocab_size': 50_265, 'pad_token_id': 1}, 'roberta.'),
    classifier='RobertaForSequenceClassification',
    bare='RobertaModel',
    head_names=('lm_head.dense', 'lm_head.layer_norm', 'lm_head.decoder', 'lm_head.bias'),
    classifier_names=('classifier.dense', 'classifier.out_proj'),
    counts_from_padding=True,
  ),
)
