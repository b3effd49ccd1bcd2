"""python -m sink_jax.report, the same as python -m sink_jax report."""

from sink_jax.cli.entry import start

if __name__ == '__main__':
  start('report')
