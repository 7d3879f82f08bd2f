"""TransducerModel: transcribes speech; each label depends on the labels before it (RNN-T; Graves, 2012).

    x = encoder(augmenter(frontend(audio)));  g = label_network(labels)
    p(symbol | frame t, u labels) = joint(x_t, g_u)

B batch, T frames of the encoder, L labels, D dims of the encoder, M largest number of labels to write.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars
from praxis_lite.layers.transducer import LabelNetwork, PathLogProbs, TransducerJoint, rnnt_loss
from praxis_lite.models.speech_model import SpeechModel


class TransducerPredictions(NamedTuple):
  """States of the encoder, [B, T, D], paddings of the states, [B, T], and log-probabilities of labels and blanks."""

  states: jax.Array
  paddings: jax.Array
  log_probs: PathLogProbs


class _Written(NamedTuple):
  """The state of greedy decoding: the labels so far, and the current frame of each row."""

  frame: jax.Array  # [B] int32
  ids: jax.Array  # [B, M] int32
  lengths: jax.Array  # [B] int32
  log_prob: jax.Array  # [B] float32
  known: jax.Array  # [B, D], the result of the label network.
  state: NestedDict


class TransducerModel(SpeechModel[TransducerPredictions]):
  """A `SpeechModel` with a network that reads the previous labels.

  Attributes: those of `SpeechModel`, and
    label_tpl: config of the child `label_network`.
    joint_tpl: config of the child `joint`.
    max_labels: M; None means the number of frames.
  """

  label_tpl: Config = template(LabelNetwork)
  joint_tpl: Config = template(TransducerJoint)
  max_labels: int | None = None

  label_network: LabelNetwork = child()
  joint: TransducerJoint = child()

  def setup(self) -> None:
    super().setup()
    self._check_range('max_labels', least=1)
    labels = self.create_child(
      'label_network', self.label_tpl.clone(vocab_size=self.vocab_size, start_id=self.blank_id)
    )
    sizes = {'encoder_dims': self.encoder.model_dims, 'label_dims': labels.model_dims, 'num_classes': self.vocab_size}
    self.create_child('joint', self.joint_tpl.clone(**sizes))

  def compute_predictions(self, batch: NestedDict) -> TransducerPredictions:
    """Returns states of the encoder, and log-probabilities of labels and blanks."""
    x_BTD, paddings_BT = self.encode(batch)
    labels = self.labels_of(batch)
    log_probs = self.joint(x_BTD, self.label_network(labels.ids), labels.ids, self.blank_id)
    return TransducerPredictions(x_BTD, paddings_BT, log_probs)

  def compute_loss(self, predictions: TransducerPredictions, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns metrics and each row's `loss`, which is 0 for rows without a frame.

    Metrics: `loss`, nats per row, over rows with a frame; `too_short`, the fraction of rows without a frame; and in
    evaluation error rates, see `SpeechModel.error_metrics`.
    """
    labels, weights_B = self.labels_of(batch), batch['weights']
    frames_B = jnp.sum(predictions.paddings == 0, axis=1, dtype=jnp.int32)
    has_frames_B = frames_B > 0
    loss_B = rnnt_loss(*predictions.log_probs, jnp.maximum(frames_B, 1), labels.lengths)
    loss_B = jnp.where(has_frames_B & (weights_B != 0), loss_B, 0)
    metrics = self.loss_metrics(loss_B, has_frames_B, batch)
    if self.do_eval:
      written = self._write(predictions.states, predictions.paddings)
      metrics |= self.error_metrics(written.ids, written.lengths, labels, weights_B)
    return metrics, {'loss': loss_B}

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns transcripts of the most probable symbol at each step (greedy decoding); see `SpeechModel.predict`."""
    written = self._write(*self.encode(batch))
    return {'ids': written.ids, 'lengths': written.lengths, 'log_prob': written.log_prob}

  def _write(self, x_BTD: jax.Array, paddings_BT: jax.Array) -> _Written:
    """Decodes greedily: in each of T + M steps, each row with frames left writes a label or moves to its next frame."""
    B, T, _ = x_BTD.shape
    M = T if self.max_labels is None else self.max_labels
    frames_B = jnp.sum(paddings_BT == 0, axis=1, dtype=jnp.int32)
    network, joint = self.label_network, self.joint
    of_network, of_joint = network.cast_variables(network.variables), joint.cast_variables(joint.variables)

    def read(ids_B: jax.Array, pos_B: jax.Array, state: NestedDict) -> tuple[jax.Array, NestedDict]:
      known_BD, side = network.apply(of_network, ids_B, pos_B, decode_state=state, do_eval=True, method='extend_step')
      return known_BD, side.decode_state

    def step(now: _Written, nothing: None) -> tuple[_Written, None]:
      x_B1D = jnp.take_along_axis(x_BTD, jnp.minimum(now.frame, T - 1)[:, None, None], axis=1)
      logits_BV, _ = joint.apply(of_joint, x_B1D[:, 0], now.known, do_eval=True, method='step_logits')
      is_full_B1 = (now.lengths >= M)[:, None]
      is_blank_V = jnp.arange(logits_BV.shape[-1]) == self.blank_id
      log_probs_BV = jax.nn.log_softmax(logits_BV)
      best_B = jnp.argmax(jnp.where(is_full_B1 & ~is_blank_V, -jnp.inf, log_probs_BV), axis=-1).astype(jnp.int32)
      is_inside_B = now.frame < frames_B
      is_label_B = is_inside_B & (best_B != self.blank_id)
      gained_B = jnp.take_along_axis(log_probs_BV, best_B[:, None], axis=1)[:, 0]
      known_BD, state = read(best_B, jnp.where(is_label_B, now.lengths + 1, -1), now.state)
      is_place_BM = is_label_B[:, None] & (jnp.arange(M) == now.lengths[:, None])
      return _Written(
        now.frame + (is_inside_B & ~is_label_B),
        jnp.where(is_place_BM, best_B[:, None], now.ids),
        now.lengths + is_label_B,
        now.log_prob + jnp.where(is_inside_B, gained_B, 0),
        jnp.where(is_label_B[:, None], known_BD, now.known),
        state,
      ), None

    zeros_B = jnp.zeros(B, jnp.int32)
    _, side = network.apply(of_network, B, do_eval=True, method='init_decode_state')
    known_BD, state = read(jnp.full(B, self.blank_id, jnp.int32), zeros_B, side.decode_state)
    ids_BM = jnp.full((B, M), self.blank_id, jnp.int32)
    start = _Written(zeros_B, ids_BM, zeros_B, jnp.zeros(B, jnp.float32), known_BD, state)
    written, _ = jax.lax.scan(step, start, None, length=T + M)
    return written
