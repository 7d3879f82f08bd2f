"""DraftedModel: a language model, and a smaller one that guesses its next tokens, for speculative decoding."""

from __future__ import annotations

import jax

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.position_limit import PositionLimit
from praxis_lite.models.base import BaseModel, PromptLimits
from praxis_lite.models.decoding import SpeculativeSampler
from praxis_lite.models.language_model import LanguageModel


class DraftedModel(BaseModel[jax.Array]):
  """A language model that only decodes, with the help of a smaller one.

  Attributes:
    model_tpl: config of the language model, the child `model`.
    draft_tpl: config of a language model with the same vocabulary, the child `draft`, which guesses tokens.
    decoder_tpl: config of what continues prompts.
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
      if not isinstance(layer, LanguageModel) or type(layer).decode is not LanguageModel.decode:
        raise ConfigError(
          f'{self.path_name}.{name}_tpl: speculative decoding needs a LanguageModel, got {type(layer).__name__}'
        )
    if self.model.num_ids != self.draft.num_ids:
      raise ConfigError(
        f'{self.path_name}.draft_tpl: its vocabulary has {self.draft.num_ids} tokens, and that of '
        'the model has '
        f'{self.model.num_ids}; a draft model has the same tokens'
      )

  @property
  def num_ids(self) -> int | None:
    return self.model.num_ids

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    self.model.check_input(data, batch)

  def position_limits(self) -> dict[str, PositionLimit]:
    return self.model.position_limits()

  def prompt_limits(self) -> PromptLimits | None:
    limits, of_draft = self.model.prompt_limits(), self.draft.prompt_limits()
    if limits is None or of_draft is None:
      return None

    def check_fits(prompt_length: int, max_tokens: int) -> None:
      limits.check_fits(prompt_length, max_tokens)
      of_draft.check_fits(prompt_length, max_tokens)

    def state_bytes(num_rows: int, num_slots: int) -> int:
      return limits.state_bytes(num_rows, num_slots) + of_draft.state_bytes(num_rows, num_slots)

    contexts = [context for context in (limits.context, of_draft.context) if context is not None]
    return limits._replace(context=min(contexts, default=None), check_fits=check_fits, state_bytes=state_bytes)

  def decode(self, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Continues prompts; see `LanguageModel.decode`."""
    return self.model.decode_with(batch, self.draft)
