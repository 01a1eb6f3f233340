"""MovieLens-100k as it lies in the recbole wheel: what 943 people rated, in the order in which they did."""

from __future__ import annotations

import csv
from importlib.metadata import PackageNotFoundError, distribution
from typing import NamedTuple

from bestiary.training.integrations.needs import MissingLibrary


class Interactions(NamedTuple):
    """Who took to what.

    Attributes:
        histories: user → items by time, numbered from 0. What was rated in one second comes in the order of numbers.
        items: how many there are.
        ratings: user → what each of these was rated, 1 to 5.
    """

    histories: dict[str, list[int]]
    items: int
    ratings: dict[str, list[int]]


def interactions() -> Interactions:
    """All of it.

    Raises:
        MissingLibrary: recbole is not installed; nothing of it is imported.
    """
    try:
        files = distribution("recbole").files or []
    except PackageNotFoundError as error:
        raise MissingLibrary(
            "recbole, which holds MovieLens-100k, is not installed.",
            remedy="pip install --no-deps -r tools/requirements/demo.txt",
        ) from error
    file = next(one.locate() for one in files if str(one).endswith("ml-100k.inter"))
    with open(str(file), encoding="utf-8", newline="") as table:
        rows = list(csv.reader(table, delimiter="\t"))[1:]
    numbers = {item: number for number, item in enumerate(sorted({row[1] for row in rows}, key=int))}
    histories: dict[str, list[int]] = {}
    ratings: dict[str, list[int]] = {}
    for user, item, rating, _ in sorted(rows, key=lambda row: (row[0], float(row[3]), int(row[1]))):
        histories.setdefault(user, []).append(numbers[item])
        ratings.setdefault(user, []).append(int(float(rating)))
    return Interactions(histories, len(numbers), ratings)
