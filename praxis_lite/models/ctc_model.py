"""CtcModel: transcribes speech, trained by connectionist temporal classification (Graves, 2006).

    logits = softmax(encoder(augmenter(frontend(audio))))

B batch, U frames of the encoder, L labels, V symbols.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars
from praxis_lite.layers.ctc import CtcAlignment, ctc_alignment, ctc_frames_needed, ctc_loss
from praxis_lite.layers.ctc_decoding import ctc_beam_search, ctc_greedy_decode
from praxis_lite.layers.softmax import FullSoftmax
from praxis_lite.models.speech_model import SpeechModel


class CtcPredictions(NamedTuple):
  """Logits of the symbols, [B, U, V] float32, and paddings of the frames, [B, U], nonzero for padding."""

  logits: jax.Array
  paddings: jax.Array


class CtcModel(SpeechModel[CtcPredictions]):
  """A `SpeechModel` with a softmax over each frame of the encoder.

  Attributes: those of `SpeechModel`, and
    softmax_tpl: config of the child `softmax`.
    num_beams: number of beams of the prefix search in `predict` and `decode`; 1 takes the best path.
  """

  softmax_tpl: Config = template(FullSoftmax, use_bias=True, chunk_size=None)
  num_beams: int = 1

  softmax: FullSoftmax = child()

  def setup(self) -> None:
    super().setup()
    self._check_range('num_beams', least=1)
    sizes = {'input_dims': self.encoder.model_dims, 'num_classes': self.vocab_size}
    self.create_child('softmax', self.softmax_tpl.clone(**sizes))

  def compute_predictions(self, batch: NestedDict) -> CtcPredictions:
    """Returns logits and paddings of the encoder's frames."""
    x_BUD, paddings_BU = self.encode(batch)
    return CtcPredictions(self.softmax.get_logits(x_BUD), paddings_BU)

  def compute_loss(self, predictions: CtcPredictions, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns metrics and per-example outputs.

    Metrics: `loss`, nats per row, over rows that have enough frames for their labels; `too_short`, the fraction of
    rows that have too few; and in evaluation the error rates of the best path, see `SpeechModel.error_metrics`.
    Per example: `loss`, 0 for rows that are too short.
    """
    labels, weights_B = self.labels_of(batch), batch['weights']
    frames_B = jnp.sum(predictions.paddings == 0, axis=1)
    fits_B = (ctc_frames_needed(labels.ids, labels.paddings) <= frames_B) & (frames_B > 0)
    # `ctc_loss` would return 1e5 nats for rows without a path, and no useful gradient.
    given_BL = jnp.where(fits_B[:, None], labels.paddings, 1)
    loss_B = ctc_loss(*predictions, labels.ids, given_BL, blank_id=self.blank_id)
    loss_B = jnp.where(fits_B & (weights_B != 0), loss_B, 0)
    metrics = self.loss_metrics(loss_B, fits_B, batch)
    if self.do_eval:
      best = ctc_greedy_decode(*predictions, blank_id=self.blank_id)
      metrics |= self.error_metrics(best.ids, best.lengths, labels, weights_B)
    return metrics, {'loss': loss_B}

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns the transcripts of the best path, or with several beams the best prefixes; see `SpeechModel.predict`."""
    predictions = self.compute_predictions(batch)
    if self.num_beams == 1:
      best = ctc_greedy_decode(*predictions, blank_id=self.blank_id)
    else:
      found = ctc_beam_search(*predictions, num_beams=self.num_beams, blank_id=self.blank_id)
      best = jax.tree.map(lambda x: x[:, 0], found)
    return {'ids': best.ids, 'lengths': best.lengths, 'log_prob': best.log_probs}

  def align(self, batch: NestedDict) -> CtcAlignment:
    """Returns when each label of a batch is spoken: the most probable path, in frames of the encoder."""
    labels = self.labels_of(batch)
    return ctc_alignment(*self.compute_predictions(batch), labels.ids, labels.paddings, blank_id=self.blank_id)
