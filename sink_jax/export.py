"""python -m sink_jax.export, the same as python -m sink_jax export."""

from sink_jax.cli.entry import start

if __name__ == '__main__':
  start('export')
