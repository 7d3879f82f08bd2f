"""Decides whether lower or higher values of a metric are better, by a config or else by the metric's name."""

from __future__ import annotations

import re

# Words in names of metrics. The last one in a name decides: `accuracy_loss` is a loss.
_LOWER = 'loss nll ce ppl perplexity error errors err mse rmse mae cer wer ter kl divergence brier fid bpb bpc'
_HIGHER = (
  'accuracy acc f1 bleu chrf rouge meteor precision recall auc auroc auprc iou miou dice psnr ssim mrr ndcg r2 '
  'likelihood reward correct top1 top5 success'
)
_MODES = {**dict.fromkeys(_LOWER.split(), 'min'), **dict.fromkeys(_HIGHER.split(), 'max')}


def mode_of_metric(metric: str, *modes: str) -> str | None:
  """Returns 'min' if lower values of a metric are better, 'max' if higher ones are, and None if this is unknown.

  Args:
    metric: a name, or a path that ends in one, such as 'eval/valid/accuracy'.
    *modes: the modes in configs: 'min', 'max', or 'auto' for the mode that the name implies. 'max' takes precedence
      over 'min'.
  """
  given = [mode for mode in ('max', 'min') if mode in modes]
  words = re.split(r'[^a-z0-9]+', metric.rpartition('/')[2].lower())
  return next((mode for mode in (*given, *map(_MODES.get, reversed(words))) if mode is not None), None)
