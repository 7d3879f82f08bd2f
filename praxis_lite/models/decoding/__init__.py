"""Decoding: generates whole sequences with a model that predicts the next token."""

from praxis_lite.models.decoding.buckets import Bucket, chunk_of
from praxis_lite.models.decoding.sampler import Decoded, ExtendStep, Sampler, prompt_step, sample_tokens

__all__ = [
  'Bucket',
  'Decoded',
  'ExtendStep',
  'Sampler',
  'chunk_of',
  'prompt_step',
  'sample_tokens',
]
