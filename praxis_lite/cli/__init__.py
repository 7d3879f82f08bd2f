"""The command line `praxis-lite`, with a module for each command."""
