"""Links: the connections between ranks of one generation, made by the machine that a rank is on."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence

from tokenmill.engine.ranks.door import Address, Door, Link, call_for_link
from tokenmill.parallel.channel import Channel
from tokenmill.parallel.layout import Layout
from tokenmill.peers import PeerError

LinksOf = dict[int, dict[int, Link]]  # of each rank of a machine, by the rank at the other end


def machine_of(rank: int, machines: Sequence[range]) -> range:
    return next(one for one in machines if rank in one)


def linked(layout: Layout, machines: Sequence[range]) -> list[tuple[int, int]]:
    """Ranks that exchange tensors over a connection: those of a group that one machine's memory does not reach."""
    pairs: set[tuple[int, int]] = set()
    if len(machines) == 1:
        return []
    for rank in range(layout.ranks):
        near = layout.tensor_group(rank)
        if len({machine_of(one, machines) for one in near}) > 1:
            pairs |= {(rank, other) for other in near if rank < other}
    if layout.dp > 1:
        pairs |= {(low, high) for low in range(layout.ranks) for high in range(low + 1, layout.ranks)}
    elif layout.pp > 1:
        width = layout.ranks // layout.pp
        pairs |= {(rank, rank + width) for rank in range(layout.ranks - width)}
        pairs.add((0, layout.ranks - width))  # whose answers rank 0 hears
    return sorted(pairs)


def make_links(
    generation: int,
    pairs: Sequence[tuple[int, int]],
    machine: range,
    door: Door | None,
    doors: Mapping[int, Address],  # by rank, of other machines
    secret: bytes,
    ended: Callable[[], bool],
) -> LinksOf | None:
    """Whoever has the higher rank of two calls the other. None: `ended` said that the generation has. Raises
    PeerError."""
    found: LinksOf = {rank: {} for rank in machine}
    awaited = [(generation, high, low) for low, high in pairs if low in machine and high not in machine]
    for low, high in pairs:
        if low in machine and high in machine:
            key, ends = secrets.token_bytes(32), socket.socketpair()
            found[low][high], found[high][low] = (ends[0], key), (ends[1], key)
        elif high in machine:
            try:
                found[high][low] = call_for_link(doors[low], secret, (generation, high, low))
            except PeerError as error:
                close_links(found)
                where = "{}:{}".format(*doors[low])
                raise PeerError(f"rank {high} cannot reach rank {low} at {where}: {error}") from None
    if awaited:
        assert door is not None
        came = door.links(awaited, ended)
        if came is None:
            close_links(found)
            return None
        for (_, high, low), link in came.items():
            found[low][high] = link
    return found


def close_links(links: LinksOf) -> None:
    for ends in links.values():
        for link, _ in ends.values():
            link.close()


def channels_of(rank: int, ends: Mapping[int, Link]) -> dict[int, Channel]:
    return {other: Channel(link, key, rank < other) for other, (link, key) in ends.items()}
