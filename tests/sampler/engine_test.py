"""The sampler gives an attempt the same tokens whatever else runs, and never compiles late."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats as statistics

from harness_s_jax.model import qwen3_5
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.sampler import decode
from harness_s_jax.sampler.engine import Engine
from harness_s_jax.types import AttemptKey, Sample, SampleRequest

CONFIG = Qwen35Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
VOCAB, STOP = 33, 5  # the last 7 entries of the embedding are padding
PARAMS = qwen3_5.init_params(CONFIG, jax.random.key(1))


def build(slots: int, max_tokens: int = 128) -> Engine:
    return Engine(
        PARAMS,
        CONFIG,
        vocab_size=VOCAB,
        stop_ids=(STOP,),
        slots=slots,
        max_tokens=max_tokens,
        prefill_rows=2,
        prefill_chunk=8,
        decode_steps=4,
    )


@pytest.fixture(scope="module")
def wide() -> Engine:
    return build(32)


@pytest.fixture(scope="module")
def narrow() -> Engine:
    return build(4)


def name_of(number: int) -> str:
    return str(AttemptKey(3, "train", 1, f"t/{number}", number))


def request(
    number: int, turn: int, ids_T: np.ndarray, max_tokens: int = 11, temperature: float = 0.9
) -> SampleRequest:
    key = AttemptKey(3, "train", 1, f"t/{number}", number)
    return SampleRequest(str(key), 0, key.seed(turn), ids_T, max_tokens, temperature)


def prompt_of(number: int) -> np.ndarray:
    rng = np.random.default_rng(number)
    return rng.integers(6, VOCAB, rng.integers(3, 30)).astype(np.int32)


async def attempt(
    engine: Engine, number: int, turns: int = 3, pause: float = 0.0
) -> tuple[np.ndarray, list[Sample]]:
    """Plays `turns` turns with observations that depend on the attempt only."""
    rng = np.random.default_rng((number, 1))
    ids_T, samples = prompt_of(number), []
    for turn in range(turns):
        samples.append(await engine.sample(request(number, turn, ids_T)))
        appended_T = rng.integers(6, VOCAB, rng.integers(1, 12)).astype(np.int32)
        ids_T = np.concatenate([ids_T, samples[-1].ids_T, appended_T])
        await asyncio.sleep(pause)
    engine.release(name_of(number))
    return ids_T, samples


async def attempts(engine: Engine, numbers: Iterable[int], **options: float) -> list[list[Sample]]:
    results = await asyncio.gather(*(attempt(engine, n, **options) for n in numbers))
    return [samples for _, samples in results]


def assert_same(one: list[Sample], other: list[Sample]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.ids_T, b.ids_T)
        np.testing.assert_array_equal(a.logp_T.view(np.int32), b.logp_T.view(np.int32))


@jax.jit
def _forward_logp(params, ids_T, real_T, temperature):
    segment_T = jnp.where(real_T, 0, -1)
    hidden = qwen3_5.forward(
        params, CONFIG, ids_T[None], segment_T[None], jnp.arange(len(ids_T))[None]
    )
    return jax.nn.log_softmax(qwen3_5.logits(params, CONFIG, hidden)[0, :, :VOCAB] / temperature)


def reference_logp(params, ids_T: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probs [T, VOCAB] of the next token at every position, by the training path."""
    padded_T = np.zeros(128, np.int32)
    padded_T[: len(ids_T)] = ids_T
    real_T = np.arange(128) < len(ids_T)
    return np.asarray(_forward_logp(params, padded_T, real_T, temperature))[: len(ids_T)]


def run(play: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(play(), 120)

    asyncio.run(bounded())


# --- an attempt is what it is, bit for bit ---------------------------------------------------


@pytest.mark.stack
def test_alone_among_others_and_in_another_slot(wide: Engine):
    alone = [asyncio.run(attempts(wide, [n]))[0] for n in range(4)]
    together = asyncio.run(attempts(wide, range(32)))
    reverse = asyncio.run(attempts(wide, range(31, -1, -1)))[::-1]
    for n in range(4):
        assert_same(alone[n], together[n])
    for one, other in zip(together, reverse, strict=True):
        assert_same(one, other)
    assert len({tuple(s[0].ids_T) for s in together}) > 25, "attempts must differ"


def test_parked_and_restored_sessions_are_the_same(narrow: Engine):
    alone = [asyncio.run(attempts(narrow, [n]))[0] for n in range(12)]
    parked, restored = narrow.stats.parked, narrow.stats.restored
    crowded = asyncio.run(attempts(narrow, range(12), pause=0.02))
    assert narrow.stats.parked > parked
    assert narrow.stats.restored > restored
    assert narrow.stats.rebuilt == 0
    for one, other in zip(alone, crowded, strict=True):
        assert_same(one, other)


def test_a_new_engine_repeats_the_attempt_and_compiles_only_when_built(narrow: Engine):
    expected = asyncio.run(attempts(narrow, range(12)))
    again = build(4)
    compiled = []
    listen = lambda event, seconds, **_: compiled.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        got = asyncio.run(attempts(again, range(12), pause=0.02))
        again.load(jax.tree.map(np.asarray, PARAMS), 1)
        asyncio.run(attempts(again, range(2)))
        late = [event for event in compiled if "compile" in event or "trace" in event]
        jax.jit(lambda x: x * 3 + 1)(np.ones(7))
        assert any("compile" in event for event in compiled), "the listener must hear compiles"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not late
    assert again.stats.compiled_programs == 5
    for one, other in zip(expected, got, strict=True):
        assert_same(one, other)


# --- what is recorded is true ----------------------------------------------------------------


@pytest.mark.stack
def test_logp_is_that_of_the_model_on_the_whole_context(narrow: Engine):
    ids_T, samples = asyncio.run(attempt(narrow, 7, turns=4))
    logp_TV = reference_logp(PARAMS, ids_T, 0.9)
    at, rng = len(prompt_of(7)), np.random.default_rng((7, 1))
    for sample in samples:
        n = len(sample.ids_T)
        expected = logp_TV[np.arange(at - 1, at - 1 + n), sample.ids_T]
        np.testing.assert_allclose(sample.logp_T, expected, atol=1e-5)
        at += n + len(rng.integers(6, VOCAB, rng.integers(1, 12)))
    assert at == len(ids_T)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_follow_the_distribution(temperature: float):
    n = 8192
    logits_V = np.random.default_rng(0).normal(0, 1.0, CONFIG.vocab_size).astype(np.float32)
    seed_S2 = np.random.default_rng(1).integers(0, 2**32, (n, 2), dtype=np.uint32)
    ids_S, logp_S = jax.jit(decode.draw, static_argnums=1)(
        np.tile(logits_V, (n, 1)),
        VOCAB,
        seed_S2,
        np.full(n, temperature, np.float32),
        np.arange(n, dtype=np.int32) % 5,
    )
    ids_S = np.asarray(ids_S)
    p_V = np.exp(logits_V[:VOCAB].astype(np.float64) / temperature)
    p_V /= p_V.sum()
    assert ids_S.max() < VOCAB
    np.testing.assert_allclose(np.exp(logp_S), p_V[ids_S], rtol=1e-5)
    keep = p_V * n > 5
    counts, expected = np.bincount(ids_S, minlength=VOCAB)[keep], p_V[keep] * n
    result = statistics.chisquare(counts, expected * counts.sum() / expected.sum())
    assert result.pvalue > 0.01


def test_temperature_zero_is_greedy(narrow: Engine):
    async def play() -> None:
        ids_T = prompt_of(1)
        one = await narrow.sample(request(1, 0, ids_T, temperature=0.0))
        narrow.release(name_of(1))
        other = await narrow.sample(request(1, 9, ids_T, temperature=0.0))  # another seed
        narrow.release(name_of(1))
        assert_same([one], [other])
        logp_V = reference_logp(PARAMS, ids_T, 1.0)[-1]
        assert one.ids_T[0] == int(logp_V.argmax())
        np.testing.assert_allclose(one.logp_T[0], logp_V.max(), atol=1e-5)

    run(play)


def test_turns_end_at_stop_ids_limits_and_a_full_cache(narrow: Engine):
    samples = [s for samples in asyncio.run(attempts(narrow, range(12))) for s in samples]
    assert {s.stopped for s in samples} == {True, False}
    for sample in samples:
        assert STOP not in sample.ids_T[:-1]
        assert sample.stopped == (sample.ids_T[-1] == STOP)
        assert sample.stopped or len(sample.ids_T) == 11
        assert (sample.ids_T.dtype, sample.logp_T.dtype) == (np.int32, np.float32)
        assert sample.weight_version == 0

    async def play() -> None:
        for length, room in ((127, 1), (125, 3)):
            ids_T = np.full(length, 9, np.int32)
            sample = await narrow.sample(request(0, 0, ids_T, max_tokens=50, temperature=0.0))
            assert sample.stopped or len(sample.ids_T) == room
            narrow.release(name_of(0))

    run(play)


# --- sessions --------------------------------------------------------------------------------


def test_requests_that_cannot_be_run_are_refused(narrow: Engine):
    async def play() -> None:
        for bad in (
            request(0, 0, np.full(128, 9, np.int32)),
            request(0, 0, np.zeros(0, np.int32)),
            request(0, 0, np.full(3, VOCAB, np.int32)),
            request(0, 0, prompt_of(0), max_tokens=0),
            request(0, 0, prompt_of(0), temperature=float("nan")),
        ):
            with pytest.raises(
                ValueError, match=re.escape(repr(request(0, 0, prompt_of(0)).session))
            ):
                await narrow.sample(bad)
        task = asyncio.create_task(narrow.sample(request(0, 0, prompt_of(0))))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="already has a turn"):
            await narrow.sample(request(0, 0, prompt_of(0)))
        await task
        narrow.release(name_of(0))
        narrow.release("unknown")

    run(play)


def test_changed_ids_or_segment_start_from_an_empty_cache(narrow: Engine):
    async def play() -> None:
        first = await narrow.sample(request(2, 0, prompt_of(2)))
        await narrow.sample(request(2, 1, prompt_of(3)))
        again = await narrow.sample(request(2, 0, prompt_of(2)))
        longer_T = np.concatenate([prompt_of(2), again.ids_T, [7]]).astype(np.int32)
        before = narrow.stats.prefilled_tokens
        rewritten = dataclasses.replace(request(2, 1, longer_T), segment=1)
        await narrow.sample(rewritten)
        assert narrow.stats.prefilled_tokens - before == len(longer_T)
        narrow.release(name_of(2))
        assert_same([first], [again])

    run(play)


def test_a_cancelled_caller_frees_its_slot_and_disturbs_nobody(narrow: Engine):
    expected = asyncio.run(attempts(narrow, range(8)))

    async def play() -> None:
        doomed = [asyncio.create_task(attempt(narrow, n)) for n in range(20, 30)]
        await asyncio.sleep(0.005)
        kept = asyncio.create_task(attempts(narrow, range(8)))
        await asyncio.sleep(0.005)
        for task in doomed:
            task.cancel()
        results = await asyncio.gather(*doomed, return_exceptions=True)
        assert any(isinstance(r, asyncio.CancelledError) for r in results)
        for one, other in zip(expected, await kept, strict=True):
            assert_same(one, other)

    run(play)
    assert not narrow._table.sessions
    assert sorted(narrow._table._free) == list(range(4))


def test_a_device_error_reaches_every_caller(narrow: Engine):
    def broken(*_: object) -> None:
        raise OSError("no device")

    async def play() -> None:
        idle = await narrow.sample(request(9, 0, prompt_of(9)))
        whole, narrow._programs = (
            narrow._programs,
            dataclasses.replace(narrow._programs, decode=broken),
        )
        try:
            results = await asyncio.gather(
                *(attempt(narrow, n) for n in range(6)), return_exceptions=True
            )
        finally:
            narrow._programs = whole
        assert all(isinstance(r, RuntimeError) and "no device" in str(r) for r in results)
        longer_T = np.concatenate([prompt_of(9), idle.ids_T, [7]]).astype(np.int32)
        with pytest.raises(RuntimeError, match="lost"):
            await narrow.sample(request(9, 1, longer_T))
        for n in (*range(6), 9):
            narrow.release(name_of(n))
        assert_same([idle], [await narrow.sample(request(9, 0, prompt_of(9)))])
        narrow.release(name_of(9))

    run(play)


def test_load_swaps_weights_and_rebuilds_caches(narrow: Engine):
    other = jax.tree.map(lambda x: x * 1.1, PARAMS)

    async def play() -> None:
        first = await narrow.sample(request(4, 0, prompt_of(4)))
        longer_T = np.concatenate([prompt_of(4), first.ids_T, [7, 8]]).astype(np.int32)
        running = asyncio.create_task(narrow.sample(request(5, 0, prompt_of(5))))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="1 turns running"):
            narrow.load(other, 1)
        await running
        with pytest.raises(ValueError, match="another tree"):
            narrow.load({"embed_VD": np.zeros(3)}, 1)
        narrow.load(other, 1)
        second = await narrow.sample(request(4, 1, longer_T))
        assert (first.weight_version, second.weight_version) == (0, 1)
        expected = reference_logp(other, longer_T, 0.9)[-1, second.ids_T[0]]
        np.testing.assert_allclose(second.logp_T[0], expected, atol=1e-5)
        narrow.load(PARAMS, 0)
        for n in (4, 5):
            narrow.release(name_of(n))
        assert_same([first], [await narrow.sample(request(4, 0, prompt_of(4)))])
        narrow.release(name_of(4))

    rebuilt = narrow.stats.rebuilt
    run(play)
    assert narrow.stats.rebuilt == rebuilt + 1
