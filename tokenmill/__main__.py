"""`python -m tokenmill`: the same as the `tokenmill` command."""

from tokenmill.cli import main

if __name__ == "__main__":
    main()
