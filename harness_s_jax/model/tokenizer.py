"""Text to token ids and back: SentencePiece for the embedded policy, a Hugging Face file for Qwen.

Both keep contract 10: `encode` never yields a control id, whatever the text holds.

How the SentencePiece model is made, and why:

- BPE over a list of counted words. Only runs of ASCII letters, with or without the space before
  them, are learned; punctuation, digits and newlines never merge. So nothing that is learned
  crosses the border of an app, an API or an argument, and a call never seen before is spelled from
  the pieces of other calls. Merges across a border exist only where the caller lists them.
- The caller's `pieces` are user-defined symbols. In BPE these are cut out of the text first, at
  each position the longest that fits, and are never merged further. (In a unigram model they are
  only scored, and can lose.) They match inside words too, as `or ` does in `for `: let a piece
  begin and end at a border, as ` or ` and `.liked(` do.
- All of printable ASCII is in the vocabulary; anything else becomes its UTF-8 bytes.
"""

from __future__ import annotations

import io
import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece as spm
import tokenizers

MAX_VOCAB = 1024

PAD = "<|endoftext|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
TOOL = "<|tool|>"
IM_END = "<|im_end|>"
CONTROLS = (PAD, SYSTEM, USER, ASSISTANT, TOOL, IM_END)

_UNKNOWN = "<unk>"
_SPACE = "\u2581"  # how SentencePiece writes a space inside a piece
_CHARACTERS = string.digits + string.ascii_letters + string.punctuation + "\n\t"


def train_sentencepiece(
    texts: Iterable[str], pieces: Sequence[str], *, vocab_size: int, leading_space: bool = True
) -> bytes:
    """Trains a SentencePiece model; the same arguments give the same bytes.

    Args:
        texts: the corpus. Only how often each word occurs matters, not the order.
        pieces: code fragments that become one token each wherever they occur, in this id order.
            They may hold spaces and newlines.
        vocab_size: the most ids the model may have, at most 1,024. It has fewer when the corpus has
            no more words to merge.
        leading_space: learn words with the space before them, for short prose. False keeps the
            space a token of its own, so that a word has one id wherever it stands.

    Returns:
        The serialised model, for `SentencePieceTokenizer`.

    Raises:
        ValueError: a piece cannot be used, the vocabulary is too small or large, or no text.
    """
    _check_pieces(pieces)
    smallest = len(CONTROLS) + 1 + len({*pieces, *_CHARACTERS, " "}) + 256  # the bytes
    if not smallest <= vocab_size <= MAX_VOCAB:
        raise ValueError(
            f"vocab_size is {vocab_size}, but with {len(pieces)} pieces it must be from {smallest} "
            f"to {MAX_VOCAB}: change vocab_size or pass fewer pieces."
        )
    counts = _count_words(texts, pieces, leading_space)
    if not counts:
        raise ValueError("The texts hold no words beside the pieces: pass texts to learn from.")
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([" \t1", *(f"{word}\t{n}" for word, n in sorted(counts.items()))]),
        input_format="tsv",
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        # Ids: pad 0, <unk> 1 (SentencePiece insists on one), the other controls, then the pieces.
        pad_id=0,
        pad_piece=PAD,
        unk_id=1,
        unk_piece=_UNKNOWN,
        bos_id=-1,
        eos_id=-1,
        control_symbols=list(CONTROLS[1:]),
        user_defined_symbols=[piece.replace(" ", _SPACE) for piece in pieces],
        # A U+2581 or a piece in here is an error, which for U+2581 drops them all in silence.
        required_chars="".join(c for c in _CHARACTERS if c not in pieces),
        character_coverage=1.0,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        input_sentence_size=0,
        shuffle_input_sentence=False,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


class SentencePieceTokenizer:
    """A trained model. Safe to share between threads, and cheap to pickle.

    `decode(encode(text)) == text` for every text that UTF-8 can carry; a lone surrogate becomes
    "?", so that `encode` accepts any str.
    """

    def __init__(self, model: bytes):
        self.model = model
        self._processor = spm.SentencePieceProcessor(model_proto=model)
        ids = range(self._processor.get_piece_size())
        controls = [i for i in ids if self._processor.is_control(i)]
        self.control_ids = {self._processor.id_to_piece(i): i for i in controls}
        if missing := set(CONTROLS) - set(self.control_ids):
            raise ValueError(
                f"The SentencePiece model lacks the control symbols {sorted(missing)}: "
                "train it with train_sentencepiece."
            )
        self.pad_id = self.control_ids[PAD]
        self.system_id = self.control_ids[SYSTEM]
        self.user_id = self.control_ids[USER]
        self.assistant_id = self.control_ids[ASSISTANT]
        self.tool_id = self.control_ids[TOOL]
        self.im_end_id = self.control_ids[IM_END]
        self.unknown_id = self._processor.unk_id()  # encode never gives it; decode leaves it out
        self._bytes_V = [self._bytes_of(i) for i in ids]
        # SentencePiece would read a literal U+2581 as a space, so it is always spelled in bytes.
        self._mark_ids = [self._processor.piece_to_id(f"<0x{b:02X}>") for b in _SPACE.encode()]

    @classmethod
    def from_file(cls, path: str | Path) -> SentencePieceTokenizer:
        """Loads what `train_sentencepiece` returned from a file."""
        return cls(Path(path).read_bytes())

    def __reduce__(self):
        return SentencePieceTokenizer, (self.model,)

    @property
    def vocab_size(self) -> int:
        """How many ids there are, control ids and `<unk>` included."""
        return len(self._bytes_V)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; never a control id."""
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode()
            if _SPACE in text:
                first, *rest = map(self._processor.encode_as_ids, text.split(_SPACE))
                return first + [i for part in rest for i in (*self._mark_ids, *part)]
        return self._processor.encode_as_ids(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids. Control ids are left out; bytes that are not UTF-8 become U+FFFD."""
        ids = [int(i) for i in ids]
        if bad := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise ValueError(
                f"Ids {bad[:8]} are outside of the vocabulary of {self.vocab_size}: "
                "mask the padded part of the logits when sampling."
            )
        return b"".join([self._bytes_V[i] for i in ids]).decode("utf-8", "replace")

    def _bytes_of(self, i: int) -> bytes:
        """What an id adds to the text."""
        if self._processor.is_control(i) or self._processor.is_unknown(i):
            return b""
        piece = self._processor.id_to_piece(i)
        if self._processor.is_byte(i):
            return bytes([int(piece[3:-1], 16)])  # "<0x41>"
        return piece.replace(_SPACE, " ").encode()


class HfTokenizer:
    """A checkpoint's `tokenizer.json`, with and without the matching of its added tokens.

    Matching cannot just be turned off for "special" tokens: Qwen's `<think>`, `<tool_call>` and
    `<tool_response>` are added tokens that are not special, and would still match. So plain text
    goes through a second tokenizer that has no added tokens at all.

    Qwen normalises to NFC, so text that is not in NFC does not come back as it was.
    """

    def __init__(self, tokenizer_json: str):
        self._markup = tokenizers.Tokenizer.from_str(tokenizer_json)
        spec = json.loads(tokenizer_json)
        added, spec["added_tokens"] = spec["added_tokens"], []
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(spec))
        for token in added:
            if token["id"] in self.encode(token["content"]):
                raise ValueError(
                    f"Plain text can yield the added token {token['content']!r}, because the "
                    "vocabulary proper holds it: use a tokenizer.json that keeps the two apart."
                )

    @classmethod
    def from_file(cls, path: str | Path) -> HfTokenizer:
        """Loads a `tokenizer.json`."""
        return cls(Path(path).read_text(encoding="utf-8"))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's logits may be padded beyond it."""
        return max(self._markup.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; never an added token."""
        text = text.encode("utf-8", "replace").decode()
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_markup(self, text: str) -> list[int]:
        """Ids of the template's own text, added tokens matched. Never for text from elsewhere."""
        return self._markup.encode(text, add_special_tokens=False).ids

    def token_id(self, token: str) -> int:
        """The id of one added token."""
        i = self._markup.token_to_id(token)
        if i is None:
            raise ValueError(f"The tokenizer has no token {token!r}: is it Qwen3.5's?")
        return i

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids. Special tokens are left out; `<think>` and `<tool_call>` are kept."""
        return self._markup.decode([int(i) for i in ids], skip_special_tokens=True)


def _check_pieces(pieces: Sequence[str]) -> None:
    if isinstance(pieces, str):
        raise ValueError("pieces is one string; it must be a sequence of strings.")
    if repeated := [piece for piece, count in Counter(pieces).items() if count > 1]:
        raise ValueError(f"Pieces {repeated} are given more than once: give each once.")
    for piece in pieces:
        if piece in (*CONTROLS, _UNKNOWN) or re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            raise ValueError(f"Piece {piece!r} names a control symbol or a byte: leave it out.")
        if not piece or _SPACE in piece or "\0" in piece:
            raise ValueError(f"Piece {piece!r} is empty or holds U+2581 or NUL: leave it out.")


def _count_words(texts: Iterable[str], pieces: Sequence[str], leading_space: bool) -> Counter[str]:
    """Counts the runs of letters that are left when the pieces have been cut out."""
    word = r"( ?[A-Za-z]+)" if leading_space else r"([A-Za-z]+)"
    fixed = [re.escape(piece) for piece in sorted(pieces, key=len, reverse=True)]
    pattern = re.compile("|".join([*fixed, word]))
    return Counter(m[1] for text in texts for m in pattern.finditer(text) if m[1])
