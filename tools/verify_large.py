"""Are the largest mixtures of experts verifiable on a small machine? One layer of each in its real shape, streamed.

Writes a checkpoint of random weights with one layer of GPT-OSS 120B (128 experts, stored as MXFP4) or Qwen3 235B-A22B
(128 experts, one tensor each), a small vocabulary around it, and runs level V8 on it. Passes if V8 passes and the
process never held more than --gib of memory. Needs some 5 GB of disk for the length of the run.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from bestiary.kernels.errors import BestiaryError
from bestiary.tools.arguments import Parser, at_least, write_json

MODELS = ("gpt_oss", "qwen3_moe")
VOCABULARY = 2048
SCALES = (119, 122)
"""Exponents of MXFP4 blocks, biased by 127: weights of about 2^-7, the inverse root of a fan-in of thousands."""

EXAMPLES = """\
examples:
  make verify-large
  python -m bestiary.tools.verify_large gpt_oss --gib 18

exit codes: those of verify-bridge; 1 also if more memory was used than allowed"""


def main(argv: Sequence[str] | None = None) -> int:
    """Verifies one model; returns the exit code."""
    parser = Parser("bestiary.tools.verify_large", __doc__, EXAMPLES)
    parser.add_argument("model", choices=MODELS, help="whose layer")
    parser.add_argument("--gib", type=float, default=18.0, help="memory that the process may take at most (default 18)")
    parser.add_argument("--tokens", type=at_least(129), default=160, help="length of the text (default 160)")
    parser.add_argument("--experts", type=at_least(8), default=128, help="fewer than the real 128, for a first look")
    args = parser.parse_args(argv)
    try:
        result = measure(args.model, args.tokens, args.experts)
    except BestiaryError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    result["allowed_gib"] = args.gib
    write_json(args.json, result)
    if args.json != "-":
        size = f"{args.experts} experts, {result['layer_parameters'] / 1e9:.2f} B parameters a layer"
        print(
            f"{args.model}, {size}: {result['verdict']}, peak {result['peak_gib']:.1f} GiB of {args.gib:g}, "
            f"{result['seconds']:.0f} s, worst {result['worst']}"
        )
    return int(result["exit_code"]) or int(result["peak_gib"] > args.gib)


def measure(model: str, length: int, experts: int) -> dict[str, Any]:
    """Writes the checkpoint, runs V8 on it, and says what it took."""
    from bestiary.bridges import get_bridge
    from bestiary.models import GptOss, Qwen3MoE
    from bestiary.verify.checkpoint import run_checkpoint

    full = {"gpt_oss": GptOss.sizes["120b"], "qwen3_moe": Qwen3MoE.sizes["235b-a22b"]}[model]
    config = full.with_(num_hidden_layers=1, layer_types=full.layer_types[:1], vocab_size=VOCABULARY)
    assert config.moe is not None
    config = config.with_(moe=replace(config.moe, num_experts=experts))
    bridge = get_bridge(model)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="verify-large-") as scratch:
        folder = Path(scratch, "checkpoint")
        write_checkpoint(folder, bridge, config, packed=model == "gpt_oss")
        written = time.perf_counter() - start
        ids = [7 * index % VOCABULARY for index in range(length)]
        verdict = run_checkpoint(
            folder, token_ids=ids, levels=("V8",), work=Path(scratch, "work"), progress=_line if _shown() else None
        )
    (level,) = verdict.levels
    parameters = bridge.parameters(config)
    return {
        "schema": "bestiary.verify_large/1",
        "model": model,
        "experts": experts,
        "exit_code": int(verdict.exit_code),
        "verdict": verdict.verdict,
        "findings": [f"{finding.check}: {finding.detail}" for finding in level.findings],
        "worst": None if level.worst is None else f"{level.worst.check} {level.worst.figure}",
        "layer_parameters": sum(prod(shape) for name, shape in parameters.items() if ".layers.0." in name),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30,
        "seconds_to_write": written,
        "seconds": time.perf_counter() - start,
    }


def write_checkpoint(folder: Path, bridge: Any, config: Any, *, packed: bool) -> None:
    """A checkpoint of random weights, one file a tensor.

    Args:
        packed: store the experts' matrices as MXFP4.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    places: dict[str, str] = {}
    for number, (name, tensor) in enumerate(_tensors(bridge, config, packed)):
        places[name] = f"model-{number:05d}.safetensors"
        save_file({name: tensor}, folder / places[name], metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    raw = {**bridge.config_to_hf(config), "architectures": [bridge.architecture], "dtype": "bfloat16"}
    if packed:
        raw["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")


def _tensors(bridge: Any, config: Any, packed: bool) -> Iterator[tuple[str, Any]]:
    """Every stored tensor under its hub name."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for transfer in bridge.plan_export(config).transfers:
        name, shape = transfer.hub.name, transfer.hub.shape
        if packed and len(shape) == 3:
            grid = (shape[0], shape[2], shape[1] // 32)
            yield f"{name}_blocks", torch.randint(0, 256, (*grid, 16), dtype=torch.uint8, generator=generator)
            yield f"{name}_scales", torch.randint(*SCALES, grid, dtype=torch.uint8, generator=generator)
            continue
        noise = torch.randn(shape, generator=generator)
        if len(shape) >= 2 and "embed" not in name:
            noise *= shape[-1] ** -0.5
        elif name.endswith("norm.weight"):
            noise = 1 + 0.3 * noise
        yield name, noise.to(torch.bfloat16)


def _shown() -> bool:
    return sys.stderr.isatty()


def _line(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
