"""`python -m stochbn` is the `stochbn` command."""

from stochbn.cli.main import main

main()
