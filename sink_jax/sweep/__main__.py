"""python -m sink_jax.sweep, the same as python -m sink_jax sweep."""

from sink_jax.cli.entry import start

if __name__ == '__main__':
  start('sweep')
