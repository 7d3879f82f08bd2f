"""Hugging Face checkpoints: imports and exports language models with their tokenizers."""

from praxis_lite.bridges.hf.models import ImportedModel, read_model, write_model
from praxis_lite.bridges.hf.runs import export_run, import_run

__all__ = [
  'ImportedModel',
  'export_run',
  'import_run',
  'read_model',
  'write_model',
]
