"""Bridges to other projects: Hugging Face checkpoints, and the classes of T5X."""
