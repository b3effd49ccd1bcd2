"""python -m sink_jax.generate, the same as python -m sink_jax generate."""

from sink_jax.cli.entry import start

if __name__ == '__main__':
  start('generate')
