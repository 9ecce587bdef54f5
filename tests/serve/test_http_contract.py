"""What clients may ask for beyond the plain: allowed tools, a suffix, values at and beyond the ends of their ranges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from http_models import write_model
from http_server import Server

from tokenmill import LLM, SamplingParams
from tokenmill.errors import InvalidRequest

MODEL = "tiny-chat"
MESSAGES = [{"role": "user", "content": "Tell me about mills."}]
NAMES = ["grind", "sift", "stop"]
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]
FLAT = [{"type": "function", "name": name, "parameters": None, "strict": None} for name in NAMES]
FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with tokens for filling in the middle."""
    return write_model(tmp_path_factory.mktemp("fills") / "tiny-coder", more=FIM)


@pytest.fixture(scope="module")
def filler(coder: str) -> Iterator[openai.OpenAI]:
    server = Server.start(coder)
    yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert server.stop() == 0


# -- allowed tools --------------------------------------------------------------------------------------------


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("names", [["sift"], ["stop", "grind"]])
def test_only_allowed_tools_are_called_and_all_are_shown(client: openai.OpenAI, names: list[str]) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 120, "temperature": 1}
    free = client.chat.completions.create(**asked, tool_choice="required", seed=0)
    called = set()
    for seed in range(6):
        answer = client.chat.completions.create(**asked, tool_choice=allowed("required", *names), seed=seed)
        called |= {call.function.name for call in answer.choices[0].message.tool_calls}
        assert answer.usage.prompt_tokens == free.usage.prompt_tokens
    assert called and called <= set(names)


def test_responses_allow_tools_in_their_own_form(client: openai.OpenAI) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "stop"}]}
    answer = client.responses.create(
        model=MODEL, input="Do it.", tools=FLAT, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=80
    )
    assert [item.name for item in answer.output if item.type == "function_call"] == ["stop"]
    assert answer.tool_choice.type == "allowed_tools"


def test_with_mode_auto_the_model_may_also_talk(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 20, "temperature": 0}
    plain = client.chat.completions.create(**asked)
    answer = client.chat.completions.create(**asked, tool_choice=allowed("auto", "sift"))
    assert answer.choices[0].message.content and answer.usage.prompt_tokens == plain.usage.prompt_tokens
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
    answer = client.chat.completions.create(**asked, tool_choice=allowed("auto", "sift"), response_format=form)
    assert json.loads(answer.choices[0].message.content) in ("a", "b")  # an asked for form is kept to


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (allowed("required", "grind", "bake"), "allows 'bake', which is not among the tools"),
        (allowed("required"), "allows no tools"),
        (allowed("none", "grind"), "mode 'none'"),
        ({"type": "allowed_tools", "allowed_tools": 3}, "mode None"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]},
            "only tools of type",
        ),
    ],
)
def test_wrong_allowed_tools_are_refused(client: openai.OpenAI, choice: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as refusal:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice=choice)
    assert refusal.value.param == "tool_choice"


# -- suffix ---------------------------------------------------------------------------------------------------


def test_a_suffix_asks_for_the_middle(filler: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny-coder", "max_tokens": 12, "temperature": 0}
    middle = filler.completions.create(**asked, prompt="def mill(", suffix="return flour")
    spelled = filler.completions.create(
        **asked,
        prompt="<|fim_prefix|>def mill(<|fim_suffix|>return flour<|fim_middle|>",
        extra_body={"ignore_eos": True},
    )
    assert spelled.choices[0].text.startswith(middle.choices[0].text)
    assert middle.usage.prompt_tokens == spelled.usage.prompt_tokens == len("def mill(return flour") + 3
    several = filler.completions.create(**asked, prompt=["def mill(", list(b"x")], suffix="return flour")
    assert several.choices[0].text == middle.choices[0].text and len(several.choices) == 2
    pieces = [
        chunk.choices[0].text
        for chunk in filler.completions.create(**asked, prompt="def mill(", suffix="return flour", stream=True)
    ]
    assert "".join(pieces) == middle.choices[0].text
    plain = filler.completions.create(**asked, prompt="def mill(", suffix="")  # the end of a file
    assert plain.usage.prompt_tokens == len("def mill(")


def test_the_offline_api_fills_in_the_same(coder: str, filler: openai.OpenAI) -> None:
    served = filler.completions.create(
        model="tiny-coder", prompt="def mill(", suffix="return flour", max_tokens=12, temperature=0
    )
    llm = LLM(coder, load_format="dummy", dtype="float64", device="cpu", max_num_seqs=16)
    try:
        greedy = SamplingParams(temperature=0, max_tokens=12)
        [output] = llm.generate([{"prompt": "def mill(", "suffix": "return flour"}], greedy)
        assert output.outputs[0].text == served.choices[0].text and output.prompt == "def mill("
        forced = SamplingParams(temperature=0, max_tokens=12, logit_bias={263: 100})
        assert llm.generate([{"prompt": "x", "suffix": "y"}], forced)[0].outputs[0].finish_reason == "stop"
        with pytest.raises(InvalidRequest, match="it must be text"):
            llm.generate([{"prompt": "x", "suffix": 3}], greedy)
    finally:
        llm.shutdown()


def test_a_middle_ends_with_the_marks_of_files(filler: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny-coder", "prompt": "x", "max_tokens": 12, "temperature": 0}
    bias = {str(260 + number): 100 for number in range(len(FIM))}
    ended = filler.completions.create(**asked, suffix="y", logit_bias=bias)
    assert (ended.choices[0].finish_reason, ended.choices[0].text) == ("stop", "")
    assert filler.completions.create(**asked, logit_bias=bias).choices[0].finish_reason == "length"


def test_a_suffix_is_refused_where_it_cannot_be(client: openai.OpenAI, filler: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no tokens for filling in the middle") as refusal:
        client.completions.create(model=MODEL, prompt="x", suffix="y")
    assert refusal.value.param == "suffix"
    with pytest.raises(openai.BadRequestError, match="echo"):
        filler.completions.create(model="tiny-coder", prompt="x", suffix="y", echo=True)
    with pytest.raises(openai.BadRequestError, match="the prompt has") as refusal:
        filler.completions.create(model="tiny-coder", prompt="x" * 1200, suffix="y" * 1200)
    assert refusal.value.code == "context_length_exceeded"


# -- ranges ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"temperature": 2.1}, {"temperature": 2}),
        ({"temperature": -0.1}, {"temperature": 0}),
        ({"top_p": 1.1}, {"top_p": 0}),
        ({"presence_penalty": 2.1}, {"presence_penalty": 2}),
        ({"frequency_penalty": -2.1}, {"frequency_penalty": -2}),
        ({"n": 129}, {"n": 1}),
        ({"n": 0}, {"n": 2}),
        ({"max_tokens": 0}, {"max_tokens": 1}),
        ({"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": 20}),
        ({"logit_bias": {"5": 101}}, {"logit_bias": {"5": 100}}),
        ({"seed": 2**64}, {"seed": 2**63 - 1}),
        ({"stop": ["x"] * 65}, {"stop": ["x"] * 4}),
    ],
    ids=lambda one: str(one)[:40],
)
def test_ranges_end_where_openai_has_them(client: openai.OpenAI, given: dict[str, Any], taken: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
    client.chat.completions.create(**asked | taken)
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(**asked | given)
    assert refusal.value.param == next(reversed(given))


def test_temperatures_end_where_each_api_has_them(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    for ask in (
        lambda **more: client.completions.create(model=MODEL, prompt="x", max_tokens=2, **more),
        lambda **more: client.responses.create(model=MODEL, input="x", max_output_tokens=2, **more),
    ):
        ask(temperature=2)
        with pytest.raises(openai.BadRequestError, match=r"temperature is 2\.5; it must be from 0 to 2"):
            ask(temperature=2.5)
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
    claude.messages.create(**asked, extra_body={"temperature": 1})
    with pytest.raises(anthropic.BadRequestError, match=r"temperature is 1\.5; it must be from 0 to 1"):
        claude.messages.create(**asked, extra_body={"temperature": 1.5})


def test_a_share_of_nothing_leaves_the_likeliest_token(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20}
    greedy = client.chat.completions.create(**asked, temperature=0)
    none = client.chat.completions.create(**asked, temperature=2, top_p=0, seed=3)
    assert none.choices[0].message.content == greedy.choices[0].message.content


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "replaced by tools"),
        ("/v1/chat/completions", {"function_call": "auto"}, "replaced by tool_choice"),
        ("/v1/chat/completions", {"web_search_options": {}}, "searches nothing"),
        ("/v1/chat/completions", {"audio": {"voice": "x", "format": "wav"}}, "text only"),
        ("/v1/responses", {"prompt": {"id": "pmpt_1"}}, "templates"),
        ("/v1/responses", {"conversation": "conv_1"}, "previous_response_id"),
        ("/v1/responses", {"truncation": "auto"}, "never cut"),
        ("/v1/messages", {"container": "c"}, "runs no code"),
        ("/v1/messages", {"mcp_servers": []}, "calls no others"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    server: Server, path: str, body: dict[str, Any], said: str
) -> None:
    needed = {"input": "x"} if path == "/v1/responses" else {"messages": MESSAGES, "max_tokens": 2}
    [(name, _)] = body.items()
    answer = httpx.post(server.url + path, json=needed | body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert answer.json()["error"]["message"].startswith(f"{name} is ")
    assert httpx.post(server.url + path, json=needed | {name: None}).status_code == 200


def test_what_has_no_effect_is_listed_wherever_it_stands(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    raw = client.responses.with_raw_response.create(
        model=MODEL, input="x", max_output_tokens=2, text={"verbosity": "low"}, user="me"
    )
    assert raw.headers["x-tokenmill-ignored"] == "user, text.verbosity"
    raw = claude.messages.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=2, output_config={"effort": "low"}
    )
    assert raw.headers["x-tokenmill-ignored"] == "output_config.effort"
    prediction = {"type": "content", "content": "x"}
    chat = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=2, prediction=prediction
    )
    assert chat.headers["x-tokenmill-ignored"] == "prediction"


def test_lists_of_files_and_batches_come_in_pages(client: openai.OpenAI, server: Server) -> None:
    line = b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}'
    files = [client.files.create(file=(f"{n}.jsonl", line), purpose="batch").id for n in range(3)]
    window: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
    batches = [client.batches.create(input_file_id=file, **window).id for file in files]
    first = client.files.list(limit=1)
    assert [file.id for file in first.data] == files[:1:-1] and first.has_more
    assert [file.id for file in client.files.list(limit=2)][:3] == files[::-1]  # the client turns the pages
    assert [file.id for file in client.files.list(order="asc", after=files[0])][:2] == files[1:]
    assert [batch.id for batch in client.batches.list(limit=1)][:3] == batches[::-1]
    with pytest.raises(openai.BadRequestError, match="not in this list"):
        client.batches.list(after="nobody")
    with pytest.raises(openai.BadRequestError, match="files are for batches"):
        client.files.list(purpose="fine-tune")


def test_the_description_names_what_is_refused(server: Server) -> None:
    schemas = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
    assert "replaced by tools" in schemas["ChatRequest"]["properties"]["functions"]["description"]
    assert schemas["ChatRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 2
    assert schemas["MessagesRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 1


def test_the_docs_table_says_what_the_schemas_say() -> None:
    """Every parameter that is refused or has no effect is in the table of differences, by name."""
    from tokenmill.serve import app
    from tokenmill.serve.api import schemas

    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    table = text[text.index("\n## Differences") + 1 :].partition("\n## ")[0]
    kinds = {kind for _, kind, *_ in app._POSTS} - {schemas.EmbeddingRequest, schemas.BatchRequest}
    for kind in kinds:
        for name in [*kind.IGNORED, *kind.REFUSED]:
            assert f"`{name}`" in table, (kind.__name__, name)
