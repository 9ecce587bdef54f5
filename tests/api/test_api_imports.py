"""What importing tokenmill pulls in, and what the planning packages do without."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = [
    "transformers",
    "fastapi",
    "starlette",
    "flask",
    "aiohttp",
    "uvicorn",
    "rich",
    "typer",
    "click",
    "gguf",
    "huggingface_hub",
    "requests",
    "triton",
    "matplotlib",
]
# Everything the core may need; whatever else is installed here is made invisible.
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by a test)", name=name)
sys.meta_path.insert(0, Blocked())
"""


def python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import tokenmill", ["torch", "numpy", "jinja2", "tokenizers"]),
        ("from tokenmill import SamplingParams, EngineConfig, RequestOutput", ["torch", "jinja2", "tokenizers"]),
        ("from tokenmill import LLM, AsyncLLM", []),
    ],
)
def test_an_import_loads_only_what_it_uses(code: str, absent: list[str]) -> None:
    loaded = python(f"{code}\nimport sys\nprint(*sorted(sys.modules))").split()
    roots = {name.partition(".")[0] for name in loaded}
    if "torch" in roots:  # torch itself may load Triton
        absent = [*absent, *(name for name in HEAVY if name != "triton")]
    else:
        absent = [*absent, *HEAVY]
    assert not roots & set(absent)
    assert "tokenmill" in roots


def test_no_import_loads_or_builds_the_native_library() -> None:
    code = "import tokenmill.llm, tokenmill.async_llm, tokenmill.engine.build\n"
    code += "from tokenmill.ops.native import library\nprint(len(library._loaded))"
    assert python(code).split() == ["0"]


def test_the_engine_answers_with_only_the_core_packages_present(tiny_model: str) -> None:
    code = BLOCK.format(blocked=sorted({*HEAVY, "tqdm", "psutil", "hypothesis"} - {"requests"})) + (
        "from tokenmill import LLM, SamplingParams\n"
        f"llm = LLM({tiny_model!r}, load_format='dummy', skip_tokenizer_init=True, device='cpu', max_num_seqs=4)\n"
        "print(len(llm.generate([[5, 6]], SamplingParams(max_tokens=7, ignore_eos=True))[0].outputs[0].token_ids))\n"
    )
    assert python(code).split() == ["7"]


@pytest.mark.parametrize(
    "module",
    [
        "tokenmill.engine.scheduler",
        "tokenmill.engine.request",
        "tokenmill.engine.core",
        "tokenmill.engine.runner.simulated",
        "tokenmill.kv.manager",
        "tokenmill.kv.pool",
        "tokenmill.kv.prefix",
        "tokenmill.plan.solve.hardware",
        "tokenmill.plan.solve.memory",
        "tokenmill.plan.solve.settings",
        "tokenmill.params",
        "tokenmill.config",
    ],
)
def test_plain_data_packages_import_without_torch(module: str) -> None:
    python(BLOCK.format(blocked=["torch"]) + f"import {module}")


def test_unknown_names_are_refused_and_known_ones_listed() -> None:
    import tokenmill

    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        tokenmill.LMM  # noqa: B018
    assert all(hasattr(tokenmill, name) for name in tokenmill.__all__)
