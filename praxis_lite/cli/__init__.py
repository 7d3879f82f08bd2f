"""The command line: `praxis-lite list | show | train | eval | decode`."""
