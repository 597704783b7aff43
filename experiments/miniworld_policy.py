"""The shared configuration of the embedded world's policy and its warm start.

The rates are the premise that the warm start builds in: a behaviour is shown seldom unprompted
(`rare`), half of the time where it is common (`common`), and mostly when a harness asks for it
(`section`, `moment`). Not in source: the paper starts from a pretrained Qwen3.5.
"""

from ml_collections import ConfigDict

SYSTEM = "Solve the task by programs, one a turn."  # H0's system prompt, harness/pool/h0.yaml


def warmstart_config() -> ConfigDict:
    """How the shipped policy was made; `python -m experiments.warmstart` makes it again."""
    return ConfigDict(
        {
            "seed": 0,
            "system": SYSTEM,
            "vocab_size": 1024,  # at most
            "tokenizer_seeds": 40,  # instances of each family that the tokenizer is trained on
            "demonstration_tasks": 5000,  # of the split "warmstart"
            "demonstrations": 25000,
            "plain_share": 0.3,  # demonstrations under H0 itself
            "fitting_share": 0.75,  # of the others: directions from the task's needs first
            "rates": {"rare": 0.015, "common": 0.45, "section": 0.7, "moment": 0.88},
            "row_tokens": 192,
            "batch_rows": 32,
            "steps": 1200,
            "learning_rate": 4e-3,
            "warmup_steps": 40,
            "log_every": 20,
            "save_every": 100,  # updates between checkpoints
            "model": {  # Hugging Face names; 3 linear + 1 full layer
                "hidden_size": 96,
                "intermediate_size": 192,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 32,
                "linear_conv_kernel_dim": 4,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                },
                "tie_word_embeddings": True,
                "dtype": "float32",
            },
        }
    )
