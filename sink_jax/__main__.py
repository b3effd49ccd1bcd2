"""`python -m sink_jax COMMAND`."""

from sink_jax.cli.main import main

main()
