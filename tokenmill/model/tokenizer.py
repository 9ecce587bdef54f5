"""Tokenizer: text to ids and back, with the special ids and the chat template that come with a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from tokenmill.errors import InvalidRequest, ModelError
from tokenmill.model.gguf_tokenizer import build_backend
from tokenmill.model.infill import Infill, find_infill
from tokenmill.model.pieces import TokenBytes
from tokenmill.model.text_bound import TextBound, bound_of

if TYPE_CHECKING:
    from tokenmill.model.weights.gguf import GGUFCheckpoint

# Tokens that end a turn or a document, whichever of them a model's files forget to mention.
_END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)


class Tokenizer:
    """One model's vocabulary. Safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        infill: Infill | None = None,
    ) -> None:
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.pieces = TokenBytes(backend)
        self._special = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = bos_id
        ends = (backend.token_to_id(token) for token in _END_TOKENS)
        self.eos_ids: tuple[int, ...] = tuple(
            dict.fromkeys([*eos_ids, *(id for id in ends if id is not None and id in self._special)])
        )
        self.chat_template = chat_template
        self.infill = infill or find_infill(backend.token_to_id)  # None: it has no tokens for filling in the middle

    def vocabulary(self) -> dict[str, int]:
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json and the small files beside it."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            found = "only tokenizer.model (SentencePiece)" if (folder / "tokenizer.model").is_file() else "none"
            raise ModelError(f"{folder} has no tokenizer.json ({found} was found); add the model's tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{file} cannot be read ({_first_line(error)}); download it again") from None
        settings = _read_json(folder / "tokenizer_config.json")
        names = {**_read_json(folder / "special_tokens_map.json"), **settings}
        config, generation = _read_json(folder / "config.json"), _read_json(folder / "generation_config.json")
        bos = _id_of(backend, names.get("bos_token"), _ids(config.get("bos_token_id")))
        eos = _id_of(backend, names.get("eos_token"), [])
        stops = [*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id"))]
        return cls(
            backend,
            bos_id=bos,
            eos_ids=stops if eos is None else [eos, *stops],
            chat_template=_directory_template(folder, settings),
        )

    @classmethod
    def from_gguf(cls, checkpoint: GGUFCheckpoint) -> Tokenizer:
        """Builds the tokenizer that the metadata of a GGUF file describes."""
        metadata, config = checkpoint.metadata, checkpoint.config
        template = metadata.get("tokenizer.chat_template")
        backend = build_backend(metadata, str(checkpoint.path))
        return cls(
            backend,
            bos_id=config["bos_token_id"],
            eos_ids=config["eos_token_id"],
            chat_template=template if isinstance(template, str) else None,
            infill=find_infill(backend.token_to_id, metadata),
        )

    @property
    def bos_token(self) -> str:
        return "" if self.bos_id is None else self.id_to_token(self.bos_id) or ""

    @property
    def eos_token(self) -> str:
        return self.id_to_token(self.eos_ids[0]) or "" if self.eos_ids else ""

    @cached_property
    def bound(self) -> TextBound | None:
        """How long a text can be for a number of tokens; None: of any length. Takes a while when first asked."""
        return bound_of(self._backend)

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """The ids of `text`. With `max_tokens`, a longer text is refused, an absurd one without tokenizing it."""
        if max_tokens is not None and len(text) > max_tokens:
            bound = self.bound
            if bound is not None and not bound.may_fit(text, max_tokens):
                raise InvalidRequest(_too_long(f"{len(text)} characters", max_tokens, bound.per_token))
        try:
            # As a batch of one: only then does the library let other threads run meanwhile.
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError):
            raise InvalidRequest("the prompt is not valid Unicode text; remove unpaired surrogates") from None
        if max_tokens is not None and len(encoding) > max_tokens:
            raise InvalidRequest(_too_long(f"{len(encoding)} tokens", max_tokens))
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary have no text."""
        pieces = self.pieces
        kept = (id for id in ids if not (skip_special_tokens and id in self._special))
        text = b"".join(map(pieces.bytes_of, kept)).decode("utf-8", "replace")
        return text[1:] if pieces.drops_first_space and text.startswith(" ") else text

    def id_to_token(self, id: int) -> str | None:
        return self._backend.id_to_token(id) if id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def is_special(self, id: int) -> bool:
        return id in self._special


def _too_long(length: str, max_tokens: int, per_token: int | None = None) -> str:
    room = f"max_model_len = {max_tokens} tokens"
    if per_token is not None:
        room += f", which hold {per_token * max_tokens} characters at most"
    return (
        f"the prompt has {length}, but prompt and answer share {room}; "
        "shorten it, or raise max_model_len if the model allows more"
    )


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, or nothing where the file is absent."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read ({_first_line(error)}); download it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__} instead of an object; download it again")
    return content


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [id for id in values if isinstance(id, int) and not isinstance(id, bool) and id >= 0]


def _id_of(backend: tokenizers.Tokenizer, token: Any, otherwise: list[int]) -> int | None:
    """The id of a token given as a string or as an added-token object."""
    content = token.get("content") if isinstance(token, dict) else token
    found = backend.token_to_id(content) if isinstance(content, str) else None
    return found if found is not None or not otherwise else otherwise[0]


def _directory_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
