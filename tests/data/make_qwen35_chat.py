"""Writes the tokenizer of tests/data/qwen35_chat: Qwen3.5's rules and a small vocabulary.

Not run by the tests; the same `tokenizers` (0.23) writes the same bytes:

    python tests/data/make_qwen35_chat.py

The rules are those of transformers 5.24 models/qwen3_5/tokenization_qwen3_5.py. The vocabulary is
learned from the official template and the lines below, so that it has merges across the borders of
the template's texts (">\\n\\n", "\\n\\n", "}\\n"; of these Qwen3.5's own has only the second) and
between a letter and its vowel signs.
"""

import json
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

OUT = pathlib.Path(__file__).parent / "qwen35_chat"
VOCABULARY = 1000  # 256 bytes, the rest merges
RULE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = True
ADDED = {
    "<|endoftext|>": SPECIAL,
    "<|im_start|>": SPECIAL,
    "<|im_end|>": SPECIAL,
    "<|object_ref_start|>": SPECIAL,
    "<|object_ref_end|>": SPECIAL,
    "<|box_start|>": SPECIAL,
    "<|box_end|>": SPECIAL,
    "<|quad_start|>": SPECIAL,
    "<|quad_end|>": SPECIAL,
    "<|vision_start|>": SPECIAL,
    "<|vision_end|>": SPECIAL,
    "<|vision_pad|>": SPECIAL,
    "<|image_pad|>": SPECIAL,
    "<|video_pad|>": SPECIAL,
    "<tool_call>": not SPECIAL,
    "</tool_call>": not SPECIAL,
    "<|fim_prefix|>": not SPECIAL,
    "<|fim_middle|>": not SPECIAL,
    "<|fim_suffix|>": not SPECIAL,
    "<|fim_pad|>": not SPECIAL,
    "<|repo_name|>": not SPECIAL,
    "<|file_sep|>": not SPECIAL,
    "<tool_response>": not SPECIAL,
    "</tool_response>": not SPECIAL,
    "<think>": not SPECIAL,
    "</think>": not SPECIAL,
}
IN_CONFIG_ONLY = ("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>")
IN_CONFIG_ONLY += ("<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>")

LINES = (
    "You are an agent. Solve the task by calling the tool, then give the answer.\n\n",
    "How many songs in my library did I like before the first of May? Don't guess; it's easy.\n",
    "I'll look at the first page of the list.\n\nThen I'd print what is there.\n\n\n",
    "print(apis.music.show_liked_songs(page=0))\nfor song in songs:\n    total += song['likes']\n",
    '{"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}\n',
    '[{"title": "Fig", "likes": 12}, {"title": "Oak", "likes": 345}]\n\n',
    "Error: KeyError\r\n\r\n  at line 3\t\t(main)  \n",
    "# Title\n\n- one\n- two\n\n```python\nx = 1\n```\n\n<b>done</b>\n\n(ok)\n\n",
    "caf\u00e9 na\u00efve \u2014 \u201cquoted\u201d \u4e2d\u6587\uff0c\u65e5\u672c\u8a9e\u3002\n\n",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0939\u093f\u0928\u094d\u0926\u0940 "
    "\u0e01\u0e33\u0e25\u0e31\u0e07 \u0e17\u0e35\u0e48 x\u0302\n",
)


def build() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(RULE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    template = (OUT / "chat_template.jinja").read_text(encoding="utf-8").replace("\\n", "\n")
    for token in ADDED:
        template = template.replace(token, "\n")
    tokenizer.train_from_iterator([template, *LINES, *LINES], trainer)
    for token, special in ADDED.items():
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    return tokenizer


def config(tokenizer: Tokenizer) -> dict:
    """Of tokenizer_config.json, what a checkpoint's has; every added token is listed in it."""
    first = tokenizer.get_vocab_size()
    ids = {token: tokenizer.token_to_id(token) for token in ADDED}
    ids |= {token: first + i for i, token in enumerate(IN_CONFIG_ONLY)}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    decoder = {
        str(i): {"content": token, **flags, "special": ADDED.get(token, SPECIAL)}
        for token, i in ids.items()
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def main() -> None:
    tokenizer = build()
    tokenizer.save(str(OUT / "tokenizer.json"), pretty=False)
    for name, content in (
        ("tokenizer_config.json", config(tokenizer)),
        ("config.json", {"model_type": "qwen3_5"}),
    ):
        (OUT / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
