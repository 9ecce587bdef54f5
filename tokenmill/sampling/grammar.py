"""Grammars: which tokens a structured answer may go on with. Compiles and computes masks in threads of its own.

The parser is llguidance, imported when the first structured request comes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tokenmill.errors import InvalidRequest, pip_install
from tokenmill.sampling.form_levels import check_levels
from tokenmill.sampling.structured import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_COMPILED = 32  # grammars that are kept for the next request with the same one
MAX_LEXER_STATES = 100_000  # of one grammar, 1 to 2 kB each
MOST_FORCED = 15  # tokens that are looked ahead
MOST_CHECKED = 8  # drafts of others whose masks are computed for one step, on the engine's own time
SLOW = 0.0003  # seconds per mask, beyond which that is not done
LEARNING = 0.1  # how fast the mean follows a new one
GRACE = 0.001  # seconds that a step waits for masks: they are nearly always there, and others must not wait for one

# In JSON. A model that may write any white space anywhere may write nothing else until its tokens are spent.
WHITE_SPACE = r" ?|\n{1,2}[ \t]{0,20}"


class Vocabulary(Protocol):
    """What a grammar needs to know of a tokenizer."""

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def is_special(self, id: int) -> bool: ...

    @property
    def pieces(self) -> Any: ...


class Constraint:
    """One request's place in its grammar. Belongs to the engine's thread, except while a mask is being computed.

    It is a function of the request's output tokens: preemption and failed steps take none of these away, and a request
    that goes on in another process hands them in at the start.
    """

    __slots__ = ("_behind", "_grammars", "_mask_seconds", "_matcher", "complete", "error", "forced", "id", "mask")

    def __init__(self, id: str, grammars: Grammars) -> None:
        self.id = id  # of the request
        self._grammars = grammars
        self._matcher: LLMatcher | None = None  # None: not compiled yet
        self.mask: bytes | None = None  # one bit per token, lowest first: what may come next; None: not known yet
        self.forced: Sequence[int] = ()  # tokens that the grammar leaves no choice about, from the next one on
        self._behind: dict[tuple[int, ...], bytes] = {}  # drafts -> what may come behind them
        self._mask_seconds = 0.0  # that one takes, lately
        self.complete = False  # nothing may follow
        self.error: str | None = None

    @property
    def ready(self) -> bool:
        """Whether the next token may be sampled. Becomes true in `Grammars.collect` only."""
        return self.mask is not None

    def open(self, structured: StructuredOutput, output: Sequence[int]) -> None:
        """Compile, and advance over what the request has said already."""
        self._grammars.compile(self, structured, output)

    def start(self, matcher: LLMatcher, output: Sequence[int]) -> None:
        """The grammar is compiled, and the request has said this already."""
        self._matcher = matcher
        for token in output:
            self.consume(token)
            if self.error is not None:
                return

    def consume(self, token: int) -> bool:
        """The request said it. Whether it goes on: it may be complete, or the token may not fit. Takes microseconds,
        unlike a mask."""
        assert self._matcher is not None
        self.mask, self.forced = None, ()
        self._behind.clear()
        if self._matcher.is_stopped() or not self._matcher.consume_token(token):
            said = _said(self._matcher.get_error())
            self.error = f"token {token} of the output does not fit its grammar: {said}"
            return False
        self.complete = self._matcher.is_stopped()
        return not self.complete

    def start_mask(self) -> None:
        """Start on what may come next."""
        assert self._matcher is not None
        self._grammars.compute_mask(self, self._matcher)

    def take(self, found: _Found) -> None:
        """What was computed in another thread is there."""
        self.mask, self.forced = found.mask, found.forced
        self.error = self.error or found.error
        self._mask_seconds += LEARNING * (found.mask_seconds - self._mask_seconds)
        for count, mask in enumerate(found.masks, start=1):
            self._behind[tuple(found.forced[:count])] = mask

    def masks_behind(self, drafts: Sequence[int]) -> list[bytes]:
        """What may come behind each of these, as far as that is known: a draft is verified under its mask, or not."""
        masks: list[bytes] = []
        while len(masks) < len(drafts) and (known := self._behind.get(tuple(drafts[: len(masks) + 1]))) is not None:
            masks.append(known)
        return masks

    def may_begin(self, drafts: Sequence[int]) -> bool:
        """Whether the answer may go on with the first of these, as far as that is known without another mask."""
        count = min(len(drafts), len(self.forced))
        if self.mask is None or not drafts or not _allows(self.mask, drafts[0]):
            return False
        return list(drafts[:count]) == list(self.forced[:count])

    def check(self, drafts: Sequence[int]) -> int:
        """How many of these the grammar allows, each behind those before it. Computes their masks, of a few, if that is
        quick: the engine waits for it."""
        masks = self.masks_behind(drafts)
        known = len(masks)
        drafts = drafts[: max(known, MOST_CHECKED)]
        if self.mask is None or self._matcher is None or known == len(drafts) or self._mask_seconds > SLOW:
            return known
        mask = masks[-1] if masks else self.mask
        if not _allows(mask, drafts[known]):
            return known
        try:
            ahead = self._matcher.deep_copy()
            if known and not ahead.consume_tokens(list(drafts[:known])):
                return known
            began = time.thread_time()
            for found in _masks_behind(ahead, mask, drafts[known:]):
                known += 1
                self._behind[tuple(drafts[:known])] = found
                ended = time.thread_time()
                self._mask_seconds += LEARNING * (ended - began - self._mask_seconds)
                began = ended
        except BaseException as problem:  # of the parser, whose panics are no Exceptions: a draft is worth no answer
            if isinstance(problem, KeyboardInterrupt | SystemExit):
                raise
        return known


class _Found(NamedTuple):
    """What a thread made for a constraint."""

    constraint: Constraint
    compiled: bool = False  # it was compiled just now
    mask: bytes | None = None
    error: str | None = None
    mask_seconds: float = 0.0
    forced: Sequence[int] = ()  # tokens that have to come next
    masks: Sequence[bytes] = ()  # what may come behind each of these


class Grammars:
    """Compiled grammars, and the threads that compile and compute masks. The engine's thread calls it.

    `vocabulary` is called once, when the first structured request comes; `eos_ids` are for one that names none.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], eos_ids: Sequence[int] = (), threads: int = 2) -> None:
        self._vocabulary = vocabulary
        self._eos_ids = tuple(eos_ids)
        # A mask must not wait for somebody's large grammar. Threads start with the first job.
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._maskers = ThreadPoolExecutor(threads, "grammar-masks")
        self.looks_ahead = False  # whether forced tokens are of use to anybody
        self._done: queue.SimpleQueue[_Found] = queue.SimpleQueue()
        self._compiling = 0
        self._masking = 0
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # at their start; the compiling thread's
        self._tokenizer: LLTokenizer | None = None

    @property
    def busy(self) -> bool:
        """Whether a grammar or a mask is on its way."""
        return bool(self._compiling or self._masking)

    def compile(self, constraint: Constraint, structured: StructuredOutput, output: Sequence[int]) -> None:
        self._compiling += 1
        self._compiler.submit(self._compile_job, constraint, structured, list(output))

    def compute_mask(self, constraint: Constraint, matcher: LLMatcher) -> None:
        self._masking += 1
        self._maskers.submit(self._mask_job, constraint, matcher)

    def collect(self, patience: float = GRACE, for_grammars: bool = False) -> list[Constraint]:
        """Take in what the threads have done: those that became ready, complete or broken.

        Waits up to `patience` seconds for masks; for grammars only if asked to, and then for one.
        """
        until = time.monotonic() + patience
        collected: list[Constraint] = []
        while self._compiling or self._masking:
            waits = self._masking or (for_grammars and not collected)
            left = max(0.0, until - time.monotonic()) if waits else 0.0
            try:
                found = self._done.get(left > 0, left or None)
            except queue.Empty:
                break
            self._compiling -= found.compiled
            self._masking -= not found.compiled
            found.constraint.take(found)
            collected.append(found.constraint)
        return collected

    def close(self) -> None:
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._maskers.shutdown(wait=False, cancel_futures=True)

    def _compile_job(self, constraint: Constraint, structured: StructuredOutput, output: list[int]) -> None:
        mask = error = None
        try:
            matcher = self._matcher(grammar_text(structured))
            constraint.start(matcher, output)
            if not constraint.complete and constraint.error is None:
                mask, error = _mask(matcher)
        except BaseException as problem:  # the request must hear of it; a panic of the parser is no Exception
            error = str(problem) or type(problem).__name__
        self._done.put(_Found(constraint, True, mask, error))

    def _mask_job(self, constraint: Constraint, matcher: LLMatcher) -> None:
        began = time.thread_time()
        forced: list[int] = []
        masks: list[bytes] = []
        try:
            mask, error = _mask(matcher)
            seconds = time.thread_time() - began
        except BaseException as problem:
            self._done.put(_Found(constraint, error=str(problem) or type(problem).__name__))
            return
        if self.looks_ahead and mask is not None:
            with contextlib.suppress(BaseException):  # (a panic of the parser): it is only about drafts
                ahead = matcher.deep_copy()  # costs less than the way back
                forced = ahead.compute_ff_tokens()[:MOST_FORCED]
                masks = list(_masks_behind(ahead, mask, forced))
        self._done.put(_Found(constraint, False, mask, error, seconds, forced[: len(masks)], masks))

    def _matcher(self, text: str) -> LLMatcher:
        """A matcher at its grammar's start."""
        from llguidance import LLMatcher

        compiled = self._compiled.get(text)
        if compiled is None:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer_of(self._vocabulary(), self._eos_ids)
            compiled = LLMatcher(self._tokenizer, text, log_level=0, limits=_limits())
            if compiled.is_error():
                raise InvalidRequest(f"structured output cannot be compiled: {_said(compiled.get_error())}")
            self._compiled[text] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(text)
        return compiled.deep_copy()


def check_grammar(structured: StructuredOutput) -> None:
    """Raise InvalidRequest, with the parser's own words, for what cannot be compiled. Any thread may call it."""
    problem = _problem(grammar_text(structured))
    if problem is not None:
        raise InvalidRequest(f"structured output cannot be compiled: {problem}")


def grammar_text(structured: StructuredOutput) -> str:
    """The grammar as llguidance reads it. Raises InvalidRequest for one that it would not survive."""
    if importlib.util.find_spec("llguidance") is None:
        raise InvalidRequest(
            f"structured output needs the llguidance package, which is not installed; {pip_install('structured')}"
        )
    check_levels(structured)
    from llguidance import LLMatcher, regex_to_lark

    if "json" in structured:
        return _json_grammar(structured["json"])
    if "json_object" in structured:
        return _json_grammar('{"type": "object"}')
    if "regex" in structured:
        # Nobody who writes \d means the digits of all scripts.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(structured['regex'], use_ascii='d')}/")
    if "choice" in structured:
        quoted = (json.dumps(text, ensure_ascii=False) for text in structured["choice"])
        return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
    return LLMatcher.grammar_from_lark(structured["grammar"])


def _json_grammar(schema: str) -> str:
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITE_SPACE})
    except ValueError as error:  # options of the library inside the schema, under "x-guidance"
        raise InvalidRequest(f"structured output cannot be compiled: {_said(str(error))}") from None


@functools.lru_cache(maxsize=256)
def _problem(text: str) -> str | None:
    from llguidance import LLMatcher

    try:
        failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=_limits())
    except BaseException as error:  # a panic of the parser is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return str(error)
    return _said(messages[0]) if failed else None


def _mask(matcher: LLMatcher) -> tuple[bytes | None, str | None]:
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        return None, f"its grammar leaves no way to go on, or is too complex: {_said(matcher.get_error())}"
    return mask, None


def _masks_behind(ahead: LLMatcher, mask: bytes, drafts: Sequence[int]) -> Iterator[bytes]:
    """What may come behind each of these: up to one that is not allowed, or that nothing may follow."""
    for token in drafts:
        if not _allows(mask, token) or not ahead.consume_token(token) or ahead.is_stopped():
            return
        found, _ = _mask(ahead)
        if found is None:
            return
        mask = found
        yield mask


def _allows(mask: bytes, token: int) -> bool:
    return 0 <= token < 8 * len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def _tokenizer_of(vocabulary: Vocabulary, eos_ids: tuple[int, ...]) -> LLTokenizer:
    """Tokens by the bytes that the detokenizer gives them: what is allowed is then what the user gets to read."""
    ends = vocabulary.eos_ids or eos_ids
    if not ends:
        raise InvalidRequest("structured output needs a model with an end token, and this one names none")
    from llguidance import LLTokenizer, TokenizerWrapper

    adapter = _Adapter(vocabulary, ends[0])
    tokenizer = LLTokenizer(TokenizerWrapper(adapter), eos_token=list(ends))
    adapter.otherwise = tokenizer.greedy_tokenize
    return tokenizer


class _Adapter:
    """A vocabulary as llguidance wants to see it. It is called to spell what the grammar leaves no choice about."""

    def __init__(self, vocabulary: Vocabulary, eos_id: int) -> None:
        self._vocabulary = vocabulary
        self.otherwise: Callable[[str], list[int]] | None = None
        self.eos_token_id = eos_id
        self.bos_token_id = vocabulary.bos_id
        self.tokens = [vocabulary.pieces.bytes_of(id) for id in range(vocabulary.vocab_size)]
        self.special_token_ids = [id for id in range(vocabulary.vocab_size) if vocabulary.is_special(id)]

    def __call__(self, text: str) -> list[int]:
        """As the model would spell it; but a text that looks like a special token is none, and a tokenizer that puts
        a space before every text does not do so in the middle of one.
        """
        ids = self._vocabulary.encode(text, add_special_tokens=False)
        same = b"".join(self.tokens[id] for id in ids) == text.encode()
        if self.otherwise is None or (same and not any(map(self._vocabulary.is_special, ids))):
            return ids
        return self.otherwise(text)


def _limits() -> LLParserLimits:
    """The library's own limits on time, a lower one on memory, and errors that do not print its insides."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)


def _said(message: str) -> str:
    """The parser's message in one line of bounded length."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text if len(text) <= 400 else text[:397] + "..."
