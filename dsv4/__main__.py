"""`python -m dsv4`: the command line without an installed script."""

from dsv4.cli.main import main

main()
