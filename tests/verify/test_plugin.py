"""The pytest plugin: one test a level, and nothing but a pass is a pass."""

import pytest

pytest_plugins = ["pytester"]


@pytest.mark.slow
def test_a_family_is_one_test_a_level(pytester):
    result = pytester.runpytest_subprocess("--verify-bridge=qwen3", "--collect-only", "-q")
    names = [line for line in result.outlines if line.startswith("verify-bridge[qwen3]::")]
    assert names[0] == "verify-bridge[qwen3]::V0-keys"
    assert len(names) == len(set(names)) >= 7
    assert result.ret == 0


def test_levels_are_chosen_by_option_and_by_keyword_beside_the_tests_of_a_port(pytester):
    pytester.makepyfile(test_port="def test_own_V0(): pass")
    result = pytester.runpytest_subprocess("--verify-bridge=qwen3", "--verify-bridge-level=V0..V1", "-k", "V0", "-v")
    result.stdout.fnmatch_lines(["*test_own_V0 PASSED*", "*V0-keys PASSED*", "*2 passed, 1 deselected*"])
    assert result.ret == 0


@pytest.mark.slow
def test_a_divergence_fails_its_level_and_shows_the_verdict_without_a_traceback(pytester):
    pytester.makeconftest(
        """
        from bestiary.models.layers.norm import RMSNorm
        right = RMSNorm.forward
        RMSNorm.forward = lambda self, x: right(self, x) * 1.001
        """
    )
    result = pytester.runpytest_subprocess("--verify-bridge=qwen3", "--verify-bridge-level=V0,V2")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*first divergence*", "*verify-bridge qwen3 --level V2*", "exit 1  numeric*"])
    assert not any("runtest" in line for line in result.outlines)


@pytest.mark.parametrize(
    "options", [["--verify-bridge=frobnicator"], ["--verify-bridge=qwen3", "--verify-bridge-level=V77"]]
)
def test_an_unknown_target_or_level_is_wrong_usage_and_no_empty_success(pytester, options):
    result = pytester.runpytest_subprocess(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*UnsupportedModelType*" if len(options) == 1 else "*BadUsage*"])


@pytest.mark.slow
def test_the_fixture_returns_the_verdict_and_fails_the_test_unless_it_passes(pytester):
    pytester.makepyfile(
        """
        def test_good(verify_bridge):
            assert [level.id for level in verify_bridge("qwen3", level="V0").levels] == ["V0"]

        def test_bad(verify_bridge):
            verify_bridge("qwen3", level="V2", only=["base/logits"], tighten=["V2=1e-18"])
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*NotVerified*", "*exit 1  numeric*"])


def test_without_the_option_nothing_heavy_is_imported(pytester):
    pytester.makepyfile("import sys\n\ndef test_light(): assert not {'torch', 'pydantic'} & set(sys.modules)")
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
