"""Whether an experiment computes on its mesh what it computes on one device: the same model in small, step by step."""

from praxis_lite.verification.verify import Difference, Verification, format_verification, verify

__all__ = [
  'Difference',
  'Verification',
  'format_verification',
  'verify',
]
