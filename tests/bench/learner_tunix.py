"""The peer of tests/bench/learner.py: GRPO of google-tunix on its own Qwen3, float32 on the CPU.

    PYTHON_WITH_TUNIX learner_tunix.py SETUP

A process that lives as long as the benchmark. SETUP is JSON with `model` (fields of tunix's
ModelConfig), `shape` (prompts, samples, prompt_tokens, sampled_tokens), `optimizer`
(learning_rate, max_grad_norm) and `beta`. First it prints its versions; then each line of stdin is
a JSON string, "step" or "update", and the answer is one line of JSON with its seconds. Needs
google-tunix and nothing of this project.
"""

import importlib.metadata
import json
import os
import platform
import string
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

PAUSE = 0.05  # seconds in which the threads of the other side go to sleep
ENDLESS = 10**9


class Tokenizer:
    """A token a letter. Its end of text is no token of the model, so that every sample is long."""

    def __init__(self, vocab_size: int):
        """The size says which ids are none of the model's."""
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """As many ids as letters, so that a prompt is as long as it was asked for."""
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        """Any id has a letter; rewards do not read it."""
        return "".join(chr(i) for i in ids)

    def bos_id(self) -> int:
        """Tunix takes 0 for none, and adds nothing to the prompt."""
        return 0

    def eos_id(self) -> int:
        """The first id that is never sampled."""
        return self._vocab_size

    def pad_id(self) -> int:
        """Where it is sampled, tunix leaves it out of the loss, at no gain in time."""
        return 0


class Peer:
    """Tunix's learner, what can be asked of it, and what it last learned from."""

    def __init__(self, setup: dict[str, Any]):
        """A reference model is there only where the KL term has a weight."""
        self.shape, self._rng = setup["shape"], np.random.default_rng(0)
        self._compiled: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        config = ModelConfig(**setup["model"])
        self._actor = Qwen3(config, rngs=nnx.Rngs(0))
        reference = Qwen3(config, rngs=nnx.Rngs(0)) if setup["beta"] else None
        self._engine = rl_cluster.RLCluster(
            actor=self._actor,
            reference=reference,
            tokenizer=Tokenizer(config.vocab_size),
            cluster_config=self._cluster(setup["optimizer"]),
        )
        algorithm = GRPOConfig(num_generations=self.shape["samples"], beta=setup["beta"])
        self.learner = GRPOLearner(self._engine, algorithm, self._reward)
        self._update, self._engine.update_actor = self._engine.update_actor, self._kept
        self._batch: Any = None

    def _cluster(self, numbers: dict[str, float]) -> rl_cluster.ClusterConfig:
        """All roles on one device, an update a step, as tunix's own examples have it on a CPU."""
        mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        roles = rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT
        optimizer = optax.chain(
            optax.clip_by_global_norm(numbers["max_grad_norm"]),
            optax.adamw(numbers["learning_rate"]),
        )
        prompt, sampled = self.shape["prompt_tokens"], self.shape["sampled_tokens"]
        return rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optimizer, eval_every_n_steps=ENDLESS, max_steps=ENDLESS
            ),
            rollout_config=RolloutConfig(
                max_prompt_length=prompt,
                max_tokens_to_generate=sampled,
                kv_cache_size=prompt + sampled,
                temperature=1.0,
            ),
        )

    def _hear(self, event: str, seconds: float, **about: Any) -> None:
        """Counts compilations, which would make a step look slow."""
        if "backend_compile" in event:
            self._compiled.append(event)

    def _reward(self, prompts: list[str], completions: list[str], **more: Any) -> list[float]:
        """Half of each group succeeds, at random: every group teaches."""
        halves = np.arange(len(prompts)).reshape(-1, self.shape["samples"]) % 2
        return self._rng.permuted(halves, axis=1).astype(float).ravel().tolist()

    def _kept(self, batch: Any, *more: Any) -> None:
        """Tunix's update, whose batch is kept for updates alone."""
        self._batch = batch
        self._update(batch, *more)

    def _prompts(self) -> dict[str, np.ndarray]:
        """Random letters, none of them the padding."""
        size = self.shape["prompts"], self.shape["prompt_tokens"]
        letters = self._rng.choice(list(string.ascii_letters), size)
        return {"prompts": np.array(["".join(row) for row in letters])}

    def asked(self, say: Callable[[dict[str, Any]], None]) -> Iterator[dict[str, np.ndarray]]:
        """The data that tunix trains on. It wants a step's when the step before is over, which is
        when that one is answered; an update alone happens while it waits for data."""
        for line in sys.stdin:
            command = json.loads(line)
            if command == "quit":
                return
            self._compiled.clear()
            time.sleep(PAUSE)
            started = time.perf_counter()
            if command == "step":
                yield self._prompts()
            else:
                self._update(self._batch, None)
            jax.block_until_ready(nnx.state(self._actor))
            seconds = time.perf_counter() - started
            tokens = sum(int(example.completion_mask.sum()) for example in self._batch)
            say({"seconds": seconds, "compiles": len(self._compiled), "tokens": tokens})

    def about(self) -> dict[str, Any]:
        """Versions, and how many numbers the model has."""
        sizes = [x.size for x in jax.tree.leaves(nnx.state(self._actor, nnx.Param))]
        versions = {name: importlib.metadata.version(name) for name in ("google-tunix", "flax")}
        versions |= {"jax": jax.__version__, "python": platform.python_version()}
        return {**versions, "parameters": sum(sizes)}


def main() -> None:
    """Answers until it is told to quit."""
    jax.config.update("jax_platforms", "cpu")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(answer: dict[str, Any]) -> None:
        """One line to whoever asked."""
        print(json.dumps(answer), file=answers, flush=True)

    peer = Peer(json.loads(sys.argv[1]))
    say(peer.about())
    peer.learner.train(peer.asked(say))


if __name__ == "__main__":
    main()
