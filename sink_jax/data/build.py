"""python -m sink_jax.data.build, the same as python -m sink_jax data.build."""

from sink_jax.cli.entry import start

if __name__ == '__main__':
  start('data.build')
