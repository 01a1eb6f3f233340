"""Our forward in a process in which transformers' modelling files cannot be imported.

Run as `python -m bestiary.verify.isolated FOLDER` by `bestiary.verify.delegation.isolated_logits`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


def _is_modelling(name: str) -> bool:
    parts = name.split(".")
    return parts[:2] == ["transformers", "models"] and parts[-1].startswith("modeling_")


class Blocker:
    """A finder that refuses transformers' modelling files."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """None for every other module; the import goes on."""
        if _is_modelling(name):
            raise ImportError(f"{name} is blocked while the verifier runs our forward")
        return None


def main(folder: Path) -> None:
    """Answers every question in `folder` with the logits of our model."""
    sys.meta_path.insert(0, Blocker())
    import torch
    from safetensors.torch import load_file, save_file

    from bestiary.bridges import load_decoder

    torch.set_num_threads(1)
    for name in json.loads((folder / "request.json").read_text()):
        model = load_decoder(folder / name).eval()
        with torch.no_grad():
            logits = model(**load_file(folder / f"{name}.inputs.safetensors"))["logits"]
        save_file({"logits": logits.contiguous()}, folder / f"{name}.logits.safetensors")
    imported = [name for name in sys.modules if _is_modelling(name)]
    if imported:
        raise ImportError(f"{imported[0]} was imported past the block")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
