"""Kernels are compiled ahead in other processes, remembered, and under the hash that the engine will look for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


def _run(program: str, cache: Path) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


HASHES = """
import json, sys
from tokenmill.ops.triton.attention import decode as attention_decode
from tokenmill.ops.triton.attention import shared_prefix as attention_shared
from tokenmill.ops.triton.sample import filtered as sample_filtered
from tokenmill.ops.triton.specializations import hash_callees_first
kernels = [attention_decode._decode_kernel, attention_shared._prefix_kernel, sample_filtered._survey_kernel,
           sample_filtered._decide_kernel]
for one in kernels[::STEP]:
    hash_callees_first(one.kernel)
print(json.dumps([one.kernel.cache_key for one in kernels]))
"""


def test_a_kernels_hash_does_not_depend_on_what_was_used_before_it(tmp_path: Path) -> None:
    assert _run(HASHES.replace("STEP", "1"), tmp_path) == _run(HASHES.replace("STEP", "-1"), tmp_path)


COMPILE = """
import json
import torch, triton
from no_gpu import hopper
from tokenmill.ops.triton import compiler, norm
from tokenmill.ops.triton.specializations import collect

hits = []
triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
with hopper():
    x, weight = torch.empty(4, 128, dtype=torch.bfloat16, device=torch.device("cuda")), None
    weight = torch.empty(128, dtype=torch.bfloat16, device=torch.device("cuda"))
    with collect() as collected:
        norm.rms_norm(x, weight, 1e-6)
    steps = []
    made = compiler.KernelCompiler(2 << 30)
    made._load = lambda collected, tell: None  # there is no device
    first = made.compile(collected, lambda *told: steps.append(told))
    again = compiler.KernelCompiler(2 << 30)
    again._load = made._load
    second = again.compile(collected, lambda *told: None)
    for one in collected.found:
        one.compile()
print(json.dumps([len(collected), first, second, hits, steps]))
"""


def test_what_was_compiled_by_others_is_found_and_not_compiled_again(tmp_path: Path) -> None:
    found, first, second, hits, steps = _run(COMPILE, tmp_path)
    assert found == first == 1 and second == 0
    assert hits == [True]  # in this process nothing was compiled
    assert steps == [[0, 1, "compiling kernels"], [1, 1, "compiling kernels"]]
