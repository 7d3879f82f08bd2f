"""Hugging Face checkpoints: language models in and out, with their tokenizers."""
