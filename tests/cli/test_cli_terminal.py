"""What is printed where: at a terminal (a pseudo-terminal here) and in a log."""

import io
import os
import select
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tokenmill.cli import terminal

pty = pytest.importorskip("pty")


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_model_text_cannot_control_the_terminal(monkeypatch):
    screen = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", screen)
    terminal.write("a\x1b]0;owned\x07b\x9b2Jc\n\td é 🙂")
    assert screen.getvalue() == "a]0;ownedb2Jc\n\td é 🙂"


def test_piped_model_text_is_left_as_it_is(monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    terminal.write("a\x1b[0m")
    assert pipe.getvalue() == "a\x1b[0m"


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (98_362_432, "98.4 MB"), (3e13, "30.0 TB")])
def test_sizes_read_well(count, text):
    assert terminal.size(count) == text


def test_log_gets_one_line_and_only_for_what_takes_long(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with terminal.progress() as report:
        report(1, 10, "loading")
        assert log.getvalue() == ""
        monkeypatch.setattr(terminal, "SLOW", 0.0)
        report(5, 10, "loading")
        report(6, 10, "loading")
        report(7, 0, "downloading")
    assert log.getvalue() == "(loading ...)\n(downloading ...)\n"


def test_a_log_of_what_takes_minutes_gets_a_line_every_so_many_seconds(monkeypatch):
    log, now = io.StringIO(), 100.0
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    with terminal.progress(every=5.0) as report:
        for done, now in enumerate((100.0, 104.0, 106.0, 108.0, 112.0)):  # noqa: B007
            report(done, 30, "layers")
    assert log.getvalue() == "(layers: 2 of 30)\n(layers: 4 of 30)\n"


def test_terminal_gets_a_bar_that_shows_the_name_as_it_is(monkeypatch):
    screen = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(terminal, "QUICK", 0.0)
    with terminal.progress() as report:
        report(5, 10, "get [red]x[/] ok")
        wait_for(screen, "50%")
    assert "get [red]x[/] ok" in screen.getvalue()


def test_a_terminal_is_told_that_something_starts_before_anything_is_reported(monkeypatch):
    screen = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with terminal.progress():
        pass
    monkeypatch.setattr(terminal, "QUICK", 0.01)
    with terminal.progress() as report:
        wait_for(screen, "starting")
        report(3, 4, "loading")
        wait_for(screen, "75%")
    assert screen.getvalue().count("starting") < 50  # and then no more


def wait_for(screen: io.StringIO, text: str) -> None:
    until = time.monotonic() + 20
    while text not in screen.getvalue():
        assert time.monotonic() < until, screen.getvalue()
        time.sleep(0.01)


CHAT = """
import sys
sys.path.insert(0, {tests!r})
from cli_stub import StubLLM
from tokenmill.cli import main
from tokenmill.cli import options
options.open_llm = StubLLM("the answer").open
sys.argv = ["tokenmill", "chat"]
main()
"""


class Typist:
    """Types into a program at a pseudo-terminal and reads its screen."""

    def __init__(self, program: str, home: str) -> None:
        self.screen = ""  # what was printed and not yet looked at
        self.keyboard, inside = pty.openpty()
        streams = {"stdin": inside, "stdout": inside, "stderr": inside}
        environment = {**os.environ, "HOME": home, "TERM": "dumb"}
        command = [sys.executable, "-c", _OWN_TERMINAL + program]
        self.process = subprocess.Popen(command, **streams, env=environment, start_new_session=True)
        os.close(inside)

    def type(self, keys: str) -> None:
        os.write(self.keyboard, keys.encode())

    def wait_for(self, text: str) -> None:
        """Read until the text shows up, and go on after it; fail with what was there instead."""
        deadline = time.monotonic() + 90
        while text not in self.screen:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.screen!r}"
            self._look()
        self.screen = self.screen.partition(text)[2]

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C, as people do, until it is noticed: between the prompt and the wait for a key it is not."""
        deadline = time.monotonic() + 90
        while text not in self.screen:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.screen!r}"
            self.type("\x03")
            self._look()

    def leave(self) -> int:
        """Press Ctrl-D until the program is gone; a Ctrl-C that is noticed late may swallow one."""
        for _ in range(30):
            self.type("\x04")
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(timeout=1)
        raise AssertionError(f"Ctrl-D does not leave: {self.screen!r}")

    def _look(self) -> None:
        if select.select([self.keyboard], [], [], 1.0)[0]:
            self.screen += os.read(self.keyboard, 4096).decode()


# Ctrl-C reaches only the foreground group of a controlling terminal, so the program first makes the terminal its own.
# Tests that run in the background were started with Ctrl-C ignored, which a program at a terminal never is.
_OWN_TERMINAL = """import fcntl, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


def test_at_a_terminal_ctrl_c_stays_and_ctrl_d_leaves_and_history_is_kept(request, tmp_path):
    typist = Typist(CHAT.format(tests=str(request.path.parent)), str(tmp_path))
    try:
        typist.wait_for("> ")
        typist.type("hello\n")
        typist.wait_for("the answer")
        typist.wait_for("> ")
        typist.interrupt_until("/quit leaves")
        typist.wait_for("> ")
        assert typist.leave() == 0
    finally:
        typist.process.kill()
        typist.process.wait()
        os.close(typist.keyboard)
    history = tmp_path / ".cache" / "tokenmill" / "chat_history"
    assert "hello" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
