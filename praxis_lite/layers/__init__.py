"""Layers: what models are made of."""

from praxis_lite.layers.activations import ACTIVATIONS, Activation, get_activation
from praxis_lite.layers.adapters import AdaptedFeedForward, MultitaskResidualAdapter
from praxis_lite.layers.alibi import AlibiBias
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.attention_spec import AttentionSpec, LogitBias, ProbabilityDropout
from praxis_lite.layers.audio_encoder_decoder import AudioEncoderDecoder, AudioStem, WindowLogMel
from praxis_lite.layers.bi_tempered import BiTemperedLoss, BiTemperedSoftmax, bi_tempered_loss
from praxis_lite.layers.blockwise import blockwise_attention
from praxis_lite.layers.causal_conv import CausalConv
from praxis_lite.layers.chunk_memory import ChunkMemory, MemoryAttention
from praxis_lite.layers.conformer import ConformerBlock, ConformerEncoder
from praxis_lite.layers.context_parallel import context_parallel_attention
from praxis_lite.layers.contrastive import ContrastiveLoss, ContrastiveOutput
from praxis_lite.layers.convnext import ConvNeXt, ConvNeXtBlock
from praxis_lite.layers.cross_attention import CrossAttention
from praxis_lite.layers.ctc import CtcAlignment, ctc_alignment, ctc_frames_needed, ctc_loss
from praxis_lite.layers.ctc_decoding import CtcHypotheses, ctc_beam_search, ctc_greedy_decode
from praxis_lite.layers.diagonal_ssm import DiagonalSsm
from praxis_lite.layers.differential_attention import DifferentialAttention
from praxis_lite.layers.diffusion_transformer import DiffusionTransformer, ModulatedBlock, TimeEmbedding
from praxis_lite.layers.dora import Dora, DoraLinear, DoraProjection
from praxis_lite.layers.dot_product import choose_attention, dot_product_attention
from praxis_lite.layers.dropout import Dropout, StochasticResidual
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.encoder import HeadTransform, TransformerEncoder
from praxis_lite.layers.encoder_decoder import DecoderBlock, TransformerEncoderDecoder
from praxis_lite.layers.feedforward import FeedForward, GatedFeedForward
from praxis_lite.layers.gated_delta_net import GatedDeltaNet
from praxis_lite.layers.ia3 import Ia3, Ia3Linear, Ia3Projection
from praxis_lite.layers.image_coders import ImageDecoder, ImageEncoder
from praxis_lite.layers.image_mixing import ImageMixing, MixedImages
from praxis_lite.layers.image_tokens import AttentionPooling, PatchEmbedding
from praxis_lite.layers.images import Conv2D, ConvNet, GlobalPooling, Mlp, Pooling
from praxis_lite.layers.latent_attention import LatentAttention
from praxis_lite.layers.linears import Bias, Linear
from praxis_lite.layers.log_mel import LogMel, mel_filters
from praxis_lite.layers.lora import Adapter, Lora, LoraEmbedding, LoraLinear, LoraMoeFeedForward, LoraProjection
from praxis_lite.layers.low_rank import LowRankUpdate
from praxis_lite.layers.mamba2 import GatedRMSNorm, Mamba2
from praxis_lite.layers.masked_patches import PatchDecoder
from praxis_lite.layers.masks import (
  ArrayMask,
  AttentionMask,
  Band,
  Causal,
  FunctionMask,
  Known,
  LocalChunks,
  Paddings,
  Prefix,
  Segments,
  SlidingWindow,
  Visibility,
  key_array,
  make_mask,
  query_array,
  row_array,
)
from praxis_lite.layers.mixer_block import MixerBlock
from praxis_lite.layers.moe import MoeFeedForward
from praxis_lite.layers.multi_token import MultiTokenModule, MultiTokenPrediction
from praxis_lite.layers.normalizations import BatchNorm, GroupNorm, IdentityNorm, LayerNorm, RMSNorm, RMSNormNoScale
from praxis_lite.layers.partial_rotary import PartialRotaryPositions
from praxis_lite.layers.pipeline import Pipelined, describe_pipelines
from praxis_lite.layers.pipeline_schedule import PipelineSchedule
from praxis_lite.layers.positions import (
  LearnedPositions,
  RelativeBias,
  RotaryPositions,
  SinusoidalPositions,
  SinusoidalPositions2D,
  grid_positions,
)
from praxis_lite.layers.projections import PerDimScale, Projection
from praxis_lite.layers.quantized_weights import QuantizedWeights
from praxis_lite.layers.quantizers import GumbelQuantizer, QuantizedVectors, RandomVectorQuantizer, VectorQuantizer
from praxis_lite.layers.recurrent import Recurrent
from praxis_lite.layers.relative_attention import RelativeAttention
from praxis_lite.layers.repeat import Repeat
from praxis_lite.layers.resnet import ResNet, ResNetBlock
from praxis_lite.layers.rg_lru import RgLru
from praxis_lite.layers.routing import Router
from praxis_lite.layers.scalar_quantizers import FiniteScalarQuantizer, LookupFreeQuantizer
from praxis_lite.layers.scaled_embedding import ScaledEmbeddingSoftmax
from praxis_lite.layers.sequence_parts import SequenceSplit
from praxis_lite.layers.sequential import Sequential
from praxis_lite.layers.sigmoid import SigmoidCrossEntropy
from praxis_lite.layers.softmax import FullSoftmax, SharedEmbeddingSoftmax, cross_entropy
from praxis_lite.layers.spectrum_augmenter import SpectrumAugmenter
from praxis_lite.layers.stacking import StackingOverTime
from praxis_lite.layers.time_convolutions import ConvolutionModule, ConvSubsampling, DepthwiseConv1D
from praxis_lite.layers.transducer import LabelNetwork, PathLogProbs, TransducerJoint, rnnt_loss
from praxis_lite.layers.transformer import PipelinedTransformer, RepeatedTransformer, StackedTransformer
from praxis_lite.layers.transformer_block import TransformerBlock
from praxis_lite.layers.transformer_lm import TransformerLm
from praxis_lite.layers.value_residual import ValueResidual
from praxis_lite.layers.vision_transformer import VisionTransformer
from praxis_lite.layers.weight_norms import SpectralNormLinear, StandardizedConv2D, WeightNormalizedLinear

__all__ = [
  'ACTIVATIONS',
  'Activation',
  'AdaptedFeedForward',
  'Adapter',
  'AlibiBias',
  'ArrayMask',
  'AttentionMask',
  'AttentionPooling',
  'AttentionSpec',
  'AudioEncoderDecoder',
  'AudioStem',
  'Band',
  'BatchNorm',
  'BiTemperedLoss',
  'BiTemperedSoftmax',
  'Bias',
  'Causal',
  'CausalConv',
  'ChunkMemory',
  'ConformerBlock',
  'ConformerEncoder',
  'ContrastiveLoss',
  'ContrastiveOutput',
  'Conv2D',
  'ConvNeXt',
  'ConvNeXtBlock',
  'ConvNet',
  'ConvSubsampling',
  'ConvolutionModule',
  'CrossAttention',
  'CtcAlignment',
  'CtcHypotheses',
  'DecoderBlock',
  'DepthwiseConv1D',
  'DiagonalSsm',
  'DifferentialAttention',
  'DiffusionTransformer',
  'Dora',
  'DoraLinear',
  'DoraProjection',
  'Dropout',
  'Embedding',
  'FeedForward',
  'FiniteScalarQuantizer',
  'FullSoftmax',
  'FunctionMask',
  'GatedDeltaNet',
  'GatedFeedForward',
  'GatedRMSNorm',
  'GlobalPooling',
  'GroupNorm',
  'GumbelQuantizer',
  'HeadTransform',
  'Ia3',
  'Ia3Linear',
  'Ia3Projection',
  'IdentityNorm',
  'ImageDecoder',
  'ImageEncoder',
  'ImageMixing',
  'Known',
  'LabelNetwork',
  'LatentAttention',
  'LayerNorm',
  'LearnedPositions',
  'Linear',
  'LocalChunks',
  'LogMel',
  'LogitBias',
  'LookupFreeQuantizer',
  'Lora',
  'LoraEmbedding',
  'LoraLinear',
  'LoraMoeFeedForward',
  'LoraProjection',
  'LowRankUpdate',
  'Mamba2',
  'MemoryAttention',
  'MixedImages',
  'MixerBlock',
  'Mlp',
  'ModulatedBlock',
  'MoeFeedForward',
  'MultiHeadAttention',
  'MultiTokenModule',
  'MultiTokenPrediction',
  'MultitaskResidualAdapter',
  'Paddings',
  'PartialRotaryPositions',
  'PatchDecoder',
  'PatchEmbedding',
  'PathLogProbs',
  'PerDimScale',
  'PipelineSchedule',
  'Pipelined',
  'PipelinedTransformer',
  'Pooling',
  'Prefix',
  'ProbabilityDropout',
  'Projection',
  'QuantizedVectors',
  'QuantizedWeights',
  'RMSNorm',
  'RMSNormNoScale',
  'RandomVectorQuantizer',
  'Recurrent',
  'RelativeAttention',
  'RelativeBias',
  'Repeat',
  'RepeatedTransformer',
  'ResNet',
  'ResNetBlock',
  'RgLru',
  'RotaryPositions',
  'Router',
  'ScaledEmbeddingSoftmax',
  'Segments',
  'SequenceSplit',
  'Sequential',
  'SharedEmbeddingSoftmax',
  'SigmoidCrossEntropy',
  'SinusoidalPositions',
  'SinusoidalPositions2D',
  'SlidingWindow',
  'SpectralNormLinear',
  'SpectrumAugmenter',
  'StackedTransformer',
  'StackingOverTime',
  'StandardizedConv2D',
  'StochasticResidual',
  'TimeEmbedding',
  'TransducerJoint',
  'TransformerBlock',
  'TransformerEncoder',
  'TransformerEncoderDecoder',
  'TransformerLm',
  'ValueResidual',
  'VectorQuantizer',
  'Visibility',
  'VisionTransformer',
  'WeightNormalizedLinear',
  'WindowLogMel',
  'bi_tempered_loss',
  'blockwise_attention',
  'choose_attention',
  'context_parallel_attention',
  'cross_entropy',
  'ctc_alignment',
  'ctc_beam_search',
  'ctc_frames_needed',
  'ctc_greedy_decode',
  'ctc_loss',
  'describe_pipelines',
  'dot_product_attention',
  'get_activation',
  'grid_positions',
  'key_array',
  'make_mask',
  'mel_filters',
  'query_array',
  'rnnt_loss',
  'row_array',
]
