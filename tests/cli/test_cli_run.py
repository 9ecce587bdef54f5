"""`tokenmill run` with a scripted model."""

import os
import signal

import pytest
from cli_stub import StubLLM

from tokenmill.errors import InvalidRequest, ModelError


def test_answer_goes_to_stdout_and_nothing_else_does(invoke):
    stub = StubLLM("Paris is the capital.")
    result = invoke(stub, "run", "Capital?", "--verbose")
    assert result.exit_code == 0
    assert result.stdout == "Paris is the capital.\n"
    assert "plan: 7 blocks" in result.stderr
    assert "3 prompt tokens" in result.stderr
    assert "4 tokens" in result.stderr


def test_prompt_becomes_a_chat_message_after_the_system_message(invoke):
    stub = StubLLM()
    invoke(stub, "run", "Hi", "--system", "Be brief")
    assert stub.asked[0][0] == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]


def test_raw_prompt_is_passed_as_it_is(invoke):
    stub = StubLLM()
    invoke(stub, "run", "Once upon", "--raw")
    assert stub.asked[0][0] == "Once upon"


def test_raw_and_system_together_are_refused_before_the_model_is_loaded(invoke):
    stub = StubLLM()
    result = invoke(stub, "run", "Once", "--raw", "--system", "x")
    assert result.exit_code == 2
    assert "--system" in result.stderr
    assert not stub.opened_with


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_prompt_comes_from_stdin_when_there_is_no_argument(invoke, arguments):
    stub = StubLLM()
    invoke(stub, "run", *arguments, stdin="From a pipe\n")
    assert stub.asked[0][0][-1]["content"] == "From a pipe\n"


def test_empty_prompt_is_refused_before_the_model_is_loaded(invoke):
    stub = StubLLM()
    result = invoke(stub, "run", stdin="  \n")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the prompt is empty")
    assert not stub.opened_with


def test_options_reach_the_sampling_parameters_and_the_engine(invoke):
    stub = StubLLM()
    sampling = ["--max-tokens", "9", "--temperature", "0.5", "--top-p", "0.8", "--top-k", "7", "--seed", "3"]
    where = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "128"]
    forms = ["--quantization", "int4,layers.0-3=int8", "--kv-cache-dtype", "int8"]
    invoke(stub, "run", "Hi", "-m", "some/model", *sampling, *where, *forms)
    params = stub.asked[0][1]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (9, 0.5, 0.8, 7, 3)
    assert stub.opened_with == {
        "model": "some/model",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 128,
        "quantization": "int4,layers.0-3=int8",
        "kv_cache_dtype": "int8",
    }


def test_wrong_sampling_value_is_one_line_and_loads_nothing(invoke):
    stub = StubLLM()
    result = invoke(stub, "run", "Hi", "--temperature", "nan")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: temperature is nan")
    assert result.stderr.count("\n") == 1
    assert not stub.opened_with


def test_debug_after_two_dashes_is_a_prompt(invoke):
    stub = StubLLM()
    assert invoke(stub, "run", "--", "--debug").exit_code == 0
    assert stub.asked[0][0] == [{"role": "user", "content": "--debug"}]


@pytest.mark.parametrize("command", [["run", "Hi"], ["chat"]])
def test_no_tokens_at_all_is_refused_before_the_model_is_loaded(invoke, command):
    stub = StubLLM()
    result = invoke(stub, *command, "--max-tokens", "0")
    assert result.exit_code == 2
    assert result.stderr == "error: --max-tokens is 0; it must be 1 or more\n"
    assert stub.opened_with == {}


def test_error_is_one_line_and_the_engine_is_shut_down(invoke):
    stub = StubLLM(ModelError("the file x.gguf is cut short; download it again"))
    result = invoke(stub, "run", "Hi")
    assert result.exit_code == 1
    assert result.stderr == "error: the file x.gguf is cut short; download it again\n"
    assert stub.shut_down == 1


def test_request_that_fails_on_the_way_is_an_error_after_what_came(invoke):
    stub = StubLLM("half an answer")
    stub.error = "the logits were not finite; try float32"
    result = invoke(stub, "run", "Hi")
    assert result.exit_code == 1
    assert result.stdout == "half an answer\n"
    assert result.stderr == "error: the logits were not finite; try float32\n"


@pytest.mark.parametrize("words", [["--debug", "run", "Hi"], ["run", "--debug", "Hi"], ["run", "Hi", "--debug"]])
def test_debug_lets_the_error_through_with_its_traceback(invoke, words):
    result = invoke(StubLLM(InvalidRequest("no")), *words)
    assert isinstance(result.exception, InvalidRequest)


def test_a_cut_answer_says_how_to_get_more(invoke):
    result = invoke(StubLLM("one two three"), "run", "Count", "--max-tokens", "3")
    assert "--max-tokens" in result.stderr


def test_an_answer_cut_by_the_models_length_says_so(invoke):
    stub = StubLLM("one two three")
    stub.stop_reason = "max_model_len"
    result = invoke(stub, "run", "Count", "--max-tokens", "3")
    assert "3 tokens: prompt and answer together may have 6; --max-model-len" in result.stderr


def test_ctrl_c_cancels_the_request_and_exits_130(invoke):
    stub = StubLLM("one two three", between=lambda: os.kill(os.getpid(), signal.SIGINT))
    result = invoke(stub, "run", "Count")
    assert result.exit_code == 130
    assert result.stdout == "one two\n"
    assert (stub.cancelled, stub.shut_down) == (1, 1)


def test_second_ctrl_c_ends_an_answer_that_does_not_come(invoke):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    stub = StubLLM("one two three", between=twice)
    assert invoke(stub, "run", "Count").exit_code == 130
    assert stub.shut_down == 1
