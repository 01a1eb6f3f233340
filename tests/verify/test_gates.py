"""Gates judge strictly and can only be tightened."""

import math

import pytest

from bestiary.verify.gates import OFFICIAL, Gate, GateError, Gates


def test_nan_satisfies_no_gate():
    assert not Gate(1e-10).holds(math.nan)
    assert not Gate(0.999, at_least=True).holds(math.nan)


@pytest.mark.parametrize(
    ("gate", "figure", "holds"), [("V2", 1e-10, True), ("V2", 1.1e-10, False), ("V8.top1", 0.99, False)]
)
def test_a_figure_is_compared_in_the_direction_of_its_gate(gate, figure, holds):
    assert OFFICIAL[gate].holds(figure) is holds


def test_tightening_replaces_one_gate_and_leaves_the_official_table_alone():
    gates = Gates().tightened(["V2=1e-12"])
    assert gates["V2"].limit == 1e-12
    assert gates["V3"] == OFFICIAL["V3"]
    assert OFFICIAL["V2"].limit == 1e-10


def test_a_level_with_several_gates_tightens_those_that_bound_from_above():
    gates = Gates().tightened(["V6=1e-7"])
    assert gates["V6.rms"].limit == gates["V6.max"].limit == 1e-7
    gates = Gates().tightened(["V8=1e-8"])
    assert gates["V8.max"].limit == 1e-8
    assert gates["V8.top1"] == OFFICIAL["V8.top1"]


@pytest.mark.parametrize("request_", ["V2=1e-9", "V6=1e-5", "V8.top1=0.9"])
def test_loosening_is_refused_by_name(request_):
    with pytest.raises(GateError, match="would loosen V"):
        Gates().tightened([request_])


@pytest.mark.parametrize("request_", ["V9=1", "V2", "V2=small", "=1"])
def test_a_request_that_names_no_gate_or_number_is_refused(request_):
    with pytest.raises(GateError) as error:
        Gates().tightened([request_])
    assert error.value.exit_code == 7
