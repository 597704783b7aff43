"""Writes tests/data/qwen35_tiny: a tiny Qwen3.5 text model and what the reference makes of it.

Not run by the tests. In an environment of its own (torch 2.13, transformers 5.24, safetensors):

    python tests/data/make_qwen35_tiny.py

config.json and model.safetensors are as transformers saves them; reference.npz holds ids_BT,
logits_BTV, the mean next-token loss, its gradient under `grad/<tensor name>`, and the logits of
the bfloat16 model for a statistical comparison.
"""

import pathlib

import numpy as np
import torch
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

OUT = pathlib.Path(__file__).parent / "qwen35_tiny"
ROWS, TOKENS = 2, 150  # not a multiple of the chunk of 64
# Spread of each kind of parameter, (mean, standard deviation); the library's own initial values
# (norms 0 or 1, dt_bias 1) would hide a missing 1 + w, swapped heads or a swapped gate.
SPREAD = {
    "linear_attn.norm": (1.0, 0.25),
    "norm": (0.0, 0.25),
    "A_log": (0.5, 1.0),
    "dt_bias": (-1.5, 1.5),
    "conv1d": (0.0, 0.5),
    "embed_tokens": (0.0, 0.15),
}


def build() -> Qwen3_5ForCausalLM:
    config = Qwen3_5TextConfig(
        vocab_size=448,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_conv_kernel_dim=4,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen3_5ForCausalLM(config).to(torch.float32).eval()
    random = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fan_in_spread = (0.0, 0.8 * parameter.shape[-1] ** -0.5)
            found = (spread for part, spread in SPREAD.items() if part in name)
            mean, deviation = next(found, fan_in_spread)
            parameter.copy_(torch.randn(parameter.shape, generator=random) * deviation + mean)
    return model


def main() -> None:
    torch.set_num_threads(1)
    model = build()
    model.save_pretrained(OUT)
    (OUT / "generation_config.json").unlink(missing_ok=True)

    random = np.random.default_rng(21)
    ids_BT = random.integers(2, model.config.vocab_size, (ROWS, TOKENS))
    ids = torch.from_numpy(ids_BT)
    logits_BTV = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    grads = {f"grad/{n}": p.grad.numpy() for n, p in model.named_parameters()}
    with torch.no_grad():
        low = model.to(torch.bfloat16)(input_ids=ids[:1], use_cache=False).logits
    np.savez_compressed(
        OUT / "reference.npz",
        ids_BT=ids_BT.astype(np.int32),
        logits_BTV=logits_BTV.detach().numpy(),
        bfloat16_logits_TV=low[0].float().numpy().astype(np.float16),
        loss=np.float32(loss.item()),
        **grads,
    )
    count = sum(p.numel() for p in model.parameters())
    print(f"{count} parameters, logits std {logits_BTV.std():.3f}, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
