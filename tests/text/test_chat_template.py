"""Chat templates render as in transformers, inside a sandbox, and failures are one sentence."""

import time

import pytest

from tokenmill.errors import InvalidRequest, ModelError
from tokenmill.model.chat_template import render

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""  # noqa: E501
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{#- the system message is written even when there is none #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + (tool_call.arguments | tojson) + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + (message.content | tojson) + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and not message.content.startswith('<tool>') %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') if message.content else '' %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""  # noqa: E501
PHI3 = """{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>
' + message['content'] + '<|end|>
'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}"""
GENERATION = """{% for message in messages %}
    {% if message.role == 'assistant' %}
        {% generation %}{{ message.content }}{% endgeneration %}
    {% else %}
{{ message.role }}: {{ message.content }}
    {% endif %}
{% endfor %}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "qwen": QWEN,
    "gemma": GEMMA,
    "phi3": PHI3,
    "generation": GENERATION,
}
TALK = [
    {"role": "user", "content": " What is <b>2 & 2</b>? \n"},
    {"role": "assistant", "content": "<think>hm</think>\n\n4, ça va \N{GRINNING FACE}"},
    {"role": "user", "content": "Thanks 'so' \"much\""},
]
SYSTEM = {"role": "system", "content": "Be brief."}
FUNCTION = {"name": "f", "description": "é <x>", "parameters": {"b": 1, "a": [1, None]}}
TOOLS = [{"type": "function", "function": FUNCTION}]


def reference(template, messages, tools=None, **options):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=template, tools=tools, **options)
    return rendered[0]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("system", [False, True], ids=["no system", "system"])
@pytest.mark.parametrize("generation_prompt", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name, generation_prompt, system, tools):
    messages = [SYSTEM, *TALK] if system and name != "gemma" else TALK
    options = {"add_generation_prompt": generation_prompt, "bos_token": "<s>", "eos_token": "</s>"}
    got = render(TEMPLATES[name], messages, tools=tools, **options)
    assert got == reference(TEMPLATES[name], messages, tools, **options)
    assert "Thanks" in got


def test_the_default_models_template_renders_as_in_transformers(byte_level):
    for messages in (TALK, [SYSTEM, *TALK]):
        expected = reference(byte_level.chat_template, messages, add_generation_prompt=True)
        assert render(byte_level.chat_template, messages) == expected


def test_tool_calls_render_as_in_transformers():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    messages = [*TALK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "4"}]
    options = {"add_generation_prompt": True, "bos_token": "<s>"}
    assert render(LLAMA3, messages, **options) == reference(LLAMA3, messages, **options)


def test_further_arguments_reach_the_template():
    assert "<think>" in render(QWEN, TALK, enable_thinking=False)
    assert "<think>" not in render(QWEN, TALK)


def test_the_date_is_available():
    assert render("{{ strftime_now('%Y') }}", TALK) == time.strftime("%Y")


def test_content_parts_are_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert "one two" in render(CHATML, [{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        (["hello"], "message 0 is a str"),
        ([{"content": "x"}], "message 0 has role None"),
        ([{"role": "user", "content": "x"}, {"role": "foo", "content": "x"}], "message 1 has role 'foo'; .*user.*tool"),
        ([{"role": "user"}], "message 0 has content of type NoneType"),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'"),
    ],
)
def test_messages_of_the_wrong_shape_are_refused(messages, expected):
    with pytest.raises(InvalidRequest, match=expected):
        render(CHATML, messages)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function", "ipython", "model"])
def test_roles_that_templates_are_written_for_reach_them(role):
    assert f"<|im_start|>{role}\n" in render(CHATML, [{"role": role, "content": "x"}])


def test_a_template_may_name_a_role_of_its_own():
    template = "{% for m in messages %}{% if m.role == 'reader' %}{{ m.content }}{% endif %}{% endfor %}"
    assert render(template, [{"role": "reader", "content": "x"}]) == "x"


def test_a_model_without_template_says_what_to_pass():
    with pytest.raises(InvalidRequest, match="pass chat_template"):
        render(None, TALK)


def test_a_template_may_refuse_with_its_own_words():
    with pytest.raises(InvalidRequest, match="System role not supported"):
        render(GEMMA, [SYSTEM, *TALK])


def test_a_broken_template_is_a_model_error():
    with pytest.raises(ModelError, match="cannot be compiled"):
        render("{% for x in %}", TALK)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ range(10 ** 9) | list }}",
        "{{ undefined_name.attribute }}",
        "{% include 'other' %}",
        "{{ '%s' % missing.x }}",
    ],
)
def test_templates_can_neither_reach_python_nor_flood_memory(template):
    with pytest.raises(InvalidRequest) as caught:
        render(template, TALK)
    assert "\n" not in str(caught.value)


def test_output_is_bounded():
    endless = "{% for a in range(9999) %}{% for b in range(9999) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="over 1000 characters"):
        render(endless, TALK, max_characters=1000)
