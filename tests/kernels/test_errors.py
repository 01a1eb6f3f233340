"""An error that crosses processes arrives as it was, whatever its class takes to be made."""

import pickle

import pytest

from bestiary.bridges.errors import UnsupportedConfig
from bestiary.kernels.errors import BestiaryError, InvalidArgument


@pytest.mark.parametrize(
    "error",
    [
        BestiaryError("x = 3.", read_from="config.json", remedy="give 4"),
        InvalidArgument("y is missing."),
        UnsupportedConfig("rope.kind", "spiral", "is not implemented.", read_from="config.json", remedy="use another"),
    ],
)
def test_an_error_survives_a_pickle(error: BestiaryError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    assert back.exit_code == error.exit_code
