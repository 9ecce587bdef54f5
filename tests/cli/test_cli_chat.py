"""`tokenmill chat` over a pipe, with a scripted model."""

import json
import os
import signal

import pytest
from cli_stub import StubLLM

from tokenmill.errors import InvalidRequest


def said(stub, turn):
    """The messages of one request, as role:content strings."""
    return [f"{message['role']}:{message['content']}" for message in stub.asked[turn][0]]


def test_each_answer_joins_the_history(invoke):
    stub = StubLLM("first answer", "second answer")
    result = invoke(stub, "chat", stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stdout == "first answer\nsecond answer\n"
    assert said(stub, 1) == ["user:one", "assistant:first answer", "user:two"]
    assert stub.shut_down == 1


def test_blank_lines_ask_nothing(invoke):
    stub = StubLLM()
    invoke(stub, "chat", stdin="\n  \n")
    assert stub.asked == []


def test_backslash_joins_lines_into_one_message(invoke):
    stub = StubLLM()
    invoke(stub, "chat", stdin="one\\\ntwo\n")
    assert said(stub, 0) == ["user:one\ntwo"]


def test_reset_forgets_the_turns_but_keeps_the_system_message(invoke):
    stub = StubLLM()
    invoke(stub, "chat", "--system", "S", stdin="one\n/reset\ntwo\n")
    assert said(stub, 1) == ["system:S", "user:two"]


def test_system_message_can_be_set_and_removed(invoke):
    stub = StubLLM("a")
    invoke(stub, "chat", stdin="/system Be kind\none\n/reset\n/system\ntwo\n")
    assert said(stub, 0) == ["system:Be kind", "user:one"]
    assert said(stub, 1) == ["user:two"]


def test_set_changes_the_next_answer_only_by_valid_values(invoke):
    stub = StubLLM()
    lines = ["/set temperature 0.7", "/set temperature hot", "/set top_p 3", "/set colour red", "/set seed none", "hi"]
    result = invoke(stub, "chat", "--seed", "4", stdin="\n".join(lines))
    params = stub.asked[0][1]
    assert (params.temperature, params.top_p, params.seed) == (0.7, 0.9, None)
    assert result.stderr.count("error:") == 3
    assert "colour" in result.stderr


def test_set_alone_shows_the_settings(invoke):
    assert "temperature = 0.2" in invoke(StubLLM(), "chat", stdin="/set\n").stderr


def test_regenerate_asks_the_same_again_with_another_seed(invoke):
    stub = StubLLM("first", "second", "third")
    invoke(stub, "chat", "--seed", "4", stdin="one\n/regenerate\ntwo\n")
    assert said(stub, 1) == ["user:one"]
    assert said(stub, 2) == ["user:one", "assistant:second", "user:two"]
    assert [params.seed for _, params in stub.asked] == [4, 5, 4]


def test_failed_regenerate_keeps_the_old_answer(invoke):
    stub = StubLLM("first", InvalidRequest("too long"), "third")
    invoke(stub, "chat", stdin="one\n/regenerate\ntwo\n")
    assert said(stub, 2) == ["user:one", "assistant:first", "user:two"]


def test_regenerate_without_an_answer_is_an_error_line(invoke):
    result = invoke(StubLLM(), "chat", stdin="/regenerate\n")
    assert "error: there is no answer" in result.stderr


def test_error_is_told_and_the_chat_goes_on_without_the_message(invoke):
    stub = StubLLM(InvalidRequest("the prompt has 9000 tokens"), "fine")
    result = invoke(stub, "chat", stdin="long\nshort\n")
    assert result.exit_code == 0
    assert "error: the prompt has 9000 tokens" in result.stderr
    assert said(stub, 1) == ["user:short"]


def test_ctrl_c_stops_the_answer_not_the_program(invoke):
    hits = iter([True])
    between = lambda: next(hits, False) and os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    stub = StubLLM("one two three four", "fine", between=between)
    result = invoke(stub, "chat", stdin="count\nagain\n")
    assert result.exit_code == 0
    assert result.stdout == "one two\nfine\n"
    assert stub.cancelled == 1
    assert said(stub, 1) == ["user:count", "assistant:one two", "user:again"]


def test_saved_conversation_goes_on_after_load(invoke, tmp_path):
    path = tmp_path / "talk.json"
    invoke(StubLLM("naïve answer"), "chat", "--system", "S", "--seed", "8", stdin=f"one\n/save {path}\n")
    stub = StubLLM()
    invoke(stub, "chat", stdin=f"/load {path}\ntwo\n")
    assert said(stub, 0) == ["system:S", "user:one", "assistant:naïve answer", "user:two"]
    assert stub.asked[0][1].seed == 8


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[" * 100_000,
        "[]",
        "{}",
        json.dumps({"messages": [{"role": "root", "content": "x"}]}),
        json.dumps({"messages": [{"role": "user", "content": 3}]}),
        json.dumps({"messages": [], "settings": {"stop": "x"}}),
        json.dumps({"messages": [], "settings": {"temperature": "hot"}}),
        json.dumps({"messages": [], "system": 1}),
    ],
)
def test_loading_anything_else_is_refused_and_changes_nothing(invoke, tmp_path, content):
    path = tmp_path / "talk.json"
    path.write_text(content)
    stub = StubLLM("a")
    result = invoke(stub, "chat", stdin=f"one\n/load {path}\ntwo\n")
    assert result.exit_code == 0
    assert result.stderr.startswith("error:")
    assert said(stub, 1) == ["user:one", "assistant:a", "user:two"]


@pytest.mark.parametrize("line", ["/save", "/load", "/save /nowhere/at.json", "/load /nowhere/at.json", "/dance"])
def test_wrong_command_is_an_error_line_and_the_chat_goes_on(invoke, line):
    stub = StubLLM()
    result = invoke(stub, "chat", stdin=f"{line}\nhello\n")
    assert result.stderr.startswith("error:")
    assert len(stub.asked) == 1


def test_help_names_every_command(invoke):
    stderr = invoke(StubLLM(), "chat", stdin="/help\n").stderr
    for name in ("/help", "/reset", "/system", "/set", "/regenerate", "/save", "/load", "/stats", "/quit"):
        assert name in stderr


def test_other_names_of_commands_work_too(invoke):
    stub = StubLLM()
    assert invoke(stub, "chat", stdin="one\n/clear\ntwo\n/exit\nthree\n").stderr == "(the conversation starts anew)\n"
    assert [said(stub, turn) for turn in range(len(stub.asked))] == [["user:one"], ["user:two"]]


def test_stats_count_all_answers(invoke):
    stderr = invoke(StubLLM("one two", "three"), "chat", stdin="a\nb\n/stats\n").stderr
    assert "4 messages" in stderr
    assert "all answers: 3 tokens" in stderr


def test_forms_of_weights_and_cache_reach_the_engine(invoke):
    stub = StubLLM()
    invoke(stub, "chat", "--quantization", "int8", "--kv-cache-dtype", "fp8", stdin="hello\n")
    assert (stub.opened_with["quantization"], stub.opened_with["kv_cache_dtype"]) == ("int8", "fp8")


def test_quit_leaves_the_rest_unread(invoke):
    stub = StubLLM()
    assert invoke(stub, "chat", stdin="/quit\nhello\n").exit_code == 0
    assert stub.asked == []
    assert stub.shut_down == 1
