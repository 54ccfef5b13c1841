"""Tokenizers from GGUF metadata and from tokenizer.json, on a vocabulary of bytes, a few merges and special tokens."""

import json
import shutil
from typing import Any

import pytest
from tiny_checkpoints import DATA
from tokenizers import pre_tokenizers

import models
from models.tokenizer import PRE_TOKENIZERS, gguf_tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["a b", "ab c", "1 2", "12 3", "123 4", "Ġ a"]
SPECIAL = ["<|end|>", "<think>"]


def metadata(**changes: Any) -> dict[str, Any]:
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), "abcdef", *SPECIAL]
    types = [1] * (len(tokens) - 2) + [3, 4]  # <|end|> is a control token, <think> a user-defined one
    fields = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": types,
        "merges": MERGES,
        "bos_token_id": tokens.index("<|end|>"),
        "add_bos_token": False,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def pieces(tokenizer: models.Tokenizer, text: str, **options: Any) -> list[str]:
    return [tokenizer.decode([i]) for i in tokenizer.encode(text, **options)]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_text_comes_back_whole(pre: str) -> None:
    tokenizer = gguf_tokenizer(metadata(pre=pre), where="x")
    for text in ("abc 1234\n\n\tdef f(x):  # é 你好 \U0001f600", "", " ", "<|end|> and <think>", "a\r\nb\x00"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
    ],
)
def test_digits_are_split_as_the_publisher_splits_them(pre: str, expected: list[str]) -> None:
    assert pieces(gguf_tokenizer(metadata(pre=pre), where="x"), "1234") == expected


def test_llama_takes_a_whole_word_that_is_a_token_before_any_merge() -> None:
    assert pieces(gguf_tokenizer(metadata(pre="llama-bpe"), where="x"), "abcdef") == ["abcdef"]
    assert pieces(gguf_tokenizer(metadata(pre="gpt-2"), where="x"), "abcdef") == ["abc", "d", "e", "f"]


def test_special_tokens_are_text_unless_asked() -> None:
    tokenizer = gguf_tokenizer(metadata(), where="x")
    assert len(tokenizer.encode("a<|end|>")) == 1 + len("<|end|>")
    assert pieces(tokenizer, "a<|end|>", special_tokens=True) == ["a", "<|end|>"]
    assert len(tokenizer.encode("a<|end|>")) == 1 + len("<|end|>")  # asking once does not stick
    assert pieces(tokenizer, "a<think>") == ["a", "<think>"]  # user-defined: a word of the text


def test_bos_is_added_only_when_asked_and_the_file_wants_it() -> None:
    with_bos = gguf_tokenizer(metadata(add_bos_token=True), where="x")
    assert pieces(with_bos, "a") == ["a"]
    assert pieces(with_bos, "a", special_tokens=True) == ["<|end|>", "a"]
    old_llama3 = gguf_tokenizer(metadata(pre="llama-bpe", add_bos_token=None), where="x")
    assert pieces(old_llama3, "a", special_tokens=True) == ["<|end|>", "a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "deepseek-v3"}, "'deepseek-v3' is not supported; supported are gpt-2, llama-bpe, qwen2, smollm"),
        ({"pre": None}, "None is not supported"),
        ({"model": "llama"}, "'llama' is not supported; supported is 'gpt2'"),
        ({"tokens": None}, "needs tokens"),
        ({"token_type": [1]}, "one token_type a token"),
        ({"merges": ["ab"]}, "not a pair"),
        ({"merges": ["z q9"]}, "do not fit"),
        ({"add_space_prefix": True}, "add_space_prefix"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id"),
    ],
)
def test_a_tokenizer_that_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        gguf_tokenizer(metadata(**changes), where="m.gguf")
    assert str(error.value).startswith("m.gguf: ")


def test_tokenizer_json_of_a_directory(tmp_path) -> None:
    source = gguf_tokenizer(metadata(), where="x")
    path = tmp_path / "m"
    shutil.copytree(DATA / "qwen2_tiny", path)
    stored = json.loads(source._backend.to_str())
    stored["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (path / "tokenizer.json").write_text(json.dumps(stored))
    tokenizer = models.load(path).tokenizer
    text = "abc <|end|> abcabc"
    assert tokenizer.encode(text) == source.encode(text)  # a stored truncation does not cut the text
    assert tokenizer.encode(text, special_tokens=True) == source.encode(text, special_tokens=True)
    assert tokenizer.vocab_size == source.vocab_size
