"""python -m sink_jax.analyses, the same as python -m sink_jax analyses."""

from sink_jax.cli.entry import start

if __name__ == '__main__':
  start('analyses')
