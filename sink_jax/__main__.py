"""python -m sink_jax COMMAND"""

from sink_jax.cli.entry import main

if __name__ == '__main__':
  main()
