"""Packs of prompts become packs of answers: which documents, which tokens are trained, and the same after a resume."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from bestiary.training.data.encoded import encoded
from bestiary.training.data.loader import PackLoader
from bestiary.training.data.plan import Plan
from bestiary.training.data.source import Source
from bestiary.training.rl.loader import RolloutLoader
from bestiary.training.rl.rollout import Rollout, Sampling, seed_of

LENGTH, ANSWER, IGNORED = 40, 6, -100


class Echo:
    """Answers with what it was asked: version, key and the prompt's first token, one of them cut off."""

    def __init__(self):
        self.version, self.calls = 0, []

    def generate(self, prompts, sampling, *, keys):
        self.calls.append((self.version, sampling.seed, list(keys), [list(prompt) for prompt in prompts]))
        return [
            Rollout(
                place,
                np.array([1000 + self.version, *key, prompt[0]][: 3 + prompt[0] % 2], np.int32),
                np.zeros(3 + prompt[0] % 2),
                "stop" if prompt[0] % 2 else "length",
                self.version,
            )
            for place, (prompt, key) in enumerate(zip(prompts, keys, strict=True))
        ]

    def close(self):
        """Nothing."""


def asking(row):
    """A row that leaves room for an answer behind its prompt."""
    made = encoded(row)
    return replace(made, least=made.prompt + ANSWER)


def unchanged(pack):
    return pack


def loader(folder, *, share=1.0, answers=True, streams=2, seed=3, **ranks):
    file = folder / f"rows-{answers}.jsonl"
    if not file.exists():
        rows = []
        for row in range(60):
            prompt, answer = 2 + row % 5, (3 + row % 7) * answers
            ids = [row + 1] * (prompt + answer) + [999]
            rows.append({"input_ids": ids, "labels": [IGNORED] * prompt + [row + 1] * answer + [IGNORED]})
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = Plan(
        sources=(Source(name="all", files=str(file), encode=asking),), pack_length=LENGTH, pad_id=7, streams=streams
    )
    packs = PackLoader(plan, workers=0, make=unchanged, **ranks)
    sampling = Sampling(max_tokens=ANSWER, seed=seed)
    return RolloutLoader(packs, Echo(), sampling, make=unchanged, pad_id=7, share=share)


def taken(made, count):
    return [pack for _, pack in zip(range(count), made, strict=False)]


def key(pack):
    return pack.stream, pack.number, pack.input_ids.tolist(), pack.labels.tolist(), pack.borders.tolist()


@pytest.mark.parametrize("answers", [False, True])
def test_a_document_is_its_prompt_and_what_was_sampled(tmp_path, answers):
    """Whether the data had an answer or not; only the sampled tokens are trained, and all find room in the pack."""
    made = loader(tmp_path, answers=answers)
    packs = taken(made, 6)
    documents = 0
    for pack, (version, seed, keys, prompts) in zip(packs, made._engine.calls, strict=True):
        assert (version, seed) == (pack.number, seed_of(3, pack.number))
        assert keys == [(pack.stream, place) for place in range(pack.documents)]
        for place, prompt in enumerate(prompts):
            start, end = pack.borders[place : place + 2]
            said = [1000 + pack.number, pack.stream, place, prompt[0]][: 3 + prompt[0] % 2]
            assert pack.input_ids[start:end].tolist() == [*prompt, *said]
            assert pack.labels[start:end].tolist() == [IGNORED] * len(prompt) + said
            assert prompt == [prompt[0]] * (2 + (prompt[0] - 1) % 5) + [999] * (not answers)
        assert pack.borders[pack.documents] <= LENGTH
        documents += pack.documents
    assert {pack.number for pack in packs} == {0, 1, 2}
    assert made.given.loss_tokens == sum(pack.loss_tokens for pack in packs) == made.given.more["rl/answer_tokens"]
    assert made.given.more["rl/answers"] == documents
    assert 0 < made.given.more["rl/truncated"] < documents


def test_a_share_of_the_documents_keeps_its_own_answer(tmp_path):
    """As many as asked; 0 asks for none, and what has no answer is answered all the same."""
    own = dict.fromkeys((0.0, 0.5, 1.0), 0)
    for share in own:
        packs = taken(loader(tmp_path, share=share), 40)
        answered = [(pack.input_ids[: pack.borders[pack.documents]] >= 1000).sum() for pack in packs]
        own[share] = sum(answered) / sum(pack.documents for pack in packs)
    assert own[0.0] == 0
    assert own[1.0] == 1
    assert 0.35 < own[0.5] < 0.65
    made = loader(tmp_path, share=0.0, answers=False)
    taken(made, 2)
    assert made.given.more["rl/answers"] > 0


@pytest.mark.parametrize("taken_before", [1, 2, 5])
def test_the_state_of_the_prompts_is_the_state_of_the_answers(tmp_path, taken_before):
    """After any batch, the middle of a step too; and two ranks give what one does."""
    make = partial(loader, tmp_path, share=0.5)
    whole = make()
    expected = [key(pack) for pack in taken(whole, 8)]
    first = make()
    taken(first, taken_before)
    state = json.loads(json.dumps(first.global_state()))
    again = make()
    again.load_state_dict(state)
    assert [key(pack) for pack in taken(again, 8 - taken_before)] == expected[taken_before:]
    ranks = [[key(pack) for pack in taken(make(rank=rank, world_size=2), 4)] for rank in range(2)]
    assert [pack for step in zip(*ranks, strict=True) for pack in step] == expected
