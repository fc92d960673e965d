"""The model's tokenizer with the interface of Hugging Face's, for callers of `engine.tokenizer`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import tokenizers

from sbert_infer._util.tensor_array import TensorArray
from sbert_infer.errors import EngineError

_TRUNCATE = {True: "longest_first", False: None, "do_not_truncate": None, None: None}
_STRATEGIES = ("longest_first", "only_first", "only_second")
_PAD = {True: "longest", False: None, "do_not_pad": None, None: None}


class BatchEncoding(dict[str, Any]):
    """Token ids and what belongs to them, as items and, as Hugging Face has it, attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the tokenizer gave no {name!r}, only {', '.join(self)}") from None

    def to(self, device: Any) -> BatchEncoding:
        """Move the tensors to a device."""
        return BatchEncoding({name: value.to(device) for name, value in self.items()})


class HuggingFaceTokenizer:
    """The methods of a Hugging Face tokenizer that callers of sentence-transformers use.

    It cuts no text unless asked to, whatever the model's limit. It can't be changed: the engine
    would not notice.
    """

    is_fast = True

    def __init__(
        self,
        tokenizer_json: str,
        *,
        model_max_length: int,
        pad_token_id: int,
        padding_side: str = "right",
        truncation_side: str = "right",
        model_input_names: Sequence[str] = ("input_ids", "attention_mask"),
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Load the tokenizer; the rest is what tokenizer_config.json would say."""
        self.backend_tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        self.backend_tokenizer.no_padding()
        self.backend_tokenizer.no_truncation()
        self.model_max_length, self.pad_token_id = model_max_length, pad_token_id
        self.padding_side, self.truncation_side = padding_side, truncation_side
        self.model_input_names = list(model_input_names)
        pad_token = str(self.backend_tokenizer.id_to_token(pad_token_id))
        self.special_tokens_map = {"pad_token": pad_token, **(special_tokens or {})}
        self._lock = threading.Lock()  # the last: from here on, nothing can be set

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles load the tokenizer again."""
        names = ("model_max_length", "pad_token_id", "padding_side", "truncation_side", "model_input_names")
        options = {name: getattr(self, name) for name in names} | {"special_tokens": self.special_tokens_map}
        return partial(type(self), **options), (self.backend_tokenizer.to_str(),)

    def __call__(
        self,
        text: str | Sequence[Any],
        text_pair: str | Sequence[str] | None = None,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        *,
        return_tensors: str | None = None,
        return_attention_mask: bool | None = None,
        return_token_type_ids: bool | None = None,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
    ) -> BatchEncoding:
        """Tokenize one text or a list of texts, each with its pair if there is one.

        The arguments and results are those of Hugging Face's tokenizers: lists, or with
        `return_tensors` "pt" or "np" tensors or arrays.
        """
        single = isinstance(text, str)
        texts = [text] if single else list(text)
        if text_pair is not None:
            pairs = [text_pair] if isinstance(text_pair, str) else list(text_pair)
            texts = list(zip(texts, pairs, strict=True))
        found = self._encode(texts, add_special_tokens, padding, truncation, max_length)
        names = [name for name in self.model_input_names if name in _COLUMNS]
        wanted = {"attention_mask": return_attention_mask, "token_type_ids": return_token_type_ids}
        wanted |= {"special_tokens_mask": return_special_tokens_mask, "offset_mapping": return_offsets_mapping}
        wanted |= {"length": return_length}
        names += [name for name, on in wanted.items() if on and name not in names]
        names = [name for name in names if wanted.get(name) is not False or name not in wanted]
        columns: dict[str, Any] = {name: [_COLUMNS[name](encoding) for encoding in found] for name in names}
        if return_tensors is not None:
            return BatchEncoding({name: _as_tensor(name, rows, return_tensors) for name, rows in columns.items()})
        return BatchEncoding({name: rows[0] for name, rows in columns.items()} if single else columns)

    def encode(self, text: str, text_pair: str | None = None, add_special_tokens: bool = True, **options: Any) -> Any:
        """Return the token ids of one text; all of them, unless `truncation` is given."""
        return self(text, text_pair, add_special_tokens, **options)["input_ids"]

    def tokenize(self, text: str, pair: str | None = None, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text as strings."""
        texts = [text if pair is None else (text, pair)]
        tokens: list[str] = self._encode(texts, add_special_tokens, False, False, None)[0].tokens
        return tokens

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any:
        """Return the text of token ids, or a list of texts for a list of lists of ids."""
        ids = _as_ids(token_ids)
        if ids and isinstance(ids[0], list):
            return self.batch_decode(ids, skip_special_tokens)
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each list of token ids."""
        rows = [_as_ids(row) for row in sequences]
        return list(self.backend_tokenizer.decode_batch(rows, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Return the token of an id, or the tokens of a list of ids."""
        if isinstance(ids, (int, np.integer)):
            return self.backend_tokenizer.id_to_token(int(ids))
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.backend_tokenizer.id_to_token(id) for id in _as_ids(ids) if id not in skipped]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or the ids of a list; that of unk_token for unknown ones."""
        if isinstance(tokens, str):
            found = self.backend_tokenizer.token_to_id(tokens)
            return self._id_of("unk_token") if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Join tokens to a text."""
        decoder = self.backend_tokenizer.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(list(tokens)))

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Return how many special tokens are added to a text, or to a pair."""
        return int(self.backend_tokenizer.num_special_tokens_to_add(pair))

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token, added ones included."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    vocab = property(get_vocab)

    @property
    def vocab_size(self) -> int:
        """The number of tokens without those that were added; `len` counts all."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def all_special_tokens(self) -> list[str]:
        """The special tokens that have a name, such as cls_token."""
        return list(dict.fromkeys(self.special_tokens_map.values()))

    @cached_property
    def all_special_ids(self) -> list[int]:
        """The ids of `all_special_tokens`."""
        known = self.get_vocab()
        return [known[token] for token in self.all_special_tokens if token in known]

    def __getattr__(self, name: str) -> Any:
        """Return a special token or its id, as `cls_token` or `sep_token_id`, or None."""
        special = name.removesuffix("_id")
        if name.startswith("_") or special not in _SPECIAL:
            raise AttributeError(f"this tokenizer has no {name!r}; see its backend_tokenizer")
        return self._id_of(special) if name.endswith("_id") else self.special_tokens_map.get(special)

    def __setattr__(self, name: str, value: object) -> None:
        if "_lock" not in vars(self):
            return object.__setattr__(self, name, value)
        more = "set max_seq_length of the engine" if name == "model_max_length" else "the engine would not notice"
        raise AttributeError(f"{name} of an engine's tokenizer can't be set: {more}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size}, model_max_length={self.model_max_length})"

    def _id_of(self, special: str) -> int | None:
        token = self.special_tokens_map.get(special)
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def _encode(
        self, texts: Sequence[Any], special: bool, padding: bool | str, truncation: bool | str, length: int | None
    ) -> list[tokenizers.Encoding]:
        cut = _TRUNCATE.get(truncation, truncation)
        pad = _PAD.get(padding, padding)
        if cut is not None and cut not in _STRATEGIES:
            raise ValueError(f"truncation must be a bool or one of {', '.join(_STRATEGIES)}, got {truncation!r}")
        if pad not in (None, "longest", "max_length"):
            raise ValueError(f"padding must be a bool, 'longest' or 'max_length', got {padding!r}")
        most = self.model_max_length if length is None else length
        backend = self.backend_tokenizer
        with self._lock:  # the limits are settings of the tokenizer, not arguments
            try:
                if cut is not None:
                    backend.enable_truncation(most, strategy=cut, direction=self.truncation_side)
                if pad is not None:
                    to = most if pad == "max_length" else None
                    token = {"pad_id": self.pad_token_id, "pad_token": self.special_tokens_map["pad_token"]}
                    backend.enable_padding(direction=self.padding_side, length=to, **token)
                return list(backend.encode_batch(list(texts), add_special_tokens=special))
            finally:
                backend.no_truncation()
                backend.no_padding()


_SPECIAL = {f"{name}_token" for name in ("bos", "cls", "eos", "mask", "pad", "sep", "unk")}
_COLUMNS = {
    "input_ids": lambda encoding: encoding.ids,
    "token_type_ids": lambda encoding: encoding.type_ids,
    "attention_mask": lambda encoding: encoding.attention_mask,
    "special_tokens_mask": lambda encoding: encoding.special_tokens_mask,
    "offset_mapping": lambda encoding: encoding.offsets,
    "length": len,
}


def _as_ids(ids: Any) -> list[Any]:
    """Return ids as plain ints, given as a list, an array, a tensor or one int."""
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    return [ids] if isinstance(ids, int) else list(ids)


def _as_tensor(name: str, rows: list[Any], kind: str) -> Any:
    if kind not in ("pt", "np"):
        raise ValueError(f"return_tensors must be 'pt' or 'np', got {kind!r}")
    if len({len(row) for row in rows if not isinstance(row, int)}) > 1:
        raise ValueError(f"{name}: texts of different lengths make no tensor: give padding=True")
    if kind == "np":
        return TensorArray.of(np.array(rows, np.int64))
    try:
        import torch
    except ModuleNotFoundError as error:
        raise EngineError("return_tensors='pt' needs torch, which is not installed: use 'np'") from error
    return torch.tensor(rows, dtype=torch.int64)
