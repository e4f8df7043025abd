"""`python -m calque` is `calque`."""

from calque.cli import main

main()
