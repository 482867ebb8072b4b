"""The table of delimiters: three ways to write tokens, all scripts, linear time."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vllm_kvcompress.methods.delimiters import DELIMITERS, DelimiterTable

MIXED = (
    "The cat, the dog; v1.2.3 of example.com!\n\n\tfor (i = 0; i < 3; ++i) { x[i] = {1}; }\r\n"
    "吾輩は猫である。名前はまだ無い、どこで？「生れた」… 你好，世界！｡､ "
    "مرحبا، كيف؟ नमस्ते। 한국어 문장. 🙂👩‍👩‍👧 ไทย"
)


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges of ASCII: every CJK mark is three tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", ";;;"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat, the dog.\n\n  the    bird...\n\n"] * 50, trainer)
    tokenizer.add_tokens([AddedToken("。。", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|im_start|>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """Like Llama 2: U+2581 for spaces, bytes as <0xNN>, a decoder that drops the first space."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "▁",
        "▁▁",
        "▁▁▁▁",
        "t",
        "h",
        "e",
        "a",
        "th",
        "▁th",
        "▁the",
        ".",
        "▁.",
        ",",
        "。",
        "你",
    ]
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", ".")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


MAKERS = {"byte level": byte_level, "byte fallback": byte_fallback}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return MAKERS[request.param]()


@pytest.fixture(scope="module")
def real(model_path: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(model_path)


def classify(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[list[str], np.ndarray]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    table = DelimiterTable.from_tokenizer(tokenizer)
    return tokenizer.convert_ids_to_tokens(ids), table.classify(np.array(ids, np.int64))


def check_against_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """Tokens that cover whole characters must be delimiters exactly where the text says so."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = DelimiterTable.from_tokenizer(tokenizer).classify(np.array(ids, np.int64))
    begin = 0
    done = tokenizer.decode(ids[:1], clean_up_tokenization_spaces=False)[:0]
    for end in range(1, len(ids) + 1):
        so_far = tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
        if so_far.endswith("\ufffd"):
            continue
        added = so_far.removeprefix(done)
        if added == "":  # the space that decoders drop at the very beginning
            added = " "
        expected = all(char in DELIMITERS for char in added)
        assert found[begin:end].tolist() == [expected] * (end - begin), (added, ids[begin:end])
        begin, done = end, so_far
    assert begin == len(ids)


def test_agrees_with_the_text(tokenizer):
    check_against_text(tokenizer, MIXED)


def test_agrees_with_the_text_of_the_real_tokenizer(real):
    check_against_text(real, MIXED)


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("Ġ", True),
        ("ĊĊ", True),
        (";;;", False),  # a special token
        (",", True),
        ("{", True),
        ("(", False),
        ("Ġthe", False),
        ("e", False),
        ("<|im_start|>", False),
        ("。。", True),  # an added token
        ("ã", False),  # a byte of "。" alone
    ],
)
def test_byte_level_pieces(piece, expected):
    tokenizer = byte_level()
    table = DelimiterTable.from_tokenizer(tokenizer)
    assert table.classify(np.array(tokenizer.convert_tokens_to_ids([piece])))[0] == expected


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("▁", True),
        ("▁▁▁▁", True),
        ("▁.", True),
        (".", True),
        ("。", True),
        ("<0x0A>", True),
        ("<0x2E>", True),
        ("▁the", False),
        ("你", False),
        ("<s>", False),
        ("<unk>", False),
        ("<0xE3>", False),
    ],
)
def test_byte_fallback_pieces(piece, expected):
    tokenizer = byte_fallback()
    table = DelimiterTable.from_tokenizer(tokenizer)
    assert table.classify(np.array(tokenizer.convert_tokens_to_ids([piece])))[0] == expected


def test_characters_spread_over_tokens():
    tokens, found = classify(byte_level(), "猫。犬…a、é؟")
    texts = [bytes([byte_level_byte(t)]) for t in tokens]
    joined = b"".join(texts).decode()
    expected = [char in "。…、؟" for char in joined for _ in char.encode()]
    assert len(tokens) == len(expected)
    assert found.tolist() == expected


def byte_level_byte(piece: str) -> int:
    table = {ord(char): byte for char, byte in zip(*_alphabet(), strict=True)}
    return table[ord(piece)]


def _alphabet() -> tuple[list[str], list[int]]:
    """GPT-2's alphabet, found out from the tokenizer itself rather than by the code under test."""
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    chars, numbers = [], []
    for char in [chr(c) for c in range(0x800)]:
        for piece, byte in zip(encode(char)[0][0], char.encode(), strict=True):
            chars.append(piece)
            numbers.append(byte)
    for byte, piece in zip("。猫…、".encode(), encode("。猫…、")[0][0], strict=True):
        chars.append(piece)
        numbers.append(byte)
    return chars, numbers


def fragments(*contents: bytes) -> tuple[DelimiterTable, np.ndarray]:
    """A table in which token ``i`` is ``contents[i]``, and the text of all of them."""
    return (
        DelimiterTable(np.zeros(len(contents), bool), dict(enumerate(contents))),
        np.arange(len(contents)),
    )


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ([b"\xe3\x80", b"\x82"], [1, 1]),
        ([b"\xe3", b"\x80", b"\x82"], [1, 1, 1]),
        ([b".\xe3\x80", b"\x82\n"], [1, 1]),  # with other delimiters
        ([b"a\xe3\x80", b"\x82"], [0, 0]),  # a token that holds something else
        ([b"\xe3\x80", b"\x82a"], [0, 0]),
        ([b"\xe3\x80\x82\xe3", b"\x80\x82"], [1, 1]),
        ([b"\xe3\x80\x82\xe7", b"\x8c\xab"], [0, 0]),  # "。" and the first byte of another
        ([b"\xe7\x8c", b"\xab", b"\xe3\x80", b"\x82"], [0, 0, 1, 1]),
        ([b"\xe3\x80"], [0]),  # cut off
        ([b"\x80", b"\x82", b"\xe3"], [0, 0, 0]),  # no text
        ([b"\xd8", b"\x8c", b"\xd8\x9f"], [1, 1, 1]),
        ([b"\xf0\x9f", b"\x99\x82"], [0, 0]),
    ],
)
def test_fragments(contents, expected):
    table, ids = fragments(*contents)
    assert table.classify(ids).tolist() == [bool(e) for e in expected]


def test_fragments_do_not_join_across_other_tokens():
    table = DelimiterTable(np.array([False, False, True]), {0: b"\xe3\x80", 1: b"\x82"})
    assert table.classify(np.array([0, 2, 1])).tolist() == [False, True, False]
    assert table.classify(np.array([2, 0, 1, 2])).tolist() == [True] * 4


def test_unknown_ids_are_no_delimiters(tokenizer):
    table = DelimiterTable.from_tokenizer(tokenizer)
    size = len(tokenizer)
    ids = np.array([-1, size, size + 1, 2**31, 2**40])
    assert not table.classify(ids).any()
    assert table.classify(np.array([], np.int64)).tolist() == []


def test_real_pieces(real):
    table = DelimiterTable.from_tokenizer(real)

    def of(piece: str) -> bool:
        return bool(table.classify(np.array([real.convert_tokens_to_ids(piece)]))[0])

    assert all(map(of, ["Ġ", "ĊĊ", ".", ",", "Ġ,", ";", "{", "},", "...", "ĠĠĠ"]))
    assert not any(map(of, ["Ġthe", "a", "(", "-", "'", "<|im_start|>", "<|endoftext|>", "1"]))


@pytest.mark.parametrize("text", ["v1.2.3", "example.com"])
def test_points_inside_words_are_delimiters_by_token(real, text):
    tokens, found = classify(real, text)
    assert [token for token, is_one in zip(tokens, found, strict=True) if is_one] == ["."] * (
        text.count(".")
    )


def test_time_is_linear(real):
    table = DelimiterTable.from_tokenizer(real)
    line = np.array(real.encode("名前はまだ無い。" * 50 + "word, " * 50), np.int64)
    ids = np.tile(line, 400_000 // len(line))
    start = time.process_time()
    found = table.classify(ids)
    assert time.process_time() - start < 4.0  # a quadratic pass would take minutes
    assert np.array_equal(found[: len(line)], found[-len(line) :])
