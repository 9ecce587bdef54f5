"""The `tokenmill` command: the entry point, which imports nothing until it is called."""

import sys


def main() -> None:
    try:
        from tokenmill.cli.app import app_for
        from tokenmill.cli.terminal import forgive_encodings
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"error: the command line needs the package {error.name}; install it with: pip install {error.name}")
    except KeyboardInterrupt:
        sys.exit(130)
    forgive_encodings()
    app_for(sys.argv[1:])(prog_name="tokenmill")
