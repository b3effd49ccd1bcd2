"""python -m sink_jax.data.build_tfds, the same as python -m sink_jax data.build_tfds."""

from sink_jax.cli.entry import start

if __name__ == '__main__':
  start('data.build_tfds')
