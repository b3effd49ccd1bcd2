"""python -m sink_jax.plan, the same as python -m sink_jax plan."""

from sink_jax.cli.entry import start

if __name__ == '__main__':
  start('plan')
