"""Two engines, two processes: one reads prompts and pushes their KV, the other answers; whatever dies, tokens stay."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_tiers_same_tokens import engine_of, open_llm
from tiny import write_tiny

from tokenmill import SamplingParams
from tokenmill.errors import ConfigError

WORKER = """
import sys
sys.path[:0] = {paths!r}
from test_tiers_same_tokens import open_llm, settle
from test_prefill_decode import prompts
from tokenmill import SamplingParams
options = dict(kv_push_to="127.0.0.1:{port}", kv_secret_file={secret!r}, max_num_batched_tokens=32)
with open_llm({model!r}, 100, **options) as llm:
    scheduler = llm._built.engine.scheduler
    print("ready", flush=True)
    for line in sys.stdin:
        llm.generate([prompts()[int(line)]], SamplingParams(temperature=0, max_tokens=1))
        settle(scheduler)
        print(scheduler.kv.transfers.tiers[0].stats.written, flush=True)
"""
DECODE = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def prompts():
    rng = random.Random(7)
    return [{"prompt_token_ids": [rng.randrange(3, 128) for _ in range(rng.randrange(60, 200))]} for _ in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def expected(model):
    with open_llm(model, 400) as llm:
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts(), DECODE)]


@pytest.fixture
def secret(tmp_path):
    (tmp_path / "secret").write_text("0123456789abcdef0123456789abcdef\n")
    return str(tmp_path / "secret")


class Worker:
    def __init__(self, model, port, secret):
        tests = Path(__file__).parents[1]
        paths = [str(Path(__file__).parent), str(tests), str(tests.parent)]
        script = WORKER.format(paths=paths, model=model, port=port, secret=secret)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, number):
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()

    def read(self, number):
        """Have it read a prompt; how many blocks it has pushed so far."""
        self.ask(number)
        return int(self.process.stdout.readline())

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def port_of(llm):
    return engine_of(llm).scheduler.kv.transfers.tiers[0].transport.listener.address[1]


def decode(llm, numbers):
    found = llm.generate([prompts()[number] for number in numbers], DECODE)
    llm._built.engine.scheduler.check_integrity()
    return [list(one.outputs[0].token_ids) for one in found]


def test_what_one_engine_read_the_other_answers(model, expected, secret):
    options = {"kv_host_memory": 8 << 20, "kv_listen": "127.0.0.1:0", "kv_secret_file": secret}
    with open_llm(model, 60, **options) as llm, Worker(model, port_of(llm), secret) as worker:
        scheduler = llm._built.engine.scheduler
        for number in range(4):
            pushed = worker.read(number)
        before = scheduler.stats.tokens
        assert decode(llm, range(4)) == expected[:4]
        lengths = [len(one["prompt_token_ids"]) for one in prompts()[:4]]
        assert pushed == sum(length // 16 for length in lengths)
        computed = scheduler.stats.tokens - before
        assert computed == sum((length - 1) % 16 + 1 for length in lengths) + 4 * 19, "only unfinished blocks are read"

        worker.ask(4)  # and killed while it reads and pushes
        time.sleep(0.01)
        worker.kill()
        assert decode(llm, range(8)) == expected[:8]
        with Worker(model, port_of(llm), secret) as again:  # under the same name
            again.read(8)
            assert decode(llm, range(12)) == expected


def test_a_worker_whose_decode_engine_dies_goes_on(model, expected, secret):
    options = {"kv_host_memory": 8 << 20, "kv_listen": "127.0.0.1:0", "kv_secret_file": secret}
    with open_llm(model, 60, **options) as llm:
        port = port_of(llm)
        pusher = open_llm(model, 100, kv_push_to=f"127.0.0.1:{port}", kv_secret_file=secret)
        engine_of(pusher)
        assert decode(pusher, range(2)) == expected[:2]
    with pusher:
        assert decode(pusher, range(12)) == expected


def test_settings_of_peers_are_refused_in_one_sentence(model, tmp_path, secret):
    with pytest.raises(ConfigError, match="kv_host_memory; set that, too"):
        open_llm(model, 40, kv_listen="127.0.0.1:0", kv_secret_file=secret)
    with pytest.raises(ConfigError, match="set kv_secret_file"):
        open_llm(model, 40, kv_push_to="127.0.0.1:1")
    with pytest.raises(ConfigError, match="it must be host:port"):
        open_llm(model, 40, kv_push_to="nowhere", kv_secret_file=secret)
    with pytest.raises(ConfigError, match="cannot be read"):
        open_llm(model, 40, kv_push_to="127.0.0.1:1", kv_secret_file=str(tmp_path / "none"))
    (tmp_path / "short").write_text("short")
    with pytest.raises(ConfigError, match="holds 5 bytes"):
        open_llm(model, 40, kv_push_to="127.0.0.1:1", kv_secret_file=str(tmp_path / "short"))
    with pytest.raises(ConfigError, match="nobody can listen"):
        open_llm(model, 40, kv_listen="203.0.113.1:1", kv_host_memory=1 << 20, kv_secret_file=secret)
