"""One clear error where a trainer's library is not installed."""

from collections.abc import Iterator
from contextlib import contextmanager

from bestiary.kernels.errors import BestiaryError


class MissingLibrary(BestiaryError):
    """The library of a trainer is not installed; the message has the command that installs it.

    Remedy: install the extra that the message names; `bestiary doctor` lists all.
    """


@contextmanager
def needs(library: str, install: str) -> Iterator[None]:
    """Around the imports of `library`.

    Args:
        install: what pip is given: "bestiary[lightning]", or options.
    Raises:
        MissingLibrary: an import failed, of the library or of what it needs.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = error.name or library
        told = f"{library} is not installed" if missing.partition(".")[0] == library else f"{library} needs {missing}"
        wanted = install if install.startswith("-") else f"'{install}'"
        raise MissingLibrary(f"{told}.", remedy=f"pip install {wanted}") from error
