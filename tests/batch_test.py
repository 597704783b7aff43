"""Packing loses nothing, overflows nothing, and depends on lengths and order alone; a batch holds
what an update needs of its groups, and nothing else."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_s_jax.batch import agreed, cut, lay_out, pack_rows, to_agree_on, train_batch
from harness_s_jax.rows import Packed, PackedRows, TrainBatch
from harness_s_jax.types import AttemptKey, Counted, Group, Outcome, Segment, Task, Trajectory

ROW = 20
LENGTHS = st.lists(st.integers(1, ROW), max_size=40)


def segment(length: int, first: int = 100) -> Segment:
    """Ids first, first + 1, ...; every third token is sampled, never the first.

    Log-probabilities and temperatures are other numbers for every id.
    """
    sampled_T = np.arange(length) % 3 == 1
    number_T = np.arange(first, first + length, dtype=np.float32)
    return Segment(
        ids_T=np.arange(first, first + length, dtype=np.int32),
        sampled_T=sampled_T,
        logp_T=np.where(sampled_T, -number_T / 7, 0.0).astype(np.float32),
        temperature_T=np.where(sampled_T, number_T / 1000, 0.0).astype(np.float32),
        weight_version_T=np.where(sampled_T, 0, -1).astype(np.int32),
    )


def segments(lengths: list[int]) -> list[Segment]:
    return [segment(n, 1000 * i) for i, n in enumerate(lengths, 1)]


def loads(rows: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in row) for row in rows]


@given(LENGTHS)
def test_every_segment_once_and_no_row_overflows(lengths: list[int]):
    rows = pack_rows(segments(lengths), ROW)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < load <= ROW for load in loads(rows, lengths))
    assert rows == pack_rows(segments(lengths), ROW)


@given(LENGTHS, st.randoms(use_true_random=False))
def test_rows_are_few_whatever_the_order(lengths: list[int], rng):
    bound = math.ceil(math.ceil(sum(lengths) / ROW) * 1.7)
    shuffled = rng.sample(lengths, len(lengths))
    rows, again = (pack_rows(segments(n), ROW) for n in (lengths, shuffled))
    assert len(rows) <= bound
    assert sorted(loads(again, shuffled)) == sorted(loads(rows, lengths))


@given(LENGTHS)
def test_no_two_rows_could_be_one(lengths: list[int]):
    by_load = sorted(loads(pack_rows(segments(lengths), ROW), lengths))
    assert all(a + b > ROW for a, b in itertools.pairwise(by_load))


def test_longest_first_and_ties_in_the_given_order():
    assert pack_rows(segments([5, 12, 5, 8, 12]), ROW) == [[1, 3], [4, 0], [2]]
    assert pack_rows([], ROW) == []


def test_a_segment_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="got a segment of 21 tokens; rows hold 20"):
        pack_rows(segments([3, 21]), ROW)


@given(LENGTHS, st.integers(0, 3))
def test_lay_out_keeps_every_token_and_pads_the_rest(lengths: list[int], spare: int):
    given_ = segments(lengths)
    rows = pack_rows(given_, ROW)
    attempts = [7 + i // 2 for i in range(len(given_))]  # two segments of each
    batch = lay_out(given_, attempts, rows, ROW, len(rows) + spare)
    shape = (len(rows) + spare, ROW)
    for array, dtype in (
        (batch.ids_BT, np.int32), (batch.segment_BT, np.int32),
        (batch.position_BT, np.int32), (batch.sampled_BT, bool),
        (batch.logp_BT, np.float32), (batch.temperature_BT, np.float32),
        (batch.attempt_BT, np.int32),
    ):  # fmt: skip
        assert array.shape == shape
        assert array.dtype == dtype
    found = {}
    for b in range(shape[0]):
        numbers = batch.segment_BT[b]
        real = numbers[numbers >= 0]
        assert (np.diff(real) >= 0).all()  # runs of 0, 1, ... and then padding
        assert set(real) == set(range(len(set(real))))
        assert (numbers[len(real) :] == -1).all()
        for number in set(real):
            here = numbers == number
            np.testing.assert_array_equal(batch.position_BT[b, here], np.arange(here.sum()))
            found[int(batch.ids_BT[b, here][0])] = (
                batch.ids_BT[b, here],
                batch.sampled_BT[b, here],
                batch.logp_BT[b, here],
                batch.temperature_BT[b, here],
                batch.attempt_BT[b, here],
            )
    assert len(found) == len(given_)
    for attempt, original in zip(attempts, given_, strict=True):
        ids, sampled, logp, temperature, owner = found[int(original.ids_T[0])]
        np.testing.assert_array_equal(ids, original.ids_T)
        np.testing.assert_array_equal(sampled, original.sampled_T)
        np.testing.assert_array_equal(logp, original.logp_T)
        np.testing.assert_array_equal(temperature, original.temperature_T)
        np.testing.assert_array_equal(owner, np.full(len(original.ids_T), attempt))
    padding_BT = batch.segment_BT == -1
    assert not batch.sampled_BT[padding_BT].any()
    assert not batch.ids_BT[padding_BT].any()
    assert not batch.position_BT[padding_BT].any()
    assert not batch.logp_BT[padding_BT].any()
    assert not batch.temperature_BT[padding_BT].any()
    np.testing.assert_array_equal(batch.attempt_BT == -1, padding_BT)


def test_an_example_by_hand():
    batch = lay_out([segment(3, 7), segment(2, 50)], [4, 2], [[0, 1]], 6, 2)
    assert batch.ids_BT.tolist() == [[7, 8, 9, 50, 51, 0], [0] * 6]
    assert batch.segment_BT.tolist() == [[0, 0, 0, 1, 1, -1], [-1] * 6]
    assert batch.position_BT.tolist() == [[0, 1, 2, 0, 1, 0], [0] * 6]
    assert batch.sampled_BT.tolist() == [[False, True, False, False, True, False], [False] * 6]
    assert batch.attempt_BT.tolist() == [[4, 4, 4, 2, 2, -1], [-1] * 6]
    wanted = np.zeros((2, 6), np.float32)
    wanted[0, 1], wanted[0, 4] = 8, 51  # the sampled ids
    np.testing.assert_array_equal(batch.logp_BT, -wanted / 7)
    np.testing.assert_array_equal(batch.temperature_BT, wanted / 1000)


def test_more_rows_than_the_batch_holds_are_refused():
    given_ = segments([ROW, ROW, ROW])
    with pytest.raises(ValueError, match="got 3 rows; the batch holds 2"):
        lay_out(given_, [0, 1, 2], pack_rows(given_, ROW), ROW, 2)


# --- the batch of an update -----------------------------------------------------------------------

S, F, L, X = Outcome.SOLVED, Outcome.FAILED, Outcome.LIMIT, Outcome.INFRA
A, MICRO = 16, 2


def group(name: str, *members: tuple[Outcome, list[Segment]]) -> Group:
    task = Task(f"fake/train/{name}", "fake", "train", name, "Do it.", 3)
    trajectories = (
        Trajectory(
            AttemptKey(0, "train", 1, task.id, n), task, "h0", "", tuple(segments_), (),
            outcome, float(outcome == S),
        )
        for n, (outcome, segments_) in enumerate(members)
    )  # fmt: skip
    return Group(name, task, "initial", tuple(trajectories))


def batch_of(groups: list[Group], **changes: int | str) -> TrainBatch:
    return train_batch(groups, **{"attempts": A, "row_tokens": ROW, "micro_rows": MICRO} | changes)


def owned(batch: TrainBatch) -> dict[int, list[list[int]]]:
    """Attempt -> the ids of each of its segments, as the rows hold them; in order of ids."""
    found: dict[int, list[list[int]]] = {}
    for rows in batch.rows:
        for b in range(len(rows.ids_BT)):
            for number in range(rows.segment_BT[b].max() + 1):
                here = rows.segment_BT[b] == number
                (attempt,) = set(rows.attempt_BT[b, here].tolist())
                found.setdefault(attempt, []).append(rows.ids_BT[b, here].tolist())
    return {a: sorted(ids) for a, ids in sorted(found.items())}


def test_a_batch_by_hand():
    late = group("2", (S, [segment(4, 100)]), (F, [segment(8, 200)]), (L, [segment(3, 300)]))
    lost = group("1", (F, [segment(5, 400)]), (X, []), (S, [segment(2, 500), segment(7, 600)]))
    flat = group("3", (F, [segment(9, 700)]), (L, [segment(6, 800)]))
    batch = batch_of([late, flat, lost])
    # Groups in order of their ids, attempts in order within each, and places for more.
    assert batch.group_A.tolist() == [0, -1, 0, 1, 1, 1, 2, 2] + [-1] * 8
    assert batch.reward_A.tolist() == [0, 0, 1, 1, 0, 0, 0, 0] + [0] * 8
    assert batch.tokens_A.tolist() == [2, 0, 3, 1, 3, 1, 3, 2] + [0] * 8
    for array, dtype in (
        (batch.group_A, np.int32), (batch.reward_A, np.float32), (batch.tokens_A, np.int32),
    ):  # fmt: skip
        assert array.dtype == dtype
    # The flat group and the lost attempt have no token in any row.
    assert owned(batch) == {
        0: [[*range(400, 405)]],
        2: [[500, 501], [*range(600, 607)]],
        3: [[*range(100, 104)]],
        4: [[*range(200, 208)]],
        5: [[*range(300, 303)]],
    }


MEMBER = st.tuples(
    st.sampled_from([S, F, L, X]), st.lists(st.integers(1, ROW), min_size=1, max_size=3)
)
GROUPS = st.lists(st.lists(MEMBER, max_size=4), max_size=4)


@given(GROUPS, st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_batch_holds_its_groups_whatever_their_order(plan, micro_rows: int, rng):
    first = itertools.count(1000, 1000)
    names = rng.sample(["10", "2", "b", "a"], len(plan))
    groups = [
        group(
            name,
            *((o, [] if o == X else [segment(n, next(first)) for n in sizes]) for o, sizes in m),
        )
        for name, m in zip(names, plan, strict=True)
    ]
    batch = batch_of(groups, micro_rows=micro_rows)

    in_order = sorted(groups, key=lambda g: g.id)
    members = [(number, t) for number, g in enumerate(in_order) for t in g.trajectories]
    rewards = [{t.reward for t in g.trajectories if t.outcome != X} for g in in_order]
    wanted: dict[int, list[list[int]]] = {}
    for a, (number, trajectory) in enumerate(members):
        if trajectory.outcome == X:
            assert (batch.group_A[a], batch.reward_A[a], batch.tokens_A[a]) == (-1, 0, 0)
            continue
        assert batch.group_A[a] == number
        assert batch.reward_A[a] == trajectory.reward
        assert batch.tokens_A[a] == trajectory.sampled_tokens
        if rewards[number] == {0.0, 1.0}:
            wanted[a] = sorted(s.ids_T.tolist() for s in trajectory.segments)
    for array, filler in ((batch.group_A, -1), (batch.reward_A, 0), (batch.tokens_A, 0)):
        assert array.shape == (A,)
        assert (array[len(members) :] == filler).all()

    assert owned(batch) == wanted
    for rows in batch.rows:
        for name in (f.name for f in dataclasses.fields(PackedRows)):
            assert getattr(rows, name).shape == (micro_rows, ROW)
        np.testing.assert_array_equal(rows.attempt_BT == -1, rows.segment_BT == -1)
        counted_BT = rows.segment_BT >= 0
        assert counted_BT[0].any()  # no micro-batch is all padding
        assert (batch.group_A[rows.attempt_BT[counted_BT]] >= 0).all()
    sampled = np.bincount(
        np.concatenate([np.zeros(0, np.int32), *(r.attempt_BT[r.sampled_BT] for r in batch.rows)]),
        minlength=A,
    )
    for a in range(A):  # the tokens that an attempt is weighed by are those in the rows
        assert sampled[a] == (batch.tokens_A[a] if a in wanted else 0)

    again = batch_of(rng.sample(groups, len(groups)), micro_rows=micro_rows)
    for name in ("group_A", "reward_A", "tokens_A"):
        np.testing.assert_array_equal(getattr(again, name), getattr(batch, name))
    for a, b in zip(again.rows, batch.rows, strict=True):
        for field in dataclasses.fields(PackedRows):
            np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


@pytest.mark.parametrize("micro_rows", [1, 2, 3, 5])
def test_micro_batches_have_one_shape_and_are_as_few_as_can_be(micro_rows: int):
    members = [(outcome, [segment(ROW, 1000 * n)]) for n, outcome in enumerate([S, F, F, S, F])]
    batch = batch_of([group("g", *members)], micro_rows=micro_rows)  # a row each
    assert len(batch.rows) == math.ceil(5 / micro_rows)
    assert {rows.ids_BT.shape for rows in batch.rows} == {(micro_rows, ROW)}
    padding = sum(int((rows.segment_BT == -1).all(axis=1).sum()) for rows in batch.rows)
    assert padding == len(batch.rows) * micro_rows - 5


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [group("a")],
        [group("a", (S, [segment(5)]), (S, [segment(6)]))],
        [group("a", (F, [segment(5)]), (L, [segment(6)])), group("b", (S, [segment(7)]))],
        [group("a", (X, []), (X, []))],
        [group("a", (S, [segment(5)]), (X, []))],  # a lost attempt is no failure
    ],
    ids=["no group", "an empty group", "all solved", "no group has both", "all lost", "one left"],
)
def test_nothing_that_teaches_makes_no_rows(groups: list[Group]):
    assert batch_of(groups).rows == ()


def test_a_lost_attempt_with_leftovers_is_in_no_row():
    """Were a lost attempt ever to keep segments and a reward, they must not be trained on, nor be
    in any mean (verl PR#6452); its group goes on without it (prime-rl#2585)."""
    lost = dataclasses.replace(
        group("g", (S, [segment(5, 900)])).trajectories[0], outcome=X, reward=1.0
    )
    one = group("g", (F, [segment(4, 100)]), (S, [segment(6, 200)]))
    batch = batch_of([dataclasses.replace(one, trajectories=(lost, *one.trajectories))])
    assert batch.group_A[:3].tolist() == [-1, 0, 0]
    assert batch.reward_A[:3].tolist() == [0, 0, 1]
    assert batch.tokens_A[:3].tolist() == [0, 1, 2]
    assert owned(batch) == {1: [[*range(100, 104)]], 2: [[*range(200, 206)]]}
    flat = dataclasses.replace(one, trajectories=(lost, one.trajectories[0]))
    assert batch_of([flat]).rows == ()


def test_two_groups_with_one_id_are_refused():
    """Attempts are grouped by id, never by place (prime-rl PR#600, slime PR#2062)."""
    groups = [group(n, (S, [segment(3)]), (F, [segment(3)])) for n in ("a", "b", "a")]
    with pytest.raises(ValueError, match="got two groups with one id"):
        batch_of(groups)


def test_more_attempts_than_there_are_places_for_are_refused():
    groups = [group(n, *[(F, [segment(3)])] * 4) for n in "abcd"]
    assert (batch_of(groups).group_A == np.repeat(np.arange(4), 4)).all()
    with pytest.raises(ValueError, match="got 17 attempts; the batch has places for 16"):
        batch_of([*groups, group("e", (X, []))])


@pytest.mark.parametrize("length", [21, 500])
def test_a_segment_longer_than_a_row_is_refused_in_a_batch(length: int):
    """The sentence says how long, whose it is, and which two settings change it."""
    with pytest.raises(ValueError, match=f"got a segment of {length} tokens") as refused:
        batch_of([group("a", (S, [segment(3)]), (F, [segment(4), segment(length)]))])
    for part in ("fake/train/a", "under h0", "rows hold 20", "config.learner.row_tokens",
                 "config.learner.long_segments"):  # fmt: skip
        assert part in str(refused.value)


# --- segments longer than a row -------------------------------------------------------------------


def turns(text: str, first: int = 100, version: int = 0) -> Segment:
    """A letter for each token: s sampled, anything else not."""
    sampled_T = np.asarray([letter == "s" for letter in text])
    version_T = np.where(sampled_T, version, -1).astype(np.int32)
    whole = segment(len(text), first)
    return dataclasses.replace(whole, sampled_T=sampled_T, weight_version_T=version_T)


@pytest.mark.parametrize(
    ("text", "row", "kept"),
    [
        ("ppssoossoo", 10, "ppssoossoo"),  # fits: nothing is cut, not even what trains nothing
        ("ppssoossoo", 9, "ppssooss"),  # the observation behind the last turn teaches nothing
        ("ppssoossoo", 8, "ppssooss"),  # a turn that ends with the row
        ("ppssoossoo", 7, "ppss"),  # a turn is whole or not there
        ("ppssoossoo", 4, "ppss"),
        ("ppssoossoo", 3, None),  # no turn fits
        ("ppssooss", 7, "ppss"),  # the last turn is too long: it does not end in the row
        ("ppssss", 5, None),  # the only one
        ("pppppppp", 5, None),  # nothing was sampled
        ("soss", 1, "s"),
    ],
)
def test_a_segment_is_cut_behind_the_last_turn_that_fits(text: str, row: int, kept: str | None):
    whole = turns(text)
    part = cut(whole, row)
    if kept is None:
        assert part is None
        return
    for field in dataclasses.fields(Segment):
        wanted_T = getattr(whole, field.name)[: len(kept)]
        np.testing.assert_array_equal(getattr(part, field.name), wanted_T)


@given(st.text("sp", min_size=1, max_size=30), st.integers(1, 30))
def test_a_cut_keeps_whole_turns_as_many_as_fit(text: str, row: int):
    part = cut(turns(text), row)
    kept = 0 if part is None else len(part.ids_T)
    assert kept <= row
    if len(text) <= row:
        assert kept == len(text)
        return
    assert kept == 0 or text[kept - 1 : kept + 1] == "sp"
    assert "sp" not in text[max(0, kept - 1) + (kept > 0) : row + 1]  # no later turn ends in time


def test_a_batch_of_cut_segments_counts_what_is_kept():
    """tokens_A, which a token is weighed by, are those in rows (a mean over tokens that are not
    there would be one over too many); what is lost is counted beside them."""
    long = turns("pp" + "s" * 12 + "oo" + "s" * 7 + "oo", 1000, version=4)  # 12 of 19 fit
    hopeless = turns("p" + "s" * 25, 2000, version=1)  # a segment of which no turn fits
    short = turns("ppsss", 3000, version=6)
    flat = group("b", (F, [long]), (F, [short]))  # teaches nothing, so that nothing is lost
    batch = batch_of(
        [group("a", (S, [long, short]), (F, [hopeless]), (F, [short])), flat], long_segments="cut"
    )
    assert batch.tokens_A[:5].tolist() == [15, 0, 3, 12, 3]
    assert batch.reward_A[:5].tolist() == [
        1,
        0,
        0,
        0,
        0,
    ]  # who lost all its tokens has failed still
    assert batch.group_A[:5].tolist() == [0, 0, 0, 1, 1]
    assert owned(batch) == {
        0: [[*range(1000, 1014)], [*range(3000, 3005)]],
        2: [[*range(3000, 3005)]],
    }
    assert batch.packed == Packed(
        lengths=(14, 5, 5), trained_tokens=18, cut_tokens=7 + 25, oldest_version=4
    )


def planned(plan: list[list[tuple[Outcome, list[int]]]]) -> list[Group]:
    """Of GROUPS: outcomes, and lengths of segments."""
    first = itertools.count(1000, 1000)
    members = [
        [(o, [] if o == X else [segment(n, next(first)) for n in sizes]) for o, sizes in each]
        for each in plan
    ]
    return [group(str(g), *each) for g, each in enumerate(members)]


@given(GROUPS)
def test_where_nothing_is_too_long_cut_and_refuse_are_the_same(plan):
    groups = planned(plan)
    refused, cut_ = (batch_of(groups, long_segments=how) for how in ("refuse", "cut"))
    assert owned(refused) == owned(cut_)
    assert refused.packed == cut_.packed
    assert refused.packed.cut_tokens == 0
    sampled = sum(int(rows.sampled_BT.sum()) for rows in refused.rows)
    assert refused.packed.trained_tokens == sampled
    lengths = sorted(len(ids) for all_ in owned(refused).values() for ids in all_)
    assert sorted(refused.packed.lengths) == lengths


# --- a batch of several hosts ---------------------------------------------------------------------


def known_to(host: int, groups: list[Group], owner: dict[str, list[int]]) -> list[Group]:
    """The groups as a host has them: of attempts that another ran, no segments."""

    def seen(t: Trajectory, ran: int) -> Trajectory:
        counted = Counted(t.sampled_tokens, t.context_tokens)
        return t if ran == host else dataclasses.replace(t, segments=(), elsewhere=counted)

    return [
        dataclasses.replace(g, trajectories=tuple(map(seen, g.trajectories, owner[g.id])))
        for g in groups
    ]


def of_hosts(shares: list[list[Group]], **changes: int | str) -> list[TrainBatch]:
    """Each host's batch, once they told one another."""
    own = [batch_of(share, **changes) for share in shares]
    told = json.loads(json.dumps([to_agree_on(batch) for batch in own]))  # as it travels
    sizes = {"row_tokens": ROW, "micro_rows": changes.get("micro_rows", MICRO)}
    return [agreed(batch, told, **sizes) for batch in own]


def test_hosts_agree_by_hand():
    """verl PR#5228: hosts with less to do wait for nobody; SkyRL#1296: tokens are counted once,
    over all of them."""
    late = (turns("pp" + "s" * 15, 1000, version=5), turns("ppss", 2000, version=2))
    groups = [
        group("a", (S, [late[0]]), (F, [late[1]]), (X, [])),
        group("b", (F, [turns("psss", 3000)]), (F, [turns("ps", 4000)])),  # flat
        group("c", (F, [turns("p" + "s" * 25, 5000)] * 2), (S, [turns("ps" + "o" * 16, 6000, 7)])),
    ]
    owner = {"a": [0, 1, 0], "b": [1, 0], "c": [1, 1]}
    shares = [known_to(host, groups, owner) for host in (0, 1)]
    here, there = of_hosts(shares, long_segments="cut", micro_rows=1)
    for batch in (here, there):  # an attempt has its place wherever it ran
        assert batch.reward_A[:7].tolist() == [1, 0, 0, 0, 0, 0, 1]
        assert batch.group_A[:7].tolist() == [0, 0, -1, 1, 1, 2, 2]
        assert batch.tokens_A[:7].tolist() == [15, 2, 0, 3, 1, 0, 1]
        assert batch.tokens_A.dtype == np.int32
        assert batch.packed == Packed((17, 4, 18), 18, 50, 2)
    assert owned(here) == {0: [[*range(1000, 1017)]]}
    assert owned(there) == {1: [[*range(2000, 2004)]], 6: [[*range(6000, 6018)]]}
    assert len(here.rows) == len(there.rows) == 2  # the second is padding here
    for name, array in vars(PackedRows.empty(1, ROW)).items():
        np.testing.assert_array_equal(getattr(here.rows[1], name), array)
        assert getattr(here.rows[1], name).dtype == array.dtype


def test_hosts_where_none_has_anything_to_train_on_make_no_rows():
    groups = [group("a", (S, [segment(5)]), (S, [segment(6)]))]
    shares = [known_to(host, groups, {"a": [0, 1]}) for host in (0, 1)]
    for batch in of_hosts(shares):
        assert batch.rows == ()
        assert batch.packed == Packed((), 0, 0, None)
        assert batch.tokens_A[:2].tolist() == [2, 2]


@given(GROUPS, st.integers(1, 3), st.randoms(use_true_random=False))
def test_hosts_have_together_what_one_has(plan, hosts: int, rng):
    groups = planned(plan)
    owner = {g.id: [rng.randrange(hosts) for _ in g.trajectories] for g in groups}
    whole = batch_of(groups)
    parts = of_hosts([known_to(host, groups, owner) for host in range(hosts)])
    together: dict[int, list[list[int]]] = {}
    for part in parts:
        for name in ("reward_A", "group_A", "tokens_A"):
            np.testing.assert_array_equal(getattr(part, name), getattr(whole, name))
        assert part.packed == parts[0].packed
        assert len(part.rows) == len(parts[0].rows)
        mine = owned(part)
        assert not mine.keys() & together.keys()
        together |= mine
    assert together == owned(whole)
    one, all_ = (dataclasses.asdict(batch.packed) for batch in (whole, parts[0]))
    assert sorted(one.pop("lengths")) == sorted(all_.pop("lengths"))
    assert one == all_
