"""python -m sink_jax.evaluate, the same as python -m sink_jax evaluate."""

from sink_jax.cli.entry import start

if __name__ == '__main__':
  start('evaluate')
