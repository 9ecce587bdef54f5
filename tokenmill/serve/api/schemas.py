"""What clients may send to each endpoint, as data. What is not here is refused; what is `IGNORED` is listed as such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from tokenmill.serve.http.request_body import RequestBody

# Ranges and inner forms are checked where they are used, where a message can say what to do; to clients they are
# described here.


def _described(**schema: Any) -> Meta:
    return Meta(extra_json_schema=schema)


def _within(low: float, high: float) -> Meta:
    return _described(minimum=low, maximum=high)


_COMMON = frozenset(["safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"])
_ANTHROPIC = frozenset(
    ["metadata", "service_tier", "cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id"]
)
_NO_TOOLS_HERE = {
    "container": "this server runs no code; leave it out",
    "mcp_servers": "this server calls no others; call them yourself and offer their tools",
    "context_management": "conversations are never shortened here; send what is to be read",
}
_NO_MODERATION = "this server judges no texts; leave it out"
_Stop = str | list[str] | None
LEAST_LEASE, MOST_LEASE = 1, 3600  # seconds that a session may be left alone for
_Names = {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}}
HOTTEST, HOTTEST_ANTHROPIC = 2, 1  # the highest temperatures that the two APIs know
_Content = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
    ]
}
_Messages = Annotated[
    list[
        Annotated[
            dict[str, Any],
            _described(
                required=["role", "content"],
                properties={
                    "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                    "content": _Content,
                    "tool_calls": {"type": "array", "items": {"type": "object", "required": ["function"]}},
                },
            ),
        ]
    ],
    _described(minItems=1),
]
_Tools = list[Annotated[dict[str, Any], _described(properties={"type": {"enum": ["function", "custom"]}})]]
_Temperature = Annotated[float, _within(0, HOTTEST)]
_Share = Annotated[float, _within(0, 1)]
_TopLogprobs = Annotated[int, _within(0, 20)]
_Few = Annotated[int, _within(1, 128)]
_Count = Annotated[int, _described(minimum=1)]
_Seed = Annotated[int, _within(-(2**63), 2**64 - 1)]
_Priority = Annotated[str, _described(enum=["realtime", "api", "batch"])] | Annotated[int, _within(0, 2)]
_TokenIds = list[Annotated[Any, _described(type="integer", minimum=0)]]  # checked where they are used, all at once
_Prompt = Annotated[
    Any,
    _described(
        anyOf=[
            {"type": "string", "minLength": 1},
            {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
            {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
            {"type": "array", "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}},
        ]
    ),
]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # nothing is padded here, whatever is asked


class JsonSchema(Struct):
    """OpenAI's wrapper around a schema."""

    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None  # the schema is always kept to
    description: str | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: str  # text, json_object, json_schema
    json_schema: JsonSchema | None = None


class SchedulingOptions(RequestBody, kw_only=True):
    """What a client may say about how it is served, in every endpoint that needs the engine."""

    model: str | None = None
    priority: _Priority | None = None
    deadline_ms: Annotated[float, _within(1, 86_400_000)] | None = None  # from arrival: what it is worth nothing after
    cache_salt: str | None = None  # requests share a cached prefix only with those of the same salt


class CommonOptions(SchedulingOptions, kw_only=True):
    """The same, in every endpoint that generates."""

    stream: bool | None = None


class Sampling(CommonOptions, kw_only=True):
    """How tokens are chosen, by the names that OpenAI's clients and those of other engines use."""

    temperature: _Temperature | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, _described(minimum=-1)] | None = None
    min_p: Annotated[float, _within(0, 1)] | None = None
    n: _Few | None = None
    seed: _Seed | None = None
    stop: _Stop = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Annotated[float, _within(-2, 2)] | None = None
    frequency_penalty: Annotated[float, _within(-2, 2)] | None = None
    repetition_penalty: Annotated[float, _within(0.001, 100)] | None = None
    logit_bias: Annotated[dict[str, float], _described(propertyNames={"pattern": "^[0-9]+$"})] | None = None
    bad_words: list[str] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    resume_token_ids: list[_TokenIds] | None = None  # with Last-Event-ID: what each choice had said
    response_format: ResponseFormat | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None


class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions"""

    messages: _Messages
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: _TopLogprobs | None = None
    tools: _Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None

    IGNORED = _COMMON | {"user", "store", "metadata", "service_tier", "reasoning_effort", "verbosity", "prediction"}
    REFUSED: ClassVar[dict[str, str]] = {
        "functions": "it was replaced by tools; send them",
        "function_call": "it was replaced by tool_choice; send that",
        "audio": "this model writes text only; leave it out",
        "web_search_options": "this server searches nothing; leave it out",
        "moderation": _NO_MODERATION,
    }


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions"""

    prompt: _Prompt
    suffix: str | None = None  # the answer is what stands between prompt and suffix
    max_tokens: _Count | None = 16
    logprobs: _TopLogprobs | None = None
    echo: bool | None = None
    best_of: _Few | None = None

    IGNORED = frozenset(["user"])


class TextFormat(Struct, forbid_unknown_fields=True):
    """The Responses API has the schema beside the type."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None


class TextSettings(Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(CommonOptions, kw_only=True):
    """POST /v1/responses"""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: _Count | None = None
    temperature: _Temperature | None = None
    top_p: _Share | None = None
    top_logprobs: _TopLogprobs | None = None
    text: TextSettings | None = None
    tools: _Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    seed: _Seed | None = None
    top_k: Annotated[int, _described(minimum=-1)] | None = None
    min_p: Annotated[float, _within(0, 1)] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None  # answered at once; the response is made meanwhile, and asked for by its id
    store: bool | None = None  # False: the response cannot be asked for again, nor gone on from
    include: list[str] | None = None
    truncation: str | None = None

    IGNORED = _COMMON | {"user", "service_tier", "reasoning", "stream_options", "max_tool_calls"}
    REFUSED: ClassVar[dict[str, str]] = {
        "prompt": "no templates of prompts are kept here; send input and instructions",
        "context_management": _NO_TOOLS_HERE["context_management"],
        "image": "this model writes text only; leave it out",
        "moderation": _NO_MODERATION,
        "access_programs": "there are none here; leave it out",
    }


class OutputConfig(Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    effort: str | None = None  # there is one kind of effort


class MessagesRequest(CommonOptions, kw_only=True):
    """POST /v1/messages"""

    messages: _Messages
    max_tokens: _Count
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, _within(0, HOTTEST_ANTHROPIC)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, _described(minimum=-1)] | None = None
    tools: _Tools | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    seed: _Seed | None = None

    IGNORED = _ANTHROPIC
    REFUSED = _NO_TOOLS_HERE


_Lease = Annotated[float, _within(LEAST_LEASE, MOST_LEASE)]
_Steps = list[
    Annotated[
        Any,
        _described(
            anyOf=[
                {"type": "string"},
                {"type": "object", "required": ["gen"], "properties": {"gen": {"type": "object"}}},
                {
                    "type": "object",
                    "required": ["select"],
                    "properties": {"select": {"type": "object", "required": ["choices"]}},
                },
                {
                    "type": "object",
                    "required": ["role", "content"],
                    "properties": {"role": {"type": "string"}, "content": {"type": ["string", "array"]}},
                },
                {"type": "object", "required": ["fork"], "properties": {"fork": _Names}},
                {"type": "object", "required": ["drop"], "properties": {"drop": _Names}},
            ]
        ),
    ]
]


class SessionRequest(SchedulingOptions, kw_only=True):
    """POST /v1/sessions"""

    lease_seconds: _Lease | None = None  # it ends when nobody has asked anything of it for so long


class SessionCallRequest(RequestBody, kw_only=True):
    """POST /v1/sessions/ID"""

    do: _Steps = msgspec.field(default_factory=list)  # none: the lease is renewed
    state: str | None = None
    stream: bool | None = None
    lease_seconds: _Lease | None = None


class CountRequest(RequestBody, kw_only=True):
    """POST /v1/messages/count_tokens"""

    messages: _Messages
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: _Tools | None = None

    IGNORED = _ANTHROPIC | {"tool_choice", "thinking", "output_config", "output_format"}
    REFUSED = _NO_TOOLS_HERE


class MessageBatchEntry(Struct, forbid_unknown_fields=True):
    custom_id: str
    params: dict[str, Any]  # a MessagesRequest, judged when its turn comes


class MessageBatchRequest(RequestBody, kw_only=True):
    """POST /v1/messages/batches"""

    requests: Annotated[list[MessageBatchEntry], _described(minItems=1)]


class EmbeddingRequest(SchedulingOptions, kw_only=True):
    """POST /v1/embeddings"""

    input: _Prompt
    encoding_format: Annotated[str, _described(enum=["float", "base64"])] | None = None
    dimensions: _Count | None = None
    pooling: Annotated[str, _described(enum=["mean", "last"])] | None = None

    IGNORED = frozenset(["user"])


class TokenizeRequest(RequestBody, kw_only=True):
    """POST /tokenize"""

    prompt: str | None = None
    messages: _Messages | None = None
    model: str | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(RequestBody, kw_only=True):
    """POST /detokenize"""

    tokens: _TokenIds
    model: str | None = None
    skip_special_tokens: bool = False


class ResetPrefixCacheRequest(RequestBody, kw_only=True):
    """POST /reset_prefix_cache"""

    cache_salt: str | None = None  # of the requests whose traces are wiped; unset: those without one


class LoadAdapterRequest(RequestBody, kw_only=True):
    """POST /v1/load_lora_adapter"""

    lora_name: str
    lora_path: str
    load_inplace: bool = False

    IGNORED = frozenset(["base_model_name", "lora_int_id"])


class UnloadAdapterRequest(RequestBody, kw_only=True):
    """POST /v1/unload_lora_adapter"""

    lora_name: str

    IGNORED = frozenset(["lora_int_id"])


class BatchRequest(RequestBody, kw_only=True):
    """POST /v1/batches"""

    input_file_id: str
    endpoint: str
    completion_window: str | None = None
    metadata: dict[str, str] | None = None

    IGNORED = frozenset(["output_expires_after"])


def components(kinds: Sequence[type[RequestBody]]) -> dict[str, Any]:
    """The JSON schemas of these requests, by name."""
    _, found = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    without_effect = {"description": "without effect here; listed in the header x-tokenmill-ignored"}
    for kind in kinds:
        schema = found[kind.__name__]
        schema["properties"] |= dict.fromkeys(sorted(kind.IGNORED), without_effect)
        for name, why in kind.REFUSED.items():
            schema["properties"][name] = {"type": "null", "description": f"refused: {why}"}
        schema["additionalProperties"] = False
    return dict(found)
