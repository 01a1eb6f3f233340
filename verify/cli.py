"""The `verify-bridge` command. Heavy imports wait until a run starts, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from bestiary.verify import outputs
from bestiary.verify.destination import say

USAGE_ERROR = 7

DESCRIPTION = """\
Does our implementation, with its bridge, equal the Hugging Face class of the installed transformers:
on every config field, input shape and gradient that can matter? If not, where and why?

A family is verified on tiny random configs derived from its Hugging Face config; nothing is downloaded.
A checkpoint folder is verified on its own weights: keys, round trip, and in float32 each layer and the logits, one
layer in memory at a time; a run that was killed goes on where it was."""

EPILOG = """\
levels:
  V0 keys  V1 round trip  V2 semantics  V3 config  V4 gradients  V5 inputs  V6 fp32
  V7 bf16  K kernels;  V8 for a checkpoint

examples:
  verify-bridge qwen3                                   one family
  verify-bridge qwen3 gemma3 --json out.json            several, with the verdict for a program
  verify-bridge --all --json -                          every registered bridge
  verify-bridge qwen3 --level V0..V2 --only layer0      the inner loop of a port
  verify-bridge qwen3 --report out.html --card out.md   the verdict for people
  verify-bridge diff before.json after.json             progress between two verdicts
  verify-bridge ./checkpoint --text README.md           a checkpoint, on a text of yours
  verify-bridge new llama                               what a port of a new architecture starts from
  verify-bridge qwen3 --head score                      its reward model, …ForSequenceClassification
  verify-bridge qwen3 --ours mine.model:build           an nn.Module of yours, its parameters named as the bridge does
  verify-bridge self-test                               plant bugs and see that each is found
  verify-bridge self-test gpt_oss --catalogue my_bugs   with bugs of a module of yours

exit codes (of several findings the first of 7, 6, 2, 3, 1, 5, 4, 0):
  0 pass   1 numeric   2 keys, shapes, round trip   3 config field ignored   4 refused as unsupported
  5 inconclusive   6 tampering   7 usage or environment"""


class _Parser(argparse.ArgumentParser):
    """argparse with the verifier's exit code for wrong usage."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `verify-bridge TARGET…`."""
    parser = _Parser(
        prog="verify-bridge",
        usage="verify-bridge [options] TARGET [TARGET …]\n       verify-bridge self-test [options] [FAMILY …]\n"
        "       verify-bridge diff BEFORE.json AFTER.json\n"
        "       verify-bridge new MODEL_TYPE",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="model_type of a family, or a checkpoint folder")
    parser.add_argument("--all", action="store_true", help="every registered bridge, our forward also isolated")
    parser.add_argument("--level", metavar="V0..V2", help="levels to run: V2, V0..V2, V0,V4; default: all")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="layerN, or a glob of check ids")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs; default: 0")
    parser.add_argument("--keep-going", action="store_true", help="run later levels after one failed")
    parser.add_argument(
        "--tighten", action="append", default=[], metavar="LEVEL=VALUE", help="a stricter gate, e.g. V2=1e-12"
    )
    parser.add_argument("--config", metavar="FILE", help="verify on this config.json in place of the tiny ones")
    parser.add_argument("--isolate", action="store_true", help="run our forward where transformers' models are blocked")
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="where both sides compute: cpu, cuda, cuda:N")
    parser.add_argument(
        "--head", choices=("lm", "score"), default="lm", help="score: the family's reward model; levels V0 V1 V2 V4 V5"
    )
    parser.add_argument(
        "--ours",
        metavar="MODULE:FACTORY",
        help="verify FACTORY(config), an nn.Module of yours, in place of ours",
    )
    parser.add_argument("--text", metavar="FILE", help="checkpoint: text to compare on, by the folder's tokenizer")
    parser.add_argument("--tokens", metavar="FILE", help="checkpoint: JSON list of token ids to compare on")
    parser.add_argument("--revision", help="checkpoint: branch, tag or commit of a hub id; the verdict has the commit")
    parser.add_argument("--work", metavar="DIR", help="checkpoint: where a killed run's state is; default: user cache")
    outputs.add_options(parser, "json", "report", "card", "junit")
    parser.add_argument("--kill-matrix", metavar="FILE", help="self-test JSON whose kill matrix page and card show")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default: one a core with --all, else 1")
    parser.add_argument("--quiet", action="store_true", help="no progress lines on stderr")
    return parser


def build_self_test_parser() -> argparse.ArgumentParser:
    """The parser of `verify-bridge self-test`."""
    parser = _Parser(
        prog="verify-bridge self-test",
        description="Plants every bug of the catalogue, and benign rewrites, and reports what the verifier finds.",
    )
    parser.add_argument("targets", nargs="*", metavar="FAMILY", help="model_type; default: every registered bridge")
    parser.add_argument("--all", action="store_true", help="every registered bridge")
    parser.add_argument("--catalogue", action="append", default=[], metavar="MODULE", help="a module with more bugs")
    parser.add_argument(
        "--matrix",
        metavar="V0..V7",
        help="ask these levels too about every bug, beside the one that must see it",
    )
    parser.add_argument("--head", choices=("lm", "score"), default="lm", help="score: bugs of reward models")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs; default: 0")
    outputs.add_options(parser, "json", "report", "junit")
    parser.add_argument("--quiet", action="store_true", help="no progress lines on stderr")
    return parser


def build_diff_parser() -> argparse.ArgumentParser:
    """The parser of `verify-bridge diff`."""
    parser = _Parser(
        prog="verify-bridge diff",
        description="Progress between two verdicts that `verify-bridge --json` wrote.",
        epilog="exit codes: 0 nothing got worse   1 something that passed fails now\n"
        "            5 something is not verified any more   7 no verdict, or one of another gate version",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", metavar="BEFORE.json", help="the older verdict")
    parser.add_argument("after", metavar="AFTER.json", help="the newer verdict")
    outputs.add_options(parser, "json")
    return parser


def build_new_parser() -> argparse.ArgumentParser:
    """The parser of `verify-bridge new`."""
    parser = _Parser(
        prog="verify-bridge new",
        description="What a port starts from: config fields and what each does, keys, nearest family, skeleton.",
        epilog="example:\n  verify-bridge new llama --json llama.json\n\n"
        "`bestiary port new llama` writes the same as files, with the task and the first verdict",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_type", metavar="MODEL_TYPE", help="Hugging Face's model_type")
    parser.add_argument("--config", metavar="FILE", help="a small config.json, where the class cannot be built tiny")
    parser.add_argument("--no-sweep", action="store_true", help="do not run the reference to classify config fields")
    outputs.add_options(parser, "json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["self-test"]:
        return _guarded(_self_test, build_self_test_parser().parse_args(arguments[1:]))
    if arguments[:1] == ["diff"]:
        return _guarded(_diff, build_diff_parser().parse_args(arguments[1:]))
    if arguments[:1] == ["new"]:
        return _guarded(_new, build_new_parser().parse_args(arguments[1:]))
    parser = build_parser()
    args = parser.parse_args(arguments)
    if not args.targets and not args.all:
        parser.error("name a family or a checkpoint folder, or pass --all")
    return _guarded(_verify, args)


def _guarded(command: Any, args: argparse.Namespace) -> int:
    """A command whose typed errors become one message and their exit code."""
    from bestiary.kernels.errors import BestiaryError

    try:
        code: int = command(args)
    except BestiaryError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return USAGE_ERROR
    return code


def _verify(args: argparse.Namespace) -> int:
    outputs.check(args)
    from bestiary.verify.api import verify_several
    from bestiary.verify.reading import read_self_test
    from bestiary.verify.report import text
    from bestiary.verify.self_test import cores
    from bestiary.verify.verdict import report

    kills = read_self_test(args.kill_matrix) if args.kill_matrix else None
    verdicts = verify_several(
        _every(args.head) if args.all else args.targets,
        workers=(cores() if args.all else 1) if args.workers is None else args.workers,
        level=args.level,
        only=args.only,
        seed=args.seed,
        keep_going=args.keep_going,
        tighten=args.tighten,
        config=args.config,
        isolate=args.all or args.isolate,
        text=args.text,
        tokens=args.tokens,
        work=args.work,
        revision=args.revision,
        ours=args.ours,
        device=args.device,
        head=args.head,
        progress=None if args.quiet else _progress,
    )
    _progress("")
    result = report(verdicts)
    if not outputs.write_report(args, result, kills):
        say(text(result))
    return int(result.exit_code)


def _every(head: str) -> list[str]:
    """Every registered bridge that has a model under `head`; stderr names the others."""
    from bestiary.bridges import registered_bridges
    from bestiary.bridges.errors import NoScoreClass
    from bestiary.models.config import HeadKind

    found, without = [], []
    for name, bridge in registered_bridges().items():
        try:
            bridge.reference_for(HeadKind(head))
        except NoScoreClass:
            without.append(name)
        else:
            found.append(name)
    if without:
        print(f"transformers has no reward model of {', '.join(without)}", file=sys.stderr)
    return found


def _self_test(args: argparse.Namespace) -> int:
    outputs.check(args)
    from bestiary.models.config import HeadKind
    from bestiary.verify.self_test import self_test

    families = args.targets if args.targets and not args.all else _every(args.head)
    result = self_test(
        families,
        catalogues=args.catalogue,
        seed=args.seed,
        progress=None if args.quiet else _progress,
        matrix=args.matrix,
        head=HeadKind(args.head),
    )
    _progress("")
    if not outputs.write_self_test(args, result):
        say(result.text())
    return int(result.exit_code)


def _diff(args: argparse.Namespace) -> int:
    outputs.check(args)
    from bestiary.verify.diff import diff
    from bestiary.verify.reading import read_report

    result = diff(read_report(args.before), read_report(args.after))
    if not outputs.write_diff(args, result):
        say(result.text())
    return int(result.exit_code)


def _new(args: argparse.Namespace) -> int:
    outputs.check(args)
    import json
    from pathlib import Path

    from bestiary.bridges.storage import read_json
    from bestiary.verify import destination
    from bestiary.verify.skeleton import analyse
    from bestiary.verify.skeleton_text import bridge_source, text

    raw = read_json(Path(args.config)) if args.config else None
    analysis = analyse(args.model_type, raw=raw, sweep=not args.no_sweep)
    if args.json is not None:
        destination.write_text(args.json, json.dumps(analysis.as_json(), indent=1, ensure_ascii=False) + "\n")
    if args.json != destination.STDOUT:
        say(text(analysis) + "\n" + bridge_source(analysis, f"bestiary.models.{args.model_type}"))
    return 0


def _progress(line: str) -> None:
    """One line on stderr that the next one overwrites; nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
