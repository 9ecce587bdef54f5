"""A list of kernels comes back as it was written; of a file that is something else nothing is taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent

ROUND_TRIP = """
import json, sys
from pathlib import Path
from coverage import MODELS, ROWS, TOKENS, LENGTH
from no_gpu import hopper, runner_of
from tokenmill.engine.runner.warmup import _settings_of, kernels_of
from tokenmill.ops.triton.compiler import KernelCompiler

asked, said = [], {}
for name in ("llama fp8",):
    with hopper():
        def start(rows=ROWS):
            options = {key: MODELS[name][key] for key in ("config", "quantization")}
            runner = runner_of(**options, max_rows=rows, max_tokens=TOKENS, max_len=LENGTH)
            def find():
                asked.append(name)
                return kernels_of(runner, rows, TOKENS, True)
            return KernelCompiler(1 << 30).listed(_settings_of(runner, rows, TOKENS, True), find).found
        first, again = start(), start()
        same = list(first.items()) == list(again.items())  # the same kernels, under the keys that launches ask by
        start(ROWS - 8)
        said[name] = [same, len(first), asked.count(name)]
print(json.dumps(said))
"""


def test_the_next_start_knows_which_kernels_it_needs(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for same, kernels, asked in json.loads(done.stdout.splitlines()[-1]).values():
        assert same and kernels > 20
        assert asked == 2  # the first start, and the one with other settings


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '[[{"class": "subprocess.Popen", "fields": {"args": ["true"]}}, []]]',
        '[[{"type": "os.system"}, []]]',
        '[[{"class": "tokenmill.ops.triton.specializations.Specialization", "fields": {"module": "os"}}, []]]',
        '[[{"class": "tokenmill.ops.triton.specializations.Specialization", '
        '"fields": {"module": "os", "kernel": "system", "args": [], "meta": []}}, []]]',
        '[[{"dtype": "nn"}, []]]',
        "[" * 100_000,
        '[[{"class": "tokenmill.ops.triton.specializations.Specialization", "fields": {"module": '
        '"tokenmill.ops.triton.norm", "kernel": "_norm_kernel", "meta": [], "args": [{"class": '
        '"tokenmill.ops.triton.specializations.DescriptorLike", "fields": {"module": "os", "dtype": '
        '{"dtype": "int8"}, "block_shape": []}}]}}, []]]',
    ],
)
def test_what_is_no_list_is_not_taken(text: str, tmp_path: Path) -> None:
    from tokenmill.ops.triton.kept_list import read_list

    path = tmp_path / "list.json"
    path.write_text(text)
    found = read_list(path, 0)
    assert found is None or not found.found
    assert read_list(tmp_path / "nothing.json", 0) is None
