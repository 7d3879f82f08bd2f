"""Makes the task of a language model whose tokens a smaller draft model guesses."""

from __future__ import annotations

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.models.decoding import Sampler, SpeculativeSampler
from praxis_lite.models.drafted_model import DraftedModel
from praxis_lite.runs.prompts import is_beam_search, is_decoder, to_decoder


def drafted_task(task: Config, draft: Config) -> Config:
  """Returns the config of a task that decodes with the model of `task`, guessing with the model of `draft`.

  Args:
    task, draft: configs of the tasks of two language models. The result has the mesh and the rules of `task`.

  Raises:
    ConfigError: a model is not a language model, or decodes by beam search.
  """
  for name, config in (('the model', task), ('the draft model', draft)):
    if not hasattr(config.model, 'decoder_tpl'):
      raise ConfigError(f'draft: speculative decoding needs language models, and {name} has no decoder_tpl')
  if is_beam_search(task):
    raise ConfigError('draft: beam search takes no guesses; leave out one of them')
  drafted, decoder = task.clone(), task.model.decoder_tpl
  is_speculative = is_decoder(task, SpeculativeSampler)
  decoder = decoder.clone() if is_speculative else to_decoder(SpeculativeSampler, decoder, Sampler)
  decoder.lookup, decoder.own_heads = None, False  # Only the draft model guesses tokens.
  drafted.model = Config(
    DraftedModel,
    model_tpl=task.model.clone(),
    draft_tpl=draft.model.clone(),
    decoder_tpl=decoder,
  )
  return drafted
