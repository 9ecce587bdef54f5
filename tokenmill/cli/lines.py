"""LineReader: what a person types, with editing and history at a terminal, or the lines of a pipe."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from tokenmill.cache import root
from tokenmill.cli.terminal import note
from tokenmill.errors import TokenmillError

HISTORY_LINES = 1000


class LineReader:
    """Reads one message at a time; raises EOFError when there are no more."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if self.interactive:
            with suppress(TokenmillError):  # no home, no history
                _keep_history(root() / "chat_history")

    def read(self) -> str:
        """One message without surrounding space; a backslash at the end of a line continues it in the next."""
        lines = [self._line("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(". "))
        return "\n".join(lines).strip()

    def _line(self, prompt: str) -> str:
        if not self.interactive:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.rstrip("\r\n")
        while True:
            try:
                return input(prompt)
            except KeyboardInterrupt:
                note("\n(Ctrl-D or /quit leaves)")
            except EOFError:
                note("")
                raise


def _keep_history(path: Path) -> None:
    """Let the arrow keys reach earlier sessions. A system without readline, or a read-only home, has no history."""
    with suppress(ImportError, OSError):
        import atexit
        import readline

        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
        readline.set_history_length(HISTORY_LINES)
        atexit.register(_write_history, path)


def _write_history(path: Path) -> None:
    import readline

    with suppress(OSError):
        readline.write_history_file(path)
