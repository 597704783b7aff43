"""The peer of tests/bench/model.py: Qwen3.5 of transformers in torch, float32 on the CPU.

    PYTHON_WITH_TORCH model_torch.py CHECKPOINT_DIRECTORY THREADS

A process that lives as long as the benchmark. First it prints its versions; then each line of
stdin is a JSON string that names a measurement, and the answer is one line of JSON with its
seconds. Needs torch, transformers and numpy, and nothing of this project. The directory holds a
checkpoint of the text model and ids.npy, [B, T].
"""

import json
import os
import pathlib
import platform
import sys
import time

import numpy as np
import torch
import transformers
from torch.nn import functional
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM

PAUSE = 0.05  # seconds in which the threads of the other side go to sleep


class Peer:
    """The model, its batch, and what can be asked of it."""

    def __init__(self, directory: pathlib.Path):
        self.model = Qwen3_5ForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model.train()  # else nothing is checkpointed; the model has no dropout
        self.ids_BT = torch.from_numpy(np.load(directory / "ids.npy")).long()

    def loss(self) -> torch.Tensor:
        logits_BTV = self.model(input_ids=self.ids_BT, use_cache=False).logits[:, :-1]
        return functional.cross_entropy(logits_BTV.flatten(0, 1), self.ids_BT[:, 1:].flatten())

    @torch.no_grad()
    def forward(self) -> dict[str, float]:
        seconds, loss = timed(self.loss)
        return {"seconds": seconds, "loss": loss.item()}

    def forward_backward(self) -> dict[str, float]:
        def both() -> torch.Tensor:
            loss = self.loss()
            loss.backward()
            return loss

        self.model.zero_grad(set_to_none=True)
        seconds, loss = timed(both)
        norms = [p.grad.norm() for p in self.model.parameters()]  # None, if any, is an error
        grad_norm = torch.stack(norms).norm().item()
        return {"seconds": seconds, "loss": loss.item(), "grad_norm": grad_norm}

    def forward_backward_remat(self) -> dict[str, float]:
        passes = []
        layer = self.model.model.layers[0].mlp
        hook = layer.register_forward_pre_hook(lambda *_: passes.append(1))
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            answer = self.forward_backward()
        finally:
            self.model.gradient_checkpointing_disable()
            hook.remove()
        if len(passes) != 2:
            raise RuntimeError(f"a layer ran {len(passes)} times; with checkpointing it must be 2.")
        return answer

    def matmul(self) -> dict[str, float]:
        """Seconds by size of square float32 products."""
        seconds = {}
        for size in (1024, 2048, 3072):
            x, y = torch.randn(2, size, size).unbind()
            seconds[str(size)] = timed(lambda x=x, y=y: x @ y)[0]
        return seconds


def timed(work):
    """(seconds, result) of one call."""
    time.sleep(PAUSE)
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def main() -> None:
    directory, threads = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(answer: dict) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    peer = Peer(directory)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    say({**versions, "python": platform.python_version(), "threads": torch.get_num_threads()})
    asked = {
        "forward": peer.forward,
        "forward_backward": peer.forward_backward,
        "forward_backward_remat": peer.forward_backward_remat,
        "matmul": peer.matmul,
    }
    for line in sys.stdin:
        command = json.loads(line)
        if command == "quit":
            return
        say(asked[command]())


if __name__ == "__main__":
    main()
