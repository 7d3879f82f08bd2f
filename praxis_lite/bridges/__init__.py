"""Other projects' forms: Hugging Face checkpoints, and the classes of T5X."""
