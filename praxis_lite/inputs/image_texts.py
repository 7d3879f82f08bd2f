"""Encoded images with a text, from files of records, as batches for a `TwoTowerModel`.

    text    ^ a a a $ . . .      ^ begins and $ ends a text, . is padding; a text that is too long is cut

A batch has `image`, [B, height, width, channels] float32; `ids` and `segment_ids` (0 is padding), [B, T] int32; and
`weights`, [B] float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, build_at, template
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs.image_records import ImageRecordInput
from praxis_lite.inputs.rows import Struct
from praxis_lite.inputs.tensorflow import tf
from praxis_lite.inputs.tokenizers import BaseTokenizer, ByteTokenizer


class ImageTextRecordInput(ImageRecordInput):
  """JPEG, PNG, BMP or GIF images with a text, in files of the kinds that `ImageRecordInput` reads.

  Attributes: those of `ImageRecordInput` besides `label_feature`, and
    text_feature: name of the feature with the text, as UTF-8.
    text_len: T, tokens of a row, including the begin and end tokens.
    tokenizer_tpl: config of the tokenizer, which is built as `tokenizer`.
    has_begin: whether the tokenizer's begin token comes before a text.
    hides_padding: whether batches have `segment_ids`, so that no token attends to padding. SigLIP needs False.

  Raises (when the data is first needed):
    DataError: see `ImageRecordInput`. A record without a text, or whose text is not UTF-8, counts as a bad record.
  """

  label_feature: str | None = None
  text_feature: str = 'text'
  text_len: int = REQUIRED
  tokenizer_tpl: Config = template(ByteTokenizer)
  has_begin: bool = True
  hides_padding: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    self.check_at_least(text_len=1 + self.has_begin)
    if self.label_feature is not None:
      raise ConfigError(f'{self.label}.label_feature: expected None; a record with a text has no class')
    self.tokenizer: BaseTokenizer = build_at(f'{self.label}.tokenizer_tpl', self.tokenizer_tpl)

  @property
  def vocab_size(self) -> int:
    """Number of token ids."""
    return self.tokenizer.vocab_size

  def example_struct(self) -> Struct:
    row = jax.ShapeDtypeStruct((self.text_len,), np.int32)
    text = {'ids': row, 'segment_ids': row} if self.hides_padding else {'ids': row}
    return super().example_struct() | text

  def _features_to_read(self) -> dict[str, tf.DType]:
    return super()._features_to_read() | {self.text_feature: tf.string}

  def _try(self, stored: Mapping[str, tf.Tensor]) -> None:
    super()._try(stored)
    self._encode(stored[self.text_feature].numpy())

  def _values_beside(self, stored: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    text = stored[self.text_feature]
    ids, segments = tf.numpy_function(self._encode, [text], [tf.int32, tf.int32], stateful=False)
    values = {'ids': ids, 'segment_ids': segments} if self.hides_padding else {'ids': ids}
    return {name: tf.ensure_shape(x, (self.text_len,)) for name, x in values.items()}

  def _encode(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `ids` and `segment_ids` of a text, [T] int32; raises DataError if it is not UTF-8."""
    try:
      tokens = self.tokenizer.encode(text.decode())
    except UnicodeDecodeError as error:
      raise DataError(f'its {self.text_feature} is not UTF-8: {error}') from None
    bos, eos, pad = self.tokenizer.special_ids
    begin = [bos] if self.has_begin else []
    tokens = [*begin, *tokens[: self.text_len - len(begin) - 1], eos]
    ids = np.full((self.text_len,), pad, np.int32)
    ids[: len(tokens)] = tokens
    return ids, (np.arange(self.text_len) < len(tokens)).astype(np.int32)
