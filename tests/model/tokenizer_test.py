"""Contract 10: no text yields a control id. Round trips, borders, determinism, limits."""

import json
import pickle
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_s_jax.model import tokenizer as tk

APPS = ("music", "mail", "shop")
WORDS = ("fig", "oak", "elm", "song", "liked", "send", "code", "page", "the", "first", "every")
CALL = "<tool_call>\n<function=execute>\n<parameter=code>\n"
PIECES = ("apis.", "apis.music.", ".liked(", ".send_code(", "(page=", "complete_task(answer=")
PIECES += (
    "print(",
    " in ",
    " for ",
    " = ",
    " += ",
    "range(1, ",
    "['",
    "', '",
    "']",
    "\n    ",
    CALL,
)
LITERALS = (*tk.CONTROLS, "<unk>", "<pad>", "<s>", "</s>", "<0x0A>", "\u2581", " ", "|>", "<|")
LITERALS += PIECES
HF_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
HF_TOKENS += ("<tool_response>", "</tool_response>", "<think>", "</think>")

texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.sampled_from(LITERALS)).map("".join),
    st.lists(st.sampled_from(LITERALS) | st.text(max_size=3)).map("".join),
)


def corpus() -> list[str]:
    draw = random.Random(0)
    programs = [
        f"a = apis.{draw.choice(APPS)}.{draw.choice(WORDS)}(page={draw.randrange(9)})\nprint(a)"
        for _ in range(200)
    ]
    sentences = [" ".join(draw.choices(WORDS, k=8)) + "." for _ in range(200)]
    lists = [str(draw.choices(WORDS, k=4)) for _ in range(100)]
    return programs + sentences + lists


def train(**kwargs) -> bytes:
    return tk.train_sentencepiece(corpus(), PIECES, **{"vocab_size": 700} | kwargs)


@pytest.fixture(scope="module")
def tokenizer() -> tk.SentencePieceTokenizer:
    return tk.SentencePieceTokenizer(train())


def spelled(tokenizer: tk.SentencePieceTokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


@settings(max_examples=400, deadline=None)
@given(text=texts)
def test_no_text_yields_a_control_id_and_every_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert not {tokenizer.unknown_id, *tokenizer.control_ids.values()} & set(ids)
    assert tokenizer.decode(ids) == text.encode("utf-8", "replace").decode()
    assert ids == tokenizer.encode(text)


ODD = ("x<|im_end|><|assistant|>y", "<0x41>", "\u2581", "a\u2581\u2581 b\u2581", "\u2585", "\ufeff")
ODD += ("\0", "a\0b", "\x7f\x1f\x85", "\r\n\t", "  a  ", "\n\n", "", "\U0010ffff", "\u202e\u200d")
ODD += ("\U0001f600e\u0301",)


@pytest.mark.parametrize("text", ODD)
def test_odd_texts_come_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.unknown_id, *tokenizer.control_ids.values()} & set(ids)


def test_decode_leaves_out_control_ids_and_replaces_broken_bytes(tokenizer):
    a, tree = tokenizer.encode("a"), tokenizer.encode("\u6728")
    assert len(tree) == 3
    controls = [*tokenizer.control_ids.values(), tokenizer.unknown_id]
    assert tokenizer.decode([*controls, *a, *controls]) == "a"
    assert tokenizer.decode([*tree[:2], *a]) == "\ufffda"
    assert tokenizer.decode([tree[0], tokenizer.im_end_id, *tree[1:]]) == "\u6728"
    assert tokenizer.encode("\ud800a") == tokenizer.encode("?a")
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="outside of the vocabulary"):
            tokenizer.decode([bad])


def test_ids_are_named_and_all_used(tokenizer):
    assert set(tokenizer.control_ids) == set(tk.CONTROLS)
    assert tokenizer.pad_id == tokenizer.control_ids["<|endoftext|>"] == 0
    assert tokenizer.im_end_id == tokenizer.control_ids["<|im_end|>"]
    assert len({*tokenizer.control_ids.values(), tokenizer.unknown_id}) == 7


def test_pieces_are_one_token_and_the_longest_wins(tokenizer):
    assert [len(tokenizer.encode(piece)) for piece in PIECES] == [1] * len(PIECES)
    assert spelled(tokenizer, "apis.music.x") == ["apis.music.", "x"]
    assert spelled(tokenizer, "['fig', 'oak']") == ["['", "fig", "', '", "oak", "']"]
    assert spelled(tokenizer, CALL + "print(") == [CALL, "print("]


def test_a_call_never_seen_is_spelled_from_the_pieces_of_others(tokenizer):
    assert spelled(tokenizer, "apis.mail.send_code()") == ["apis.", "mail", ".send_code(", ")"]
    assert spelled(tokenizer, "every song.") == ["every", " song", "."]


@pytest.mark.parametrize("leading_space", [True, False])
def test_what_is_learned_is_letters_only(leading_space):
    tokenizer = tk.SentencePieceTokenizer(train(leading_space=leading_space))
    every = {tokenizer.decode([i]) for i in range(tokenizer.vocab_size)}
    learned = {piece for piece in every - set(PIECES) if len(piece) > 1}
    assert {"liked", "every"} <= learned
    assert (" every" in learned) == leading_space
    assert all(piece.removeprefix(" ").isalpha() for piece in learned)
    assert {chr(i) for i in range(32, 127)} | {"\n", "\t"} <= every


def test_training_is_deterministic():
    assert train() == train() == tk.train_sentencepiece(corpus()[::-1], PIECES, vocab_size=700)
    code = (
        "import hashlib, runpy, sys\n"
        "print(hashlib.sha256(runpy.run_path(sys.argv[1])['train']()).hexdigest())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code, __file__],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]


def test_vocabulary_keeps_its_limits(tokenizer):
    assert tokenizer.vocab_size <= 700
    assert tk.SentencePieceTokenizer(train(vocab_size=400)).vocab_size <= 400
    for size in (300, 1025):
        with pytest.raises(ValueError, match=f"vocab_size is {size}"):
            train(vocab_size=size)


@pytest.mark.parametrize("piece", [*tk.CONTROLS, "<unk>", "<0x41>", "", "a\u2581", "\0", "apis."])
def test_pieces_that_cannot_work_are_refused(piece):
    with pytest.raises(ValueError, match=r"[Pp]iece"):
        tk.train_sentencepiece(corpus(), [*PIECES, piece], vocab_size=700)


def test_no_words_is_refused():
    with pytest.raises(ValueError, match="no words"):
        tk.train_sentencepiece(["1 + 1"], PIECES, vocab_size=700)


@pytest.mark.parametrize("piece", [" ", "\n", "\t", ")", "a", '"', ",", "\\n", "é", "or "])
def test_any_other_piece_works(piece):
    model = tk.train_sentencepiece(corpus(), [*PIECES, piece], vocab_size=700)
    assert len(tk.SentencePieceTokenizer(model).encode(piece)) == 1


def test_threads_files_and_pickles_agree(tokenizer, tmp_path):
    (tmp_path / "m.model").write_bytes(tokenizer.model)
    others = [tk.SentencePieceTokenizer.from_file(tmp_path / "m.model")]
    others += [pickle.loads(pickle.dumps(tokenizer))]
    expected = [tokenizer.encode(text) for text in corpus()]
    for other in others:
        assert [other.encode(text) for text in corpus()] == expected
    with ThreadPoolExecutor(4) as pool:
        for ids in pool.map(lambda _: [tokenizer.encode(text) for text in corpus()], range(8)):
            assert ids == expected


def test_another_model_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(tk, "CONTROLS", (*tk.CONTROLS, "<|other|>"))
    with pytest.raises(ValueError, match="lacks the control symbols"):
        tk.SentencePieceTokenizer(tokenizer.model)


@pytest.fixture(scope="module")
def hf() -> tk.HfTokenizer:
    """A byte-level stand-in for Qwen's file: the same kinds of added tokens, few words."""
    fake = tokenizers.Tokenizer(tokenizers.models.BPE())
    fake.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fake.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fake.train_from_iterator(corpus() + [" ".join(HF_TOKENS)] * 50, trainer)
    fake.add_special_tokens(list(HF_TOKENS[:3]))
    fake.add_tokens(list(HF_TOKENS[3:]))
    return tk.HfTokenizer(fake.to_str())


@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.sampled_from(HF_TOKENS) | st.text(max_size=3)).map("".join) | texts)
def test_hf_plain_text_yields_no_added_token(hf, text):
    ids = hf.encode(text)
    assert not {hf.token_id(token) for token in HF_TOKENS} & set(ids)
    assert hf.decode(ids) == text.encode("utf-8", "replace").decode()


def test_hf_markup_matches_and_decode_keeps_what_is_not_special(hf):
    for token in HF_TOKENS:
        assert hf.encode_markup(token) == [hf.token_id(token)]
    ids = hf.encode_markup("<think>\n<tool_call>x</tool_call><|im_end|>")
    assert hf.decode(ids) == "<think>\n<tool_call>x</tool_call>"
    assert max(hf.token_id(token) for token in HF_TOKENS) == hf.vocab_size - 1
    with pytest.raises(ValueError, match="no token"):
        hf.token_id("<|tool|>")


def test_hf_refuses_an_added_token_that_plain_text_can_yield():
    model = tokenizers.models.BPE({"<": 0, ">": 1, "<>": 2}, [("<", ">")])
    bad = tokenizers.Tokenizer(model)
    bad.add_tokens(["<>"])
    with pytest.raises(ValueError, match="Plain text can yield"):
        tk.HfTokenizer(bad.to_str())


CHECKPOINT = Path(__file__).parents[1] / "data" / "qwen35_chat"


def edit(directory: Path, file: str, **changes) -> None:
    content = json.loads((directory / file).read_text()) | changes
    (directory / file).write_text(json.dumps(content))


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "checkpoint"))


def test_hf_reads_a_checkpoint_and_the_tokens_that_only_its_config_adds():
    hf = tk.HfTokenizer.from_checkpoint(CHECKPOINT)
    raw = tk.HfTokenizer((CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"))
    for text in [*tk._PROBES, *corpus(), "".join(HF_TOKENS)]:
        assert hf.encode(text) == raw.encode(text)
        assert hf.encode_markup(text) == raw.encode_markup(text)
    assert raw.vocab_size == 1026
    assert hf.token_id("<|audio_pad|>") == hf.vocab_size - 1 == 1032
    for token in HF_TOKENS:
        assert hf.encode_markup(token) == [hf.token_id(token)]
        assert hf.decode([hf.token_id(token)]) == ("" if "|" in token else token)
        assert hf.token_id(token) not in hf.encode(token)


def test_hf_leaves_out_truncation_and_padding(checkpoint):
    raw = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    raw.save(str(checkpoint / "tokenizer.json"))
    hf, text = tk.HfTokenizer.from_checkpoint(checkpoint), "a b c d e f g h"
    assert hf.decode(hf.encode(text)) == hf.decode(hf.encode_markup(text)) == text
    assert len(hf.encode("a")) == len(hf.encode_markup("a")) == 1


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen2", ""])
def test_hf_refuses_a_class_with_rules_of_its_own(checkpoint, kind):
    # Of these three, transformers takes Qwen2Tokenizer's word for the rule that cuts words.
    edit(checkpoint, "config.json", model_type=kind)
    if not kind:
        (checkpoint / "config.json").unlink()
    with pytest.raises(ValueError, match=r"as Qwen2Tokenizer, and it cuts .* \"Tokenizers"):
        tk.HfTokenizer.from_checkpoint(checkpoint)
    edit(checkpoint, "tokenizer_config.json", tokenizer_class="TokenizersBackend")
    if kind != "qwen2":  # of which transformers knows better
        hf = tk.HfTokenizer.from_checkpoint(checkpoint)
        assert hf.vocab_size == 1033


def test_hf_refuses_other_merges_and_other_added_tokens(checkpoint):
    spec = json.loads((checkpoint / "tokenizer.json").read_text())
    edit(checkpoint, "tokenizer.json", model=spec["model"] | {"ignore_merges": True})
    with pytest.raises(ValueError, match="its vocabulary or merges are not as"):
        tk.HfTokenizer.from_checkpoint(checkpoint)
    loaded = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    spec["added_tokens"][2]["content"] = "<|eot|>"
    file = tokenizers.Tokenizer.from_str(json.dumps(spec))
    assert tk._difference(file, loaded) == "the added token '<|eot|>' is"
    assert tk._difference(loaded, loaded) == ""


def test_hf_says_what_is_wrong_with_a_directory(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json.* name the directory"):
        tk.HfTokenizer.from_checkpoint(tmp_path / "absent")
    edit(checkpoint, "tokenizer_config.json", tokenizer_class="ByT5Tokenizer", unk_token="<unk>")
    (checkpoint / "config.json").unlink()
    with pytest.raises(ValueError, match=r"is the slow ByT5Tokenizer, .* is needed: set"):
        tk.HfTokenizer.from_checkpoint(checkpoint)
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot be read \(.*\): download"):
        tk.HfTokenizer.from_checkpoint(checkpoint)


def test_hf_costs_no_import_of_transformers_before_it_loads():
    code = "import sys, harness_s_jax.model.template; print('transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
