"""Metrics of texts: functions of the texts that a model has written, and of reference texts.

    exact_match    the fraction of texts that equal one of their references, apart from spaces at the ends
    f1             the overlap of words with the nearest reference, as in SQuAD (Rajpurkar et al., 2016)
    bleu, chrf     scores of the whole corpus, 0 to 100, by sacrebleu
    rouge1, rouge2, rougeL    F-measures, 0 to 1, against the nearest reference, by rouge-score

Your own metric is a function of the same form: it takes predictions, and a list of references for each prediction.
"""

from __future__ import annotations

import importlib.util
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from praxis_lite.common.errors import ConfigError, did_you_mean

References = Sequence[Sequence[str]]
TextMetric = Callable[[Sequence[str], References], float]


def exact_match(predictions: Sequence[str], references: References) -> float:
  """Returns the fraction of texts that equal one of their references, apart from spaces at the ends."""
  hits = [text.strip() in {other.strip() for other in others} for text, others in zip(predictions, references)]
  return sum(hits) / max(len(hits), 1)


def f1(predictions: Sequence[str], references: References) -> float:
  """Returns the mean F1 score of words against the nearest reference, ignoring case, punctuation and articles."""
  scores = [max(_f1_of_words(text, other) for other in others) for text, others in zip(predictions, references)]
  return sum(scores) / max(len(scores), 1)


def _f1_of_words(text: str, reference: str) -> float:
  found, wanted = _words(text), _words(reference)
  if not found or not wanted:
    return float(found == wanted)
  common = sum((Counter(found) & Counter(wanted)).values())
  return 2 * common / (len(found) + len(wanted))


def _words(text: str) -> list[str]:
  plain = ''.join(c for c in text.lower() if c not in string.punctuation)
  return re.sub(r'\b(a|an|the)\b', ' ', plain).split()


def bleu(predictions: Sequence[str], references: References) -> float:
  """Returns the BLEU score of the corpus, 0 to 100, with sacrebleu's tokenizer (Papineni et al., 2002; Post, 2018)."""
  import sacrebleu

  return float(sacrebleu.corpus_bleu(list(predictions), _transpose(references)).score)


def chrf(predictions: Sequence[str], references: References) -> float:
  """Returns the chrF score of the corpus, 0 to 100 (Popovic, 2015)."""
  import sacrebleu

  return float(sacrebleu.corpus_chrf(list(predictions), _transpose(references)).score)


def _transpose(references: References) -> list[list[str | None]]:
  """Returns lists: the first references of all texts, the second ones, and so on; None where a text has fewer."""
  most = max(map(len, references), default=1)
  return [[others[i] if i < len(others) else None for others in references] for i in range(most)]


def rouge1(predictions: Sequence[str], references: References) -> float:
  """Returns the mean F-measure of single words, ROUGE-1 (Lin, 2004)."""
  return _rouge('rouge1', predictions, references)


def rouge2(predictions: Sequence[str], references: References) -> float:
  """Returns the mean F-measure of pairs of words, ROUGE-2."""
  return _rouge('rouge2', predictions, references)


def rougeL(predictions: Sequence[str], references: References) -> float:
  """Returns the mean F-measure of the longest common sequence of words, ROUGE-L."""
  return _rouge('rougeL', predictions, references)


def _rouge(kind: str, predictions: Sequence[str], references: References) -> float:
  from rouge_score.rouge_scorer import RougeScorer

  scorer = RougeScorer([kind], use_stemmer=False)
  scores = [scorer.score_multi(list(others), text)[kind].fmeasure for text, others in zip(predictions, references)]
  return sum(scores) / max(len(scores), 1)


METRICS: dict[str, TextMetric] = {
  **{'exact_match': exact_match, 'f1': f1, 'bleu': bleu, 'chrf': chrf},
  **{'rouge1': rouge1, 'rouge2': rouge2, 'rougeL': rougeL},
}
_PACKAGES = {'bleu': 'sacrebleu', 'chrf': 'sacrebleu', **dict.fromkeys(('rouge1', 'rouge2', 'rougeL'), 'rouge_score')}


def find_metrics(path: str, wanted: Sequence[str | TextMetric]) -> dict[str, TextMetric]:
  """Returns metrics by name, from names in `METRICS` or functions.

  Raises:
    ConfigError: there is no such metric, or the package that computes it is not installed; the message begins with
      `path`.
  """
  found: dict[str, TextMetric] = {}
  for metric in wanted:
    if isinstance(metric, str):
      if metric not in METRICS:
        raise ConfigError(
          f'{path}: expected {", ".join(map(repr, METRICS))} or, in Python, a function, got {metric!r}.'
          f'{did_you_mean(metric, list(METRICS))}'
        )
      package = _PACKAGES.get(metric)
      if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(f"{path}: {metric!r} needs praxis_lite[eval]: pip install 'praxis_lite[eval]'")
      found[metric] = METRICS[metric]
    elif callable(metric):
      found[getattr(metric, '__name__', type(metric).__name__)] = metric
    else:
      raise ConfigError(f'{path}: expected names or functions, got {metric!r}')
  return found
