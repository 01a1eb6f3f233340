"""pytest for ports in other repositories: `pytest --verify-bridge=MODEL_TYPE` runs one test a level.

The plugin is there wherever bestiary is installed, and does nothing unless it is asked. A port's own tests may also use
the fixture:

    def test_the_port(verify_bridge):
        verdict = verify_bridge("my_family", level="V0..V2")  # fails the test unless it passes
        assert verdict.official

A level that is refused or inconclusive fails its test: only what passed is a pass. torch is imported when a target is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from bestiary.verify.reference import ReferencePool
    from bestiary.verify.verdict import Verdict


class NotVerified(AssertionError):
    """A verdict that is no pass; the message is its text."""

    def __init__(self, verdict: Verdict) -> None:
        from bestiary.verify.report import family_lines

        super().__init__("\n".join(family_lines(verdict)))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the plugin."""
    group = parser.getgroup("verify-bridge", "bridges to Hugging Face models")
    group.addoption(
        "--verify-bridge",
        action="append",
        default=[],
        metavar="TARGET",
        help="verify this model_type (one test a level) or checkpoint folder; may be given several times",
    )
    group.addoption("--verify-bridge-level", metavar="V0..V2", help="levels to run; default: all")
    group.addoption("--verify-bridge-seed", type=int, default=0, metavar="N", help="of weights and inputs; default: 0")


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds the tests of each target behind those that were found in files."""
    for target in dict.fromkeys(config.getoption("--verify-bridge")):
        name = f"verify-bridge[{target}]"
        levels = _levels(target, config.getoption("--verify-bridge-level"))
        items.extend(
            session.genitems(Target.from_parent(session, name=name, nodeid=name, target=target, levels=levels))
        )


def _levels(target: str, wanted: str | None) -> list[tuple[str, str | None]]:
    """Names and ids of a target's tests; a checkpoint, whose levels share what they load, is one test.

    Raises:
        UsageError: an unknown model_type or level.
    """
    from bestiary.bridges import get_bridge
    from bestiary.kernels.errors import BestiaryError
    from bestiary.verify.api import is_checkpoint
    from bestiary.verify.run import parse_levels

    if is_checkpoint(target):
        return [("checkpoint", None)]
    try:
        get_bridge(target)
        return [(f"{spec.id}-{spec.title.replace(' ', '-')}", spec.id) for spec in parse_levels(wanted)]
    except BestiaryError as error:
        raise pytest.UsageError(f"{type(error).__name__}: {error}") from error


class Target(pytest.Collector):
    """A family or a checkpoint: its items share the references they build."""

    def __init__(self, *, target: str, levels: Sequence[tuple[str, str | None]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.target = target
        self.levels = levels
        self.pool: ReferencePool | None = None

    def collect(self) -> Iterator[pytest.Item]:
        """One item a level."""
        from bestiary.verify.reference import ReferencePool

        self.pool = ReferencePool()
        for name, level in self.levels:
            yield LevelItem.from_parent(self, name=name, level=level)


class LevelItem(pytest.Item):
    """One level of a family, or a whole checkpoint (`level` None)."""

    def __init__(self, *, level: str | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.level = level

    def runtest(self) -> None:
        """Verifies; raises unless the verdict is a pass."""
        from bestiary.verify.api import verify

        assert isinstance(self.parent, Target)
        verdict = verify(
            self.parent.target,
            level=self.level,
            seed=self.config.getoption("--verify-bridge-seed"),
            pool=self.parent.pool,
        )
        self.user_properties.append(("verdict", verdict.verdict))
        if verdict.exit_code != 0:
            raise NotVerified(verdict)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **kwargs: Any) -> Any:
        """The verdict's text, which names place, cause and command; no traceback of the verifier."""
        if isinstance(excinfo.value, NotVerified):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args, **kwargs)

    def reportinfo(self) -> tuple[Any, None, str]:
        """Where the test is said to stand."""
        return self.path, None, self.nodeid


@pytest.fixture(scope="session")
def verify_bridge() -> Callable[..., Verdict]:
    """A function with the arguments of `bestiary.verify.verify` that fails the test unless the verdict is a pass."""
    from bestiary.verify.api import verify
    from bestiary.verify.reference import ReferencePool

    pool = ReferencePool()

    def check(target: str, **options: Any) -> Verdict:
        __tracebackhide__ = True
        verdict = verify(target, **{"pool": pool, **options})
        if verdict.exit_code != 0:
            raise NotVerified(verdict)
        return verdict

    return check
