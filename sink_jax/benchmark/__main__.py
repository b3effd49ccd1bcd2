"""python -m sink_jax.benchmark, the same as python -m sink_jax benchmark."""

from sink_jax.cli.entry import start

if __name__ == '__main__':
  start('benchmark')
