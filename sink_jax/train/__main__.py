"""python -m sink_jax.train, the same as python -m sink_jax train."""

from sink_jax.cli.entry import start

if __name__ == '__main__':
  start('train')
