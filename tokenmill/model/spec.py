"""DecoderSpec: an architecture as plain data, and the shapes and sizes that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tokenmill.ops.kv_forms import KVForm

NormPlacement = Literal["pre", "sandwich", "post"]
QKNorm = Literal["none", "head", "full"]
ParamKind = Literal["embedding", "linear", "bias", "norm", "router", "stacked", "experts"]


@dataclass(frozen=True)
class RopeSpec:
    """One rotary embedding. Layers with equal specs share one table."""

    dim: int  # dims rotated, at the front of a head
    theta: float
    kind: str = "default"  # default, linear, dynamic, llama3, yarn, longrope
    factor: float = 1.0
    original_positions: int = 0  # length the model was trained at, before it was stretched
    attention_factor: float = 1.0  # multiplies cosines and sines
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope, served within the original length
    long_factors: tuple[float, ...] = ()  # longrope, served beyond it


@dataclass(frozen=True)
class MoESpec:
    """Routed experts, and which layers have them instead of a dense MLP."""

    layers: tuple[bool, ...]  # one per layer: whether its MLP is a mixture
    experts: int
    top_k: int
    intermediate: int  # of one routed expert
    shared_intermediate: int = 0  # of the experts every token uses, together; 0: none
    normalize: bool = False  # chosen weights sum to one
    scale: float = 1.0  # multiplies the chosen weights
    groups: int = 1  # experts come in this many groups ...
    top_groups: int = 1  # ... and only the best of them are searched


@dataclass(frozen=True)
class MLASpec:
    """Latent attention in absorbed form: one shared key [rope | latent], whose latent part is also the value."""

    q_rank: int | None  # None: queries come straight from the hidden state
    kv_rank: int  # the latent
    nope_dim: int  # per head, without rotation
    rope_dim: int  # per head for queries; shared by all heads for keys
    v_dim: int  # per head
    norm_eps: float = 1e-6  # of the two inner norms; fixed, whatever the outer norms use


@dataclass(frozen=True)
class KVShape:
    """What one layer caches per token. v_dim is 0 where values are a view of the keys."""

    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True)
class ParamSpec:
    shape: tuple[int, ...]
    kind: ParamKind

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class StagePart:
    """What makes a spec that of one stage of a pipeline (model/stage.py): its layers are some of the model's."""

    model: DecoderSpec
    layers: range  # of the model's

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.model.num_layers

    def name_in_model(self, name: str) -> str:
        """What the model calls a parameter of the stage, whose layers are numbered anew."""
        if not name.startswith("layers."):
            return name
        _, index, rest = name.split(".", 2)
        return f"layers.{self.layers.start + int(index)}.{rest}"


@dataclass(frozen=True)
class RankPart:
    """What makes a spec that of one rank's part of a model (model/shard.py): its heads and inner columns are fewer."""

    whole: DecoderSpec
    rank: int
    ranks: int  # that share heads, columns and the vocabulary
    vocab: range  # the tokens whose embeddings and logits the rank has
    experts: tuple[int, ...] | None = None  # those it has, where whole ones are divided; None: some of each
    expert_rank: int = 0  # among those that divide whole experts
    expert_ranks: int = 1
    hot_experts: tuple[int, ...] = ()  # those that all of these ranks have


@dataclass(frozen=True)
class DecoderSpec:
    """Everything the one decoder needs to know about an architecture."""

    architecture: str
    vocab_size: int
    hidden: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of the dense MLP
    norm_eps: float
    max_positions: int
    ropes: tuple[RopeSpec, ...]  # one per layer
    windows: tuple[int | None, ...]  # one per layer; None: every earlier position is visible
    attn_scale: float
    activation: str = "silu"  # silu or gelu_tanh
    norms: NormPlacement = "pre"
    norm_offset: bool = False  # the checkpoint holds w where the norm multiplies by 1 + w
    qk_norm: QKNorm = "none"  # over each head, or over all heads together
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    embed_scale: float = 1.0
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    tie_embeddings: bool = False
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str | None = None  # what the checkpoint says it was saved in, e.g. "bfloat16"
    stage: StagePart | None = None  # None: all layers
    part: RankPart | None = None  # None: the whole model

    def uneven(self, ranks: int, whole_experts: bool) -> str:
        """What of a whole model so many ranks cannot divide evenly; empty where they can. whole_experts: these are not
        cut."""
        sizes = {"attention heads": self.heads}
        if self.moe is None or not all(self.moe.layers):
            sizes["inner columns of its MLP"] = self.intermediate
        if self.moe is not None and not whole_experts:
            sizes["inner columns of its experts"] = self.moe.intermediate
        if self.moe is not None and self.moe.shared_intermediate:
            sizes["inner columns of its shared experts"] = self.moe.shared_intermediate
        for what, count in sizes.items():
            if count % ranks:
                return f"its {count} {what} are no multiple of {ranks}"
        if self.mla is None and self.kv_heads % ranks and ranks % self.kv_heads:
            return f"its {self.kv_heads} KV heads can be neither divided by {ranks} nor repeated evenly"
        return f"its vocabulary has {self.vocab_size} tokens" if self.vocab_size < ranks else ""

    @property
    def embeds(self) -> bool:
        """Whether tokens enter here, and not what another stage made of them."""
        return self.stage is None or self.stage.is_first

    @property
    def has_head(self) -> bool:
        """Whether logits are computed here."""
        return self.stage is None or self.stage.is_last

    @property
    def whole(self) -> DecoderSpec:
        """The model, of which this may be one rank's part."""
        return self if self.part is None else self.part.whole

    @property
    def vocab_rows(self) -> int:
        """Tokens whose embeddings and logits are here."""
        return self.vocab_size if self.part is None else len(self.part.vocab)

    @property
    def expert_count(self) -> int:
        """Routed experts whose weights are here."""
        assert self.moe is not None
        held = None if self.part is None else self.part.experts
        return self.moe.experts if held is None else len(held)

    @property
    def q_size(self) -> int:
        """Rows of the fused projection that make queries (or their latent)."""
        if self.mla is None:
            return self.heads * self.head_dim
        return self.mla.q_rank or self.heads * (self.mla.nope_dim + self.mla.rope_dim)

    @property
    def kv_size(self) -> int:
        """Rows of the fused projection that make keys; and, without MLA, as many again that make values."""
        if self.mla is None:
            return self.kv_heads * self.head_dim
        return self.mla.rope_dim + self.mla.kv_rank

    @property
    def qkv_size(self) -> int:
        return self.q_size + self.kv_size * (1 if self.mla else 2)

    @property
    def attention_size(self) -> int:
        """Width of what the output projection reads."""
        return self.heads * (self.mla.v_dim if self.mla else self.head_dim)

    @property
    def attention_head_dim(self) -> int:
        """Width of a key as the attention op sees it."""
        return self.mla.rope_dim + self.mla.kv_rank if self.mla else self.head_dim

    @cached_property
    def kv_shapes(self) -> list[KVShape]:
        if self.mla is not None:
            return [KVShape(1, self.attention_head_dim, 0)] * self.num_layers
        return [KVShape(self.kv_heads, self.head_dim, self.head_dim)] * self.num_layers

    def kv_bytes_per_token(self, itemsize: int, form: KVForm | None = None) -> int:
        """Of a cache of floats of this size, or of a quantized one, scales included."""
        return sum(
            shape.kv_heads * (form.head_bytes(dim) if form else dim * itemsize)
            for shape in self.kv_shapes
            for dim in (shape.k_dim, shape.v_dim)
            if dim
        )

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and self.moe.layers[layer]

    def parameters(self) -> dict[str, ParamSpec]:
        """Every weight the decoder uses, by canonical name. A bias is named after its linear layer."""
        found = {}
        if self.embeds or (self.has_head and self.tie_embeddings):
            found["embed"] = ParamSpec((self.vocab_rows, self.hidden), "embedding")
        for index in range(self.num_layers):
            for name, param in self.layer_parameters(index).items():
                found[f"layers.{index}.{name}"] = param
        if self.has_head:
            found["final_norm"] = ParamSpec((self.hidden,), "norm")
        if self.has_head and not self.tie_embeddings:
            found["lm_head"] = ParamSpec((self.vocab_rows, self.hidden), "linear")
        return found

    def layer_parameters(self, index: int) -> dict[str, ParamSpec]:
        norms = {name: ParamSpec((self.hidden,), "norm") for name in NORM_NAMES[self.norms]}
        return norms | self._attention_parameters() | self._mlp_parameters(index)

    def weight_bytes(self, itemsize: int) -> int:
        return sum(
            param.numel * (max(4, itemsize) if self.stored_wide(param.kind) else itemsize)
            for param in self.parameters().values()
        )

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with: all but the embedding and the experts it does not choose."""
        found = self.parameters()
        total = sum(param.numel for name, param in found.items() if name not in ("embed", "lm_head"))
        if self.moe is not None:
            idle = 1 - self.moe.top_k / self.moe.experts
            total -= int(idle * sum(param.numel for name, param in found.items() if ".experts_" in name))
        return total

    def stored_wide(self, kind: ParamKind) -> bool:
        """Small weights kept in float32: routers, since rounding would change who is chosen, and 1 + w norms."""
        return kind == "router" or (kind == "norm" and self.norm_offset)

    @property
    def activation_elements(self) -> int:
        """Upper bound of elements alive at once per token inside a layer, for the memory plan.

        Ops in plain torch hold one more copy of what they work on than fused ones do; they set the bound.
        """
        stream = 4 * self.hidden
        queries = self.heads * self.attention_head_dim
        attention = self.qkv_size + 2 * queries + self.attention_size + self.kv_size
        mlp = 4 * self.intermediate if not self.moe or not all(self.moe.layers) else 0
        if self.moe is not None:
            chosen = self.moe.top_k * (4 * self.moe.intermediate + 3 * self.hidden)
            mlp = max(mlp, chosen + 4 * self.moe.shared_intermediate)
        return stream + max(attention, mlp)

    def _attention_parameters(self) -> dict[str, ParamSpec]:
        found = {"qkv": ParamSpec((self.qkv_size, self.hidden), "linear")}
        if self.qkv_bias:
            found["qkv.bias"] = ParamSpec((self.qkv_size,), "bias")
        if self.mla is not None:
            found |= self._latent_parameters(self.mla)
        elif self.qk_norm == "head":
            found["q_norm"] = found["k_norm"] = ParamSpec((self.head_dim,), "norm")
        elif self.qk_norm == "full":
            found["q_norm"] = ParamSpec((self.whole.q_size,), "norm")
            found["k_norm"] = ParamSpec((self.whole.kv_size,), "norm")
        found["o"] = ParamSpec((self.hidden, self.attention_size), "linear")
        if self.o_bias:
            found["o.bias"] = ParamSpec((self.hidden,), "bias")
        return found

    def _latent_parameters(self, mla: MLASpec) -> dict[str, ParamSpec]:
        found = {"kv_norm": ParamSpec((mla.kv_rank,), "norm")}
        if mla.q_rank is not None:
            found["q_norm"] = ParamSpec((mla.q_rank,), "norm")
            found["q_up"] = ParamSpec((self.heads * (mla.nope_dim + mla.rope_dim), mla.q_rank), "linear")
        found["k_up"] = ParamSpec((self.heads, mla.nope_dim, mla.kv_rank), "stacked")
        found["v_up"] = ParamSpec((self.heads, mla.v_dim, mla.kv_rank), "stacked")
        return found

    def _mlp_parameters(self, index: int) -> dict[str, ParamSpec]:
        if self.moe is None or not self.moe.layers[index]:
            return self._dense_mlp("", self.intermediate, self.mlp_bias)
        moe = self.moe
        found = {
            "router": ParamSpec((moe.experts, self.hidden), "router"),
            "experts_gate_up": ParamSpec((self.expert_count, 2 * moe.intermediate, self.hidden), "experts"),
            "experts_down": ParamSpec((self.expert_count, self.hidden, moe.intermediate), "experts"),
        }
        if moe.shared_intermediate:
            found |= self._dense_mlp("shared_", moe.shared_intermediate, self.mlp_bias)
        return found

    def _dense_mlp(self, prefix: str, inner: int, bias: bool) -> dict[str, ParamSpec]:
        found = {
            f"{prefix}gate_up": ParamSpec((2 * inner, self.hidden), "linear"),
            f"{prefix}down": ParamSpec((self.hidden, inner), "linear"),
        }
        if bias:
            found[f"{prefix}gate_up.bias"] = ParamSpec((2 * inner,), "bias")
            found[f"{prefix}down.bias"] = ParamSpec((self.hidden,), "bias")
        return found


# Where a layer's norms stand around attention and MLP.
NORM_NAMES: dict[NormPlacement, tuple[str, ...]] = {
    "pre": ("before_attention", "before_mlp"),
    "sandwich": ("before_attention", "after_attention", "before_mlp", "after_mlp"),
    "post": ("after_attention", "after_mlp"),
}
