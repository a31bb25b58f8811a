"""Tokenizer: counts known from outside, losslessness, the barrier between text and special tokens, files."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from transformers import AutoTokenizer

from perilune import Error
from perilune.chat import Segment, StreamDecoder, Tokenizer, render, train_bpe
from perilune.chat.bpe import PIECE, RUN, byte_alphabet, pieces
from perilune.chat.specials import K2, K3

DATA = Path(__file__).parents[1] / "data"
MARKERS = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "<|media_pad|>", "<|im_end|>", "<think>"]
# Arbitrary text, and text made to look like the format.
anything = st.text() | st.lists(st.sampled_from([*MARKERS, "message", 'role="system"', " ", "\n", "é北"])).map("".join)


@pytest.fixture(scope="module")
def kimi():
    return Tokenizer.load(DATA / "tokenizer" / "kimi.tiktoken.model")


@pytest.fixture(scope="module")
def small():
    sources = sorted(Path(json.__file__).parent.glob("*.py"))
    return train_bpe((path.read_text(encoding="utf-8") for path in sources), 1024)


@pytest.fixture(params=["kimi", "small"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def test_ids_of_the_released_vocabulary(kimi):
    assert kimi.vocab_size == 163_840
    assert (kimi.eos_id, kimi.text_end_id, kimi.bos_id, kimi.pad_id) == (163_586, 163_585, 163_584, 163_839)
    assert [kimi.specials[name] for name in ("<|open|>", "<|close|>", "<|sep|>")] == [163_587, 163_588, 163_589]
    assert kimi.specials["<|media_begin|>"] == 163_602
    assert kimi.specials["<|reserved_token_163700|>"] == 163_700
    assert len(kimi.specials) == 256


def test_names_of_the_k2_family():
    kimi = Tokenizer.load(DATA / "tokenizer" / "kimi.tiktoken.model", family="k2")
    assert kimi.eos_token == "<|im_end|>"
    assert kimi.specials["<|im_middle|>"] == 163_601
    assert (kimi.specials["<think>"], kimi.specials["</think>"]) == (163_606, 163_607)
    assert "<|open|>" not in kimi.specials


@pytest.mark.parametrize("case", json.loads((DATA / "tokenizer" / "prompt_tokens.json").read_text(encoding="utf-8")))
def test_published_prompt_counts(kimi, case):
    """Usage counts the prompt without its last three tokens, the stub that opens the next channel."""
    ids, by_model = kimi.encode_segments(render(**case["request"]))
    assert len(ids) - 3 == case["prompt_tokens"]
    assert len(ids) == len(by_model)


@settings(deadline=None)
@given(text=anything)
def test_text_comes_back_and_never_becomes_a_special_token(kimi, small, text):
    for tokenizer in (kimi, small):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not any(tokenizer.is_special(id_) for id_ in ids)


@settings(deadline=None)
@given(name=anything, content=anything, reasoning=anything, key=anything, value=anything, result=anything)
def test_no_text_of_a_request_can_become_a_marker(kimi, small, name, content, reasoning, key, value, result):
    """The special ids of a rendering are those of the same conversation with harmless text everywhere."""

    def conversation(name, content, reasoning, key, value, result):
        call = {"id": "c", "function": {"name": name or "f", "arguments": json.dumps({key: value})}}
        return [
            {"role": "system", "name": name, "content": content},
            {"role": "user", "content": [{"type": "text", "text": content}, {"type": "text", "text": value}]},
            {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": result},
        ]

    tools = [{"type": "function", "function": {"name": "f", "description": content, "parameters": {key: value}}}]
    hostile = render(conversation(name, content, reasoning, key, value, result), tools=tools)
    harmless = render(conversation(*"abcdef"), tools=tools)
    for tokenizer in (kimi, small):
        special = [
            [id_ for id_ in tokenizer.encode_segments(s)[0] if tokenizer.is_special(id_)] for s in (hostile, harmless)
        ]
        assert special[0] == special[1]


def test_the_pattern_cuts_where_it_should(kimi):
    words = HfTokenizer.from_str(small_json()).pre_tokenizer
    text = "It's 北京 a中b 12345  foo!?\r\n\n  Bar"
    cut = [text[start:end] for _, (start, end) in words.pre_tokenize_str(text)]
    assert cut == ["It's", " ", "北京", " a", "中", "b", " ", "123", "45", " ", " foo", "!?\r\n\n", " ", " Bar"]


def small_json():
    from perilune.chat.bpe import train

    return json.dumps(train(["a"], 300)._spec)


@pytest.mark.parametrize("text", ["a" * (RUN + 7), " " * (2 * RUN), "ab " * (PIECE // 2), "x" * RUN + "\n" * RUN + "é"])
def test_long_text_is_cut_into_bounded_pieces(kimi, text):
    cut = list(pieces(text))
    assert "".join(cut) == text
    assert all(0 < len(piece) <= PIECE for piece in cut)
    for piece in cut:
        assert max(len(run) for run in piece.split()) <= RUN if piece.split() else len(piece) <= RUN
    assert kimi.decode(kimi.encode(text)) == text


def test_text_that_utf8_cannot_hold(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "😀"


def test_segments(tokenizer):
    segments = [Segment("<|open|>", True), Segment("<|open|>hi", False, True), Segment("<|sep|>", True, True)]
    ids, by_model = tokenizer.encode_segments(segments)
    inner = tokenizer.encode("<|open|>hi")
    assert ids == [tokenizer.specials["<|open|>"], *inner, tokenizer.specials["<|sep|>"]]
    assert by_model == [False] + [True] * (len(inner) + 1)
    with pytest.raises(Error, match="not a special token"):
        tokenizer.encode_segments([Segment("<|nope|>", True)])


def test_skipping_special_tokens_keeps_the_structure(tokenizer):
    ids = [tokenizer.specials[name] for name in ("[BOS]", "<|open|>", "<|end_of_msg|>", "<|sep|>")]
    assert tokenizer.decode(ids) == "[BOS]<|open|><|end_of_msg|><|sep|>"
    assert tokenizer.decode(ids, skip_special=True) == "<|open|><|sep|>"


@pytest.mark.parametrize("id_", [-1, 163_840])
def test_ids_outside_the_vocabulary(kimi, id_):
    with pytest.raises(Error, match="outside the vocabulary"):
        kimi.decode([id_])


@settings(deadline=None)
@given(data=st.data())
def test_streamed_text_equals_text_at_once(small, data):
    """Any ids, also those that are no UTF-8 together, in any cut."""
    ids = data.draw(st.lists(st.integers(0, small.vocab_size - 1), max_size=40) | anything.map(small.encode))
    stream, at, text = StreamDecoder(small), 0, ""
    while at < len(ids):
        step = data.draw(st.integers(1, 5))
        text += stream.push(ids[at : at + step])
        at += step
    assert text + stream.finish() == small.decode(ids)


def test_a_character_is_held_back_until_whole(small):
    stream = StreamDecoder(small)
    ids = small.encode("😀")
    assert len(ids) > 1
    assert [stream.push([id_]) for id_ in ids] == [""] * (len(ids) - 1) + ["😀"]


def test_training_gives_exactly_the_size_with_the_special_tokens_last(small):
    assert small.vocab_size == 1024
    assert list(small.specials.values()) == list(range(1024 - len(K3), 1024))
    assert small.eos_token == "<|end_of_msg|>"
    text = "def f(self): return None"
    assert len(small.encode(text)) < len(text) / 2


def test_training_is_repeatable():
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    one, two = train_bpe(texts, 700), train_bpe(iter(texts), 700)
    assert [one.token_bytes(id_) for id_ in range(700)] == [two.token_bytes(id_) for id_ in range(700)]


def test_too_little_text_leaves_reserved_ids():
    tokenizer = train_bpe(["abab"], 300)
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode(tokenizer.encode("zürich 北京")) == "zürich 北京"
    assert "<|reserved_token_260|>" in tokenizer.specials
    assert tokenizer.specials["[PAD]"] == 299
    with pytest.raises(Error, match="vocab_size is 200"):
        train_bpe([], 200)


def test_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    text = "Grüße <|open|> 北京 12345\n\n  x"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.specials == tokenizer.specials
    assert (again.vocab_size, again.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)


def test_released_file_is_written_back_byte_for_byte(kimi, tmp_path):
    kimi.save(tmp_path)
    assert (tmp_path / "tiktoken.model").read_bytes() == (DATA / "tokenizer" / "kimi.tiktoken.model").read_bytes()


def test_k2_names_survive_a_save(tmp_path):
    Tokenizer.load(DATA / "tokenizer" / "kimi.tiktoken.model", family="k2").save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert all(again.specials[name] == 163_584 + offset for offset, name in K2.items())


def test_transformers_reads_the_trained_tokenizer(small, tmp_path):
    """Its ids agree with ours; it recognises special tokens in text, as ours does not."""
    small.save(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    text = "class A(object):\n    '''Grüße 北京'''\n"
    assert other(text, add_special_tokens=False).input_ids == small.encode(text)
    assert other.decode(small.encode(text)) == text
    assert (len(other), other.eos_token_id, other.pad_token_id) == (1024, small.eos_id, small.pad_id)
    assert other("<|open|>").input_ids == [small.specials["<|open|>"]]


def test_special_tokens_inside_the_vocabulary_of_a_foreign_file_are_not_recognised(small, tmp_path):
    """Some files list special tokens in the model's vocabulary too and match whole words there before merging."""
    small.save(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    spec["model"]["ignore_merges"] = True
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": 1024, "content": "Hello"})
    spec["model"]["vocab"]["Hello"] = 1024
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.is_special(1024)
    assert 1024 not in loaded.encode("Hello")


def lines(tokens):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.model", b"???\n", "a.model:1"),
        ("a.model", lines([bytes([i]) for i in range(256)]) + b"YWI= x\n", "a.model:257"),
        ("a.model", lines([bytes([i]) for i in range(255)]), "0xff"),
        ("a.model", lines([bytes([i]) for i in range(256)]) + b"YWI= 300\n", "ranks"),
        ("tokenizer.json", b"{", "tokenizer.json"),
        ("tokenizer.json", b"[]", "JSON object"),
        ("tokenizer.json", b'{"model": {"type": "WordPiece"}}', "byte-level BPE"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 0}}, "decoder": {"type": "ByteLevel"}}', "no token"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Error, match=message):
        Tokenizer.load(tmp_path / name)


def test_missing_files(tmp_path):
    with pytest.raises(Error, match="neither"):
        Tokenizer.load(tmp_path)
    with pytest.raises(Error, match="does not exist"):
        Tokenizer.load(tmp_path / "x.model")


def test_byte_alphabet_agrees_with_the_library():
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(byte_alphabet()) == sorted(ByteLevel.alphabet())
    assert len(set(byte_alphabet())) == 256
