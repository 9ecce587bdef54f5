"""Simulated clients: what they ask, when, and how they behave, all drawn from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from sim_answer import VOCAB

from tokenmill.engine.beams import Beams
from tokenmill.engine.request import API, BATCH, REALTIME, Request
from tokenmill.engine.step import POOLINGS
from tokenmill.params import SamplingParams

STOP_IDS = frozenset(range(7, 27))
POISON = frozenset({VOCAB + 1, 500})  # one that only prompts can hold, one that the model may say


@dataclass(frozen=True)
class Mix:
    """What a crowd of clients is like; shares are probabilities per client."""

    prefixes: int = 6  # shared beginnings to choose from
    prefix_tokens: int = 60
    tail_tokens: int = 40
    output_tokens: int = 24
    several: float = 0.06  # n > 1
    beams: float = 0.04
    stops: float = 0.8
    min_tokens: float = 0.2
    prompt_logprobs: float = 0.02
    pooling: float = 0.04  # wants a vector of its prompt
    deadline: float = 0.05
    poisoned: float = 0.0
    vanish: float = 0.0  # leaves after some tokens
    regret: float = 0.0  # cancels before anything ran
    tenants: int = 3
    burst: int = 300  # clients per burst; the house falls idle between bursts
    gap: float = 0.0015  # mean seconds between arrivals in a burst


CALM = Mix()
ROUGH = replace(CALM, poisoned=0.002, vanish=0.06, regret=0.02)


@dataclass
class Client:
    """One user call: its sequences (the first is the one the engine is given) and what the user does meanwhile."""

    arrival: float
    requests: list[Request]
    vanish_after: int | None = None  # cancels everything once it has heard this many tokens
    regrets: bool = False  # cancels right after asking
    heard: int = 0
    ended: set[str] = field(default_factory=set)


def clients(seed: int, count: int, mix: Mix = CALM) -> Iterator[Client]:
    rng = random.Random(seed)
    prefixes = [_tokens(rng, mix.prefix_tokens) for _ in range(mix.prefixes)]
    now = 0.0
    for number in range(count):
        now += -math.log(1 - rng.random()) * mix.gap
        if number % mix.burst == mix.burst - 1:
            now += 100.0
        yield _client(rng, number, now, mix, prefixes)


def _client(rng: random.Random, number: int, arrival: float, mix: Mix, prefixes: list[list[int]]) -> Client:
    prompt = rng.choice(prefixes)[: rng.randrange(mix.prefix_tokens)] + _tokens(rng, rng.randrange(1, mix.tail_tokens))
    if rng.random() < mix.poisoned:
        prompt[rng.randrange(len(prompt))] = VOCAB + 1
    params = _params(rng, mix)
    several = params.n if params.beam_width is None else 1
    requests = [_request(rng, f"{number}/{k}", prompt, params, arrival, mix) for k in range(several)]
    leader = requests[0]
    for follower in requests[1:]:
        follower.priority, follower.deadline = leader.priority, leader.deadline
        follower.salt, follower.stop_ids = leader.salt, leader.stop_ids
    leader.followers = requests[1:]
    if params.beam_width is not None:
        leader.beams = Beams(leader)
    elif several == 1 and random.Random(number).random() < mix.pooling:
        leader.pooling, leader.max_tokens = POOLINGS[number % 2], 0
    client = Client(arrival, requests)
    if rng.random() < mix.vanish:
        client.vanish_after = rng.randrange(1, mix.output_tokens)
    client.regrets = rng.random() < mix.regret
    return client


def _params(rng: random.Random, mix: Mix) -> SamplingParams:
    max_tokens = rng.randrange(1, mix.output_tokens + 1)
    kind = rng.random()
    if kind < mix.beams:
        width = rng.randrange(2, 5)
        return SamplingParams(temperature=0, max_tokens=max_tokens, beam_width=width, n=rng.randrange(1, width + 1))
    several = rng.randrange(2, 6) if kind < mix.beams + mix.several else 1
    min_tokens = rng.randrange(max_tokens) if rng.random() < mix.min_tokens else 0
    temperature = rng.choice([0.0, 1.0]) if several == 1 else 1.0
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=several,
        prompt_logprobs=0 if rng.random() < mix.prompt_logprobs else None,
    )


def _request(
    rng: random.Random, id: str, prompt: list[int], params: SamplingParams, arrival: float, mix: Mix
) -> Request:
    return Request(
        id,
        prompt,
        params,
        max_tokens=params.max_tokens or 1,
        seed=rng.getrandbits(63),
        stop_ids=STOP_IDS if rng.random() < mix.stops else frozenset(),
        priority=rng.choices([REALTIME, API, BATCH], [2, 5, 3])[0],
        arrival=arrival,
        deadline=arrival + rng.expovariate(1 / 0.3) if rng.random() < mix.deadline else None,
        salt=f"tenant-{rng.randrange(mix.tenants)}",
    )


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB // 2) for _ in range(count)]  # below the poison that the model may say
