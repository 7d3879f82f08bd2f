"""A run as a model for EleutherAI's `lm_eval`, on any mesh. Needs `pip install 'praxis_lite[eval]'`.

    praxis-lite-lm-eval --model praxis_lite --model_args path=runs/x --tasks my_task --include_path tasks

This command takes all arguments of `lm_eval`, which cannot load models of other packages by itself. From Python:

    lm_eval.simple_evaluate(model=RunLM('runs/x'), tasks=['my_task'], task_manager=...)

With several hosts, all processes take part in the evaluation of each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.inputs import BaseTokenizer, HfTokenizer
from praxis_lite.runs.continuations import continued_text
from praxis_lite.runs.prompts import encode_prompt
from praxis_lite.runs.run import open_run
from praxis_lite.runs.task_files import cut_at
from praxis_lite.runs.trained import TrainedModel

try:
  from lm_eval.api.instance import Instance
  from lm_eval.api.model import LM
  from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
  raise ConfigError(f"lm_eval cannot be imported ({error}); pip install 'praxis_lite[eval]'") from None

NAME = 'praxis_lite'
_MOST_TOKENS = 2048  # The length of a window for a model without a limit.
_SETTINGS = ('temperature', 'top_k', 'top_p', 'min_p', 'repetition_penalty')


class RunLM(LM):
  """A language model of a run.

  Args:
    path: the run's directory, or the `TrainedModel` that `open_run(...).load()` returns, with which `mesh` and `step`
      have no effect.
    mesh: the size along each mesh axis of the run, as in '1x8x1' or (1, 8, 1); None uses one device.
    step: step of the checkpoint, 'best' or 'newest'; None uses the newest.
    batch_size: how many requests are computed at a time; 'auto' means 8.
    max_length: the largest number of tokens in a window; None uses the model's limit, or 2048 if it has none.
    max_gen_toks: the largest number of tokens to generate, for tasks that do not set it.
    **others: `device` and `max_batch_size`, which `lm_eval` passes to all models, and which have no effect here.

  Raises:
    UserError: there is no such run, it has no tokenizer, or its model is not a decoder-only language model.
  """

  def __init__(
    self,
    path: str | Path | TrainedModel,
    mesh: str | int | Sequence[int] | None = None,
    step: int | str | None = None,
    batch_size: int | str | None = None,
    max_length: int | None = None,
    max_gen_toks: int = 256,
    **others: Any,
  ):
    super().__init__()
    unknown = sorted(others.keys() - {'device', 'max_batch_size'})
    if unknown:
      raise ConfigError(
        f'lm_eval: --model_args: there is no {unknown[0]}; a run has path, mesh, step, batch_size, max_length, '
        'max_gen_toks'
      )
    if isinstance(path, TrainedModel):
      self.model = path
    else:
      self.model = open_run(path).load(mesh=_read_mesh(mesh), step=_read_step(step))
    limits = self.model.layer.score_limits()
    if limits is None or limits.start_id is not None:
      kind = type(self.model.layer).__name__
      raise ConfigError(f'lm_eval: needs a language model that continues texts; this model is a {kind}')
    tokenizer = self.model.tokenizer
    if tokenizer is None:
      raise ConfigError('lm_eval: the run has no tokenizer; add a dataset with one to its config')
    self.tokenizer: BaseTokenizer = tokenizer
    text = str(8 if batch_size is None else batch_size)
    self.batch_size = 8 if text.startswith('auto') else _positive('batch_size', text)
    known = limits.max_positions or _MOST_TOKENS
    self.max_length = _positive('max_length', str(known if max_length is None else max_length))
    self.max_gen_toks = _positive('max_gen_toks', str(max_gen_toks))
    self._context = getattr(self.model.layer, 'context', None)

  # ---------------------------------------------------------------- the requests of lm_eval

  def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
    """Returns (log-probability of the continuation in nats, whether it is greedy) of each pair of texts."""
    pairs = [_move_spaces(*request.args) for request in requests]
    return self._score([context for context, _ in pairs], [more for _, more in pairs])

  def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
    """Returns the log-probability of each whole text, in nats: a sum over windows that do not overlap."""
    windows: list[tuple[list[int], list[int]]] = []
    counts = []
    for request in requests:
      tokens, begin = self.tokenizer.encode(request.args[0]), self.tokenizer.special_ids[0]
      found = get_rolling_token_windows(tokens, begin, self.max_length, context_len=1)
      own = [make_disjoint_window(window) for window in found]
      windows += own
      counts.append(len(own))
    scores = iter(self._score([context for context, _ in windows], [more for _, more in windows]))
    return [sum(next(scores)[0] for _ in range(count)) for count in counts]

  def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
    """Returns the text that follows each context, up to, and without, the first of the texts in `until`."""
    answers: dict[int, str] = {}
    groups: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
      groups.setdefault(repr(sorted(request.args[1].items(), key=str)), []).append(i)
    for rows in groups.values():
      until, settings = self._settings(requests[rows[0]].args[1])
      prompts = [self._fit(requests[i].args[0], settings['max_tokens']) for i in rows]
      found_ids = self.model.decode(prompts, stop=until, batch_size=self.batch_size, **settings)
      texts = [continued_text(self.tokenizer, prompt, ids) for prompt, ids in zip(prompts, found_ids)]
      answers |= {i: cut_at(text, until) for i, text in zip(rows, texts)}
    found = [answers[i] for i in range(len(requests))]
    for request, answer in zip(requests, found):
      self.cache_hook.add_partial('generate_until', request.args, answer)
    return found

  # ---------------------------------------------------------------- chats

  @property
  def tokenizer_name(self) -> str:
    """The name of the tokenizer, for caches of requests."""
    return str(getattr(self.tokenizer, 'path', type(self.tokenizer).__name__)).replace('/', '__')

  def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Returns a chat as text, in the tokenizer's template, up to where the model's answer begins.

    Raises UserError if the tokenizer has no chat template, or if `add_generation_prompt` is False.
    """
    if not isinstance(self.tokenizer, HfTokenizer) or not add_generation_prompt:
      raise UserError(
        'lm_eval: --apply_chat_template needs a tokenizer with a chat template, and no beginning of answers'
      )
    return self.tokenizer.chat_prompt(chat_history)

  # ---------------------------------------------------------------- calls of the model

  def _score(self, contexts: list[Any], continuations: list[Any]) -> list[tuple[float, bool]]:
    scores = self.model.score(contexts, continuations, batch_size=self.batch_size)
    return [(score.log_prob, score.is_greedy) for score in scores]

  def _settings(self, given: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Returns the texts that end a continuation, and the settings of `decode`."""
    until = given.get('until') or []
    until = [until] if isinstance(until, str) else [text for text in until if text]
    most = next((given[name] for name in ('max_gen_toks', 'max_new_tokens', 'max_tokens') if name in given), None)
    settings: dict[str, Any] = {'max_tokens': int(self.max_gen_toks if most is None else most)}
    settings |= {name: given[name] for name in _SETTINGS if given.get(name) is not None}
    if not given.get('do_sample', settings.get('temperature', 0) > 0):
      settings['temperature'] = 0.0
    elif 'temperature' not in settings:
      settings['temperature'] = 1.0
    return until, {name: float(x) if name == 'temperature' else x for name, x in settings.items()}

  def _fit(self, context: str, max_tokens: int) -> list[int]:
    """Returns the tokens of a context, without the first ones if the model cannot see context and answer together.

    Raises ConfigError if the answer leaves no room for a token of the context.
    """
    tokens = encode_prompt(self.tokenizer, context)
    if self._context is None:
      return tokens
    room = self._context + 1 - max_tokens
    if room < 1:
      raise ConfigError(f'lm_eval: max_gen_toks = {max_tokens}: the model sees only {self._context} tokens at once')
    return tokens[-room:]


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
  """Returns (context, continuation), with spaces at the end of the context moved to the start of the continuation.

  `lm_eval` does the same for its own models.
  """
  kept = context.rstrip()
  return (context, continuation) if not kept else (kept, context[len(kept) :] + continuation)


def _read_mesh(mesh: str | int | Sequence[int] | None) -> tuple[int, ...] | None:
  if mesh is None or not isinstance(mesh, str | int):
    return None if mesh is None else tuple(mesh)
  sizes = str(mesh).split('x')
  if not all(size.isdecimal() for size in sizes):
    raise ConfigError(f'lm_eval: --model_args: mesh={mesh}; expected the size of each axis, as in mesh=1x8x1')
  return tuple(map(int, sizes))


def _read_step(step: int | str | None) -> int | Literal['best'] | None:
  if step is None or step == 'newest':
    return None
  if step == 'best':
    return 'best'
  if not str(step).isdecimal():
    raise ConfigError(f"lm_eval: --model_args: step={step}; expected the step of a checkpoint, 'best' or 'newest'")
  return int(step)


def _positive(name: str, text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise ConfigError(f'lm_eval: --model_args: {name}={text}; expected an integer of at least 1')
  return int(text)


def register_with_lm_eval() -> None:
  """Registers `RunLM` with `lm_eval` under the name `praxis_lite`."""
  from lm_eval.api.registry import register_model

  register_model(NAME)(RunLM)
