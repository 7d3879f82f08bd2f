"""Models, which tasks train, and decoding."""

from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.models.base import BaseModel
from praxis_lite.models.classifier import ClassificationModel
from praxis_lite.models.encoder_decoder_configs import encoder_decoder
from praxis_lite.models.encoder_decoder_model import EncoderDecoderModel
from praxis_lite.models.language_model import LanguageModel
from praxis_lite.models.lm_configs import set_pipeline, set_sharding, transformer_lm

__all__ = [
  'BaseModel',
  'ClassificationModel',
  'EncoderDecoderModel',
  'LanguageModel',
  'WeightedScalars',
  'encoder_decoder',
  'set_pipeline',
  'set_sharding',
  'transformer_lm',
  'weighted_mean',
]
