"""The parsers that `tools/fuzz_parsers.py` tests, and its mutations of good input."""
