"""What programs spare: the same tasks as programs and as separate calls with a prefix cache, in turns.

    python scripts/program_tasks.py [--model default] [--rounds 3] [--items 10]
    tokenmill serve default & python scripts/program_tasks.py --url http://127.0.0.1:8000

Separate calls are batched as well as can be: all items of a stage go to one `generate`. They score choices by the
log-probabilities of whole prompts, which the prefix cache is no help for ("whole"), or of the prompts' ends ("ends",
`prompt_logprobs_start`). Over HTTP all items of a stage are asked for at a time, each
by a request to /v1/completions; where scores begin cannot be said there, so there is no "ends". Prefilled are prompt
tokens that were computed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tokenmill import LLM, SamplingParams
from tokenmill.program import Program, ProgramState, RemoteLLM, gen, program, select

SHOTS = "".join(
    f"Question: Which of these is {what}?\nAnswer: {answer}\n\n"
    for what, answer in [
        ("an animal", "horse"), ("a colour", "green"), ("a fruit", "apple"), ("a tool", "hammer"), ("a city", "Rome"),
        ("a river", "Nile"), ("a metal", "iron"), ("a planet", "Mars"), ("a drink", "tea"), ("a season", "winter"),
    ] * 3
)  # fmt: skip
OPTIONS = ["a small village", "the deep sea", "a busy city", "an old forest", "a high mountain"]
TOOLS = ["search the web", "read a file", "ask the user", "write the answer"]
KINDS = ["a letter", "a report", "a story", "an invoice"]
MOODS = ["friendly", "neutral", "angry", "sad"]
YES = ["yes", "no"]


def document(number: int) -> str:
    """A text of some hundred tokens, another one for each number."""
    names = ["Ada", "Bo", "Cem", "Dora", "Eli", "Fay", "Gus", "Hana"]
    lines = [
        f"{names[(number + k) % 8]} wrote to {names[(number * 3 + k + 1) % 8]} on day {number * 7 + k} about order "
        f"{number * 100 + k}, which had come with {k + 2} boxes instead of {k + 5}."
        for k in range(8)
    ]
    return f"Document {number}.\n" + "\n".join(lines) + "\n"


@dataclass
class Calls:
    """Separate calls, and what they cost."""

    llm: LLM
    ends: bool
    prefilled: int = 0
    said: list[str] = field(default_factory=list)

    def generate(self, prompts: list[list[int]], max_tokens: int, seeds: list[int] | None = None) -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=0 if seeds is None else 1, seed=seeds and seeds[k], max_tokens=max_tokens, ignore_eos=True
            )
            for k in range(len(prompts))
        ]
        found = self._ask(prompts, params)
        self.said += [one.outputs[0].text for one in found]
        return [one.outputs[0].token_ids for one in found]

    def select(self, prompts: list[list[int]], choices: list[str]) -> list[str]:
        options = [self.encode(choice) for choice in choices]
        asked, params = [], []
        for prompt in prompts:
            for option in options:
                asked.append([*prompt, *option])
                start = len(prompt) if self.ends else 0
                params.append(
                    SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start)
                )
        found = self._ask(asked, params)
        chosen = []
        for number, prompt in enumerate(prompts):
            scores = []
            for at, option in enumerate(options):
                tables = found[number * len(options) + at].prompt_logprobs or []
                scores.append(
                    sum(next(iter(one.values())).logprob for one in tables[len(prompt) :] if one) / len(option)
                )
            chosen.append(choices[max(range(len(choices)), key=scores.__getitem__)])
        self.said += chosen
        return chosen

    def encode(self, text: str, first: bool = False) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        assert tokenizer is not None
        return tokenizer.encode(text, add_special_tokens=first)

    def _ask(self, prompts: list[list[int]], params: list[SamplingParams]):  # type: ignore[no-untyped-def]
        found = self.llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        for one in found:
            assert one.metrics is not None
            self.prefilled += len(one.prompt_token_ids) - one.metrics.cached_tokens
        return found


@dataclass
class HttpCalls(Calls):
    """The same as requests of their own."""

    server: RemoteLLM = field(default_factory=RemoteLLM)

    def encode(self, text: str, first: bool = False) -> list[int]:
        asked = {"prompt": text, "add_special_tokens": first}
        return list(self.server.connection.ask("POST", "/tokenize", asked)["tokens"])

    def _ask(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:  # type: ignore[override]
        with ThreadPoolExecutor(64) as pool:
            found = list(pool.map(self._one, prompts, params))
        for one in found:
            self.prefilled += len(one.prompt_token_ids) - one.cached
        return found

    def _one(self, prompt: list[int], params: SamplingParams) -> Any:
        scored = params.prompt_logprobs is not None
        body = {
            "prompt": prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "ignore_eos": params.ignore_eos,
            "return_token_ids": True,
            **({"echo": True, "logprobs": 0} if scored else {}),
        }
        told = self.server.connection.ask("POST", "/v1/completions", body)
        [choice], details = told["choices"], told["usage"].get("prompt_tokens_details") or {}
        scores = choice["logprobs"]["token_logprobs"][: len(prompt)] if scored else []
        return SimpleNamespace(
            prompt_token_ids=prompt,
            cached=details.get("cached_tokens") or 0,
            outputs=[SimpleNamespace(text=choice["text"], token_ids=choice["token_ids"])],
            prompt_logprobs=[None if one is None else {0: SimpleNamespace(logprob=one)} for one in scores],
        )


@program
def multiple_choice(s: ProgramState, number: int) -> None:
    s += SHOTS + f"Question: Where does person {number} like to live?\nAnswer: " + select("answer", OPTIONS)


def multiple_choice_calls(calls: Calls, items: int) -> None:
    calls.select(
        [calls.encode(SHOTS + f"Question: Where does person {n} like to live?\nAnswer: ", True) for n in range(items)],
        OPTIONS,
    )


@program
def tree_of_thought(s: ProgramState, number: int) -> None:
    s += document(number) + "How many boxes are missing? Think step by step.\n"
    best = s
    for depth in range(2):
        ways = best.fork(3)
        for way, one in enumerate(ways):
            one += f"Thought {depth}: " + gen("thought", max_tokens=16, temperature=1.0, seed=way, ignore_eos=True)
            one += "\nIs this right? "
            one += select("right", YES)
            one += "\n"
        ways.join()
        best = next((one for one in ways if one["right"] == "yes"), ways[0])


def tree_of_thought_calls(calls: Calls, items: int) -> None:
    best = [calls.encode(document(n) + "How many boxes are missing? Think step by step.\n", True) for n in range(items)]
    for depth in range(2):
        opening = calls.encode(f"Thought {depth}: ")
        ways = [[*prompt, *opening] for prompt in best for _ in range(3)]
        thoughts = calls.generate(ways, 16, [way for _ in best for way in range(3)])
        asked = [[*way, *said, *calls.encode("\nIs this right? ")] for way, said in zip(ways, thoughts)]
        right = calls.select(asked, YES)
        done = [[*prompt, *calls.encode(verdict + "\n")] for prompt, verdict in zip(asked, right)]
        best = [
            next((done[k] for k in range(3 * n, 3 * n + 3) if right[k] == "yes"), done[3 * n]) for n in range(items)
        ]


@program
def extraction(s: ProgramState, number: int) -> None:
    s += document(number) + '{"kind": "' + select("kind", KINDS) + '", "mood": "' + select("mood", MOODS)
    s += '", "urgent": "' + select("urgent", YES) + '", "answered": "' + select("answered", YES)
    s += '", "summary": "' + gen("summary", max_tokens=8, temperature=0, ignore_eos=True)


def extraction_calls(calls: Calls, items: int) -> None:
    prompts = [calls.encode(document(n) + '{"kind": "', True) for n in range(items)]
    for choices, follows in ((KINDS, '", "mood": "'), (MOODS, '", "urgent": "'), (YES, '", "answered": "'),
                             (YES, '", "summary": "')):  # fmt: skip
        chosen = calls.select(prompts, choices)
        prompts = [[*one, *calls.encode(said), *calls.encode(follows)] for one, said in zip(prompts, chosen)]
    calls.generate(prompts, 8)


@program
def agent(s: ProgramState, number: int) -> None:
    s += document(number) + "You may use tools. Say which, and why.\n"
    for turn in range(5):
        s += (
            f"Turn {turn}: "
            + select("tool", TOOLS)
            + " because "
            + gen("why", max_tokens=6, temperature=0, ignore_eos=True)
        )
        s += "\n"


def agent_calls(calls: Calls, items: int) -> None:
    prompts = [
        calls.encode(document(n) + "You may use tools. Say which, and why.\nTurn 0: ", True) for n in range(items)
    ]
    for turn in range(5):
        chosen = calls.select(prompts, TOOLS)
        prompts = [[*one, *calls.encode(said), *calls.encode(" because ")] for one, said in zip(prompts, chosen)]
        whys = calls.generate(prompts, 6)
        prompts = [[*one, *why, *calls.encode(f"\nTurn {turn + 1}: ")] for one, why in zip(prompts, whys)]


TASKS: dict[str, tuple[Program, Callable[[Calls, int], None]]] = {
    "multiple choice, 5 options": (multiple_choice, multiple_choice_calls),
    "tree of thought": (tree_of_thought, tree_of_thought_calls),
    "JSON extraction": (extraction, extraction_calls),
    "agent, 5 turns": (agent, agent_calls),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--url", help="of a server of tokenmill, instead of a model in this process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--items", type=int, default=10)
    args = parser.parse_args()
    if args.url is not None:
        server = RemoteLLM(args.url)

        def forget() -> None:
            server.connection.ask("POST", "/reset_prefix_cache", {})

        compare(server, forget, {"whole": lambda: HttpCalls(None, False, server=server)}, args)  # type: ignore[arg-type]
        return
    with LLM(args.model) as llm:
        ways = {"whole": lambda: Calls(llm, ends=False), "ends": lambda: Calls(llm, ends=True)}
        compare(llm, llm.reset_prefix_cache, ways, args)


def compare(
    llm: LLM | RemoteLLM,
    forget: Callable[[], None],
    separate: dict[str, Callable[[], Calls]],
    args: argparse.Namespace,
) -> None:
    ways = [*separate, "program"]
    print(f"| task | prefilled: {' | '.join(ways)} | | s: {' | '.join(ways)} | |")
    print("|---" * (2 * len(ways) + 3) + "|")
    for name, (run, separately) in TASKS.items():
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        tokens: dict[str, int] = {}
        for _ in range(args.rounds):
            for way, times in seconds.items():
                forget()
                began = time.perf_counter()
                if way == "program":
                    states = run.run_batch(llm, [{"number": number} for number in range(args.items)])
                    tokens[way] = states[0].usage.computed_tokens
                else:
                    calls = separate[way]()
                    separately(calls, args.items)
                    tokens[way] = calls.prefilled
                times.append(time.perf_counter() - began)
        took = {way: statistics.median(times) for way, times in seconds.items()}
        cells = [
            *(str(tokens[way]) for way in ways),
            ", ".join(f"{tokens[way] / tokens['program']:.1f}x" for way in separate) + " fewer",
            *(f"{took[way]:.2f}" for way in ways),
            ", ".join(f"{took[way] / took['program']:.2f}x" for way in separate),
        ]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
