"""`python -m shaketable` is the command line."""

from shaketable.cli import main

main()
