"""Text to token ids and back: SentencePiece for the embedded policy, Hugging Face for Qwen.

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
    """A fast Hugging Face tokenizer, with and without the matching of its added tokens.

    Matching cannot just be turned off for "special" tokens: Qwen's `<think>`, `<tool_call>` and
    `<tool_response>` are added tokens that are not special, and would still match. So plain text
    goes through a second tokenizer that has no added tokens at all.

    Qwen normalises to NFC, so text that is not in NFC does not come back as it was.
    """

    def __init__(self, tokenizer_json: str):
        spec = json.loads(tokenizer_json)
        spec["truncation"] = spec["padding"] = None  # a file saved after use may hold them
        self._markup = tokenizers.Tokenizer.from_str(json.dumps(spec))
        added, spec["added_tokens"] = spec["added_tokens"], []
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(spec))
        for token in added:
            if token["id"] in self.encode(token["content"]):
                raise ValueError(
                    f"Plain text can yield the added token {token['content']!r}, because the "
                    "vocabulary proper holds it: use a tokenizer.json that keeps the two apart."
                )

    @classmethod
    def from_checkpoint(cls, directory: str | Path) -> HfTokenizer:
        """Loads a checkpoint directory's tokenizer, as transformers.AutoTokenizer reads it.

        AutoTokenizer rather than tokenizer.json alone, because tokenizer_config.json may add
        tokens (Qwen3.5's audio tokens). But AutoTokenizer may also pick a class that keeps only the
        file's vocabulary and merges and cuts words by a rule of its own: Qwen2Tokenizer does, and
        its rule is not Qwen3.5's. So the two are compared, and one that reads text differently
        from its tokenizer.json is refused. Reads local files only, and runs no code from them.

        Raises:
            ValueError: there is no fast tokenizer, it cannot be read, or the two differ.
        """
        directory = Path(directory)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"{directory} has no tokenizer.json, which a fast tokenizer needs: name the "
                "directory of a checkpoint as it was published, or save its tokenizer there."
            )
        import transformers  # here, because it takes a second

        try:
            loaded = transformers.AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
            raw = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ValueError(
                f"The tokenizer in {directory} cannot be read ({error}): download the "
                "checkpoint's tokenizer files again."
            ) from error
        name = type(loaded).__name__
        if not loaded.is_fast:
            raise ValueError(
                f"The tokenizer in {directory} is the slow {name}, and a fast one is needed: "
                'set "tokenizer_class" to "TokenizersBackend" in its tokenizer_config.json.'
            )
        if difference := _difference(raw, loaded.backend_tokenizer):
            raise ValueError(
                f"AutoTokenizer reads {directory} as {name}, and {difference} not as its "
                'tokenizer.json says: set "tokenizer_class" to "TokenizersBackend" in its '
                "tokenizer_config.json, or install a transformers that knows the model."
            )
        return cls(loaded.backend_tokenizer.to_str())

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


# What normalisers and rules for cutting words treat differently: accents apart from their letter,
# compatibility characters, vowel signs, contractions, digits, white space, line ends, scripts.
_PROBES = (
    "e\u0301 \u00e9 \u212b \ufb01 \uff21 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\u0e01\u0e33\u0e25\u0e31\u0e07 \u0645\u064f\u062d \u05e9\u05c1\u05b8 x\u0301\u0302",
    "I'll WE'RE don't it's 3.14 12345 \u0662\u0663 a1b2",
    "  a\t\tb \n\n  c\r\n \r\n\u3000d \u00a0\u2028e   ",
    'x = {"k": [1, 2]};\n\n    return f(x)  # </a>\n\n\nb!?\n.',
    "\u4e2d\u6587\uff0c\u65e5\u672c \U0001f469\u200d\U0001f52c \u200b\ufeff",
)


def _difference(file: tokenizers.Tokenizer, loaded: tokenizers.Tokenizer) -> str:
    """What of a tokenizer.json is not the same when loaded, or "". Added tokens may be more."""
    models = (json.loads(t.to_str())["model"] for t in (file, loaded))
    one, other = ({k: v for k, v in model.items() if v} for model in models)  # "" and null agree
    if one != other:
        return "its vocabulary or merges are"
    added = loaded.get_added_tokens_decoder()
    for i, token in file.get_added_tokens_decoder().items():
        if i not in added or added[i].content != token.content:
            return f"the added token {token.content!r} is"
    for text in _PROBES:
        if _words(file, text) != _words(loaded, text):
            return f"it cuts the text {text!r} into words"
    return ""


def _words(tokenizer: tokenizers.Tokenizer, text: str) -> list[str]:
    """What a tokenizer cuts a text into before it merges anything."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return [text]
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


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
