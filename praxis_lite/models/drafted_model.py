"""DraftedModel: a text model and a smaller one that guesses its next tokens, for speculative decoding."""

from __future__ import annotations

from typing import Any

import jax

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.position_limit import PositionLimit
from praxis_lite.models.base import BaseModel, PromptLimits
from praxis_lite.models.decoding import Decoder, SpeculativeSampler
from praxis_lite.models.encoder_decoder_model import EncoderDecoderModel
from praxis_lite.models.language_model import LanguageModel


class DraftedModel(BaseModel[jax.Array]):
  """A language model or an encoder-decoder that only decodes, with the help of a smaller one.

  Attributes:
    model_tpl: config of the model, the child `model`.
    draft_tpl: config of a model of the same kind with the same vocabulary, the child `draft`, which guesses tokens.
    decoder_tpl: config of the decoder.
  """

  model_tpl: Config = REQUIRED
  draft_tpl: Config = REQUIRED
  decoder_tpl: Config = template(SpeculativeSampler)

  model: LanguageModel = child()
  draft: LanguageModel = child()

  def setup(self) -> None:
    for name in ('model', 'draft'):
      tpl = getattr(self, f'{name}_tpl').clone()
      if hasattr(tpl, 'decoder_tpl'):
        tpl.decoder_tpl = self.decoder_tpl.clone()
      self.create_child(name, tpl)
      layer = getattr(self, name)
      if not isinstance(layer, LanguageModel) or type(layer).decode not in _WAYS_TO_DECODE:
        raise ConfigError(
          f'{self.path_name}.{name}_tpl: speculative decoding needs a LanguageModel or an EncoderDecoderModel, got '
          f'{type(layer).__name__}'
        )
    if _reads(self.model) != _reads(self.draft):
      raise ConfigError(
        f'{self.path_name}.draft_tpl: a draft model reads what the model reads; the model is a '
        f'{type(self.model).__name__}, and the draft model a {type(self.draft).__name__}'
      )
    if self.model.num_ids != self.draft.num_ids:
      raise ConfigError(
        f'{self.path_name}.draft_tpl: its vocabulary has {self.draft.num_ids} tokens, and that of the model has '
        f'{self.model.num_ids}; a draft model has the same tokens'
      )

  @property
  def num_ids(self) -> int | None:
    return self.model.num_ids

  @property
  def decoder(self) -> Decoder:
    return self.model.decoder

  @property
  def prompts_are_sources(self) -> bool:  # type: ignore[override]
    return self.model.prompts_are_sources

  def most_prompt_tokens(self) -> int | None:
    each = [model.most_prompt_tokens() for model in (self.model, self.draft)]
    return min((most for most in each if most is not None), default=None)

  def check_fits(self, prompt_length: int, max_tokens: int) -> None:
    """Raises a `ConfigError` if the model or the draft model cannot see prompts and continuations of these lengths."""
    for model in (self.model, self.draft):
      model.check_fits(prompt_length, max_tokens)

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    self.model.check_input(data, batch)

  def position_limits(self) -> dict[str, PositionLimit]:
    return self.model.position_limits()

  def prompt_limits(self) -> PromptLimits | None:
    limits, of_draft = self.model.prompt_limits(), self.draft.prompt_limits()
    if limits is None or of_draft is None:
      return None

    def state_bytes(num_rows: int, num_slots: int) -> int:
      return limits.state_bytes(num_rows, num_slots) + of_draft.state_bytes(num_rows, num_slots)

    contexts = [context for context in (limits.context, of_draft.context) if context is not None]
    return limits._replace(context=min(contexts, default=None), check_fits=self.check_fits, state_bytes=state_bytes)

  def decode(self, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Continues prompts, or writes targets for sources; see `decode` of the model."""
    return self.model.decode_with(batch, self.draft)


_WAYS_TO_DECODE = (LanguageModel.decode, EncoderDecoderModel.decode)


def _reads(model: LanguageModel) -> tuple[Any, bool]:
  """Returns a value for the kind of input that a model reads: prompts, sources or audio.

  Two models with equal values read the same kind.
  """
  return type(model).decode, model.prompts_are_sources
