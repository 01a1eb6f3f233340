"""The `bestiary` command. Heavy imports wait until a command runs, so `bestiary --help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from bestiary.tools.arguments import USAGE_ERROR, write_json
from bestiary.tools.data_commands import add_data
from bestiary.tools.model_commands import add_models
from bestiary.tools.plot_commands import add_plot
from bestiary.tools.port.commands import add_port
from bestiary.tools.rl_commands import add_rl
from bestiary.tools.submit_commands import add_submit
from bestiary.tools.train_commands import add_training

DESCRIPTION = """\
A model zoo for LLM post-training: list its families, export checkpoints, port new architectures.
The verifier has a command of its own: verify-bridge --help"""

EXAMPLES = """\
examples:
  bestiary models                                    families, sizes, parameters, memory, FLOPs, date of the verdict
  bestiary models show gemma3-270m                   its modules with shapes and names; nothing is loaded
  bestiary export ./checkpoint ./exported            read a checkpoint, write Hugging Face safetensors
  bestiary export ./checkpoint ./exported --dtype bfloat16 --overwrite
  bestiary port new llama --plugin ./bestiary-llama  a new architecture; then port check, port status
  bestiary data inspect run.yaml --html data.html    what of your data is trained, and what is wrong with it
  bestiary sft run.yaml optim.lr=2e-5                supervised fine-tuning; goes on where it was stopped
  bestiary submit run.yaml --nodes 2 --gpus-per-node 8   the same on a Ray cluster; then bestiary jobs
  bestiary plot runs/first runs/second               loss and speed of runs, compared
  bestiary doctor                                    what is missing here for which feature, and how to get it

exit codes: 0 done, 2 keys or shapes, 4 refused as unsupported, 6 a port breaks its rules, 7 usage or environment"""

EXPORT_EXAMPLES = """\
examples:
  bestiary export ./adapter ./merged --merge           a PEFT adapter folded into its base
  bestiary export ./runs/first/checkpoints/step-00000100 ./at-100   a run as it stood, with its tokenizer
  bestiary export ./gpt-oss-mxfp4 ./gpt-oss-bf16       MXFP4 experts become their exact bf16 values
  bestiary export ./tuned ./spliced --into ./original  text weights put back into a copy of a multimodal checkpoint"""


DOCTOR_EXAMPLES = """\
examples:
  bestiary doctor                      packages, devices, disk, hub, then a family verified, a model trained
  bestiary doctor --no-check --json -

exit codes: 0 nothing that bestiary requires is missing or broken, 1 a check failed, 7 a required package is missing"""

_GROUPS = ("port", "data", "models", "jobs")  # commands that have commands


class _Parser(argparse.ArgumentParser):
    """argparse with the project's exit code for wrong usage, and with KEY=VALUE behind options too."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See argparse: which takes a list of words for complete before the first option, and refuses the rest."""
        found, rest = self.parse_known_args(args, namespace)
        if rest and (not hasattr(found, "changes") or any(word.startswith("-") or "=" not in word for word in rest)):
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        if rest:
            found.changes = [*found.changes, *rest]
        return found

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}\n")


class _Version(argparse.Action):
    """Prints the version and exits; it is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """See argparse.Action."""
        from importlib.metadata import version

        print(f"bestiary {version('bestiary')}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The parser of the `bestiary` command; each subcommand stores its function as `run`."""
    parser = _Parser(
        prog="bestiary",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(json=None)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    add_models(commands, _add_command)
    export = _add_command(commands, "export", "read a checkpoint, write Hugging Face safetensors", EXPORT_EXAMPLES)
    export.add_argument(
        "source",
        metavar="SRC",
        help="checkpoint folder, PEFT adapter that names its base, hub id, or resume point of a run",
    )
    export.add_argument("destination", metavar="DST", help="folder to write")
    export.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the checkpoint's")
    export.add_argument("--revision", help="branch, tag or commit of a hub id")
    export.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")
    export.add_argument("--merge", action="store_true", help="merge LoRA and write the full checkpoint")
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="default: 5GB")
    export.add_argument("--into", metavar="ORIGINAL", help="splice the text weights into a copy of this checkpoint")
    export.set_defaults(run=_run_export)
    doctor = _add_command(
        commands, "doctor", "what is here, what is missing for which feature, what works", DOCTOR_EXAMPLES
    )
    doctor.add_argument("--no-check", action="store_true", help="leave the self-check out, which takes up to a minute")
    doctor.set_defaults(run=_run_doctor)
    add_port(commands, _add_command)
    add_data(commands, _add_command)
    add_training(commands, _add_command)
    add_rl(commands, _add_command)
    add_submit(commands, _add_command)
    add_plot(commands, _add_command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (0 done, otherwise the error's own, as `verify-bridge` counts them)."""
    args = build_parser().parse_args(argv)
    from bestiary.kernels.errors import BestiaryError

    try:
        payload = args.run(args, partial(_say, args)) if args.command in _GROUPS else args.run(args)
    except BestiaryError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        told = {name: getattr(error, name) for name in ("what", "read_from", "remedy")}
        _write(args, {"exit_code": error.exit_code, "error": {"type": type(error).__name__, **told}})
        return error.exit_code
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return USAGE_ERROR
    _write(args, {"exit_code": 0, **payload})
    return int(payload.get("exit_code", 0))


def _add_command(commands: Any, name: str, what: str, examples: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--json",
        metavar="FILE",
        default=argparse.SUPPRESS,  # not None: that would undo what stands before a command of a command
        help="write the result as JSON; - is stdout, and silences the rest",
    )
    return command


def _write(args: argparse.Namespace, payload: dict[str, Any]) -> None:
    action = args.action if args.command in _GROUPS else None
    command = args.command if action is None else f"{args.command}_{action}"
    write_json(args.json, {"schema": f"bestiary.{command}/1", **payload})


def _say(args: argparse.Namespace, line: str) -> None:
    if args.json != "-":
        print(line)


def _run_doctor(args: argparse.Namespace) -> dict[str, Any]:
    from bestiary.tools.doctor import examine

    found = examine(checks=not args.no_check)
    for line in found.lines():
        _say(args, line)
    return found.as_json()


def _run_export(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from bestiary.models import AutoDecoder

    dtype = getattr(torch, args.dtype) if args.dtype else None
    options = {"merge": args.merge, "max_shard_size": args.max_shard_size, "into": args.into}
    if (Path(args.source) / "manifest.json").is_file():
        from bestiary.training.export import load_resume_point, write_result

        model, tokenizer = load_resume_point(Path(args.source))
        model.to(dtype or model.dtype)
        written = write_result(model, tokenizer, Path(args.destination), overwrite=args.overwrite, **options)
    else:
        model = AutoDecoder.from_pretrained(args.source, dtype=dtype, revision=args.revision)
        written = model.save_pretrained(args.destination, overwrite=args.overwrite, **options)
    model_type = model.decoder_config.model_type
    _say(args, f"{model_type} {args.source} -> {written}")
    return {"model_type": model_type, "source": args.source, "destination": str(written)}


if __name__ == "__main__":
    sys.exit(main())
