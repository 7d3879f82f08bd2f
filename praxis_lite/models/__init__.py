"""Models, which tasks train, and decoding."""

from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.models.adapters import (
  ADAPTER_VARIABLES,
  add_adapters,
  combine_adapters,
  merge_adapters,
  remove_adapters,
  unmerge_adapters,
)
from praxis_lite.models.adversarial_model import AdversarialModel
from praxis_lite.models.base import BaseModel
from praxis_lite.models.classifier import ClassificationModel, Classifier, ImageFeatureModel
from praxis_lite.models.convnext_configs import convnext, convnext_classifier
from praxis_lite.models.ctc_model import CtcModel
from praxis_lite.models.diffusion_model import DiffusionModel, diffusion_transformer
from praxis_lite.models.distilled_model import DistilledModel
from praxis_lite.models.drafted_model import DraftedModel
from praxis_lite.models.encoder_configs import (
  masked_language_model,
  sequence_classifier,
  text_encoder,
  transformer_encoder,
)
from praxis_lite.models.encoder_decoder_configs import encoder_decoder
from praxis_lite.models.encoder_decoder_model import EncoderDecoderModel
from praxis_lite.models.language_model import LanguageModel
from praxis_lite.models.lm_configs import transformer_lm
from praxis_lite.models.masked_image_model import MaskedAutoencoder, masked_autoencoder
from praxis_lite.models.masked_text_model import MaskedLanguageModel
from praxis_lite.models.mup import Mup
from praxis_lite.models.on_policy_model import OnPolicyModel
from praxis_lite.models.pipeline_configs import set_pipeline
from praxis_lite.models.policy_losses import Grpo
from praxis_lite.models.policy_model import PolicyModel
from praxis_lite.models.preference_losses import Dpo, Ipo, Kto, Orpo, PreferenceLoss, SimPo
from praxis_lite.models.preference_model import PreferenceModel
from praxis_lite.models.quantization import (
  dequantize_variables,
  quantize_variables,
  quantize_weights,
  remove_quantization,
)
from praxis_lite.models.recurrent_configs import griffin_lm, mamba2_lm, recurrent_lm
from praxis_lite.models.resnet_configs import resnet, resnet_classifier
from praxis_lite.models.reward_model import RewardModel
from praxis_lite.models.speech_configs import conformer_ctc, conformer_encoder, conformer_transducer, whisper
from praxis_lite.models.speech_model import SpeechModel
from praxis_lite.models.speech_to_text_model import SpeechToTextModel
from praxis_lite.models.split_configs import set_sharding
from praxis_lite.models.text_classifier import SequenceClassifier
from praxis_lite.models.text_features import TextEncoder
from praxis_lite.models.transducer_model import TransducerModel
from praxis_lite.models.two_towers import TwoTowerModel
from praxis_lite.models.vision_configs import image_classifier, vision_transformer
from praxis_lite.models.vq_vae import VqVae

__all__ = [
  'ADAPTER_VARIABLES',
  'AdversarialModel',
  'BaseModel',
  'ClassificationModel',
  'Classifier',
  'CtcModel',
  'DiffusionModel',
  'DistilledModel',
  'Dpo',
  'DraftedModel',
  'EncoderDecoderModel',
  'Grpo',
  'ImageFeatureModel',
  'Ipo',
  'Kto',
  'LanguageModel',
  'MaskedAutoencoder',
  'MaskedLanguageModel',
  'Mup',
  'OnPolicyModel',
  'Orpo',
  'PolicyModel',
  'PreferenceLoss',
  'PreferenceModel',
  'RewardModel',
  'SequenceClassifier',
  'SimPo',
  'SpeechModel',
  'SpeechToTextModel',
  'TextEncoder',
  'TransducerModel',
  'TwoTowerModel',
  'VqVae',
  'WeightedScalars',
  'add_adapters',
  'combine_adapters',
  'conformer_ctc',
  'conformer_encoder',
  'conformer_transducer',
  'convnext',
  'convnext_classifier',
  'dequantize_variables',
  'diffusion_transformer',
  'encoder_decoder',
  'griffin_lm',
  'image_classifier',
  'mamba2_lm',
  'masked_autoencoder',
  'masked_language_model',
  'merge_adapters',
  'quantize_variables',
  'quantize_weights',
  'recurrent_lm',
  'remove_adapters',
  'remove_quantization',
  'resnet',
  'resnet_classifier',
  'sequence_classifier',
  'set_pipeline',
  'set_sharding',
  'text_encoder',
  'transformer_encoder',
  'transformer_lm',
  'unmerge_adapters',
  'vision_transformer',
  'weighted_mean',
  'whisper',
]
