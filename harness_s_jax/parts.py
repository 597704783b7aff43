"""Puts a run's parts together from its configuration; the joins begin with this."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from harness_s_jax.config import ConfigError
from harness_s_jax.envs.base import Environment
from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import POOL, HarnessSpec, load_pool
from harness_s_jax.model import shard
from harness_s_jax.model.policy import StoredPolicy, load_policy
from harness_s_jax.model.template import KeepThinking
from harness_s_jax.rollout.attempt import Setting
from harness_s_jax.sampler.engine import Engine


@dataclass(frozen=True)
class Parts:
    """The policy as stored, its sampler, the harnesses and the task set."""

    mesh: Mesh  # all devices; the stored parameters are sharded over it
    stored: StoredPolicy
    copy: Callable[[Any], Any]  # parameters over the mesh -> the sampler's own
    engine: Engine
    setting: Setting
    h0: HarnessSpec
    siblings: tuple[HarnessSpec, ...]

    @property
    def environment(self) -> Environment:
        return self.setting.environment

    @property
    def specs(self) -> dict[str, HarnessSpec]:
        """Every harness by its id, H0 first."""
        return {spec.id: spec for spec in (self.h0, *self.siblings)}


def read_policy(directory: Path, keep_thinking: KeepThinking, mesh: Mesh) -> StoredPolicy:
    """Raises ConfigError with a sentence if the policy there cannot be used."""
    try:
        return load_policy(directory, keep_thinking, mesh)
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot use the policy in {directory}: {e}") from None


def pool_directory(workdir: Path) -> Path:
    """Where a run's harnesses are: the pool it evolved, else the shipped one."""
    own = workdir / "pool"
    return own if own.exists() else POOL


def assemble(
    config: Any, directory: Path, stage: str, say: Callable[[str], None], pool: Path = POOL
) -> Parts:
    """Loads the policy in `directory` and the harnesses in `pool`, and compiles the sampler.

    Raises:
      ConfigError: the policy or the pool cannot be used.
    """
    try:
        h0, siblings = load_pool(pool)
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot use the pool in {pool}: {e}") from None
    mesh = shard.make_mesh()
    stored = read_policy(directory, config.policy.keep_thinking, mesh)
    copy = functools.partial(shard.local_copy, mesh, dtype=stored.config.dtype)
    engine = Engine(
        copy(stored.params),
        stored.config,
        vocab_size=stored.template.vocab_size,
        stop_ids=stored.template.stop_ids,
        max_tokens=config.limits.context_tokens,
        **config.sampler,
    )
    say(
        f"{stage}: the sampler's {engine.stats.compiled_programs} programs compiled in "
        f"{engine.stats.compile_seconds:.1f} s"
    )
    setting = Setting(
        environment=MiniWorldEnvironment(),
        policy=engine,
        codec=stored.template,
        limits=Limits(**config.limits),
        infra_retries=config.rollout.infra_retries,
        deadline_s=config.rollout.deadline_s,
    )
    return Parts(mesh, stored, copy, engine, setting, h0, siblings)
