"""The model "tokenmill" of lm-evaluation-harness: log-likelihoods and greedy answers of an LLM in this process.

    python -m tokenmill.evaluation.harness --model tokenmill --model_args pretrained=default --tasks hellaswag

Importing this module makes the model known; run as a program it is the harness's own command.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tokenmill.errors import InvalidRequest
from tokenmill.llm import LLM
from tokenmill.model.chat_template import render_for
from tokenmill.params import SamplingParams

_NO_MEANING = {"batch_size", "max_batch_size", "trust_remote_code"}  # an engine batches by itself
_PASSED_ON = ("top_p", "top_k", "min_p", "seed", "repetition_penalty")

Scored = tuple[Any, list[int], list[int]]  # a name for caches, the context, and what is scored behind it


@register_model("tokenmill")
class TokenmillLM(TemplateLM):  # type: ignore[misc]
    """`pretrained` is the model; other arguments are those of `LLM`, and `add_bos_token`, `max_gen_toks`."""

    def __init__(
        self,
        pretrained: str = "default",
        *,
        add_bos_token: bool | None = None,
        max_gen_toks: int = 256,
        max_length: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        given = {name: value for name, value in options.items() if name not in _NO_MEANING}
        if device is not None:
            given["device"] = "cuda" if device.startswith("cuda") else device
        if max_length is not None:
            given["max_model_len"] = max_length + 2
        self.llm = LLM(pretrained, **given)
        tokenizer = self.llm.get_tokenizer()
        if tokenizer is None:
            raise InvalidRequest("the harness needs a tokenizer, but skip_tokenizer_init is set; leave it out")
        self.tokenizer = tokenizer
        self.max_gen_toks = max_gen_toks
        self._name, self._add_bos = pretrained, add_bos_token
        # What the harness means: the most that is read before the last token that is scored. Here that one is part of
        # the prompt, and behind it there is a token that nobody wants.
        self.max_length: int = self.llm._processor.max_len - 2
        self.computed_tokens = self.prompt_tokens = 0

    @property
    def eot_token_id(self) -> int:
        return int(next(iter(self.tokenizer.eos_ids)))

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.token_to_id(self.tokenizer.bos_token) if self.tokenizer.bos_token else None
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        special = add_special_tokens
        if special is None:  # as the tokenizer has it, but not a second time
            bos = self.tokenizer.bos_token
            special = self._add_bos is not False and not (bos and string.startswith(bos))
        return self.tokenizer.encode(string, add_special_tokens=special)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render_for(self.tokenizer, chat_history, add_generation_prompt)

    def _loglikelihood_tokens(self, requests: Sequence[Scored], **_: Any) -> list[tuple[float, bool]]:
        """Contexts that many share come out of the prefix cache: nothing is asked about their tokens."""
        order = sorted(range(len(requests)), key=lambda one: requests[one][1])
        prompts, params = [], []
        for number in order:
            _, context, scored = requests[number]
            whole = [*context, *scored][-(self.max_length + 1) :]
            prompts.append({"prompt_token_ids": whole})
            start = max(len(whole) - len(scored), 1)
            params.append(
                SamplingParams(
                    temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=1, prompt_logprobs_start=start
                )
            )
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for number, output in zip(order, self.llm.generate(prompts, params), strict=True):
            if output.error is not None or output.prompt_logprobs is None:
                raise RuntimeError(f"request {number} of the harness ended without log-probabilities: {output.error}")
            ids, tables = output.prompt_token_ids, output.prompt_logprobs
            said = [table[ids[at]] for at, table in enumerate(tables) if table is not None]
            found[number] = sum(one.logprob for one in said), all(one.rank == 1 for one in said)
            self.prompt_tokens += len(ids)
            self.computed_tokens += len(ids) - output.num_cached_tokens
            if requests[number][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[number][0], found[number])
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[Scored] = []
        ends = []
        for request in requests:
            (text,) = request.args
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(one)) for one in rolling]
            ends.append(len(windows))
        scores = [score for score, _ in self._loglikelihood_tokens(windows)]
        return [sum(scores[begin:end]) for begin, end in zip([0, *ends], ends)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        eos = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        prompts, params, stops = [], [], []
        for context, options in (request.args for request in requests):
            wanted = normalize_gen_kwargs(options, default_max_gen_toks=self.max_gen_toks)
            until = handle_stop_sequences(wanted["until"], eos=eos)
            most = min(wanted["max_gen_toks"], self.max_length)
            ids = self.tok_encode(context)[-(self.max_length + 1 - most) :]
            prompts.append({"prompt_token_ids": ids})
            chosen = {name: wanted[name] for name in _PASSED_ON if wanted.get(name) is not None}
            chosen["temperature"] = float(wanted.get("temperature") or 0)
            params.append(SamplingParams(max_tokens=most, stop=[one for one in until if one], **chosen))
            stops.append(until)
        said = []
        for request, output, until in zip(requests, self.llm.generate(prompts, params), stops, strict=True):
            said.append(postprocess_generated_text(output.outputs[0].text, until, None))
            self.cache_hook.add_partial("generate_until", request.args, said[-1])
        return said


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    from tokenmill.evaluation.harness import main as run  # the module that the registry knows, and not this copy of it

    run()
