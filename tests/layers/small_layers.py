"""A small config and arguments of every exported layer, split over a 2 x 2 x 2 mesh that its dims do not divide by."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from praxis_lite import layers
from praxis_lite.common.config import Config

AXES = ('replica', 'data', 'mdl')
B, T, D, F, V, N, H = 3, 5, 7, 9, 11, 3, 4
BATCH = ('replica', 'data')
OUT = (BATCH, None, 'mdl')
INNER = ('data', None, 'mdl')  # Inside of a stage, 'replica' splits the stages.
WT = ('data', 'mdl')


class Case(NamedTuple):
  """A layer, its arguments, and whether it returns float32 whatever it computes in."""

  config: Config
  args: tuple[Any, ...]
  float32_out: bool = False


def normal(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ids(*shape: int, below: int = V) -> np.ndarray:
  return np.random.default_rng(1).integers(0, below, shape).astype(np.int32)


def split(cls: Any, wt: Any = None, out: Any = None, **fields: Any) -> Config:
  config = Config(cls, **fields)
  if wt is not None:
    config.weight_split_dims_mapping.wt = wt
  if out is not None:
    config.activation_split_dims_mapping.out = out
  return config


def block(batch: str | tuple[str, ...] = BATCH) -> Config:
  config = split(layers.TransformerBlock, out=(batch, None, None), input_dims=D, hidden_dims=F, num_heads=N)
  config.set(dims_per_head=H)
  config.norm_tpl.weight_split_dims_mapping.wt = ('mdl',)
  config.attention_tpl.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  config.ff_tpl.weight_split_dims_mapping.wt = WT
  return config


def update(dropout: float = 0.0) -> Config:
  config = Config(layers.LowRankUpdate, rank=3, scale=2.0)
  config.dropout_tpl.rate = dropout
  return config


def low_rank_update() -> Config:
  config = update().set(in_shape=(D,), out_shape=(N, H))
  config.weight_split_dims_mapping.set(a=('data', None), b=(None, 'mdl', None))
  return config


def repeated() -> Config:
  linear = split(layers.Linear, WT, OUT, input_dims=D, output_dims=D)
  config = Config(layers.Repeat, num_layers=7, layers_tpl=(linear, linear.clone(use_bias=True)))
  config.weight_split_dims_mapping.stack = ('replica',)
  return config


def pipelined() -> Config:
  config = Config(layers.Pipelined, num_layers=6, num_stages=2, num_microbatches=2, circular_repeat=2)
  config.layers_tpl = split(layers.Linear, WT, INNER, input_dims=D, output_dims=D)
  config.weight_split_dims_mapping.stages = ('replica',)
  return config


def pipelined_transformer() -> Config:
  config = Config(layers.PipelinedTransformer, layers_tpl=block('data'), num_layers=3, num_stages=2, microbatch_size=2)
  config.weight_split_dims_mapping.stages = ('replica',)
  return config


def contrastive_loss() -> Config:
  config = split(layers.ContrastiveLoss, None, (BATCH,), kind='sigmoid', chunk_size=2, initial_bias=-1.0)
  config.activation_split_dims_mapping.logits = (BATCH, 'mdl')
  return config


def conv_net() -> Config:
  config = Config(layers.ConvNet, input_channels=1, channels=(3, 5))
  config.conv_tpl.weight_split_dims_mapping.wt = (None, None, None, 'mdl')
  config.norm_tpl.weight_split_dims_mapping.wt = ('data',)
  return config


def resnet_block(**fields: Any) -> Config:
  config = Config(layers.ResNetBlock, **fields)
  config.activation_split_dims_mapping.out = (BATCH, None, None, 'mdl')
  config.conv_tpl.weight_split_dims_mapping.wt = (None, None, None, WT)
  config.norm_tpl.weight_split_dims_mapping.wt = ('mdl',)
  return config


def resnet() -> Config:
  config = Config(layers.ResNet, channels=1, stem_dims=3, stem_size=3, stem_stride=1, stage_depths=(1, 1))
  config.set(stage_dims=(5, 6), pooling_tpl=None, block_tpl=resnet_block(kind='basic'))
  config.conv_tpl, config.norm_tpl = config.block_tpl.conv_tpl.clone(), config.block_tpl.norm_tpl.clone()
  return config


def convnext_block(**fields: Any) -> Config:
  config = split(layers.ConvNeXtBlock, ('data',), (BATCH, None, None, None), kernel_size=3, initial_scale=0.5, **fields)
  config.conv_tpl.weight_split_dims_mapping.wt = (None, None, None, WT)
  config.ff_tpl.weight_split_dims_mapping.wt = WT
  return config


def convnext() -> Config:
  config = Config(layers.ConvNeXt, channels=1, patch_size=2, stage_dims=(3, 5), stage_depths=(1, 1))
  config.conv_tpl.weight_split_dims_mapping.wt = (None, None, 'data', 'mdl')
  return config.set(block_tpl=convnext_block(), stochastic_depth=0.3)


def mlp() -> Config:
  config = Config(layers.Mlp, input_dims=T * D, hidden_dims=(F, 5), activation='tanh')
  config.linear_tpl.weight_split_dims_mapping.wt = WT
  return config


def attention() -> Config:
  config = split(layers.MultiHeadAttention, ('data', 'mdl', None), OUT, input_dims=D, num_heads=N, dims_per_head=H)
  config.set(causal=True, use_bias=True, rotary_tpl=Config(layers.RotaryPositions), gate_output=True)
  config.set(implementation='blockwise', block_size=2, dropout_rate=0.2, use_sinks=True)
  config.activation_split_dims_mapping.blnh = (BATCH, None, 'mdl', None)
  return config


def latent_attention() -> Config:
  config = split(layers.LatentAttention, ('data', 'mdl', None), OUT, input_dims=D, num_heads=N, dims_per_head=H)
  config.set(rotary_dims=2, value_dims=H - 1, latent_dims=5, query_latent_dims=7, use_bias=True, causal=True)
  config.gate_output = True
  config.activation_split_dims_mapping.set(blnh=(BATCH, None, 'mdl', None), blkh=(BATCH, None, 'mdl', None))
  return config.set(rotary_tpl=Config(layers.RotaryPositions), dropout_rate=0.2, use_sinks=True)


def differential_attention() -> Config:
  config = split(layers.DifferentialAttention, ('data', 'mdl', None), OUT, input_dims=D, num_heads=4, dims_per_head=H)
  config.set(num_kv_heads=2, use_bias=True, causal=True, rotary_tpl=Config(layers.RotaryPositions), use_sinks=True)
  config.head_norm_tpl.weight_split_dims_mapping.wt = ('mdl',)
  config.activation_split_dims_mapping.set(blnh=(BATCH, None, 'mdl', None), blkh=(BATCH, None, 'mdl', None))
  return config.set(dropout_rate=0.2, local_chunk=3, gate_output=True)


def relative_attention(cls: type[layers.MemoryAttention] = layers.RelativeAttention, **fields: object) -> Config:
  config = split(cls, ('data', 'mdl', None), OUT, input_dims=D, num_heads=N, dims_per_head=H, **fields)
  config.activation_split_dims_mapping.set(blnh=(BATCH, None, 'mdl', None), blkh=(BATCH, None, 'mdl', None))
  config.gate_output = True
  return config.set(causal=True, dropout_rate=0.2, use_bias=True, chunk_length=3, memory_length=2)


def multi_token_module() -> Config:
  config = split(layers.MultiTokenModule, input_dims=D, block_tpl=block())
  config.block_tpl.attention_tpl.causal = True
  config.norm_tpl.weight_split_dims_mapping.wt = ('mdl',)
  config.join_tpl.weight_split_dims_mapping.wt = WT
  config.join_tpl.activation_split_dims_mapping.out = OUT
  return config


def multi_token_prediction() -> Config:
  module = multi_token_module()
  return Config(
    layers.MultiTokenPrediction, input_dims=D, num_modules=2, module_tpl=module, block_tpl=module.block_tpl.clone()
  )


def moe(cls: type = layers.MoeFeedForward, **fields: Any) -> Config:
  config = split(cls, ('data', None, 'mdl'), OUT, input_dims=D, hidden_dims=F, num_experts=5, **fields)
  config.set(
    expert_axis='data', dispatch='capacity', capacity_factor=0.8, num_shared_experts=1, shared_expert_gate=True
  )
  config.set(use_bias=True, hidden_limit=2.0, up_offset=0.5)
  config.router_tpl = router()
  return config


def router() -> Config:
  config = split(layers.Router, WT, (BATCH, None, None), z_loss_weight=0.1, load_balance_loss_weight=0.1)
  return config.set(bias_update_rate=0.1, jitter=0.1, use_bias=True)


def transformer_lm() -> Config:
  config = split(layers.TransformerLm, out=(BATCH, None, None), vocab_size=V, model_dims=D, num_layers=2, num_heads=N)
  config.set(hidden_dims=F, dims_per_head=H)
  config.transformer_tpl.layers_tpl = block()
  config.softmax_tpl.weight_split_dims_mapping.wt = ('mdl', 'data')
  config.softmax_tpl.activation_split_dims_mapping.set(out=OUT, emb=(BATCH, None, None))
  return config


def cross_attention() -> Config:
  config = split(layers.CrossAttention, ('data', 'mdl', None), OUT, input_dims=D, num_heads=N, dims_per_head=H)
  config.activation_split_dims_mapping.set(blnh=(BATCH, None, 'mdl', None), blkh=(BATCH, None, 'mdl', None))
  return config.set(use_bias=True, qk_norm_tpl=Config(layers.RMSNorm), dropout_rate=0.2, gate_output=True)


def decoder_block() -> Config:
  config = split(layers.DecoderBlock, out=(BATCH, None, None), input_dims=D, hidden_dims=F, num_heads=N)
  config.set(dims_per_head=H)
  config.norm_tpl.weight_split_dims_mapping.wt = ('mdl',)
  config.ff_tpl.weight_split_dims_mapping.wt = WT
  for attention in config.attention_tpl, config.cross_attention_tpl:
    attention.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  return config


def encoder() -> Config:
  config = split(layers.TransformerEncoder, out=(BATCH, None, None), vocab_size=V, model_dims=D, num_layers=2)
  config.set(num_heads=N, hidden_dims=F, dims_per_head=H, position_tpl=Config(layers.LearnedPositions, max_len=T))
  config.embedding_tpl = split(layers.Embedding, ('mdl', 'data'), (BATCH, None, None))
  config.token_type_tpl = Config(layers.Embedding, num_classes=2)
  post_norm = config.transformer_tpl.layers_tpl
  post_norm.activation_split_dims_mapping.out = (BATCH, None, None)
  post_norm.norm_tpl.weight_split_dims_mapping.wt = ('mdl',)
  post_norm.attention_tpl.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  post_norm.ff_tpl.weight_split_dims_mapping.wt = WT
  return config


def head_transform() -> Config:
  config = split(layers.HeadTransform, out=OUT, dims=D)
  config.linear_tpl.weight_split_dims_mapping.wt = WT
  config.norm_tpl.weight_split_dims_mapping.wt = ('mdl',)
  return config


def attention_pooling() -> Config:
  config = split(layers.AttentionPooling, out=(BATCH, 'mdl'), dims=D, num_heads=N, dims_per_head=H, hidden_dims=F)
  config.attention_tpl.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  config.norm_tpl.weight_split_dims_mapping.wt = ('mdl',)
  config.ff_tpl.weight_split_dims_mapping.wt = WT
  return config


def patch_embedding() -> Config:
  config = split(layers.PatchEmbedding, out=OUT, patch_size=(2, 3), channels=1, dims=D)
  config.conv_tpl.weight_split_dims_mapping.wt = (None, None, None, WT)
  return config


def patch_decoder() -> Config:
  config = split(layers.PatchDecoder, out=OUT, input_dims=D, model_dims=8, num_layers=2, num_heads=2, hidden_dims=F)
  config.set(grid=(2, 3), patch_dims=5)
  config.activation_split_dims_mapping.states = (BATCH, None, None)
  config.embed_tpl.weight_split_dims_mapping.wt = config.pixels_tpl.weight_split_dims_mapping.wt = WT
  config.transformer_tpl.layers_tpl.attention_tpl.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  config.transformer_tpl.layers_tpl.ff_tpl.weight_split_dims_mapping.wt = WT
  return config


def vision_transformer() -> Config:
  config = split(layers.VisionTransformer, out=(BATCH, None), image_size=(6, 7), patch_size=(2, 3), channels=1)
  config.set(model_dims=D, num_layers=2, num_heads=N, hidden_dims=F, dims_per_head=H, pooling='attention')
  config.activation_split_dims_mapping.states = (BATCH, None, None)
  config.patch_tpl, config.pooling_tpl = split(layers.PatchEmbedding), split(layers.AttentionPooling)
  config.patch_tpl.conv_tpl.weight_split_dims_mapping.wt = (None, None, None, 'data')
  config.position_tpl.weight_split_dims_mapping.wt = WT
  config.pooling_tpl.attention_tpl.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  config.transformer_tpl.layers_tpl = block()
  config.representation_tpl = head_transform()
  config.representation_tpl.activation_split_dims_mapping.out = (BATCH, 'mdl')
  return config


def encoder_decoder() -> Config:
  config = split(layers.TransformerEncoderDecoder, out=(BATCH, None, None), vocab_size=V, model_dims=D, num_layers=2)
  config.set(num_encoder_layers=3, num_heads=N, hidden_dims=F, dims_per_head=H, scale_output_sqrt_depth=True)
  config.relative_bias_tpl = split(
    layers.RelativeBias, (None, 'mdl'), (None, 'mdl', None, None), num_buckets=8, max_distance=6
  )
  config.encoder_tpl.layers_tpl, config.decoder_tpl.layers_tpl = block(), decoder_block()
  config.softmax_tpl.weight_split_dims_mapping.wt = ('mdl', 'data')
  config.softmax_tpl.activation_split_dims_mapping.set(out=OUT, emb=(BATCH, None, None))
  return config


def sequential() -> Config:
  linear = split(layers.Linear, WT, OUT, input_dims=D, output_dims=F, use_bias=True)
  return Config(
    layers.Sequential, layers_tpl=(linear, Config(layers.Activation, activation='tanh'), linear.clone(input_dims=F))
  )


def adapter(**fields: Any) -> Config:
  return split(layers.MultitaskResidualAdapter, ('replica', 'data', 'mdl'), OUT, bottleneck_dims=5, **fields)


def adapted() -> Config:
  ff = split(layers.FeedForward, WT)
  config = split(layers.AdaptedFeedForward, None, OUT, input_dims=D, hidden_dims=F, ff_tpl=ff, mode='parallel')
  return config.set(adapter_tpl=adapter(norm_tpl=None))


def bi_tempered() -> Config:
  config = split(layers.BiTemperedSoftmax, WT, OUT, input_dims=D, num_classes=V, use_bias=True)
  config.loss_tpl.set(end_step=3, label_smoothing=0.1)
  return config


def mamba2() -> Config:
  config = split(layers.Mamba2, ('data', 'mdl', None), OUT, input_dims=D, num_heads=2 * N, dims_per_head=H)
  config.set(state_dims=5, num_groups=N, kernel_size=3, chunk_size=2, use_bias=True)
  config.weight_split_dims_mapping.groups = ('data', 'mdl', None)
  config.activation_split_dims_mapping.blnh = (BATCH, None, 'mdl', None)
  return config


def mixer_block() -> Config:
  config = split(layers.MixerBlock, out=(BATCH, None, None), input_dims=D, hidden_dims=F, mixer_tpl=mamba2())
  config.norm_tpl.weight_split_dims_mapping.wt = ('mdl',)
  config.ff_tpl.weight_split_dims_mapping.wt = WT
  return config


def convolution_module(**fields: Any) -> Config:
  config = split(layers.ConvolutionModule, WT, OUT, input_dims=D, kernel_size=4, **fields)
  config.norm_tpl.weight_split_dims_mapping.wt = ('mdl',)
  return config


def conv_subsampling() -> Config:
  config = split(layers.ConvSubsampling, None, OUT, input_dims=6, output_dims=D, channels=(3, 5))
  config.conv_tpl.weight_split_dims_mapping.wt = (None, None, None, 'mdl')
  config.proj_tpl.weight_split_dims_mapping.wt = WT
  return config


def conformer_block() -> Config:
  config = split(layers.ConformerBlock, None, OUT, input_dims=D, hidden_dims=F, num_heads=N, dims_per_head=H)
  config.set(conv_tpl=convolution_module())
  config.attention_tpl.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  config.ff_tpl.weight_split_dims_mapping.wt = WT
  return config


def modulated_block() -> Config:
  config = split(layers.ModulatedBlock, out=(BATCH, None, None), input_dims=8, hidden_dims=F, num_heads=2)
  config.modulation_tpl.weight_split_dims_mapping.wt = WT
  config.attention_tpl.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  config.ff_tpl.weight_split_dims_mapping.wt = WT
  return config


def recurrent() -> Config:
  config = split(layers.Recurrent, None, OUT, input_dims=D, output_dims=2 * F, direction='both', num_layers=2)
  config.cell_tpl.weight_split_dims_mapping.wt = WT
  return config.set(chunk_size=2)


def label_network() -> Config:
  config = split(layers.LabelNetwork, None, OUT, vocab_size=V, model_dims=D)
  config.embedding_tpl.weight_split_dims_mapping.wt = ('mdl', 'data')
  config.recurrent_tpl.cell_tpl.weight_split_dims_mapping.wt = WT
  return config


def audio_stem() -> Config:
  config = split(layers.AudioStem, None, OUT, input_dims=5, output_dims=D)
  config.conv_tpl.weight_split_dims_mapping.wt = (None, None, None, 'mdl')
  return config


def audio_encoder_decoder() -> Config:
  sizes = {'vocab_size': V, 'model_dims': D, 'num_layers': 1, 'num_heads': N, 'hidden_dims': F, 'num_mels': 5}
  config = split(layers.AudioEncoderDecoder, None, OUT, relative_bias_tpl=None, stem_tpl=audio_stem(), **sizes)
  config.position_tpl = Config(layers.LearnedPositions, max_len=T)
  config.encoder_position_tpl = Config(layers.LearnedPositions, max_len=5)
  for stack in (config.encoder_tpl, config.decoder_tpl):
    stack.layers_tpl.ff_tpl.weight_split_dims_mapping.wt = WT
    stack.layers_tpl.attention_tpl.set(use_bias=True, use_key_bias=False, dims_per_head=H)
    stack.layers_tpl.attention_tpl.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  config.softmax_tpl.weight_split_dims_mapping.wt = ('mdl', 'data')
  return config.set(dims_per_head=H)


def transducer_joint() -> Config:
  sizes = {'encoder_dims': D, 'label_dims': D, 'joint_dims': F, 'num_classes': V}
  config = split(layers.TransducerJoint, WT, None, chunk_size=2, **sizes)
  config.activation_split_dims_mapping.set(out=(BATCH, None, None, 'mdl'), hidden=(BATCH, None, None, None))
  config.proj_tpl.weight_split_dims_mapping.wt = WT
  return config


def gated_delta_net() -> Config:
  config = split(layers.GatedDeltaNet, ('data', 'mdl', None), OUT, input_dims=D, num_heads=2 * N, dims_per_head=H)
  config.set(key_dims=5, num_groups=N, kernel_size=3, chunk_size=2)
  config.weight_split_dims_mapping.groups = ('data', 'mdl', None)
  config.activation_split_dims_mapping.blnh = (BATCH, None, 'mdl', None)
  return config


def rg_lru() -> Config:
  config = split(layers.RgLru, ('data', 'mdl', None), OUT, input_dims=D, num_heads=N, width=N * H, kernel_size=3)
  config.activation_split_dims_mapping.blnh = (BATCH, None, 'mdl', None)
  return config


def diagonal_ssm() -> Config:
  config = split(layers.DiagonalSsm, (None, 'mdl', None), (BATCH, None, None), input_dims=9, num_heads=N, state_dims=4)
  config.activation_split_dims_mapping.blnh = (BATCH, None, 'mdl', None)
  return config


def conformer_encoder() -> Config:
  config = split(layers.ConformerEncoder, None, OUT, input_dims=6, model_dims=D, num_layers=2, num_heads=N)
  config.set(dims_per_head=H, hidden_dims=F, kernel_size=4, subsampling_tpl=conv_subsampling())
  config.stack_tpl.layers_tpl = conformer_block()
  return config


def diffusion_transformer() -> Config:
  config = split(layers.DiffusionTransformer, out=(BATCH, None, None), image_channels=1, model_dims=8, num_layers=2)
  config.set(num_heads=2, hidden_dims=F, num_classes=4)
  config.blocks_tpl.layers_tpl = modulated_block()
  for name in ('patch', 'modulation', 'out'):
    getattr(config, f'{name}_tpl').weight_split_dims_mapping.wt = WT
  config.class_tpl.weight_split_dims_mapping.wt = ('mdl', 'data')
  config.time_tpl = Config(layers.TimeEmbedding, num_sinusoids=6)
  config.time_tpl.linear_tpl.weight_split_dims_mapping.wt = WT
  return config


def time_embedding() -> Config:
  config = split(layers.TimeEmbedding, None, (BATCH, 'mdl'), dims=D, num_sinusoids=6)
  config.linear_tpl.weight_split_dims_mapping.wt = WT
  return config


def gumbel_quantizer() -> Config:
  config = split(layers.GumbelQuantizer, (None, 'mdl', 'data'), OUT, input_dims=D, num_codes=5)
  config.linear_tpl.weight_split_dims_mapping.wt = WT
  return config.set(diversity_weight=0.1, kl_weight=0.1, temperature=0.7)


def image_coder(cls: Any, **fields: Any) -> Config:
  config = Config(cls, channels=(3, 5), image_channels=1, **fields)
  config.activation_split_dims_mapping.out = (BATCH, None, None, None)
  config.conv_tpl.weight_split_dims_mapping.wt = (None, None, 'data', 'mdl')
  return config


X = normal(B, T, D)
SOURCE = normal(B, 6, D, seed=2)
IMAGES = normal(B, 6, 7, 1)
TIMES = np.array([0.0, 0.25, 0.75], np.float32)  # Exact in bfloat16.
WEIGHTS = np.array([1.0, 0.0, 0.5], np.float32)
POSITIONS = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))

CASES = {
  'AlibiBias': lambda: Case(
    split(layers.AlibiBias, None, (BATCH, 'mdl', None, None), num_heads=N), (POSITIONS, POSITIONS), float32_out=True
  ),
  'Activation': lambda: Case(split(layers.Activation, None, OUT, activation='gelu'), (X,)),
  'AdaptedFeedForward': lambda: Case(adapted(), (X,)),
  'AttentionPooling': lambda: Case(attention_pooling(), (X,)),
  'AudioEncoderDecoder': lambda: Case(
    audio_encoder_decoder(), (normal(B, 9, 5), ids(B, T), ids(B, T)), float32_out=True
  ),
  'AudioStem': lambda: Case(audio_stem(), (normal(B, 9, 5),)),
  'BatchNorm': lambda: Case(split(layers.BatchNorm, ('mdl',), OUT, dims=D), (X, WEIGHTS)),
  'BiTemperedLoss': lambda: Case(
    Config(layers.BiTemperedLoss, t1=0.7, t2=1.3), (normal(B, T, V), ids(B, T)), float32_out=True
  ),
  'BiTemperedSoftmax': lambda: Case(bi_tempered(), (X, ids(B, T)), float32_out=True),
  'Bias': lambda: Case(split(layers.Bias, ('mdl',), OUT, dims=D), (X,)),
  'CausalConv': lambda: Case(
    split(layers.CausalConv, (None, 'mdl', None), (BATCH, None, 'mdl', None), shape=(N, H), kernel_size=3),
    (normal(B, T, N, H),),
  ),
  'ConformerBlock': lambda: Case(conformer_block(), (X,)),
  'ConformerEncoder': lambda: Case(conformer_encoder(), (normal(B, 9, 6), np.arange(9) >= np.array([[9], [6], [1]]))),
  'ConvSubsampling': lambda: Case(conv_subsampling(), (normal(B, 7, 6), np.arange(7) >= np.array([[7], [6], [1]]))),
  'ConvolutionModule': lambda: Case(convolution_module(), (X, POSITIONS > 3)),
  'Conv2D': lambda: Case(
    split(layers.Conv2D, (None, None, None, WT), (BATCH, None, None, 'mdl'), filter_shape=(3, 2, 1, 5)), (IMAGES,)
  ),
  'ContrastiveLoss': lambda: Case(contrastive_loss(), (X[:, 0], SOURCE[:, 0], WEIGHTS), float32_out=True),
  'ConvNet': lambda: Case(conv_net(), (IMAGES, WEIGHTS)),
  'ConvNeXt': lambda: Case(convnext(), (IMAGES,)),
  'ConvNeXtBlock': lambda: Case(convnext_block(dims=5, hidden_dims=7), (normal(B, 5, 4, 5),)),
  'CrossAttention': lambda: Case(cross_attention(), (X, SOURCE)),
  'DecoderBlock': lambda: Case(decoder_block(), (X, SOURCE)),
  'DepthwiseConv1D': lambda: Case(
    split(layers.DepthwiseConv1D, (None, 'mdl'), OUT, dims=D, kernel_size=4, use_bias=True), (X, POSITIONS > 3)
  ),
  'DiffusionTransformer': lambda: Case(
    diffusion_transformer(), (normal(B, 4, 6, 1), TIMES, np.array([0, 4, 2], np.int32))
  ),
  'Dropout': lambda: Case(split(layers.Dropout, None, OUT, rate=0.3), (X,)),
  'Embedding': lambda: Case(split(layers.Embedding, ('mdl', 'data'), OUT, num_classes=V, input_dims=D), (ids(B, T),)),
  'FeedForward': lambda: Case(split(layers.FeedForward, WT, OUT, input_dims=D, hidden_dims=F), (X,)),
  'FullSoftmax': lambda: Case(
    split(layers.FullSoftmax, WT, OUT, input_dims=D, num_classes=V, use_bias=True, z_loss_weight=0.1, soft_cap=5.0),
    (X, ids(B, T)),
    float32_out=True,
  ),
  'GatedDeltaNet': lambda: Case(gated_delta_net(), (X,)),
  'GatedFeedForward': lambda: Case(split(layers.GatedFeedForward, WT, OUT, input_dims=D, hidden_dims=F), (X,)),
  'GatedRMSNorm': lambda: Case(
    split(layers.GatedRMSNorm, ('mdl', None), (BATCH, None, 'mdl', None), num_heads=6, dims_per_head=H, num_groups=3),
    (normal(B, T, 6, H), normal(B, T, 6, H, seed=1)),
  ),
  'GlobalPooling': lambda: Case(split(layers.GlobalPooling, None, (BATCH, 'mdl')), (IMAGES,)),
  'GroupNorm': lambda: Case(split(layers.GroupNorm, ('mdl',), OUT, dims=9, num_groups=3), (normal(B, T, 9),)),
  'DiagonalSsm': lambda: Case(diagonal_ssm(), (normal(B, T, 9),)),
  'DifferentialAttention': lambda: Case(differential_attention(), (X,)),
  'LatentAttention': lambda: Case(latent_attention(), (X,)),
  'IdentityNorm': lambda: Case(split(layers.IdentityNorm, None, OUT, dims=D), (X,)),
  'FiniteScalarQuantizer': lambda: Case(
    split(layers.FiniteScalarQuantizer, None, OUT, levels=(4, 5, 3)), (normal(B, T, 3), POSITIONS > 3)
  ),
  'GumbelQuantizer': lambda: Case(gumbel_quantizer(), (X, POSITIONS > 3)),
  'ImageDecoder': lambda: Case(image_coder(layers.ImageDecoder, input_dims=5, num_blocks=1), (normal(B, 1, 2, 5),)),
  'ImageEncoder': lambda: Case(image_coder(layers.ImageEncoder, output_dims=5, num_blocks=2), (normal(B, 4, 8, 1),)),
  'HeadTransform': lambda: Case(head_transform(), (X,)),
  'ImageMixing': lambda: Case(
    split(layers.ImageMixing, None, (BATCH, None, 'mdl', None), mixup_alpha=0.5, cutmix_alpha=1.0),
    (IMAGES, WEIGHTS),
    float32_out=True,
  ),
  'LabelNetwork': lambda: Case(label_network(), (ids(B, T),)),
  'LayerNorm': lambda: Case(split(layers.LayerNorm, ('mdl',), OUT, dims=D), (X,)),
  'LearnedPositions': lambda: Case(split(layers.LearnedPositions, WT, OUT, max_len=T, dims=D), (POSITIONS,)),
  'Linear': lambda: Case(split(layers.Linear, WT, OUT, input_dims=D, output_dims=F, use_bias=True), (X,)),
  'Mamba2': lambda: Case(mamba2(), (X,)),
  'MixerBlock': lambda: Case(mixer_block(), (X,)),
  'DoraLinear': lambda: Case(
    split(layers.DoraLinear, WT, OUT, input_dims=D, output_dims=F, use_bias=True, lora_tpl=update()), (X,)
  ),
  'DoraProjection': lambda: Case(
    split(
      layers.DoraProjection, ('data', 'mdl', None), in_shape=(D,), out_shape=(N, H), use_bias=True, lora_tpl=update()
    ),
    (X,),
  ),
  'Ia3Linear': lambda: Case(
    split(layers.Ia3Linear, WT, OUT, input_dims=D, output_dims=F, use_bias=True, ia3_of_inputs=True), (X,)
  ),
  'Ia3Projection': lambda: Case(
    split(layers.Ia3Projection, ('data', 'mdl', None), in_shape=(D,), out_shape=(N, H), use_bias=True), (X,)
  ),
  'LoraEmbedding': lambda: Case(
    split(
      layers.LoraEmbedding, ('mdl', 'data'), OUT, num_classes=V, input_dims=D, scale_sqrt_depth=True, lora_tpl=update()
    ),
    (ids(B, T),),
  ),
  'LoraLinear': lambda: Case(
    split(layers.LoraLinear, WT, OUT, input_dims=D, output_dims=F, use_bias=True, lora_tpl=update(dropout=0.2)), (X,)
  ),
  'LoraMoeFeedForward': lambda: Case(moe(layers.LoraMoeFeedForward, rank=3, lora_scale=2.0), (X, POSITIONS > 3)),
  'LoraProjection': lambda: Case(
    split(
      layers.LoraProjection, ('data', 'mdl', None), in_shape=(D,), out_shape=(N, H), use_bias=True, lora_tpl=update()
    ),
    (X,),
  ),
  'LowRankUpdate': lambda: Case(low_rank_update(), (X,)),
  'LogMel': lambda: Case(
    split(layers.LogMel, None, OUT, sample_rate=100, frame_length=8, frame_step=3, num_mels=3, normalize=True),
    (normal(B, 19), np.arange(19) >= np.array([[19], [14], [3]])),
  ),
  'LookupFreeQuantizer': lambda: Case(
    split(layers.LookupFreeQuantizer, None, OUT, input_dims=D, joint_dims=4), (X, POSITIONS > 3)
  ),
  'Mlp': lambda: Case(mlp(), (X,)),
  'ModulatedBlock': lambda: Case(modulated_block(), (normal(B, T, 8), normal(B, 8, seed=2))),
  'MoeFeedForward': lambda: Case(moe(), (X, POSITIONS > 3)),
  'MemoryAttention': lambda: Case(relative_attention(layers.MemoryAttention), (X,)),
  'MultiHeadAttention': lambda: Case(attention(), (X,)),
  'MultiTokenModule': lambda: Case(multi_token_module(), (X, normal(B, T, D, seed=7))),
  'MultiTokenPrediction': lambda: Case(multi_token_prediction(), (X, normal(B, T, D, seed=7))),
  'MultitaskResidualAdapter': lambda: Case(adapter(input_dims=D, num_tasks=3), (X, ids(B, below=3))),
  'PartialRotaryPositions': lambda: Case(Config(layers.PartialRotaryPositions, dims=H), (normal(B, T, N, H),)),
  'PatchDecoder': lambda: Case(
    patch_decoder(), (normal(B, 3, D), np.array([[0, 1, 2, 3, 4, 5]] * B, np.int32)[:, ::-1])
  ),
  'PatchEmbedding': lambda: Case(patch_embedding(), (IMAGES,)),
  'PerDimScale': lambda: Case(
    split(layers.PerDimScale, ('mdl',), (BATCH, None, None, 'mdl'), dims=H), (normal(B, T, N, H),)
  ),
  'Pipelined': lambda: Case(pipelined(), (X,)),
  'PipelinedTransformer': lambda: Case(pipelined_transformer(), (X,)),
  'Pooling': lambda: Case(split(layers.Pooling, None, (BATCH, None, 'mdl', None), kind='mean'), (IMAGES,)),
  'Projection': lambda: Case(
    split(layers.Projection, ('data', 'mdl', None), in_shape=(D,), out_shape=(N, H), use_bias=True), (X,)
  ),
  'RMSNorm': lambda: Case(split(layers.RMSNorm, ('mdl',), OUT, dims=D), (X,)),
  'RMSNormNoScale': lambda: Case(split(layers.RMSNormNoScale, None, OUT, dims=D), (X,)),
  'Recurrent': lambda: Case(recurrent(), (X,)),
  'RandomVectorQuantizer': lambda: Case(
    split(
      layers.RandomVectorQuantizer, ('data', 'mdl', None), OUT, input_dims=D, num_codes=5, num_groups=3, code_dims=2
    ),
    (normal(B, T, D, seed=1), POSITIONS > 3),  # None is about as near to two codes.
  ),
  'RelativeAttention': lambda: Case(relative_attention(position_dims=4), (X,)),
  'RelativeBias': lambda: Case(
    split(layers.RelativeBias, (None, 'mdl'), (BATCH, 'mdl', None, None), num_heads=N, num_buckets=8),
    (POSITIONS, POSITIONS),
  ),
  'Repeat': lambda: Case(repeated(), (X,)),
  'RepeatedTransformer': lambda: Case(Config(layers.RepeatedTransformer, layers_tpl=block(), num_layers=2), (X,)),
  'ResNet': lambda: Case(resnet(), (IMAGES, WEIGHTS)),
  'ResNetBlock': lambda: Case(
    resnet_block(pre_activation=True, stride=2, input_dims=5, output_dims=12), (normal(B, 5, 4, 5), WEIGHTS)
  ),
  'RgLru': lambda: Case(rg_lru(), (X,)),
  'RotaryPositions': lambda: Case(Config(layers.RotaryPositions, dims=H), (normal(B, T, N, H),)),
  'Router': lambda: Case(router().set(input_dims=D, num_experts=5), (X,), float32_out=True),
  'ScaledEmbeddingSoftmax': lambda: Case(
    split(layers.ScaledEmbeddingSoftmax, ('mdl', 'data'), OUT, input_dims=D, num_classes=V, embedding_scale=3.0),
    (X, ids(B, T)),
    float32_out=True,
  ),
  'Sequential': lambda: Case(sequential(), (X,)),
  'SharedEmbeddingSoftmax': lambda: Case(
    split(
      layers.SharedEmbeddingSoftmax, ('mdl', 'data'), OUT, input_dims=D, num_classes=V, use_bias=True, chunk_size=3
    ),
    (X, ids(B, T)),
    float32_out=True,
  ),
  'SigmoidCrossEntropy': lambda: Case(
    split(layers.SigmoidCrossEntropy, WT, OUT, input_dims=D, num_classes=V, use_bias=True),
    (X, ids(B, T)),
    float32_out=True,
  ),
  'SinusoidalPositions': lambda: Case(split(layers.SinusoidalPositions, None, OUT, dims=D), (POSITIONS,)),
  'SinusoidalPositions2D': lambda: Case(
    split(layers.SinusoidalPositions2D, None, OUT, dims=8), (POSITIONS, POSITIONS[:, ::-1])
  ),
  'SpectralNormLinear': lambda: Case(
    split(layers.SpectralNormLinear, WT, OUT, input_dims=D, output_dims=F, use_bias=True), (X,)
  ),
  'SpectrumAugmenter': lambda: Case(
    split(layers.SpectrumAugmenter, None, OUT, freq_mask_max_bins=3, time_mask_max_frames=2), (X, POSITIONS > 3)
  ),
  'StackedTransformer': lambda: Case(Config(layers.StackedTransformer, layers_tpl=block(), num_layers=2), (X,)),
  'StackingOverTime': lambda: Case(
    split(layers.StackingOverTime, None, OUT, left_context=1, right_context=2, stride=2), (X, POSITIONS > 3)
  ),
  'StandardizedConv2D': lambda: Case(
    split(
      layers.StandardizedConv2D, (None, None, 'data', 'mdl'), (BATCH, None, None, 'mdl'), filter_shape=(3, 2, 5, 6)
    ),
    (normal(B, 5, 4, 5),),
  ),
  'StochasticResidual': lambda: Case(
    split(layers.StochasticResidual, None, OUT, rate=0.4, residual_weight=0.5), (X, normal(B, T, D, seed=3))
  ),
  'TimeEmbedding': lambda: Case(time_embedding(), (TIMES,)),
  'TransducerJoint': lambda: Case(
    transducer_joint(), (X, normal(B, 3, D, seed=2), ids(B, 2), np.int32(0)), float32_out=True
  ),
  'TransformerBlock': lambda: Case(block(), (X,)),
  'TransformerEncoder': lambda: Case(encoder(), (ids(B, T),)),
  'TransformerEncoderDecoder': lambda: Case(encoder_decoder(), (ids(B, 6), ids(B, T), ids(B, T)), float32_out=True),
  'ValueResidual': lambda: Case(
    split(layers.ValueResidual, ('mdl',), num_heads=N, is_learned=True),
    (normal(B, T, N, H), normal(B, T, N, H, seed=7)),
  ),
  'TransformerLm': lambda: Case(transformer_lm(), (ids(B, T), ids(B, T)), float32_out=True),
  'VisionTransformer': lambda: Case(vision_transformer(), (IMAGES,)),
  'VectorQuantizer': lambda: Case(
    split(
      layers.VectorQuantizer, ('data', 'mdl', None), OUT, input_dims=9, num_codes=5, num_groups=3, restart_share=0.5
    ),
    (normal(B, T, 9), POSITIONS > 3),
  ),
  'WindowLogMel': lambda: Case(
    split(
      layers.WindowLogMel,
      None,
      OUT,
      sample_rate=100,
      frame_length=8,
      frame_step=3,
      fft_length=8,
      num_mels=3,
      window_length=21,
    ),
    (normal(B, 19), np.arange(19) >= np.array([[19], [14], [3]])),
  ),
  'WeightNormalizedLinear': lambda: Case(
    split(layers.WeightNormalizedLinear, WT, OUT, input_dims=D, output_dims=F, use_bias=True), (X,)
  ),
}
