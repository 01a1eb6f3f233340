"""Whether our forward is ours: no module, and no code that runs, may come from transformers' modelling files.

`delegates` is the cheap check of every run. `isolated_logits` is the strict one: our forward runs in a process in which
the modelling files cannot be imported, weights and logits crossing as files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn

from bestiary.kernels.errors import BestiaryError
from bestiary.verify.inputs import Inputs

ISOLATED = "bestiary.verify.isolated"
TIMEOUT = 300


class IsolationFailed(BestiaryError):
    """The process without transformers' modelling files did not answer; its last lines are in the message.

    Remedy: import nothing of transformers' modelling files from the bridge or the model.
    """

    exit_code = 6


def foreign_modules(model: nn.Module) -> list[str]:
    """Submodules whose class, or a base of it, is transformers'."""
    return [
        f"{name or 'model'}: {type(module).__module__}.{type(module).__qualname__}"
        for name, module in model.named_modules()
        if any(base.__module__.partition(".")[0] == "transformers" for base in type(module).__mro__)
    ]


def foreign_code(call: Callable[[], Any]) -> list[str]:
    """Code objects under `transformers/` that run while `call` does, as file:function."""
    import transformers

    root = str(Path(transformers.__file__).parent) + os.sep
    seen: set[str] = set()

    def profile(frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            seen.add(f"{frame.f_code.co_filename.removeprefix(root)}:{frame.f_code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return sorted(seen)


def delegates(model: nn.Module, inputs: Inputs) -> list[str]:
    """What of transformers takes part in a forward of `model`; empty for a model of our own."""
    return foreign_modules(model) + foreign_code(lambda: model(**inputs.kwargs()))


def isolated_logits(folder: Path, questions: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Logits of ours from a process without transformers' modelling files.

    Args:
        folder: an empty folder for the exchange; `<name>/` under it holds the checkpoint of each question.
        questions: by checkpoint name, the tensors of one forward call.
    Raises:
        IsolationFailed: the process hung, ended with an error or imported what it must not.
    """
    from safetensors.torch import load_file, save_file

    for name, tensors in questions.items():
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{name}.inputs.safetensors")
    (folder / "request.json").write_text(json.dumps(sorted(questions)))
    command = [sys.executable, "-P", "-m", ISOLATED, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise IsolationFailed(
            f"our forward in a process of its own gave no logits in {TIMEOUT:g} s.",
            remedy="the model's forward, and what its modules do when they are imported",
        ) from error
    if done.returncode:
        raise IsolationFailed(
            f"our forward in a process of its own ended with status {done.returncode}: "
            + " | ".join(done.stderr.strip().splitlines()[-3:]),
            remedy="the model and its bridge may not import transformers' modelling files",
        )
    return {name: load_file(folder / f"{name}.logits.safetensors")["logits"] for name in questions}
