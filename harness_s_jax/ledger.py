"""The token ledger: one growing context, and exactly what of it the policy sampled.

Environment text is encoded alone and appended; nothing is ever rendered or tokenised again
(contract 1). The loss mask is exactly the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness_s_jax.types import Sample, Segment


class Ledger:
    """One growing segment of context."""

    def __init__(self, prompt: Sequence[int]):
        self._ids: list[int] = []
        self._logp: list[float] = []
        self._temperature: list[float] = []
        self._version: list[int] = []
        self.append_text(prompt)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids_T(self) -> np.ndarray:
        """int32, everything so far."""
        return np.asarray(self._ids, np.int32)

    def append_text(self, ids: Sequence[int]) -> None:
        """Appends ids that the policy did not sample."""
        self._extend(ids, [0.0] * len(ids), 0.0, -1)

    def append_sample(self, sample: Sample, temperature: float) -> None:
        """Appends one sampled turn as it was drawn."""
        self._extend(
            sample.ids_T.tolist(), sample.logp_T.tolist(), temperature, sample.weight_version
        )

    def _extend(
        self, ids: Sequence[int], logp: Sequence[float], temperature: float, version: int
    ) -> None:
        self._ids += ids
        self._logp += logp
        self._temperature += [temperature] * len(ids)
        self._version += [version] * len(ids)

    def segment(self) -> Segment:
        """The segment as plain arrays."""
        version_T = np.asarray(self._version, np.int32)
        return Segment(
            ids_T=self.ids_T,
            sampled_T=version_T >= 0,
            logp_T=np.asarray(self._logp, np.float32),
            temperature_T=np.asarray(self._temperature, np.float32),
            weight_version_T=version_T,
        )
