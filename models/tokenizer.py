"""Tokenizers: `tokenizer.json` of a Hugging Face directory, or the byte-level BPE in a GGUF file's metadata.

Text is data: `<|im_end|>` in a document is eleven ordinary characters. Special tokens are recognised, and the
template's own (a leading BOS) are added, only with `special_tokens=True`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

# `tokenizer.ggml.token_type`
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

# How the publishers split text before the merges; the digits are what differs: any run, one, three at a time.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "qwen2", "smollm")


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, backend: tokenizers.Tokenizer, *, bos_token_id: int | None = None) -> None:
        self._backend = backend
        self._bos = bos_token_id  # added by us; None where the backend's own template adds it

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Token ids of `text`."""
        self._backend.encode_special_tokens = not special_tokens  # True: spell them out as plain text
        ids = self._backend.encode(text, add_special_tokens=special_tokens).ids
        return [self._bos, *ids] if special_tokens and self._bos is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens written out."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    @property
    def vocab_size(self) -> int:
        """How many tokens the tokenizer knows; the model's embedding may have more rows."""
        return self._backend.get_vocab_size()


def hf_tokenizer(path: Path) -> Tokenizer:
    """Reads a `tokenizer.json`."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; the tokenizer is read from it (a tokenizer.model alone is not supported)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises a bare Exception
        raise ValueError(f"{path}: is not a tokenizer.json that can be read ({error}); copy the file again") from None
    backend.no_padding()  # a stored padding or truncation rule would silently change the ids
    backend.no_truncation()
    return Tokenizer(backend)


def gguf_tokenizer(metadata: Mapping[str, Any], *, where: str) -> Tokenizer:
    """Builds the tokenizer of `tokenizer.ggml.*`."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(
            f"{where}: tokenizer.ggml.model = {kind!r} is not supported; supported is 'gpt2' (byte-level BPE)"
        )
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{where}: tokenizer.ggml.pre = {pre!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    types = metadata.get("tokenizer.ggml.token_type")
    if not tokens or merges is None or types is None or len(types) != len(tokens):
        raise ValueError(f"{where}: the tokenizer needs tokens, merges and one token_type a token; get the whole file")
    if metadata.get("tokenizer.ggml.add_space_prefix"):
        raise ValueError(f"{where}: tokenizer.ggml.add_space_prefix = True is not supported with 'gpt2'")
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if len(vocab) != len(tokens) or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{where}: the tokenizer has a repeated token or a merge that is not a pair")
    # Llama 3 takes a whole word that is a token before it tries any merge.
    try:
        bpe = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the binding raises a bare Exception
        raise ValueError(f"{where}: the tokenizer's merges do not fit its tokens ({error})") from None
    backend = tokenizers.Tokenizer(bpe)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    )
    # Files of Llama 3 from before the key existed rely on the kind to say it.
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if adds_bos and not (isinstance(bos, int) and 0 <= bos < len(tokens)):
        raise ValueError(f"{where}: tokenizer.ggml.bos_token_id = {bos!r} is not a token, but one is to be added")
    return Tokenizer(backend, bos_token_id=bos if adds_bos else None)


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    words = _WORDS.replace("DIGITS", {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}[pre])
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
