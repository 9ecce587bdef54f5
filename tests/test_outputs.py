"""Tables of log-probabilities are made when somebody looks at them, and are a list to everybody who does."""

import copy
import pickle

import pytest

from tokenmill.outputs import Logprob, LogprobTables
from tokenmill.sampling.records import TokenLogprobs

RECORDS = [TokenLogprobs(7, -0.5, 1, [(7, -0.5), (8, -1.5)]), TokenLogprobs(3, -4.0, 9, [(1, -0.1)])]
TABLES = [
    {7: Logprob(-0.5, 1, "t7"), 8: Logprob(-1.5, 2, "t8")},
    {1: Logprob(-0.1, 1, "t1"), 3: Logprob(-4.0, 9, "t3")},
]


class Decoder:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, token: int) -> str:
        self.asked.append(token)
        return f"t{token}"


def test_a_table_is_made_once_and_only_when_it_is_looked_at() -> None:
    decode = Decoder()
    tables = LogprobTables(decode)
    tables.extend(RECORDS)
    view = tables.view()
    assert len(view) == 2 and not decode.asked
    assert view[1] == TABLES[1] and decode.asked == [1, 3]
    assert tables[1] is view[1] and view[-1] is view[1] and decode.asked == [1, 3]


def test_it_is_a_list_to_those_who_look() -> None:
    tables = LogprobTables(Decoder())
    tables.extend(RECORDS)
    assert tables == TABLES and list(tables) == TABLES and tables[1:] == TABLES[1:] and tables != TABLES[:1]
    assert [*tables, None] == [*TABLES, None] and repr(tables) == repr(TABLES)
    assert list(reversed(tables)) == TABLES[::-1] and TABLES[1] in tables and bool(tables)
    with pytest.raises(IndexError):
        tables[2]
    for copied in (pickle.loads(pickle.dumps(tables)), copy.deepcopy(tables)):
        assert type(copied) is list and copied == TABLES


def test_a_view_stays_as_it_was() -> None:
    tables = LogprobTables(None)
    before = tables.view()
    tables.extend(RECORDS[:1])
    first = tables.view()
    tables.extend(RECORDS[1:])
    assert [len(before), len(first), len(tables)] == [0, 1, 2]
    assert before == [] and first == tables[:1] and first[0][7] == Logprob(-0.5, 1, None)
