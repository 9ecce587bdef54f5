"""lm-evaluation-harness finds the same through tokenmill, in this process and served, as through transformers.

Runs where lm-eval is installed (`pip install "lm-eval[api]"`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
sys.path.append(str(Path(__file__).parents[1] / "serve"))

import lm_eval
from http_models import write_model
from http_server import Server
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import tokenmill.evaluation.harness as harness

SHOTS = "Water is wet. Fire is hot. Ice is cold. Stone is hard. " * 4
CHOICE = """
task: mill_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXT = """
task: mill_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/text.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
ANSWER = """
task: mill_answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/answer.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With weights in a file, of a size that makes some tokens much likelier than others, letters among them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = write_model(tmp_path_factory.mktemp("evaluated") / "tiny-chat")
    settings = Path(folder) / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(1)
    built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
        letters = [token_id for token, token_id in tokenizer.get_vocab().items() if token.isascii() and len(token) == 1]
        built.lm_head.weight[[one for one in range(260) if one not in letters]] *= 0.1
    built.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    words = ["a horse", "green", "an apple tree", "Rome", "the river Nile", "iron"]
    rows: dict[str, list[dict[str, Any]]] = {"choice": [], "text": [], "answer": []}
    for number in range(12):
        choices = [f" {words[(number + k) % 6]}" for k in range(4)]
        rows["choice"].append({"question": f"{SHOTS}Item {number} is", "choices": choices, "answer": number % 4})
        rows["text"].append({"text": f"{number} mills by the river turned day and night. " * (number + 1)})
        rows["answer"].append({"question": f"{SHOTS}Item {chr(97 + number)}", "answer": "x"})
    for name, said in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    for name, task in (("choice", CHOICE), ("text", TEXT), ("answer", ANSWER)):
        (folder / f"mill_{name}.yaml").write_text(task.format(folder=folder))
    return TaskManager(include_path=str(folder), include_defaults=False)


NAMES = ["mill_choice", "mill_text", "mill_answer"]


def evaluated(model: Any, tasks: TaskManager, names: list[str] = NAMES, **arguments: Any) -> dict[str, Any]:
    found = lm_eval.simple_evaluate(
        model=model, tasks=names, task_manager=tasks, bootstrap_iters=0, log_samples=True, **arguments
    )
    assert found is not None
    return found


def figures(found: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task} {name}": value
        for task, values in found["results"].items()
        for name, value in values.items()
        if isinstance(value, int | float) and "stderr" not in name
    }


def answers(found: dict[str, Any], task: str) -> list[Any]:
    return [sample["filtered_resps"] for sample in sorted(found["samples"][task], key=lambda one: one["doc_id"])]


def assert_same(found: dict[str, Any], wanted: dict[str, Any], names: list[str] = NAMES) -> None:
    expected_figures = {name: value for name, value in figures(wanted).items() if name.split()[0] in names}
    assert figures(found) == pytest.approx(expected_figures, rel=1e-4)
    for said, expected in zip(answers(found, "mill_choice"), answers(wanted, "mill_choice"), strict=True):
        assert [float(one[0]) for one in said] == pytest.approx([float(one[0]) for one in expected], abs=1e-3)
        assert [str(one[1]) for one in said] == [str(one[1]) for one in expected]
    if "mill_answer" in names:
        assert answers(found, "mill_answer") == answers(wanted, "mill_answer")


@pytest.fixture(scope="module")
def reference(model: str, tasks: TaskManager) -> dict[str, Any]:
    found = evaluated(HFLM(pretrained=model, device="cpu", dtype="float32", batch_size=1), tasks)
    assert len({str(one) for one in answers(found, "mill_answer")}) > 1  # the model says different things
    return found


def test_an_llm_in_this_process_is_judged_as_transformers_is(
    model: str, tasks: TaskManager, reference: dict[str, Any]
) -> None:
    judged = harness.TokenmillLM(model, dtype="float32", device="cpu")
    try:
        assert_same(evaluated(judged, tasks), reference)
        judged.prompt_tokens = judged.computed_tokens = 0
        judged.llm.reset_prefix_cache()
        evaluated(judged, tasks, ["mill_choice"])
        assert judged.computed_tokens < 0.3 * judged.prompt_tokens  # contexts are shared, and computed once
    finally:
        judged.llm.shutdown()


def test_the_harness_finds_the_model_by_its_name(model: str, tasks: TaskManager, reference: dict[str, Any]) -> None:
    found = evaluated("tokenmill", tasks, ["mill_choice"], model_args=f"pretrained={model},dtype=float32,device=cpu")
    assert_same(found, reference, ["mill_choice"])


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Server]:
    server = Server.start(model, "--load-format", "auto", "--dtype", "float32")
    yield server
    assert server.stop() == 0


@pytest.mark.parametrize("tokenized", [True, False])
def test_its_own_client_judges_a_server_as_transformers_is(
    server: Server, model: str, tasks: TaskManager, reference: dict[str, Any], tokenized: bool
) -> None:
    arguments = {
        "model": "tiny-chat",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": model,
        "tokenized_requests": tokenized,
        "num_concurrent": 4,
        "max_length": 2046,
    }
    assert_same(evaluated("local-completions", tasks, model_args=arguments), reference)
