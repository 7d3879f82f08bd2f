"""Names in other libraries of our fields, flags and mesh axes. Errors about unknown names suggest ours.

Pax's names in capitals, such as ICI_MESH_SHAPE, need no entry: `did_you_mean` ignores case.
"""

# Our name, and the names for it in Pax, PyTorch, Lightning, the Trainer of transformers, Flax and similar libraries.
_OTHER_NAMES = {
  # Flags.
  'job_log_dir': 'output_dir logging_dir log_dir logdir run_dir model_dir workdir default_root_dir save_dir',
  'exp': 'experiment config fdl_config model',
  'set': 'fdl.set override overrides',
  'max_tokens': 'max_new_tokens max_length',
  'min_tokens': 'min_new_tokens min_length',
  'num_samples': 'num_return_sequences',
  # Fields of decoders.
  'max_decode_steps': 'seqlen max_new_tokens',
  'min_decode_steps': 'min_new_tokens',
  'stop_ids': 'eos_id eos_token_id',
  'beam_size': 'num_beams',
  'num_best': 'num_return_sequences',
  'length_penalty': 'length_norm_alpha',
  'top_k': 'k',
  'top_p': 'p',
  # Fields of a task and its training.
  'ici_mesh_shape': 'mesh_shape mesh device_mesh world_size gpus num_gpus',
  'num_train_steps': 'max_steps num_steps steps total_steps num_train_epochs max_epochs num_epochs epochs',
  'log_interval_steps': 'summary_interval_steps logging_steps log_every_n_steps log_every',
  'eval_interval_steps': 'eval_steps val_check_interval eval_every',
  'save_interval_steps': 'save_steps every_n_train_steps save_every',
  'max_to_keep': 'save_max_to_keep save_total_limit save_top_k',
  'keep_interval_steps': 'save_keep_interval_duration',
  'init_from': 'init_from_checkpoint_rules',
  'learning_rate': 'lr',
  'schedule': 'lr_schedule lr_scheduler lr_scheduler_type',
  'total_steps': 'decay_end',
  'final_value': 'min_ratio',
  'clip_gradient_norm_to_value': 'clip_grad_norm max_grad_norm gradient_clip_val grad_clip gradient_clipping',
  'num_microbatches': 'gradient_accumulation_steps accumulate_grad_batches grad_accum_steps num_sub_batches',
  'decoupled_weight_decay': 'weight_decay',
  # Fields of models and data.
  'fprop_dtype': 'compute_dtype activation_dtype precision',
  'dtype': 'param_dtype weight_dtype torch_dtype',
  'model_dims': 'hidden_size d_model n_embd embed_dim emb_dim',
  'hidden_dims': 'intermediate_size d_ff ffn_dim mlp_dim',
  'num_layers': 'num_hidden_layers n_layers n_layer',
  'num_heads': 'num_attention_heads n_heads n_head',
  'num_kv_heads': 'num_key_value_heads n_kv_heads',
  'dims_per_head': 'head_dim head_size',
  'batch_size': 'per_device_batch_size per_device_train_batch_size percore_batch_size global_batch_size',
  'seq_len': 'sequence_length max_seq_len max_length max_sequence_length',
  # Mesh axes.
  'mdl': 'model tensor tp mp',
  'data': 'fsdp dp batch',
}
OUR_NAMES: dict[str, list[str]] = {}  # For each name elsewhere: our names for it.
for _ours, _theirs in _OTHER_NAMES.items():
  for _name in _theirs.split():
    OUR_NAMES.setdefault(_name, []).append(_ours)

# Fields that users expect as flags, but that `--set` takes. The keys are the configs that have them.
_FIELDS = {
  'task': 'ici_mesh_shape',
  'task.train': 'num_train_steps log_interval_steps eval_interval_steps save_interval_steps max_to_keep init_from',
  'task.train.learner': 'learning_rate schedule optimizer clip_gradient_norm_to_value num_microbatches ema_decay',
  'task.model': 'fprop_dtype dtype',
  'datasets[*]': 'batch_size seq_len',
}
FIELD_PATHS = {field: f'{config}.{field}' for config, fields in _FIELDS.items() for field in fields.split()}


def field_path(name: str) -> str:
  """Returns the path of the field that a user means by a flag; '' if unknown. `name` may be another library's."""
  return next((FIELD_PATHS[field] for field in (name, *OUR_NAMES.get(name, ())) if field in FIELD_PATHS), '')
