"""Checks, on a smaller copy of the model, that an experiment computes the same on its mesh as on one device."""

from praxis_lite.instruments.verification.verify import (
  Difference as Difference,
  Verification as Verification,
  format_verification as format_verification,
  verify as verify,
)
