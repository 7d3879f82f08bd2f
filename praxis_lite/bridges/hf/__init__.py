"""Hugging Face checkpoints: imports and exports language models with their tokenizers."""

from praxis_lite.bridges.hf.models import (
  ImportedModel as ImportedModel,
  read_model as read_model,
  write_model as write_model,
)
from praxis_lite.bridges.hf.peft import (
  ImportedAdapter as ImportedAdapter,
  read_adapter as read_adapter,
  write_adapter as write_adapter,
)
from praxis_lite.bridges.hf.runs import export_run as export_run, import_run as import_run
