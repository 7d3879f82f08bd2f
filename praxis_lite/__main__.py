"""`python -m praxis_lite` is `praxis-lite`."""

from praxis_lite.cli.main import run

if __name__ == '__main__':
  run()
