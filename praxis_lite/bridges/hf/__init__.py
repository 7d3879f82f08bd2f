"""Hugging Face checkpoints: imports and exports models with their tokenizers."""

from praxis_lite.bridges.hf.models import ImportedModel, read_model, write_model
from praxis_lite.bridges.hf.peft import ImportedAdapter, read_adapter, write_adapter
from praxis_lite.bridges.hf.runs import export_run, import_run

__all__ = [
  'ImportedAdapter',
  'ImportedModel',
  'export_run',
  'import_run',
  'read_adapter',
  'read_model',
  'write_adapter',
  'write_model',
]
