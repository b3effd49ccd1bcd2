"""python -m sink_jax.lm_eval, the same as python -m sink_jax lm_eval."""

from sink_jax.cli.entry import start

if __name__ == '__main__':
  start('lm_eval')
