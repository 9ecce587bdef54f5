"""DraftHead: a small drafter for speculative decoding that reads its target's KV cache, and the file of one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tokenmill.errors import ModelError
from tokenmill.model.spec import DecoderSpec
from tokenmill.ops.matmul_torch import quantize_rows

FORMAT, VERSION = "tokenmill-draft-head", 2
READABLE = ("1", "2")  # files of version 1 hold heads without attention
EPS = 1e-5  # of its norms

NORMS = ("enter_norm", "mix_norm", "norm2", "out_norm")
WEIGHTS = ("enter", "gate_up", "down", "gate_up2", "down2", "head")  # `enter.weight` in the file, with `enter.scale`
ATTENTION_NORM, ATTENTION_WEIGHTS = "attention_norm", ("q", "o")  # of heads that attend

Attend = Callable[[torch.Tensor], torch.Tensor]  # queries [n, heads * dim], not yet rotated -> what they found, as wide

# Heads that come with the package: by their target's fingerprint, the file and its sha256
SHIPPED = {
    "b1c3b88d13d30d192c39ca32dfc07aa9f333844fccae2e5b34d3f3572dd6c5f4": (
        "smollm2-135m-instruct.safetensors",
        "82a1936e60474d19dc46db7fd347f2dc3c2f316b03216f949fb4d6dcf50f4cd8",
    ),
}


@dataclass(frozen=True)
class Target:
    """The model that a head drafts for."""

    architecture: str
    hidden: int
    vocab: int
    layers: int
    fingerprint: str  # of its final norm, which is the same in all quantized forms of a model

    @classmethod
    def of(cls, spec: DecoderSpec, final_norm: torch.Tensor) -> Target:
        return cls(spec.architecture, spec.hidden, spec.vocab_size, spec.num_layers, fingerprint(final_norm))


def fingerprint(final_norm: torch.Tensor) -> str:  # [hidden]
    """Of a model, whatever its weights were rounded to and its norms are computed in."""
    return hashlib.sha256(final_norm.detach().cpu().bfloat16().view(torch.int16).numpy().tobytes()).hexdigest()


def shipped_path(spec: DecoderSpec, final_norm: torch.Tensor) -> Path | None:  # [hidden]
    """Where the head lies that comes with the package for this model, if there is one. The file is not read here."""
    name, _ = SHIPPED.get(fingerprint(final_norm), ("", ""))
    path = Path(__file__).parent / "heads" / name
    if not name or not path.is_file():
        return None
    try:
        target, _, _ = _checked_metadata(path, _read_metadata(path))
        _check_target(path, target, spec, final_norm)
    except ModelError:  # a relative of its model: with a token more, or fewer layers
        return None
    return path


def shipped_head(spec: DecoderSpec, final_norm: torch.Tensor) -> DraftHead | None:  # [hidden]
    """That head, if its file is as it was made."""
    path = shipped_path(spec, final_norm)
    _, digest = SHIPPED.get(fingerprint(final_norm), ("", ""))
    if path is None or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        return None
    return DraftHead.load(path, spec, final_norm)


def can_attend(spec: DecoderSpec, layer: int) -> bool:
    """Whether a head may read what this layer caches: all of the text, in keys and values of their own."""
    plain = spec.mla is None and spec.attn_softcap is None
    return plain and 0 <= layer < spec.num_layers and spec.windows[layer] is None


def default_kv_layer(spec: DecoderSpec) -> int | None:
    """The layer nearest to two thirds of the depth that a head can attend to; None: there is none."""
    wanted = 2 * spec.num_layers // 3
    return min(
        (one for one in range(spec.num_layers) if can_attend(spec, one)),
        key=lambda one: abs(one - wanted),
        default=None,
    )


@dataclass(frozen=True)
class DraftHead:
    """Drafts tokens from the last hidden state of its target and what one of its layers has cached; it keeps nothing.

    With h, the normed hidden state that the token x1 was sampled from, and E, the target's embeddings (scaled as it
    scales them):

        state = step(enter(h), E[x1], attend);  x2 = ids[choose(logits(state))];  state = step(state, E[x2]);  ...

    The first step attends to the keys and values that the target's layer `kv_layer` has cached, up to those of the
    token that h stands behind; its queries are rotated to the position of x1. A head without `kv_layer` never attends.
    """

    enter_norm: torch.Tensor  # [hidden]
    enter_weight: torch.Tensor  # [state, hidden]
    mix_norm: torch.Tensor  # [state + hidden]
    gate_up_weight: torch.Tensor  # [2 * inner, state + hidden]: gate, up
    down_weight: torch.Tensor  # [state, inner]
    norm2: torch.Tensor  # [state]
    gate_up2_weight: torch.Tensor  # [2 * inner, state]
    down2_weight: torch.Tensor  # [state, inner]
    out_norm: torch.Tensor  # [state]
    head_weight: torch.Tensor  # [draft vocabulary, state]
    ids: torch.Tensor  # [draft vocabulary] int32: the target's token ids
    target: Target
    recipe: Mapping[str, Any] = field(default_factory=dict)  # how it was trained, and what was measured
    kv_layer: int | None = None  # of the target, whose cache is read
    attention_norm: torch.Tensor | None = None  # [state]
    q_weight: torch.Tensor | None = None  # [heads * head_dim of the target, state]
    o_weight: torch.Tensor | None = None  # [state, heads * head_dim]

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:  # [..., hidden] -> [..., state]
        return F.linear(rms_norm(hidden, self.enter_norm), self.enter_weight)

    def step(
        self,
        state: torch.Tensor,  # [..., state]
        embedding: torch.Tensor,  # [..., hidden]: of the token that comes next
        attend: Attend | None = None,  # in the first step of a chain, where the head has a `kv_layer`
    ) -> torch.Tensor:  # [..., state]
        mixed = rms_norm(torch.cat([state, embedding.to(state.dtype)], dim=-1), self.mix_norm)
        state = state + F.linear(_swiglu(F.linear(mixed, self.gate_up_weight)), self.down_weight)
        if attend is not None:
            assert self.attention_norm is not None and self.q_weight is not None and self.o_weight is not None
            found = attend(F.linear(rms_norm(state, self.attention_norm), self.q_weight))
            state = state + F.linear(found, self.o_weight)
        return state + F.linear(_swiglu(F.linear(rms_norm(state, self.norm2), self.gate_up2_weight)), self.down2_weight)

    def logits(self, state: torch.Tensor) -> torch.Tensor:  # [..., state] -> [..., draft vocabulary]
        return F.linear(rms_norm(state, self.out_norm), self.head_weight)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that is trained, by field."""
        norms, weights = self._names()
        return {name: getattr(self, name) for name in (*norms, *(f"{one}_weight" for one in weights))}

    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of the norms and the matrices that there are."""
        return _names(self.kv_layer is not None)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> DraftHead:
        """The same head with other tensors, `ids` excepted: on another device, in another dtype, rounded."""
        changed: dict[str, Any] = {name: change(one) for name, one in self.tensors().items()}
        return replace(self, **changed)

    def rounded(self) -> DraftHead:
        """As it comes back from its file: matrices of 8-bit codes with a scale for each row."""
        return self.map(lambda one: one if one.dim() == 1 else quantize_rows(one, torch.int8).widen())

    def save(self, path: str | Path) -> None:
        norms, weights = self._names()
        tensors = {name: getattr(self, name).detach().float().cpu().contiguous() for name in norms}
        for name in weights:
            rows = quantize_rows(getattr(self, f"{name}_weight").detach().float().cpu(), torch.int8)
            tensors[f"{name}.weight"], tensors[f"{name}.scale"] = rows.values.contiguous(), rows.scale.contiguous()
        tensors["ids"] = self.ids.cpu().int().contiguous()
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "target": json.dumps(vars(self.target), sort_keys=True),
            "recipe": json.dumps(dict(self.recipe), sort_keys=True),
            "kv_layer": json.dumps(self.kv_layer),
        }
        part = Path(f"{path}.part")  # others see the file whole, or not at all
        save_file(tensors, part, metadata)
        part.replace(path)

    @classmethod
    def load(
        cls,
        path: str | Path,
        spec: DecoderSpec,
        final_norm: torch.Tensor | None = None,  # the target's: with it, a head of another model is noticed
    ) -> DraftHead:
        """A head of float32 tensors on the CPU; refused in one sentence where it is none for this model."""
        tensors, metadata = _read(Path(path))
        target, recipe, kv_layer = _checked_metadata(Path(path), metadata)
        _check_target(Path(path), target, spec, final_norm)
        if kv_layer is not None and not can_attend(spec, kv_layer):
            raise ModelError(
                f"{path} attends to layer {kv_layer}, which in this model has no keys and values of the whole text; "
                "train a head for this model with `tokenmill train-draft`"
            )
        ids = tensors.pop("ids", None)
        norms, weights = _names(kv_layer is not None)
        found = {name: tensors[name].float() for name in norms if name in tensors}
        for name in weights:
            weight, scale = tensors.get(f"{name}.weight"), tensors.get(f"{name}.scale")
            if weight is not None and scale is not None and weight.dim() == 2 and scale.shape == weight.shape[:1]:
                found[f"{name}_weight"] = weight.float() * scale.float()[:, None]
        _check_tensors(Path(path), found, ids, spec, kv_layer is not None)
        assert ids is not None
        return cls(**found, ids=ids.int(), target=target, recipe=recipe, kv_layer=kv_layer)


def _names(attends: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return ((*NORMS, ATTENTION_NORM), (*WEIGHTS, *ATTENTION_WEIGHTS)) if attends else (NORMS, WEIGHTS)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # [..., width], [width]
    return F.rms_norm(x.float(), weight.shape, weight.float(), EPS).to(x.dtype)


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:  # [..., 2 * inner] -> [..., inner]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with _opened(path) as file:
        # Copies: tensors of the file are mapped, and who writes over it would change a head that drafts.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return tensors, file.metadata() or {}


def _read_metadata(path: Path) -> dict[str, str]:
    with _opened(path) as file:
        return file.metadata() or {}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise ModelError(f"there is no draft head at {path}; name a file that `tokenmill train-draft` has written")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{path} of {path.stat().st_size} bytes is truncated, or no safetensors file ({error}); "
            "copy it again, or train the head anew"
        ) from None


def _checked_metadata(path: Path, metadata: dict[str, str]) -> tuple[Target, dict[str, Any], int | None]:
    found = metadata.get("format")
    if found != FORMAT:
        raise ModelError(
            f"{path} is no draft head: its format is {found!r:.60}, not {FORMAT!r}; "
            "name a file that `tokenmill train-draft` has written"
        )
    if metadata.get("version") not in READABLE:
        raise ModelError(
            f"{path} is a draft head of version {metadata.get('version')!r:.20}, and this is version {VERSION}; "
            "train the head anew with `tokenmill train-draft`"
        )
    try:
        target = Target(**json.loads(metadata["target"]))
        recipe = json.loads(metadata["recipe"])
        kv_layer = json.loads(metadata.get("kv_layer", "null"))
        numbers = (target.hidden, target.vocab, target.layers)
        if not isinstance(recipe, dict) or not all(type(one) is int for one in numbers):
            raise ValueError("sizes are no numbers")
        if kv_layer is not None and type(kv_layer) is not int:
            raise ValueError("kv_layer is no number")
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} does not say which model it drafts for ({error}); train the head anew") from None
    return target, recipe, kv_layer


def _check_target(path: Path, target: Target, spec: DecoderSpec, final_norm: torch.Tensor | None) -> None:
    if target.hidden != spec.hidden:
        raise ModelError(
            f"{path} drafts for a model of hidden width {target.hidden}, and this one's is {spec.hidden}; "
            "train a head for this model with `tokenmill train-draft`"
        )
    if target.vocab != spec.vocab_size:
        raise ModelError(
            f"{path} drafts for a vocabulary of {target.vocab} tokens, and this model has {spec.vocab_size}; "
            "train a head for this model with `tokenmill train-draft`"
        )
    same = (target.architecture, target.layers) == (spec.architecture, spec.num_layers)
    if not same or (final_norm is not None and fingerprint(final_norm) != target.fingerprint):
        raise ModelError(
            f"{path} was trained for another model ({target.architecture}, {target.layers} layers, fingerprint "
            f"{target.fingerprint[:12]}); train a head for this model with `tokenmill train-draft`"
        )


def _check_tensors(
    path: Path, found: dict[str, torch.Tensor], ids: torch.Tensor | None, spec: DecoderSpec, attends: bool
) -> None:
    norms, weights = _names(attends)
    missing = [name for name in norms if name not in found]
    missing += [f"{name}.weight" for name in weights if f"{name}_weight" not in found]
    if missing or ids is None:
        raise ModelError(f"{path} lacks {', '.join([*missing, *(['ids'] if ids is None else [])])}; train it anew")
    if ids.dim() != 1 or ids.is_floating_point() or not len(ids) or ids.min() < 0 or ids.max() >= spec.vocab_size:
        raise ModelError(
            f"{path} drafts tokens outside the vocabulary of {spec.vocab_size}; train a head for this model with "
            "`tokenmill train-draft`"
        )
    state, inner, hidden, vocab = found["out_norm"].numel(), found["down_weight"].shape[1], spec.hidden, len(ids)
    expected = {
        "enter_norm": (hidden,),
        "enter_weight": (state, hidden),
        "mix_norm": (state + hidden,),
        "gate_up_weight": (2 * inner, state + hidden),
        "down_weight": (state, inner),
        "norm2": (state,),
        "gate_up2_weight": (2 * inner, state),
        "down2_weight": (state, inner),
        "out_norm": (state,),
        "head_weight": (vocab, state),
    }
    if attends:
        width = spec.heads * spec.head_dim
        expected |= {"attention_norm": (state,), "q_weight": (width, state), "o_weight": (state, width)}
    for name, shape in expected.items():
        if tuple(found[name].shape) != shape:
            raise ModelError(f"{path} has {name} of shape {tuple(found[name].shape)}, not {shape}; train it anew")
        if not found[name].isfinite().all():
            raise ModelError(f"{path} has weights in {name} that are NaN or infinite; train it anew")
