"""Models, which tasks train, and decoding."""

from praxis_lite.common.weighted import WeightedScalars as WeightedScalars, weighted_mean as weighted_mean
from praxis_lite.models.adapters import (
  ADAPTER_VARIABLES as ADAPTER_VARIABLES,
  add_adapters as add_adapters,
  merge_adapters as merge_adapters,
  remove_adapters as remove_adapters,
  unmerge_adapters as unmerge_adapters,
)
from praxis_lite.models.adversarial_model import AdversarialModel as AdversarialModel
from praxis_lite.models.base import BaseModel as BaseModel
from praxis_lite.models.classifier import ClassificationModel as ClassificationModel, Classifier as Classifier
from praxis_lite.models.convnext_configs import convnext as convnext, convnext_classifier as convnext_classifier
from praxis_lite.models.ctc_model import CtcModel as CtcModel
from praxis_lite.models.diffusion_configs import diffusion_transformer as diffusion_transformer
from praxis_lite.models.diffusion_model import DiffusionModel as DiffusionModel
from praxis_lite.models.distilled_model import DistilledModel as DistilledModel
from praxis_lite.models.drafted_model import DraftedModel as DraftedModel
from praxis_lite.models.encoder_configs import (
  masked_language_model as masked_language_model,
  sequence_classifier as sequence_classifier,
  text_encoder as text_encoder,
  transformer_encoder as transformer_encoder,
)
from praxis_lite.models.encoder_decoder_configs import encoder_decoder as encoder_decoder
from praxis_lite.models.encoder_decoder_model import EncoderDecoderModel as EncoderDecoderModel
from praxis_lite.models.image_features import ImageFeatureModel as ImageFeatureModel
from praxis_lite.models.language_model import LanguageModel as LanguageModel
from praxis_lite.models.lm_configs import transformer_lm as transformer_lm
from praxis_lite.models.masked_image_model import (
  MaskedAutoencoder as MaskedAutoencoder,
  masked_autoencoder as masked_autoencoder,
)
from praxis_lite.models.masked_text_model import MaskedLanguageModel as MaskedLanguageModel
from praxis_lite.models.mup import Mup as Mup
from praxis_lite.models.pipeline_configs import set_pipeline as set_pipeline
from praxis_lite.models.policy_losses import Grpo as Grpo
from praxis_lite.models.policy_model import PolicyModel as PolicyModel
from praxis_lite.models.preference_losses import (
  Dpo as Dpo,
  Ipo as Ipo,
  Kto as Kto,
  Orpo as Orpo,
  PreferenceLoss as PreferenceLoss,
  SimPo as SimPo,
)
from praxis_lite.models.preference_model import PreferenceModel as PreferenceModel
from praxis_lite.models.quantization import (
  dequantize_variables as dequantize_variables,
  quantize_variables as quantize_variables,
  quantize_weights as quantize_weights,
  remove_quantization as remove_quantization,
)
from praxis_lite.models.recurrent_configs import (
  griffin_lm as griffin_lm,
  mamba2_lm as mamba2_lm,
  recurrent_lm as recurrent_lm,
)
from praxis_lite.models.resnet_configs import resnet as resnet, resnet_classifier as resnet_classifier
from praxis_lite.models.reward_model import RewardModel as RewardModel
from praxis_lite.models.speech_configs import (
  conformer_ctc as conformer_ctc,
  conformer_encoder as conformer_encoder,
  conformer_transducer as conformer_transducer,
  whisper as whisper,
)
from praxis_lite.models.speech_model import SpeechModel as SpeechModel
from praxis_lite.models.speech_to_text_model import SpeechToTextModel as SpeechToTextModel
from praxis_lite.models.split_configs import set_sharding as set_sharding
from praxis_lite.models.text_classifier import SequenceClassifier as SequenceClassifier
from praxis_lite.models.text_features import TextEncoder as TextEncoder
from praxis_lite.models.transducer_model import TransducerModel as TransducerModel
from praxis_lite.models.two_towers import TwoTowerModel as TwoTowerModel
from praxis_lite.models.vision_configs import (
  image_classifier as image_classifier,
  vision_transformer as vision_transformer,
)
from praxis_lite.models.vq_vae import VqVae as VqVae
