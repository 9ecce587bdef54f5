"""Layout: how a model is divided among ranks, as people write it (`parallel="tp2,pp2"`), and who is where in it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenmill.errors import ConfigError

MAX_RANKS = 64  # of an engine
KINDS = {"tp": "tensor", "pp": "pipeline", "dp": "data", "ep": "expert"}


@dataclass(frozen=True)
class Layout:
    """Ranks are numbered stage by stage, in a stage by data group, in a group by tensor shard.

    Whole experts are divided among all ranks of a stage (`ep` = `tp` * `dp`), or every expert is cut (`ep` = 1).
    """

    tp: int = 1  # heads, columns and the vocabulary are divided by this
    pp: int = 1  # layers
    dp: int = 1  # requests, and with them keys and values
    ep: int = 1  # experts

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(stage, data group, tensor shard) of a rank."""
        stage, rest = divmod(rank, self.dp * self.tp)
        return stage, *divmod(rest, self.tp)

    def tensor_group(self, rank: int) -> range:
        """The ranks that share the rank's heads and columns."""
        first = rank - rank % self.tp
        return range(first, first + self.tp)

    def stage_group(self, rank: int) -> range:
        """All ranks with the rank's layers: experts are divided among these."""
        size = self.dp * self.tp
        first = rank - rank % size
        return range(first, first + size)

    def __str__(self) -> str:
        return ",".join(f"{kind}{getattr(self, kind)}" for kind in KINDS if getattr(self, kind) > 1) or "tp1"


def parse_layout(text: object) -> Layout:
    """`tp2,pp2`; None and an empty text are one rank. Anything else, such as a number, is refused."""
    sizes: dict[str, int] = {}
    given = text if isinstance(text, str) else "" if text is None else repr(text)
    for part in filter(None, (part.strip() for part in given.split(","))):
        found = re.fullmatch(r"(tp|pp|dp|ep)([1-9]\d{0,3})", part)
        if found is None or found[1] in sizes:
            raise ConfigError(
                f"parallel is {text!r}; it is the kinds tp, pp, dp and ep with their sizes, each once, separated by "
                "commas: tp2,pp2"
            )
        sizes[found[1]] = int(found[2])
    if "ep" in sizes and not sizes.keys() & {"tp", "dp"}:
        sizes["tp"] = sizes["ep"]  # attention is divided among the same ranks
    layout = Layout(**sizes)
    if layout.ep not in (1, layout.tp * layout.dp):
        raise ConfigError(
            f"parallel is {text!r}; experts are divided among all {layout.tp * layout.dp} ranks of a stage: "
            f"write ep{layout.tp * layout.dp}, or leave ep out"
        )
    return layout


def why_not(layout: Layout, device: str) -> str | None:
    """Why this version cannot run so many ranks on a device (cpu or cuda); None: it can."""
    if layout.ranks == 1:
        return None
    return "ranks on GPUs are not there yet" if device != "cpu" else None
