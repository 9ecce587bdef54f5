"""What two engines say to each other about blocks: frames of bounded length that only who knows the secret can make."""

from __future__ import annotations

import socket

from tokenmill import peers
from tokenmill.peers import HELLO_SECONDS as HELLO_SECONDS
from tokenmill.peers import OK as OK
from tokenmill.peers import Connection as Connection
from tokenmill.peers import PeerError as PeerError
from tokenmill.peers import address_of as address_of
from tokenmill.peers import fill as fill

PROTOCOL = b"tokenKV1"
LARGEST_LIST = 1 << 20  # bytes of a frame that carries no block
IDENTITY = 16

PUT, GET, LOOKUP, LEASE, DISCARD, FORGET, ANSWER, MEET, OFFER = range(1, 10)
NO, FULL = 1, 2  # statuses of answers, beside OK

_OTHERS = "the peer computes with another model, another form of KV, or another version"


def introduce(peer: socket.socket, secret: bytes, namespace: bytes, largest: int, server: bool) -> Connection:
    """With who has the same model and form of KV, which the namespace stands for."""
    return peers.introduce(peer, secret, namespace, largest, server, protocol=PROTOCOL, others=_OTHERS)


def split(identities: bytes) -> list[bytes]:
    return [identities[at : at + IDENTITY] for at in range(0, len(identities) // IDENTITY * IDENTITY, IDENTITY)]
