"""The verifier as a library: light to import, the same options as the command, a typed verdict."""

import argparse
import inspect
import subprocess
import sys

import pytest

from bestiary.kernels.errors import BestiaryError
from bestiary.verify import Exit, Verdict, verify
from bestiary.verify.api import verify_several
from bestiary.verify.cli import build_parser
from bestiary.verify.outputs import HELP
from bestiary.verify.run import BadUsage

COMMAND_ONLY = {"help", "targets", "all", "quiet", "kill_matrix", "workers", *HELP}
"""Options of the command that say what is printed, or which targets are meant."""


def test_importing_the_package_loads_neither_torch_nor_pydantic():
    code = "import sys, bestiary.verify as v; v.__all__; sys.exit(bool({'torch', 'pydantic'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_family_gives_its_verdict():
    verdict = verify("qwen3", level="V0")
    assert isinstance(verdict, Verdict)
    assert verdict.exit_code == Exit.PASS
    assert [level.id for level in verdict.levels] == ["V0"]


@pytest.mark.slow
def test_a_failure_is_a_verdict_and_not_an_exception():
    assert verify("qwen3", level="V2", tighten=["V2=1e-18"]).exit_code == Exit.NUMERIC


@pytest.mark.parametrize(
    "arguments", [{"level": "V9"}, {"tighten": ["V2=1"]}, {"config": "not-there.json"}, {"only": ["nothing"]}]
)
def test_wrong_usage_is_a_typed_error(arguments):
    with pytest.raises(BestiaryError) as caught:
        verify("qwen3", **{"level": "V0", **arguments})
    assert caught.value.exit_code == 7


def test_every_option_of_the_command_is_a_keyword_of_the_function():
    """And nothing but `target` may be given by position, so that an option can be added anywhere."""
    parameters = inspect.signature(verify).parameters
    options = {action.dest for action in build_parser()._actions if not isinstance(action, argparse._HelpAction)}
    assert options - COMMAND_ONLY <= set(parameters)
    kinds = {name: parameter.kind for name, parameter in parameters.items() if name != "target"}
    assert set(kinds.values()) == {inspect.Parameter.KEYWORD_ONLY}


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import bestiary.verify

    with pytest.raises(AttributeError, match="frobnicate"):
        bestiary.verify.frobnicate  # noqa: B018


@pytest.mark.slow
def test_two_processes_give_the_verdicts_of_one_in_the_order_of_the_targets():
    names = ["qwen3_moe", "qwen3", "gpt_oss"]
    one, two = (verify_several(names, workers=count, level="V0,V6", only=["base/*"]) for count in (1, 2))
    assert [verdict.family for verdict in two] == names
    for alone, beside in zip(one, two, strict=True):
        assert [level.passed for level in alone.levels] == [level.passed for level in beside.levels]
        assert alone.exit_code == beside.exit_code == Exit.PASS


def test_no_process_at_all_is_wrong_usage():
    with pytest.raises(BadUsage, match="--workers 0"):
        verify_several(["qwen3"], workers=0)


def test_an_error_of_another_process_arrives_as_it_was():
    with pytest.raises(BestiaryError, match="no level or range") as found:
        verify_several(["qwen3", "gpt_oss"], workers=2, level="V9")
    assert "V0..V2" in found.value.remedy
