"""Rows become records or errors that name them; records become exactly what is trained."""

import gzip
import json
import pickle

import numpy as np
import pytest

from bestiary.training.data.encode import EventEncoder, RowEncoder, Wanted, value_of
from bestiary.training.data.errors import MaskRefused, SampleRefused
from bestiary.training.data.masks import TrainOn
from bestiary.training.data.samples import RECORDS, parse
from bestiary.training.data.tokens import IGNORED, digest_of

ASK, SAY = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
# kind, row, what of it is wrong
WRONG = [
    ("chat", {"messages": [ASK]}, "messages holds no message of role 'assistant'"),
    ("chat", {"messages": []}, "messages: Tuple should have at least 1 item"),
    ("chat", {"text": "a"}, "messages: Field required"),
    ("chat", {"messages": [{"role": "robot", "content": "x"}, SAY]}, "messages.0.role: Input should be 'system'"),
    ("chat", {"messages": [ASK, {**SAY, "loss": 1}]}, "messages.1.loss: Extra inputs are not permitted"),
    ("chat", {"messages": [{**ASK, "train": True}, SAY]}, "only an assistant's message can be trained"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image"}]}, SAY]}, "messages.0.content"),
    ("completion", {"prompt": "a", "completion": ""}, "completion: String should have at least 1"),
    ("preference", {"prompt": "Q", "chosen": "A", "rejected": "A"}, "nothing to prefer"),
    ("unpaired", {"messages": [ASK], "label": True}, "ends with a message of role 'user'"),
    ("reward", {"messages": [ASK, SAY], "score": float("nan")}, "score: Input should be a finite number"),
    ("prompt", {"prompt": [ASK, SAY]}, "there is nothing to answer"),
    ("distillation", {"messages": [ASK, SAY], "teacher_ids": [[1]]}, "different shapes"),
    ("events", {"items": [1, 2], "features": {"dwell": [0.5]}}, "features['dwell'] has 1 values for 2 events"),
    ("events", {"items": [1], "codes": [[1]]}, "one of both"),
    ("events", {"items": [1, 2], "times": [2, 1]}, "times fall"),
]


def encoder(tokenizer_of, kind, family="smollm", **options):
    return RowEncoder(tokenizer=tokenizer_of(family), kind=kind, **options)


def trained(tokenizer, tokens):
    return tokenizer.decode(tokens.labels[tokens.labels != IGNORED])


@pytest.mark.parametrize(("kind", "row", "wrong"), WRONG)
def test_a_wrong_row_is_named_with_its_field(tokenizer_of, kind, row, wrong):
    with pytest.raises(SampleRefused) as caught:
        encoder(tokenizer_of, kind).sample(row, "talks.jsonl row 17")
    assert str(caught.value).startswith("talks.jsonl row 17: ")
    assert wrong in caught.value.what


def test_a_column_that_is_not_there_is_named(tokenizer_of):
    rows = encoder(tokenizer_of, "completion", columns={"prompt": "question"})
    with pytest.raises(SampleRefused, match="row 1: there is no column 'question'"):
        rows.sample({"prompt": "a"}, "row 1")


def test_each_kind_has_a_record():
    parse("text", {"text": "a"}, "row 0")
    assert len(RECORDS) == 9


def test_a_completion_is_trained_with_the_end_of_text_and_its_prompt_is_not(tokenizer_of):
    rows = encoder(tokenizer_of, "completion", "llama3.1", columns={"prompt": "question", "completion": "answer"})
    tokens = rows({"question": "One plus one?", "answer": " Two."})
    assert rows.tokenizer.decode(tokens.input_ids) == "<|begin_of_text|>One plus one? Two.<|eot_id|>"
    assert trained(rows.tokenizer, tokens) == " Two.<|eot_id|>"


def test_a_completion_may_be_a_question_and_an_answer(tokenizer_of):
    rows = encoder(tokenizer_of, "completion", as_chat=True)
    assert trained(rows.tokenizer, rows({"prompt": "Q", "completion": "A"})) == "A<|im_end|>"


def test_text_is_trained_whole(tokenizer_of):
    rows = encoder(tokenizer_of, "text", "gemma3")
    tokens = rows({"text": "abc <bos>"})
    assert rows.tokenizer.decode(tokens.input_ids) == "<bos>abc <bos><end_of_turn>"
    assert (tokens.input_ids == 2).sum() == 1
    assert (tokens.labels == IGNORED).sum() == 1


def test_of_a_pair_only_the_answers_are_trained(tokenizer_of):
    rows = encoder(tokenizer_of, "preference", train_on=TrainOn(turns=(0,)))
    pair = rows({"prompt": [ASK, SAY, ASK], "chosen": "good", "rejected": "bad"})
    assert [trained(rows.tokenizer, one) for one in pair] == ["good<|im_end|>", "bad<|im_end|>"]
    same = len(
        rows.tokenizer.prompt_ids(rows.sample({"prompt": [ASK, SAY, ASK], "chosen": "g", "rejected": "b"}, "").prompt)
    )
    assert np.array_equal(pair[0].input_ids[:same], pair[1].input_ids[:same])


def test_scored_samples_carry_their_number_and_mark_what_it_is_about(tokenizer_of):
    wanted = encoder(tokenizer_of, "unpaired")
    row = {"messages": [ASK, SAY, ASK, SAY], "label": False}
    assert trained(wanted.tokenizer, wanted(row)) == "A<|im_end|>"
    assert wanted(row).value == value_of(wanted.sample(row, "")) == 0.0
    scored = encoder(tokenizer_of, "reward")
    row = {"messages": [ASK, SAY], "score": 0.5}
    assert trained(scored.tokenizer, scored(row)) == "<|im_end|>"
    assert scored(row).value == value_of(scored.sample(row, "")) == 0.5


def test_both_documents_of_a_pair_carry_its_margin(tokenizer_of):
    rows = encoder(tokenizer_of, "preference", columns={"margin": "gap"})
    pair = {"prompt": "Q", "chosen": "good", "rejected": "bad"}
    assert [one.value for one in rows(pair | {"gap": 2})] == [2.0, 2.0]
    assert [one.value for one in encoder(tokenizer_of, "preference")(pair)] == [None, None]


def test_a_prompt_is_what_serving_sends_and_trains_nothing(tokenizer_of):
    rows = encoder(tokenizer_of, "prompt")
    tokens = rows({"prompt": "Q", "answer": "4"})
    assert rows.tokenizer.decode(tokens.input_ids).endswith("<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n")
    assert (tokens.labels == IGNORED).all()


def test_a_teacher_s_rows_fit_the_trained_tokens(tokenizer_of):
    rows = encoder(tokenizer_of, "distillation")
    row = {"messages": [ASK, SAY], "teacher_ids": [[1], [2]], "teacher_log_probs": [[-0.1], [-0.2]]}
    assert trained(rows.tokenizer, rows(row)) == "A<|im_end|>"
    with pytest.raises(SampleRefused, match="has 1 rows for 2 trained tokens"):
        rows({**row, "teacher_ids": [[1]], "teacher_log_probs": [[-0.1]]})


def test_a_teacher_s_words_stand_beside_the_tokens_that_are_trained(tokenizer_of):
    """Likeliest first, rows of unequal lengths; narrow where float32 says all of it; left in the file unless wanted."""
    row = {"messages": [ASK, SAY], "teacher_ids": [[7], [5, 3, 9]], "teacher_log_probs": [[-0.5], [-3, -1, -2]]}
    assert encoder(tokenizer_of, "distillation")(row).teacher is None
    rows = encoder(tokenizer_of, "distillation", wanted=Wanted(teacher=True, temperature=1.0))
    made = rows(row)
    told = made.labels != IGNORED
    assert made.teacher.words[told].tolist() == [[7, -1, -1], [3, 9, 5]]
    assert made.teacher.log_probs[told].tolist() == [[-0.5, -np.inf, -np.inf], [-1, -2, -3]]
    assert (made.teacher.words[~told] == -1).all()
    assert (made.teacher.log_probs.dtype, made.teacher.log_probs.shape) == (np.float32, (len(made), 3))
    assert rows({**row, "teacher_log_probs": [[-0.1], [-3, -1, -2]]}).teacher.log_probs.dtype == np.float64
    assert rows({**row, "teacher_digest": digest_of(made.input_ids, made.labels)}).teacher is not None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"teacher_ids": None, "teacher_log_probs": None}, "there are no teacher_ids"),
        ({"teacher_digest": "of other tokens"}, "teacher_ids were stored for other tokens"),
        ({"teacher_temperature": 2.0}, "taken at temperature 2 and the run's is 1"),
        ({"teacher_ids": [[1, 2], [3, 49152]]}, r"teacher_ids\[1\] holds the id 49152, and the student knows 49152"),
        ({"teacher_ids": [[1, -1], [3, 4]]}, r"teacher_ids\[0\] holds the id -1"),
        ({"teacher_ids": [[1, 2], [3, 3]]}, r"teacher_ids\[1\] holds one id twice"),
        (
            {"teacher_log_probs": [[-0.1, -0.1], [-1, -2]]},
            r"teacher_log_probs\[0\] are of probabilities that sum to 1.81",
        ),
        ({"teacher_log_probs": [[-1, float("nan")], [-1, -2]]}, r"teacher_log_probs\[0\] holds a value that is no"),
        ({"teacher_ids": [[1, 2], []], "teacher_log_probs": [[-1, -2], []]}, r"teacher_ids\[1\] names no word"),
    ],
)
def test_words_that_cannot_be_the_teacher_s_are_refused(tokenizer_of, change, said):
    row = {"messages": [ASK, SAY], "teacher_ids": [[1, 2], [3, 4]], "teacher_log_probs": [[-1, -2], [-1, -2]]}
    rows = encoder(tokenizer_of, "distillation", wanted=Wanted(teacher=True, temperature=1.0))
    assert rows(row).teacher is not None
    with pytest.raises(SampleRefused, match=said):
        rows(row | change)


def test_events_need_no_tokenizer():
    tokens = EventEncoder(items=5, first_id=10, columns={"items": "history"})({"history": [4, 0, 2], "user": 7})
    assert tokens.input_ids.tolist() == [14, 10, 12]
    assert tokens.labels.tolist() == [IGNORED, 10, 12]
    with pytest.raises(SampleRefused, match="item 5 of 5"):
        EventEncoder(items=5)({"items": [1, 5]})


def test_reasoning_can_be_dropped_before_rendering(tokenizer_of):
    row = {"messages": [ASK, {**SAY, "reasoning_content": "hm"}]}
    rows = encoder(tokenizer_of, "chat", reasoning="drop")
    assert trained(rows.tokenizer, rows(row)) == "A<|im_end|>"


def test_an_encoder_travels_to_another_process_and_does_the_same(tokenizer_of):
    rows = encoder(tokenizer_of, "chat")
    row = {"messages": [ASK, SAY]}
    again = pickle.loads(pickle.dumps(rows))
    assert np.array_equal(again(row).labels, rows(row).labels)


def test_a_batch_gives_what_single_rows_give(tokenizer_of):
    rows = encoder(tokenizer_of, "chat")
    samples = [rows.sample({"messages": [ASK, {**SAY, "content": text}]}, "") for text in ("a", "<|im_end|>", "\n\nb")]
    together = rows.encode(samples, ["", "", ""])
    assert all(
        np.array_equal(a.labels, rows.encode([b], [""])[0].labels) for a, b in zip(together, samples, strict=True)
    )


# The published samples, every shape that they come in.
FILES = [
    ("gsm8k_test.jsonl", "completion", "plain", {"prompt": "question", "completion": "answer"}),
    ("t0_subset.jsonl.gz", "completion", "plain", {}),
    ("hh_rlhf_harmless_test.jsonl.gz", "preference", "transcript", {}),
    ("dpo_demo.jsonl", "preference", "sharegpt", {}),
    ("kto_demo.jsonl", "unpaired", "plain", {}),
    ("toolcall_demo.jsonl", "chat", "sharegpt", {}),
    ("reasoning_toolcall_demo.jsonl", "chat", "plain", {}),
    ("multiturn_chat.jsonl", "chat", "plain", {}),
    ("multiturn_identity_demo.jsonl", "chat", "sharegpt", {}),
]


@pytest.mark.parametrize(("file", "kind", "shape", "columns"), FILES)
def test_published_rows_are_read_and_trained(tokenizer_of, reference_data, file, kind, shape, columns):
    """Every row is a record; what is trained ends with a stop token, and its text is what the row's answers say."""
    path = reference_data / "text" / file
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for _, line in zip(range(40), lines, strict=False)]
    encode = encoder(tokenizer_of, kind, "qwen3", shape=shape, columns=columns)
    where = [f"{file} row {index}" for index in range(len(rows))]
    samples = [encode.sample(row, place) for row, place in zip(rows, where, strict=True)]
    for made in encode.encode(samples, where):
        for tokens in made if isinstance(made, tuple) else (made,):
            assert tokens.labels[tokens.labels != IGNORED][-1] in encode.tokenizer.stop_ids
            assert 0 < (tokens.labels != IGNORED).sum() < len(tokens.labels)


def test_a_conversation_of_others_keeps_its_system_message_and_what_is_not_trained(tokenizer_of):
    rows = encoder(tokenizer_of, "chat", shape="sharegpt")
    turns = [
        {"from": "human", "value": "Q", "weight": 0},
        {"from": "gpt", "value": "One", "weight": 0, "id": 7},
        {"from": "human", "value": "R"},
        {"from": "gpt", "value": "Two", "weight": 1, "loss": None},
        {"from": "human", "value": "S"},
        {"from": "gpt", "value": "Three", "train": False},
    ]
    made = rows({"conversations": turns, "system": "Be brief."})
    assert "Be brief." in rows.tokenizer.decode(made.input_ids)
    assert trained(rows.tokenizer, made).startswith("Two<|im_end|>")
    assert all(word not in trained(rows.tokenizer, made) for word in ("One", "Three"))


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"conversations": [{"from": "gpt", "value": "A", "weight": 0.5}]}, "a turn has weight = 0.5"),
        ({"conversations": [{"from": "system", "value": "A"}], "system": "B"}, "two of them"),
    ],
)
def test_what_a_conversation_of_others_cannot_mean_is_refused(tokenizer_of, row, wrong):
    with pytest.raises(SampleRefused, match=wrong):
        encoder(tokenizer_of, "chat", shape="sharegpt").sample(row, "")


def test_a_row_without_a_trained_turn_names_itself(tokenizer_of):
    rows = encoder(tokenizer_of, "chat")
    sample = rows.sample({"messages": [ASK, {**SAY, "train": False}]}, "")
    with pytest.raises(MaskRefused, match=r"talks\.jsonl row 4: none of"):
        rows.encode([sample], ["talks.jsonl row 4"])
