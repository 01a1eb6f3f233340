"""Names of trained prompts in a resume point: exactly those, in a size that hardly grows."""

import json
import random

from hypothesis import given
from hypothesis import strategies as st

from bestiary.training.rl.policy import Account
from bestiary.training.rl.trained_names import packed, unpacked

NAMES = st.one_of(
    st.text(max_size=6),
    st.builds("{}/{}".format, st.sampled_from(["a/0/0", "a/1/0", "b/0/12"]), st.integers(0, 300)),
    st.integers(0, 10**30).map(str),
    st.sampled_from(["a/007", "a/0", "a/00", "a/٣", "a/-1", "7", ""]),
)


def written(names):
    return json.loads(json.dumps(packed(names)))


@given(st.dictionaries(NAMES, st.integers(1, 4), max_size=60))
def test_names_and_steps_come_back_exactly(names):
    assert unpacked(written(names)) == names


def test_their_size_is_bits_and_of_an_epoch_that_is_through_next_to_nothing():
    rows = random.Random(0).sample(range(20000), 10000)
    names = {f"sums/3/0/{row}": 1 for row in rows}
    assert len(json.dumps(written(names))) < 20000 / 8 * 4 / 3 + 200 < len(json.dumps(names)) / 40
    through = names | {f"sums/{epoch}/0/{row}": 1 for epoch in range(3) for row in range(20000)}
    assert len(json.dumps(written(through))) < len(json.dumps(written(names))) + 300


def test_numbers_far_apart_stay_names():
    names = {"at/5": 1, f"at/{10**15}": 1}
    assert packed(names) == {"sets": [], "others": names}


def test_an_account_reads_what_it_wrote_and_what_was_written_before():
    account = Account()
    account.controller = {"round": 3}
    account.trained.update({"a/0/0/1": 2, "own": 1})
    for state in (
        json.loads(json.dumps(account.global_state())),
        {"controller": {"round": 3}, "trained": {"a/0/0/1": 2, "own": 1}},
    ):
        again = Account()
        again.load_state_dict(state)
        assert (again.controller, again.trained) == (account.controller, account.trained)
