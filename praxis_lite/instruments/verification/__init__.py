"""Verifies, with a smaller copy of the model, that an experiment computes the same on its mesh as on one device."""

from praxis_lite.instruments.verification.verify import Difference, Verification, format_verification, verify

__all__ = [
  'Difference',
  'Verification',
  'format_verification',
  'verify',
]
