"""What a teacher said about a sample, from the columns of a file to rows beside the sample's tokens, checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bestiary.training.data.errors import SampleRefused
from bestiary.training.data.samples import Distillation
from bestiary.training.data.tokens import IGNORED, TeacherWords, Tokens, digest_of

_ALL = 1.001  # of probabilities that were rounded, the most that they may sum to
_REMEDY = "store them again for this run: bestiary distill CONFIG --store-teacher FILE"


def teacher_words(
    sample: Distillation, tokens: Tokens, *, vocabulary: int, temperature: float | None, where: str
) -> TeacherWords:
    """The teacher's words of a sample, each beside its token.

    Args:
        tokens: of the sample, whole.   vocabulary: ids that the student knows.
        temperature: that the run trains at; None: whatever theirs is.
        where: names the sample in errors.

    Raises:
        SampleRefused: there are none, or they belong to other tokens, another vocabulary or temperature, or are no
            probabilities.
    """
    if sample.teacher_ids is None or sample.teacher_log_probs is None:
        raise SampleRefused(f"{where}: there are no teacher_ids, and no teacher to ask.", remedy=_REMEDY)
    trained = check_rows(sample.teacher_ids, sample.teacher_digest, tokens, where)
    if temperature is not None and sample.teacher_temperature != temperature:
        raise SampleRefused(
            f"{where}: teacher_log_probs were taken at temperature {sample.teacher_temperature:g} and the run's is "
            f"{temperature:g}.",
            remedy=f"loss.options.temperature={sample.teacher_temperature:g}, or s{_REMEDY[1:]}",
        )
    return placed(sample.teacher_ids, sample.teacher_log_probs, trained, len(tokens), vocabulary, where)


def check_rows(rows: Sequence[object], digest: str | None, tokens: Tokens, where: str) -> NDArray[np.int64]:
    """The places of the trained tokens, each of which has a row.

    Args:
        digest: of the tokens that the rows were stored for; None: only their number is compared.

    Raises:
        SampleRefused: the rows are of other tokens.
    """
    trained = np.flatnonzero(tokens.labels != IGNORED)
    if len(rows) != len(trained):
        raise SampleRefused(
            f"{where}: teacher_ids has {len(rows)} rows for {len(trained)} trained tokens.",
            remedy="keep the teacher's tokens with the tokenizer and template of the student",
        )
    if digest not in (None, digest_of(tokens.input_ids, tokens.labels)):
        raise SampleRefused(
            f"{where}: teacher_ids were stored for other tokens: another tokenizer, template or choice of what is "
            "trained makes as many.",
            remedy=_REMEDY,
        )
    return trained


def placed(
    ids: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    trained: NDArray[np.int64],
    tokens: int,
    vocabulary: int | None,
    where: str,
) -> TeacherWords:
    """Rows of trained tokens as rows of all tokens, likeliest first.

    Args:
        ids, log_probs: of each trained token, rows of any lengths, alike.   trained: their places among `tokens`.
        vocabulary: ids that the student knows; None: not checked.

    Raises:
        SampleRefused: a row without words, an id outside the vocabulary or twice, or log-probabilities that are none.
    """
    counts = np.array([len(row) for row in ids], np.int64)
    if len(counts) and counts.min() == 0:
        raise SampleRefused(f"{where}: teacher_ids[{int(counts.argmin())}] names no word.")
    width = int(counts.max(initial=0))
    filled = np.arange(width) < counts[:, None]
    words = TeacherWords.none(len(counts), width, np.float64)
    words.words[filled] = np.array([word for row in ids for word in row], np.int64)
    words.log_probs[filled] = np.array([value for row in log_probs for value in row], np.float64)
    _check(words, filled, vocabulary, where)
    order = np.argsort(-words.log_probs, axis=1, kind="stable")
    # What float32 holds exactly takes half the room on the way to the device.
    narrow = words.log_probs.astype(np.float32)
    dtype = np.float32 if np.array_equal(narrow, words.log_probs) else np.float64
    made = TeacherWords.none(tokens, width, dtype)
    made.words[trained] = np.take_along_axis(words.words, order, 1)
    made.log_probs[trained] = np.take_along_axis(words.log_probs, order, 1)
    return made


def _check(found: TeacherWords, filled: NDArray[np.bool_], vocabulary: int | None, where: str) -> None:
    words, log_probs = found.words, found.log_probs
    wrong = filled & ((words < 0) | (words >= (np.iinfo(np.int32).max if vocabulary is None else vocabulary)))
    if wrong.any():
        row, place = (int(index) for index in np.argwhere(wrong)[0])
        known = "" if vocabulary is None else f", and the student knows {vocabulary}"
        raise SampleRefused(
            f"{where}: teacher_ids[{row}] holds the id {int(words[row, place])}{known}.",
            remedy="a teacher with the student's vocabulary",
        )
    again = (np.diff(np.sort(words, 1), axis=1) == 0) & (np.sort(words, 1)[:, 1:] >= 0)
    if again.any():
        raise SampleRefused(f"{where}: teacher_ids[{int(np.argwhere(again)[0, 0])}] holds one id twice.")
    bad = filled & ~np.isfinite(log_probs)
    if bad.any() or (log_probs > 0).any():
        row = int(np.argwhere(bad | (log_probs > 0))[0, 0])
        raise SampleRefused(f"{where}: teacher_log_probs[{row}] holds a value that is no log-probability.")
    sums = np.exp(log_probs).sum(1)
    if (sums > _ALL).any():
        row = int(sums.argmax())
        raise SampleRefused(
            f"{where}: teacher_log_probs[{row}] are of probabilities that sum to {float(sums[row]):.4g}.",
            remedy="log-probabilities under the teacher's whole vocabulary, at most 1 together",
        )
