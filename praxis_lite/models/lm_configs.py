"""Configs of language models in two styles, GPT-2 and LLaMA, and the usual ways to split models over a mesh."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from jax.typing import DTypeLike

from praxis_lite.common.config import Config, field_names, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.base import Layer
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.encoder import TransformerEncoder
from praxis_lite.layers.feedforward import FeedForward, GatedFeedForward
from praxis_lite.layers.mixers import Mixer
from praxis_lite.layers.moe import MoeFeedForward
from praxis_lite.layers.normalizations import LayerNorm, RMSNorm
from praxis_lite.layers.positions import LearnedPositions, RotaryPositions
from praxis_lite.layers.repeat import Repeat, kinds_of_stack
from praxis_lite.layers.softmax import FullSoftmax, SharedEmbeddingSoftmax
from praxis_lite.layers.transformer import PipelinedTransformer, RepeatedTransformer, StackedTransformer, TransformerLm
from praxis_lite.layers.vision_transformer import VisionTransformer
from praxis_lite.models.language_model import LanguageModel
from praxis_lite.models.two_towers import TwoTowerModel
from praxis_lite.sharding.specs import axes_to_entry, spec_axes
from praxis_lite.sharding.weights import SplitDimsMapping, WeightInit

LmT = TypeVar('LmT', bound=Layer)
Axes = str | tuple[str, ...] | None


def transformer_lm(
  *,
  vocab_size: int,
  model_dims: int,
  num_layers: int,
  num_heads: int,
  num_kv_heads: int | None = None,
  dims_per_head: int | None = None,
  hidden_dims: int | None = None,
  style: str = 'llama',
  max_len: int = 1024,
  rotary_base: float = 10_000.0,
  tie_embeddings: bool | None = None,
  use_bias: bool | None = None,
  activation: str | None = None,
  dropout: float = 0.0,
  repeat: bool = True,
  remat: str = 'auto',
  experts: Config[MoeFeedForward] | None = None,
  first_hidden_dims: tuple[int, ...] = (),
  fprop_dtype: DTypeLike | None = None,
  matmul: str = 'fprop',
) -> Config[LanguageModel]:
  """Returns the config of a language model.

  Args:
    vocab_size, model_dims, num_layers, num_heads, num_kv_heads, dims_per_head: see `TransformerLm`.
    hidden_dims: hidden dims of the feed-forward layers. None means 4 D for 'gpt2', and 8/3 D, rounded up to a multiple
      of 64, for 'llama', which gives the same number of weights.
    style: 'llama' has RMSNorm, rotary positions, a gated feed-forward layer, no biases, and separate tables for
      softmax and embedding (Touvron et al., 2023); 'gpt2' has LayerNorm, learned positions, GELU, biases, and one
      table for both (Radford et al., 2019).
    max_len: number of learned positions of 'gpt2'.
    rotary_base: longest wavelength of the rotary positions of 'llama', over 2 pi.
    tie_embeddings: whether softmax and embedding share a table; with None, the style decides.
    use_bias: whether linear layers and norms have biases; with None, the style decides.
    activation: activation of the feed-forward layers, see `activations.py`; None means 'silu' for 'llama' and
      'gelu_tanh' for 'gpt2'.
    dropout: rate of dropout on embeddings, and on values that blocks add to the residual stream.
    repeat: whether the blocks are a scan; False makes each block a separate layer.
    remat: see `layers/remat.py`.
    experts: a mixture of experts, with `hidden_dims` each, for the feed-forward layer of each block; with None, the
      layer is dense.
    first_hidden_dims: hidden dims of each dense block that comes before the blocks with experts.
    fprop_dtype: dtype of the computation, such as jnp.bfloat16; None means the dtype of the weights, float32.
    matmul: for the projections of attention and the linear layers of dense feed-forward layers: 'fprop', or 'fp8' as in
      `layers/fp8.py`. The softmax stays in `fprop_dtype`.
  """
  if style not in ('llama', 'gpt2'):
    raise ConfigError(f"transformer_lm: style is 'llama' or 'gpt2', got {style!r}")
  gpt2 = style == 'gpt2'
  if hidden_dims is None:
    hidden_dims = 4 * model_dims if gpt2 else math.ceil(8 * model_dims / 3 / 64) * 64
  lm = Config(TransformerLm, params_init=WeightInit.Gaussian(0.02))
  lm.transformer_tpl = Config(RepeatedTransformer if repeat else StackedTransformer, remat=remat)
  block = lm.transformer_tpl.layers_tpl
  # Each block adds to the residual stream twice. With this scale, all blocks together add the variance of one.
  residual_init = WeightInit.Gaussian(0.02 / math.sqrt(2 * num_layers))
  if gpt2:
    norm: Config[LayerNorm] | Config[RMSNorm] = Config(LayerNorm, epsilon=1e-5)
    lm.position_tpl = Config(LearnedPositions, max_len=max_len)
    block.attention_tpl.use_bias = True
    block.ff_tpl = Config(FeedForward, activation='gelu_tanh', use_bias=True, out_init=residual_init)
  else:
    norm = Config(RMSNorm, epsilon=1e-5)
    block.attention_tpl.rotary_tpl = Config(RotaryPositions, max_timescale=rotary_base)
    block.ff_tpl = Config(GatedFeedForward, out_init=residual_init)
  if activation is not None:
    block.ff_tpl.activation = activation
  block.attention_tpl.out_tpl.params_init = residual_init
  if matmul != 'fprop':
    for projection in (block.attention_tpl.proj_tpl, block.attention_tpl.out_tpl, block.ff_tpl.proj_tpl):
      projection.matmul = matmul
  block.norm_tpl, lm.final_norm_tpl = norm, norm.clone()
  lm.dropout_tpl = Config(Dropout, rate=dropout)
  block.dropout_tpl = Config(Dropout, rate=dropout)
  lm.transformer_tpl.first_tpl = tuple(block.clone(hidden_dims=dims) for dims in first_hidden_dims)
  if experts is not None:
    block.ff_tpl = experts.clone(out_init=residual_init)
    if activation is not None:
      block.ff_tpl.activation = activation
  if tie_embeddings if tie_embeddings is not None else gpt2:
    lm.softmax_tpl = Config(SharedEmbeddingSoftmax)
  else:
    lm.embedding_tpl, lm.softmax_tpl = Config(Embedding), Config(FullSoftmax)
  return Config(
    LanguageModel,
    vocab_size=vocab_size,
    model_dims=model_dims,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    dims_per_head=dims_per_head,
    hidden_dims=hidden_dims,
    use_bias=use_bias,
    lm_tpl=lm,
    fprop_dtype=fprop_dtype,
  )


def set_sharding(
  config: Config[LmT],
  *,
  batch_axes: str | tuple[str, ...] | None = ('replica', 'data'),
  data_axis: str | tuple[str, ...] | None = 'data',
  mdl_axis: str | None = 'mdl',
  expert_axis: str | tuple[str, ...] | None = None,
  context_axis: str | None = None,
) -> Config[LmT]:
  """Sets the split mappings of a language model, in place, and returns it.

      activations of width D      batch over `batch_axes`
      of heads, hidden, classes   also heads, hidden dims or classes over `mdl_axis` (tensor parallel)
      weights                     heads, hidden dims or classes over `mdl_axis`, D over `data_axis` (fully sharded)
      weights of experts          the same without the axes in `expert_axis`, which splits the experts

  The forward pass of a block then has two all-reduces over `mdl_axis` (Shoeybi et al., 2019), and gathers weights over
  `data_axis` before it uses them (Rajbhandari et al., 2020). Norms and learned positions are replicated.

  Args:
    config: the config of a `LanguageModel` or a `TransformerLm`, of an `EncoderDecoderModel` or its network, of a
      `MaskedLanguageModel`, a `SequenceClassifier`, a `TextEncoder` or their `TransformerEncoder`, of a
      `ClassificationModel` with a `VisionTransformer` or of that, or of a `TwoTowerModel`.
    batch_axes, data_axis, mdl_axis: mesh or logical axes; None does not split.
    expert_axis: mesh or logical axes, often one of `batch_axes`, over which tokens are exchanged between experts; see
      `MoeFeedForward`. With None, each device computes all experts for its own tokens.
    context_axis: mesh axis that splits the length of all activations (context parallelism); None disables it.
  """
  if _is_a(config, TwoTowerModel):
    return _split_towers(config, batch_axes, data_axis, mdl_axis)
  lm = _network(config)
  bld, blf = (batch_axes, context_axis, None), (batch_axes, context_axis, mdl_axis)
  blnh = (batch_axes, None, mdl_axis, None)  # A cache is not split along its length; others get `context_axis` below.
  lm.activation_split_dims_mapping.set(**({'states': bld} if _is_a(lm, VisionTransformer) else {'out': bld}))
  blocks = [block for stack in _stacks(lm) for block in kinds_of_stack(getattr(lm, stack))]
  if (mtp := getattr(lm, 'mtp_tpl', None)) is not None:
    mtp.module_tpl.join_tpl.weight_split_dims_mapping.wt = (data_axis, mdl_axis)
    mtp.module_tpl.join_tpl.activation_split_dims_mapping.out = bld
    blocks += [] if mtp.block_tpl is None else [mtp.block_tpl]
  for block in blocks:
    block.activation_split_dims_mapping.out = bld
    attentions = [block.attention_tpl, *([block.cross_attention_tpl] if hasattr(block, 'cross_attention_tpl') else [])]
    for attention in attentions:
      if attention is not None:
        attention.weight_split_dims_mapping.wt = (data_axis, mdl_axis, None)
        attention.activation_split_dims_mapping.set(blnh=blnh, blkh=blnh, out=bld)
        attention.context_axis = context_axis
    if getattr(block, 'mixer_tpl', None) is not None:
      _split_mixer(block.mixer_tpl, batch=batch_axes, length=context_axis, data=data_axis, mdl=mdl_axis)
    if block.ff_tpl is None:
      continue
    dense, kind = block.ff_tpl, target(block.ff_tpl)
    if isinstance(kind, type) and issubclass(kind, MoeFeedForward):
      free = (_remove_axes(axes, spec_axes(expert_axis)) for axes in (data_axis, mdl_axis))
      block.ff_tpl.weight_split_dims_mapping.wt = (expert_axis, *free)
      block.ff_tpl.activation_split_dims_mapping.out = bld
      block.ff_tpl.expert_axis = expert_axis
      dense = block.ff_tpl.shared_tpl
    dense.weight_split_dims_mapping.wt = (data_axis, mdl_axis)
    dense.activation_split_dims_mapping.set(hidden=blf, out=bld)
  if _is_a(lm, VisionTransformer):
    _split_ends_of_images(lm, batch_axes, data_axis, mdl_axis)
    return _split_softmax(config, (data_axis, mdl_axis), (batch_axes, mdl_axis))
  table = (mdl_axis, data_axis)
  if _is_a(lm, TransformerEncoder):
    lm.embedding_tpl.weight_split_dims_mapping.wt = table
    of_table = lm.embedding_tpl.activation_split_dims_mapping
    of_table.set(**({'emb': bld, 'out': blf} if hasattr(of_table, 'emb') else {'out': bld}))
    for name in ('transform_tpl', 'pooler_tpl'):
      if getattr(config, name, None) is not None:
        getattr(config, name).linear_tpl.weight_split_dims_mapping.wt = (data_axis, mdl_axis)
    is_of_rows = hasattr(config, 'num_classes')
    return _split_softmax(config, (data_axis, mdl_axis), (batch_axes, mdl_axis) if is_of_rows else blf)
  if getattr(lm, 'relative_bias_tpl', None) is not None:
    lm.relative_bias_tpl.weight_split_dims_mapping.wt = (None, mdl_axis)
    lm.relative_bias_tpl.activation_split_dims_mapping.out = (None, mdl_axis, None, None)
  if getattr(lm, 'decoder_embedding_tpl', None) is not None:
    lm.decoder_embedding_tpl.weight_split_dims_mapping.wt = table
    lm.decoder_embedding_tpl.activation_split_dims_mapping.out = bld
  lm.softmax_tpl.activation_split_dims_mapping.out = blf
  if lm.embedding_tpl is None:
    lm.softmax_tpl.weight_split_dims_mapping.wt = table
    lm.softmax_tpl.activation_split_dims_mapping.emb = bld
  else:
    lm.softmax_tpl.weight_split_dims_mapping.wt = (data_axis, mdl_axis)
    lm.embedding_tpl.weight_split_dims_mapping.wt = table
    lm.embedding_tpl.activation_split_dims_mapping.out = bld
  return config


def _split_mixer(config: Config, **axes: str | tuple[str, ...] | None) -> None:
  """Sets the mappings of a layer in the place of attention, as its class says."""
  kind = target(config)
  assert isinstance(kind, type) and issubclass(kind, Mixer)
  kind.set_split(config, **axes)


def _split_towers(config: Config[LmT], batch_axes: Axes, data_axis: Axes, mdl_axis: str | None) -> Config[LmT]:
  """Sets the mappings of a model with two towers, and returns its config."""
  for tower in (config.image_tpl, config.text_tpl):
    set_sharding(tower, batch_axes=batch_axes, data_axis=data_axis, mdl_axis=mdl_axis)
  config.projection_tpl.weight_split_dims_mapping.wt = (data_axis, mdl_axis)
  config.projection_tpl.activation_split_dims_mapping.out = (batch_axes, None)
  config.loss_tpl.activation_split_dims_mapping.set(out=(batch_axes,), logits=(batch_axes, None))
  return config


def _split_softmax(config: Config[LmT], wt: SplitDimsMapping, out: SplitDimsMapping) -> Config[LmT]:
  """Sets the mappings of the softmax of a model, if it has one, and returns the config."""
  if getattr(config, 'softmax_tpl', None) is not None:
    config.softmax_tpl.weight_split_dims_mapping.wt = wt
    config.softmax_tpl.activation_split_dims_mapping.out = out
  return config


def _split_ends_of_images(network: Config, batch_axes: Axes, data_axis: Axes, mdl_axis: Axes) -> None:
  """Sets the mappings of a vision transformer around its blocks."""
  bld, heads = (batch_axes, None, None), (batch_axes, None, mdl_axis, None)
  network.activation_split_dims_mapping.out = (batch_axes, None)
  network.patch_tpl.activation_split_dims_mapping.out = bld
  network.patch_tpl.conv_tpl.weight_split_dims_mapping.wt = (None, None, None, data_axis)
  network.patch_tpl.conv_tpl.activation_split_dims_mapping.out = (batch_axes, None, None, None)
  pooling = network.pooling_tpl
  pooling.activation_split_dims_mapping.out = (batch_axes, None)
  pooling.attention_tpl.weight_split_dims_mapping.wt = (data_axis, mdl_axis, None)
  pooling.attention_tpl.activation_split_dims_mapping.set(blnh=heads, blkh=heads, out=bld)
  pooling.ff_tpl.weight_split_dims_mapping.wt = (data_axis, mdl_axis)
  pooling.ff_tpl.activation_split_dims_mapping.set(hidden=(batch_axes, None, mdl_axis), out=bld)
  if network.representation_tpl is not None:
    network.representation_tpl.linear_tpl.weight_split_dims_mapping.wt = (data_axis, mdl_axis)


def _network(config: Config) -> Config:
  """Returns the config of the network of a model, or that of a network itself."""
  if hasattr(config, 'lm_tpl'):
    return config.lm_tpl
  for name, kind in (('encoder_tpl', TransformerEncoder), ('network_tpl', VisionTransformer)):
    network = getattr(config, name, None)
    if network is not None and _is_a(network, kind):
      return network
  return config


def _stacks(lm: Config) -> list[str]:
  """Returns the fields of a network that hold the configs of its stacks of blocks."""
  return [name for name in ('transformer_tpl', 'encoder_tpl', 'decoder_tpl') if hasattr(lm, name)]


def _is_a(config: Config, kind: type) -> bool:
  return isinstance(built := target(config), type) and issubclass(built, kind)


def _remove_axes(axes: str | tuple[str, ...] | None, taken: tuple[str, ...]) -> str | tuple[str, ...] | None:
  """Returns an entry of a mapping without some of its axes."""
  return axes_to_entry([axis for axis in spec_axes(axes) if axis not in taken])


def set_pipeline(
  config: Config[LmT],
  *,
  num_stages: int,
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  circular_repeat: int = 1,
  batch_axes: str | tuple[str, ...] | None = None,
  stage_remat: str = 'none',
  stage_axis: str | None = 'stage',
) -> Config[LmT]:
  """Makes a model run its blocks in stages of a pipeline; changes the config in place, and returns it.

  Its variables are the same as for the scan over blocks, so checkpoints can be restored with and without a pipeline.
  An encoder-decoder has two pipelines on the same stages, and the second one begins when the first one has ended.

  Args:
    config: the config of a model or of its network, as for `set_sharding`. Its stacks of blocks are each a
      `RepeatedTransformer`, whose fields are kept.
    num_stages, num_microbatches, microbatch_size, circular_repeat, batch_axes, stage_remat: see `Pipelined`.
    stage_axis: the mesh axis of the stages; None runs all stages on each device.
  """
  pipeline: Config[Any] = Config(PipelinedTransformer, num_stages=num_stages, num_microbatches=num_microbatches)
  pipeline.set(microbatch_size=microbatch_size, circular_repeat=circular_repeat)
  pipeline.set(batch_axes=batch_axes, stage_remat=stage_remat)
  pipeline.weight_split_dims_mapping.stages = None if stage_axis is None else (stage_axis,)
  lm = _network(config)
  pipelined = {stack: _in_stages(getattr(lm, stack), stack, pipeline.clone()) for stack in _stacks(lm)}
  lm.set(**pipelined)
  return config


def _in_stages(repeated: Config, field: str, pipelined: Config) -> Config:
  """Returns the config of a pipeline with the fields of a `RepeatedTransformer`, which is the value of a field."""
  if not (isinstance(cls := target(repeated), type) and issubclass(cls, RepeatedTransformer | PipelinedTransformer)):
    raise ConfigError(
      f'set_pipeline: {field} is the Config of {getattr(cls, "__name__", cls)}; stages need blocks '
      'that are all alike, so it must be that of a RepeatedTransformer'
    )
  if getattr(repeated, 'sliding_windows', None) is not None:
    raise ConfigError(
      f'set_pipeline: {field}.sliding_windows makes blocks of several kinds, and stages need blocks that are '
      f'all alike; set {field}.layers_tpl.attention_tpl.sliding_window, which applies to all of them'
    )
  for name in field_names(Repeat) or ():
    if name in repeated.__arguments__ and name != 'weight_split_dims_mapping':
      setattr(pipelined, name, getattr(repeated, name))
  return pipelined
