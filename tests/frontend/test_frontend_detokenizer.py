"""Text that comes token by token is the text that a whole decode gives, however it is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dpi_engine.frontend.detokenizer import Detokenizer, Vocabulary

CORPUS = [
    'The quick brown fox jumps over the lazy dog; 1234567890 times, she said: "don\'t stop".',
    "def main(): return {'key': [1, 2, 3]}\n\n\tif x != y: pass",
    "漢字かな交じり文 한국어 텍스트 العربية русский язык ελληνικά हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 é e\u0301 𠀀𠀁 🧑‍🚀",
] * 4


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool é>", special=False)])
    return tokenizer


def with_spaces() -> Tokenizer:
    """Spaces as U+2581 and single bytes where the vocabulary ends; the first space of a text is dropped."""
    alphabet = sorted({c for line in CORPUS for c in line if c.isascii() and c.isprintable()} | {"\u2581"})
    vocab = {"<unk>": 0, "</s>": 1}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for character in alphabet:
        vocab.setdefault(character, len(vocab))
    for word in ("th", "the", "\u2581t", "\u2581th", "\u2581the"):
        vocab.setdefault(word, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


KINDS: dict[str, Vocabulary] = {"bytes": Vocabulary(byte_level()), "spaces": Vocabulary(with_spaces())}
BOTH = pytest.mark.parametrize("kind", list(KINDS))

CHARACTERS = st.one_of(
    st.characters(exclude_categories=("Cs",)),
    st.characters(min_codepoint=0x10000, max_codepoint=0x10FFFF, exclude_categories=("Cs",)),
    st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF),
    st.sampled_from(["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "e\u0301", "𠀀", "\u200d", "\ufffd", " ", "  ", "\n", "the ", " th"]),
)
TEXTS = st.lists(CHARACTERS, max_size=24).map("".join)


def chunks(draw: Callable[[st.SearchStrategy[int]], int], ids: list[int]) -> list[list[int]]:
    out, at = [], 0
    while at < len(ids):
        n = draw(st.integers(1, 5))
        out.append(ids[at : at + n])
        at += n
    return out


def streamed(vocabulary: Vocabulary, pieces: list[list[int]], **options: object) -> str:
    detokenizer = Detokenizer(vocabulary, **options)  # type: ignore[arg-type]
    out = ""
    for ids in pieces:
        piece = detokenizer.push(ids)
        assert piece.tokens_used == len(ids)
        out += piece.text
    return out + detokenizer.finish().text


@BOTH
@settings(max_examples=80, deadline=None)
@given(data=st.data(), text=TEXTS)
def test_streamed_text_is_the_text_decoded_at_once(kind: str, data: st.DataObject, text: str) -> None:
    vocabulary = KINDS[kind]
    ids = vocabulary.tokenizer.encode(text).ids
    assert streamed(vocabulary, chunks(data.draw, ids)) == vocabulary.tokenizer.decode(ids)


@BOTH
@settings(max_examples=120, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_random_tokens_too(kind: str, data: st.DataObject, skip: bool) -> None:
    """Broken UTF-8 in any place and any order, special and added tokens between."""
    vocabulary = KINDS[kind]
    size = vocabulary.tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=16))
    whole = vocabulary.tokenizer.decode(ids, skip_special_tokens=skip)
    if kind == "spaces":
        # One bad byte makes this decoder change the good bytes before it, so no stream can give the same.
        assume("\ufffd" not in whole)
    assert streamed(vocabulary, chunks(data.draw, ids), skip_special_tokens=skip) == whole


def test_text_comes_as_soon_as_its_characters_are_complete() -> None:
    vocabulary = KINDS["bytes"]
    detokenizer = Detokenizer(vocabulary)
    out = []
    for token_id in vocabulary.tokenizer.encode("aŜb").ids:
        out.append(detokenizer.push([token_id]).text)
    assert "".join(out) == "aŜb"
    assert detokenizer.finish().text == ""


@BOTH
def test_bytes_left_over_at_the_end_are_shown_not_lost(kind: str) -> None:
    vocabulary = KINDS[kind]
    whole = vocabulary.tokenizer.encode("x\U000e0041").ids
    ids = whole[:-1]
    detokenizer = Detokenizer(vocabulary)
    text = detokenizer.push(ids).text
    assert text == "x"
    assert text + detokenizer.finish().text == vocabulary.tokenizer.decode(ids)
    assert "\ufffd" in vocabulary.tokenizer.decode(ids)


def test_the_first_space_of_an_output_is_kept_behind_its_prompt() -> None:
    vocabulary = KINDS["spaces"]
    prompt = vocabulary.tokenizer.encode("say").ids
    output = vocabulary.tokenizer.encode("the the").ids
    assert streamed(vocabulary, [[t] for t in output]) == "the the"
    assert streamed(vocabulary, [[t] for t in output], prompt_token_ids=prompt) == " the the"


@BOTH
@settings(max_examples=80, deadline=None)
@given(data=st.data(), include=st.booleans())
def test_stop_strings_end_at_the_token_that_completes_them(kind: str, data: st.DataObject, include: bool) -> None:
    vocabulary = KINDS[kind]
    text = data.draw(st.text("the stop漢", max_size=20))
    ids = vocabulary.tokenizer.encode(text).ids
    whole = vocabulary.tokenizer.decode(ids)
    stops = data.draw(st.lists(st.text("the stop漢", min_size=1, max_size=3), min_size=1, max_size=3))
    detokenizer = Detokenizer(vocabulary, stop=stops, include_stop_str_in_output=include)
    out, used, found = "", 0, None
    for part in chunks(data.draw, ids):
        piece = detokenizer.push(part)
        out, used, found = out + piece.text, used + piece.tokens_used, piece.stop
        if found is not None:
            break
    else:
        last = detokenizer.finish()
        out, found = out + last.text, last.stop
    ends = [(whole.find(s) + len(s), -len(s), s) for s in stops if s in whole]
    if not ends:
        assert (out, found, used) == (whole, None, len(ids))
        return
    end, _, stop = min(ends)
    assert found == stop
    assert out == whole[: end if include else end - len(stop)]
    assert Detokenizer(vocabulary, stop=stops).push(ids[: used - 1]).stop is None
    assert detokenizer.push(ids) == detokenizer.finish()  # nothing after the end


def test_a_stop_token_counts_and_its_text_is_left_out() -> None:
    vocabulary = KINDS["bytes"]
    (dot,) = vocabulary.tokenizer.encode(".").ids
    for include, expected in ((False, "x"), (True, "x.")):
        detokenizer = Detokenizer(vocabulary, include_stop_str_in_output=include)
        piece = detokenizer.push([*vocabulary.tokenizer.encode("x").ids, dot], last_is_stop_token=True)
        assert (piece.text, piece.tokens_used) == (expected, 2)


def test_stop_strings_wait_for_the_minimum_of_tokens() -> None:
    vocabulary = KINDS["bytes"]
    ids = [vocabulary.tokenizer.token_to_id(c) for c in "xaxa"]
    piece = Detokenizer(vocabulary, stop=["a"], min_tokens=2).push(ids)
    assert (piece.text, piece.stop, piece.tokens_used) == ("xax", "a", 4)


def test_token_bytes_and_texts() -> None:
    vocabulary = KINDS["bytes"]
    tokenizer = vocabulary.tokenizer
    for text in ("the", " é漢", "\x00\n", "🏳️‍🌈"):
        ids = tokenizer.encode(text).ids
        assert b"".join(vocabulary.token_bytes(i) for i in ids) == text.encode()
    added = tokenizer.token_to_id("<tool é>")
    assert vocabulary.token_bytes(added) == "<tool é>".encode()
    assert vocabulary.token_text(tokenizer.token_to_id("<|end|>")) == "<|end|>"
    assert vocabulary.is_special(tokenizer.token_to_id("<|end|>"))
    assert not vocabulary.is_special(added)
    first_byte = tokenizer.encode("漢").ids
    if len(first_byte) > 1:
        assert vocabulary.token_text(first_byte[0]) == "\ufffd"
    for outside in (-1, tokenizer.get_vocab_size() + 7):
        assert vocabulary.token_bytes(outside) == b""


def test_token_bytes_of_a_vocabulary_with_spaces() -> None:
    vocabulary = KINDS["spaces"]
    ids = vocabulary.tokenizer.encode("the 漢").ids
    assert b"".join(vocabulary.token_bytes(i) for i in ids) == " the 漢".encode()
