"""The fork server: a small process that has imported the engine once, and forks ranks of it in milliseconds.

Its standard input is a socket to the engine. What is ordered there it does; when the engine is gone, so are it and all
ranks. It computes nothing itself, so that what it forks has neither threads nor a GPU's context.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import select
import signal
import socket
import sys

from tokenmill.engine.ranks.orders import receive_order, send_order

LOOK = 1000  # milliseconds between looks whether the engine is there: a process that it forked may hold the socket, too
_PR_SET_PDEATHSIG = 1


def main() -> int:
    faulthandler.enable()
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal's Ctrl-C and a service's stop are the engine's affair
        signal.signal(number, signal.SIG_IGN)
    engine = socket.socket(fileno=os.dup(0))
    quiet = os.open(os.devnull, os.O_RDONLY)
    os.dup2(quiet, 0)
    ended, wakes = os.pipe()
    for end in (ended, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    ranks: set[int] = set()
    _import_engine()
    send_order(engine, {"ready": os.getpid()})
    try:
        while os.getppid() == parent:
            readable = {file for file, _ in _poll(engine.fileno(), ended)}
            if ended in readable:
                os.read(ended, 4096)
                _bury(ranks, engine)
            if engine.fileno() in readable and not _obey(engine, ranks):
                break
    except OSError:  # the engine is gone
        pass
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    for pid in ranks:
        os.waitpid(pid, 0)
    return 0


def _import_engine() -> None:
    import torch

    import tokenmill.engine.ranks.rank  # noqa: F401 (what ranks will need)

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # pages that nobody writes to stay shared


def _poll(*files: int) -> list[tuple[int, int]]:
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return poll.poll(LOOK)


def _obey(engine: socket.socket, ranks: set[int]) -> bool:
    """False: the engine is gone."""
    received = receive_order(engine)
    if received is None:
        return False
    order, files = received
    if "fork" in order:
        pid = os.fork()
        if pid == 0:
            _be_rank(engine, files[0])
        ranks.add(pid)
        for file in files:
            os.close(file)
        send_order(engine, {"forked": order["fork"], "pid": pid})
    elif order.get("kill") in ranks:  # not waited for yet, so the number is nobody else's
        os.kill(order["kill"], signal.SIGKILL)
    return True


def _bury(ranks: set[int], engine: socket.socket) -> None:
    for pid in list(ranks):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ranks.discard(pid)
            send_order(engine, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _be_rank(engine: socket.socket, orders: int) -> None:
    """In the forked process, which never returns from here."""
    code = 1
    try:
        server = os.getppid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        engine.close()
        _die_with_parent(server)
        from tokenmill.engine.ranks.rank import serve

        serve(socket.socket(fileno=orders))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent(parent: int) -> None:
    """Linux ends a rank with the fork server, even in the middle of a computation."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
