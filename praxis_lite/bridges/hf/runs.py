"""Makes run directories from Hugging Face checkpoints, and such checkpoints from run directories.

job_log_dir/checkpoints/0     the variables, in the dtypes of the files, without a state of the optimizer
            run.json          the config: the model, a learner for fine-tuning, and datasets with the model's tokenizer
            hugging_face/     config.json and the files of the tokenizer, for a later export
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from praxis_lite.bridges.hf.compressed_tensors import compress_tensors
from praxis_lite.bridges.hf.families import describe_model
from praxis_lite.bridges.hf.generation import GENERATION_FILE, set_decoder, write_generation
from praxis_lite.bridges.hf.hf_config import CONFIG_FILE, HfConfig, read_json
from praxis_lite.bridges.hf.image_data import PREPROCESSOR_FILE, image_datasets, image_text_datasets
from praxis_lite.bridges.hf.merged import merge_streamed
from praxis_lite.bridges.hf.peft import write_adapter
from praxis_lite.bridges.hf.reader import (
  HfCheckpoint,
  checked_pieces,
  open_checkpoint,
  stored_dtypes,
  streamed_variables,
)
from praxis_lite.bridges.hf.tensors import add_copies, pieces
from praxis_lite.bridges.hf.text_part import text_part
from praxis_lite.bridges.hf.whisper import set_transcription
from praxis_lite.bridges.hf.writer import MAX_FILE_BYTES, write_checkpoint, write_tensors
from praxis_lite.checkpoints import Checkpointer
from praxis_lite.common.config import REQUIRED, Config, target
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.devices import start_devices
from praxis_lite.common.errors import CheckpointError, ConfigError, UserError, prefix_errors
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import remove_all, user_path
from praxis_lite.common.processes import is_primary_process
from praxis_lite.common.trees import map_with_path, merge, node_at, select
from praxis_lite.inputs import (
  HfTokenizer,
  LabelledTextInput,
  MaskedTextInput,
  RecordingInput,
  SourceTargetInput,
  TextInput,
)
from praxis_lite.inputs.hf_tokenizer import TOKENIZER_FILE
from praxis_lite.models import (
  ClassificationModel,
  EncoderDecoderModel,
  ImageFeatureModel,
  LanguageModel,
  MaskedAutoencoder,
  MaskedLanguageModel,
  SequenceClassifier,
  SpeechToTextModel,
  TextEncoder,
  TwoTowerModel,
  remove_quantization,
  set_sharding,
)
from praxis_lite.runs.imported_files import HOW_TO_SET_TOKENIZER, SENTENCEPIECE_FILES, tokenizer_in
from praxis_lite.runs.quantized_arrays import dequantize_streamed, spread_streamed
from praxis_lite.runs.records.moved_files import FOLDER
from praxis_lite.runs.records.record import read_record, write_record
from praxis_lite.runs.records.run_config import job_directory
from praxis_lite.runs.shared_scales import fold_input_scales
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.learning import Learner, LinearWarmupCosine
from praxis_lite.training.state import TrainState, place_task_variables
from praxis_lite.training.task import SingleTask

_TOKENIZER_FILES = (
  *(TOKENIZER_FILE, 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json', 'chat_template.jinja'),
  *('vocab.json', 'merges.txt', *SENTENCEPIECE_FILES),
)
# Fields of the imported config.json that an export does not copy: they follow from the model, or from the version of
# transformers that wrote them.
_OUTDATED = {
  *('architectures', 'dtype', 'torch_dtype', 'transformers_version', 'rope_parameters', 'rope_scaling', 'rope_theta'),
  *('sliding_window', 'use_sliding_window', 'max_window_layers', 'layer_types', 'quantization_config'),
}


def import_run(
  folder: str | os.PathLike[str],
  job_log_dir: str | os.PathLike[str],
  *,
  overrides: Sequence[str] = (),
) -> list[str]:
  """Makes a run directory from a checkpoint; returns lines about it.

  Args:
    folder: the checkpoint's folder, with config.json and *.safetensors.
    job_log_dir: the run directory, which must not have a checkpoint yet.
    overrides: edits of the config, `path=value`, for example of the mesh, which may have more devices than this
      machine.

  Raises:
    UserError: the checkpoint cannot be imported, in which case nothing is written; or the directory is not usable; or
      JAX cannot start.
  """
  start_devices()
  checkpoint = open_checkpoint(folder)
  assets = user_path(job_log_dir).absolute() / FOLDER
  config = imported_config(checkpoint, assets)
  has_decoder = getattr(config.task.model, 'decoder_tpl', None) is not None
  unused = set_decoder(config.task.model, checkpoint) if has_decoder else []
  apply_overrides(config.roots(), overrides)
  _check_tokenizer(config, checkpoint.folder, assets)
  with contextlib.nullcontext() if overrides else prefix_errors(os.path.join(checkpoint.folder, CONFIG_FILE)):
    task = config.task.instantiate()
    weights, family = task.model.abstract_init(), checkpoint.family
  found = checked_pieces(checkpoint, family.part_of(weights))
  dtypes = family.model_variables(stored_dtypes(checkpoint, found))
  shapes = map_with_path(lambda path, w: jax.ShapeDtypeStruct(w.full_shape, node_at(dtypes, path)), weights)
  mesh = abstract_mesh(task.mesh_sizes())
  place_task_variables(task, mesh)  # Raises an error if the config cannot split the variables this way.
  with _removed_on_failure(user_path(job_log_dir)), _unreadable_source_named(), contextlib.ExitStack() as to_close:
    directory = to_close.enter_context(job_directory(job_log_dir))
    checkpointer = Checkpointer(directory)
    to_close.callback(checkpointer.close)
    if checkpointer.latest_step() is not None:
      raise UserError(f'job_log_dir {directory} has checkpoints already; name another directory')
    variables = family.model_variables(streamed_variables(checkpoint, found, family.part_of(shapes)))
    state = TrainState(np.zeros((), np.int32), variables, None)
    checkpointer.save(0, state, TrainState(jax.ShapeDtypeStruct((), np.int32), shapes, None), None)
    if is_primary_process():
      assets.mkdir(exist_ok=True)
      _copy_files(checkpoint.folder, assets, (CONFIG_FILE, GENERATION_FILE, PREPROCESSOR_FILE, *_TOKENIZER_FILES))
    checkpointer.wait()
    if is_primary_process():
      write_record(directory, config, mesh=mesh.shape)
  size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  kinds = ', '.join(sorted({str(leaf.dtype) for leaf in jax.tree.leaves(shapes)}))
  lines = [
    f'{checkpoint.folder}: {checkpoint.family.model_type}, {number_of(size, "parameter")} in {kinds}',
    *checkpoint.notes,
    *unused,
    *(_describe_chat_end(config.task.model.decoder_tpl, tokenizer_in(checkpoint.folder)) if has_decoder else ()),
  ]
  if config.datasets and getattr(config.datasets[0], 'tokenizer_tpl', None) == Config(HfTokenizer, path=REQUIRED):
    lines.append(f'there is no tokenizer beside it; {HOW_TO_SET_TOKENIZER}')
  return [*lines, f'step 0: saved in {directory / "checkpoints"}']


def _check_tokenizer(config: ExperimentConfig, folder: str, assets: Path) -> None:
  """Raises DataError if the tokenizer that will be copied into the run cannot be read."""
  tokenizer = tokenizer_in(folder)
  if tokenizer is not None and any(
    tokenizer_in(folder, assets) == getattr(c, 'tokenizer_tpl', None) for c in config.datasets
  ):
    with contextlib.suppress(ConfigError):  # The package that reads it may be missing here, which is no error yet.
      built = tokenizer.instantiate()
      _ = built.vocab_size, built.special_ids


def _describe_chat_end(decoder: Config, tokenizer: Config | None) -> Iterator[str]:
  """Yields a line if the chat template ends an answer by a special token that does not stop `decoder`."""
  if tokenizer is None:
    return
  chat = [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
  with contextlib.suppress(UserError):  # Without a template, or a package that reads it, there are no chats.
    built = tokenizer.instantiate()
    ids, is_answer = built.chat_tokens(chat)
    answer = [int(i) for i in ids[is_answer]]
    ends = [i for i in answer if i in built.control_ids]
    if ends and not {*answer} & {*decoder.stop_ids}:
      yield (
        f'chat answers end with token {ends[-1]}, which does not stop decoding; if the model has learned to end so: '
        f"--set 'task.model.decoder_tpl.stop_ids={(*decoder.stop_ids, ends[-1])}'"
      )


@contextlib.contextmanager
def _unreadable_source_named() -> Iterator[None]:
  """Replaces a save's CheckpointError by its cause, if the cause is that the imported checkpoint cannot be read."""
  try:
    yield
  except CheckpointError as error:
    if isinstance(error.__cause__, CheckpointError):
      raise error.__cause__ from None
    raise


def imported_config(checkpoint: HfCheckpoint, assets: str | os.PathLike[str]) -> ExperimentConfig:
  """Returns the config of a run that fine-tunes a checkpoint, before generation_config.json sets its decoder.

  Args:
    checkpoint: the checkpoint.
    assets: the folder in the run directory that will have the files of the tokenizer.
  """
  hf = checkpoint.config
  model = set_sharding(checkpoint.family.model(hf))
  is_quantized = hf.values.get('quantization_config') is not None
  if is_quantized or str(hf.values.get('dtype') or hf.values.get('torch_dtype')) in ('bfloat16', 'float16'):
    model.fprop_dtype = 'bfloat16'
  task = Config(
    SingleTask, name='lm', model=model, mesh_axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=(1, 1, 1)
  )
  task.train.learner = Config(
    Learner,
    optimizer=Config(optax.adamw, b1=0.9, b2=0.95, weight_decay=0.1),
    learning_rate=1e-5,
    schedule=Config(LinearWarmupCosine, warmup_steps=100),
    clip_gradient_norm_to_value=1.0,
  )
  task.train.set(num_train_steps=1000, eval_interval_steps=200, save_interval_steps=200)
  task.train.inputs_split_mapping = {'map_1d': (('replica', 'data'),), 'map_2d': (('replica', 'data'), None)}
  task.evaluate.max_batches = 100
  built = target(model)
  assert isinstance(built, type)
  if issubclass(built, (*_OF_IMAGES, TwoTowerModel)):
    task.train.inputs_split_mapping['map_4d'] = (('replica', 'data'), None, None, None)
  if issubclass(built, SpeechToTextModel):
    path = os.path.join(checkpoint.folder, GENERATION_FILE)
    set_transcription(model, read_json(path) if os.path.isfile(path) else {})
  task.name, fixed = next((about for kind, *about in _ABOUT_TASKS if issubclass(built, kind)), ('lm', ()))
  if fixed:
    task.train.learner.bprop_variable_exclusion = fixed
  tokenizer = tokenizer_in(checkpoint.folder, assets) or Config(HfTokenizer, path=REQUIRED)
  return ExperimentConfig(task, _datasets(model, built, checkpoint, tokenizer), [])


_OF_IMAGES = (ClassificationModel, ImageFeatureModel, MaskedAutoencoder)
# For each kind of model: the name of the task, and the variables that are not trained, such as fixed positions.
_ABOUT_TASKS: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
  (MaskedAutoencoder, 'masked_autoencoder', ('network.position.w', 'patch_decoder.position.w')),
  (_OF_IMAGES, 'classifier', ()),
  (TwoTowerModel, 'towers', ()),
  (SpeechToTextModel, 'speech', ('lm.encoder_position.w',)),
  (EncoderDecoderModel, 'seq2seq', ()),
)


def _datasets(model: Config, built: type, checkpoint: HfCheckpoint, tokenizer: Config) -> list[Config]:
  """Returns datasets for training and validation; [] for a `TextEncoder`, which has no loss."""
  if issubclass(built, _OF_IMAGES):
    return image_datasets(model, checkpoint.folder)
  if issubclass(built, TwoTowerModel):
    return image_text_datasets(model, checkpoint.folder, tokenizer)
  if issubclass(built, SpeechToTextModel):
    sizes = {'num_samples': model.frontend_tpl.window_length, 'sample_rate': model.frontend_tpl.sample_rate}
    prefix = (model.start_id, *model.prefix_ids)
    data: Config = Config(RecordingInput, label_len=model.lm_tpl.position_tpl.max_len, prefix_ids=prefix, **sizes)
  elif issubclass(built, EncoderDecoderModel):
    data = Config(SourceTargetInput, source_len=_SOURCE_LEN, target_len=_TARGET_LEN)
    data.set(start_id=model.start_id, end_sources=True, truncate=True)
  elif issubclass(built, MaskedLanguageModel | SequenceClassifier):
    encoder = model.encoder_tpl
    row_len = min(encoder.position_tpl.max_len - encoder.first_position, _ENCODER_LEN)
    if issubclass(built, MaskedLanguageModel):
      data = Config(MaskedTextInput, seq_len=row_len - 2)
    else:
      style = 'roberta' if encoder.first_position else 'bert'
      data = Config(LabelledTextInput, seq_len=row_len, truncate=True, pair_style=style)
  elif issubclass(built, TextEncoder):
    return []
  else:
    values = checkpoint.config.values
    length = values.get('max_position_embeddings') or values.get('n_positions') or _SEQ_LEN
    data = Config(TextInput, seq_len=min(length, _SEQ_LEN))
  data.set(path=REQUIRED, tokenizer_tpl=tokenizer, batch_size=8)
  train, validation = data.clone(name='train', is_training=True), data.clone(name='validation')
  if target(data) in (TextInput, MaskedTextInput):  # Both datasets read the same files.
    train.split, validation.split = 'train', 'validation'
  return [train, validation]


_SEQ_LEN = 1024
_ENCODER_LEN = 512
_SOURCE_LEN, _TARGET_LEN = 512, 128


def export_run(
  config: ExperimentConfig,
  job_log_dir: str | os.PathLike[str],
  out: str | os.PathLike[str],
  *,
  step: int | None = None,
  dtype: str | None = None,
  max_file_bytes: int = MAX_FILE_BYTES,
  adapter: bool = False,
  quantized: bool = False,
) -> list[str]:
  """Writes a checkpoint of a run as one that transformers loads.

  The export includes the settings of the sampler, the imported preprocessor_config.json, and the tokenizer's files; the
  tokenizer was imported with the model or is the `HfTokenizer` of a dataset. Adapters are merged into the weights, and
  quantized weights become plain ones, unless `adapter` or `quantized` says otherwise.

  Args:
    config: configs of the run. The run need not have been imported: its model only has to belong to a family.
    job_log_dir: the run directory.
    out: a folder that does not exist or is empty; it appears complete or not at all.
    step: step of the checkpoint; None uses the newest.
    dtype: dtype to write, such as 'bfloat16'; None keeps the checkpoint's dtypes.
    max_file_bytes: above this size, several files are written.
    adapter: write only the adapters, as a folder that peft loads; see `write_adapter`.
    quantized: write weights in few bits as they are, in the format of compressed-tensors, which vLLM reads.

  Returns:
    The names of the files.

  Raises:
    UserError: the model belongs to no family, or does not fit `adapter` or `quantized`; or the checkpoint does not
      exist; or `out` is not usable.
  """
  directory, target_folder = user_path(job_log_dir), user_path(out)
  if target_folder.exists() and (not target_folder.is_dir() or any(target_folder.iterdir())):
    raise UserError(f'--out={out} exists and is not an empty folder; name another')
  task = config.task.instantiate()
  model = task.model
  kept = directory / FOLDER / CONFIG_FILE
  recorded = text_part(HfConfig(read_json(kept))).values if kept.is_file() else {}
  family, values = describe_model(model, recorded.get('model_type'))
  if recorded.get('model_type') == family.model_type:
    values = merge({k: v for k, v in recorded.items() if k not in _OUTDATED}, values)
  with contextlib.closing(Checkpointer(directory, read_only=True)) as checkpointer:
    shapes = jax.tree.map(lambda w: w.as_struct(), model.abstract_init())
    whole = checkpointer.streamed_variables(shapes, use_ema=task.evaluate.use_ema, step=step)
  if quantized and (model.adapters or not model.quantized):
    what = 'adapters, which are merged into plain weights' if model.adapters else 'no weights in few bits'
    raise ConfigError(f'--quantized: the model has {what}; `praxis-lite quantize` makes a run with weights in few bits')
  if quantized and family.stores_inputs_first:
    raise ConfigError(
      f'--quantized: tensors of {family.model_type} have their inputs first, and compressed-tensors their outputs, so '
      'weights of this family cannot be written in few bits; leave out --quantized'
    )
  if quantized:
    whole = fold_input_scales(model, whole)
  spread = {kind: family.part_of(tree) for kind, tree in spread_streamed(model, whole).items()} if quantized else {}
  if model.quantized:
    whole, model = dequantize_streamed(model, whole), remove_quantization(config.task.model).instantiate()
  if adapter:
    with _appears_complete(target_folder) as folder:
      return write_adapter(folder, model, whole, dtype=dtype, base=_base_of(config, directory))
  variables, weights = family.part_of(whole), family.part_of(model.abstract_init())
  if model.adapters:
    variables = merge_streamed(variables, model, family)
    weights = select(weights, lambda path: node_at(variables, path) is not None)
  found = add_copies(pieces(family.table_of(weights), weights), family.written_copies(HfConfig(values)))
  with _appears_complete(target_folder) as folder:
    if quantized:
      written = compress_tensors(variables, spread, found, family.head, dtype)
      config_json = {**values, 'quantization_config': written.quantization}
      files = write_tensors(folder, config_json, written.declared, written.tensor, max_file_bytes)
    else:
      files = write_checkpoint(folder, values, variables, found, max_file_bytes, dtype)
    files += _copy_files(_tokenizer_folder(config, directory / FOLDER), folder, _TOKENIZER_FILES)
    files += _copy_files(directory / FOLDER, folder, (PREPROCESSOR_FILE,))
    if isinstance(model, LanguageModel):
      write_generation(folder, model.decoder, directory / FOLDER)
      files.append(GENERATION_FILE)
  return files


def _base_of(config: ExperimentConfig, directory: Path) -> str | None:
  """Returns the folder from which a run, or the run that it is initialized from, was imported; None if not recorded."""
  for run in (directory, config.task.train.init_from.path):
    with contextlib.suppress(UserError):
      for command in read_record(run).commands if run else ():
        _, _, given = command.partition(' import-hf ')
        words = [word.removeprefix('--path=') for word in shlex.split(given)]
        if folders := [word for word in words if not word.startswith('--')]:
          return folders[0].rstrip('/')
  return None


def _tokenizer_folder(config: ExperimentConfig, kept: Path) -> str | Path:
  """Returns the folder with the tokenizer's files: that of the first `HfTokenizer` among the datasets.

  If `kept` has a tokenizer, or no dataset has an `HfTokenizer`, returns `kept`.
  """
  templates = [getattr(dataset, 'tokenizer_tpl', None) for dataset in config.datasets]
  tokenizers = [t for t in templates if isinstance(t, Config) and target(t) is HfTokenizer and t.path is not REQUIRED]
  if not tokenizers or tokenizer_in(kept) is not None:
    return kept
  return tokenizers[0].instantiate().folder


def _copy_files(source: str | os.PathLike[str], target: Path, names: Sequence[str]) -> list[str]:
  """Copies the files `names` that exist in `source`; returns the names of the copied files."""
  present = [name for name in names if os.path.isfile(os.path.join(source, name))]
  for name in present:
    shutil.copyfile(os.path.join(source, name), target / name)
  return present


@contextlib.contextmanager
def _removed_on_failure(directory: Path) -> Iterator[None]:
  """Removes a directory if the block raises an error, unless the directory existed before."""
  existed = directory.exists()
  try:
    yield
  except BaseException:
    if not existed and is_primary_process():
      remove_all(directory)
    raise


@contextlib.contextmanager
def _appears_complete(target: Path) -> Iterator[Path]:
  """Yields a temporary folder next to `target`, and renames it to `target` at the end."""
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f'.{target.name}-', dir=target.parent))
  except OSError as error:
    raise UserError(f'--out={target} cannot be written: {error.strerror}') from None
  try:
    yield folder
    folder.chmod(0o755)
    if target.exists():
      target.rmdir()  # `export_run` has checked that the folder is empty.
    folder.rename(target)
  except OSError as error:
    shutil.rmtree(folder, ignore_errors=True)
    raise CheckpointError(f'writing {target} failed: {error.strerror or error}') from None
  except BaseException:
    shutil.rmtree(folder, ignore_errors=True)
    raise
