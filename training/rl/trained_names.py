"""The names of the prompts that a run has trained on, as its resume points hold them: exact, and bits instead of names.

A name ends in a number, its row (`source/epoch/file/row`). So names with one beginning that were in equally many steps
are a set of numbers: a bit for each from the smallest on, compressed. An epoch that is through is a few bytes.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

_NAME = re.compile(r"(.*?)(0|[1-9][0-9]{0,17})", re.DOTALL)  # a number that is written as Python would
_SPARSE = 64  # bits for a name at most: else names are as short


def packed(names: Mapping[str, int]) -> dict[str, Any]:
    """Names to the steps they were in, as JSON values.

    Returns:
        sets: [beginning, steps, smallest number, bits], of each.   others: the names that are in none.
    """
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    others: dict[str, int] = {}
    for name, steps in names.items():
        parts = _NAME.fullmatch(name)
        if parts is None:
            others[name] = steps
        else:
            found[parts[1], steps].append(int(parts[2]))
    sets = []
    for (start, steps), numbers in sorted(found.items()):
        least, most = min(numbers), max(numbers)
        if most - least >= _SPARSE * len(numbers):
            others |= {f"{start}{number}": steps for number in numbers}
            continue
        bits = np.zeros(most - least + 1, np.bool_)
        bits[np.array(numbers) - least] = True
        sets.append([start, steps, least, base64.b64encode(zlib.compress(np.packbits(bits).tobytes(), 9)).decode()])
    return {"sets": sets, "others": others}


def unpacked(stored: Mapping[str, Any]) -> dict[str, int]:
    """What `packed` was given, in another order."""
    found = dict(stored["others"])
    for start, steps, least, text in stored["sets"]:
        bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8))
        found |= {f"{start}{least + place}": steps for place in np.flatnonzero(bits).tolist()}
    return found
