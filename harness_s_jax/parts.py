"""Puts a run's parts together from its configuration; the joins begin with this."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from harness_s_jax.config import ConfigError
from harness_s_jax.envs.base import Environment
from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import POOL, HarnessSpec, load_pool
from harness_s_jax.learner import step as learning
from harness_s_jax.learner.loss import Objective
from harness_s_jax.model import shard
from harness_s_jax.model.policy import StoredPolicy, load_policy
from harness_s_jax.model.template import KeepThinking
from harness_s_jax.rollout.attempt import Setting
from harness_s_jax.sampler.engine import Engine


@dataclass(frozen=True)
class Parts:
    """The policy as stored, its sampler, the harnesses and the task set."""

    mesh: Mesh  # the stored parameters are sharded over it
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
    config: Any,
    directory: Path,
    stage: str,
    say: Callable[[str], None],
    pool: Path = POOL,
    mesh: Mesh | None = None,
) -> Parts:
    """Loads the policy in `directory` and the harnesses in `pool`, and compiles the sampler.

    The parameters are sharded over `mesh`, by default this process's own devices: then no other
    process has to take part.

    Raises:
      ConfigError: the policy or the pool cannot be used.
    """
    try:
        h0, siblings = load_pool(pool)
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot use the pool in {pool}: {e}") from None
    mesh = shard.make_mesh(devices=jax.local_devices()) if mesh is None else mesh
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


def make_learner(
    config: Any, parts: Parts, say: Callable[[str], None]
) -> tuple[learning.Learner, learning.State, Any]:
    """Compiles the learner. It takes over the stored parameters; the third is the reference for
    the penalty, a copy of them, or None where there is no penalty.

    Raises:
      ConfigError: rows and devices do not go together.
    """
    sizes, stored = config.learner, parts.stored
    if sizes.micro_rows % (sharing := parts.mesh.shape["fsdp"]):
        raise ConfigError(
            f"got {sizes.micro_rows} for config.learner.micro_rows; {sharing} groups of devices "
            f"share the rows of a micro-batch: give a multiple of {sharing}"
        )
    hyper = learning.Hyper(**sizes.hyper, objective=Objective(**sizes.objective))
    reference = None
    if hyper.objective.kl:
        reference = learning.reference_of(stored.params, stored.config, parts.mesh)
    state = learning.init_state(stored.params, hyper, parts.mesh)
    shapes = learning.Shapes(
        vocab_size=stored.template.vocab_size,
        attempts=config.train.tasks * config.train.group_size,
        micro_rows=sizes.micro_rows,
        row_tokens=sizes.row_tokens,
        remat=sizes.remat,
    )
    learner = learning.build(state, stored.config, hyper, parts.mesh, shapes)
    say(
        f"train: the learner's {learner.compiled} programs compiled in "
        f"{learner.compile_seconds:.1f} s"
    )
    return learner, state, reference


def require_siblings(config: Any, parts: Parts) -> None:
    """Raises ConfigError if the method asks for more distinct siblings than the pool has."""
    attempts = config.train.group_size
    distinct = {"harness_s": attempts}
    if config.mixture.unit == "within":
        distinct["mix_siblings"] = round(config.mixture.sibling_share * attempts)
    if (asked := distinct.get(config.method, 0)) > len(parts.siblings):
        raise ConfigError(
            f"got {attempts} for config.train.group_size, which asks for {asked} distinct siblings "
            f"in a group; the pool has {len(parts.siblings)}: lower it"
        )


def pool_hash(parts: Parts) -> str:
    """Of every harness of the run, in order."""
    return hashlib.sha256(" ".join(s.hash for s in parts.specs.values()).encode()).hexdigest()[:16]


def require_pool(kept: str, parts: Parts) -> None:
    """Raises ConfigError if a checkpoint was made with other harnesses than these."""
    if kept != pool_hash(parts):
        raise ConfigError(
            f"the checkpoint was made with another pool of harnesses (hash {kept}) than the one "
            f"there is now ({pool_hash(parts)}): put the old one back or use another --workdir"
        )
