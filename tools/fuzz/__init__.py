"""What `tools/fuzz_parsers.py` makes of good input, and the parsers that it is given to."""
