"""`python -m pgdefer`: the command line."""

from .cli import main

main()
