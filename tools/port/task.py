"""PORT.md: the task of a port, written so that somebody with no other context can finish it."""

from __future__ import annotations

from bestiary.tools.port.state import Port
from bestiary.verify.skeleton import Analysis
from bestiary.verify.skeleton_text import nearest_lines

_TASK = """\
# Port `{model_type}` to bestiary

Write the bridge and the model file that make bestiary's `Decoder` compute what `{reference}` of the installed
transformers computes, on every config field, input and gradient. A machine judges; you are finished when
`bestiary port check` ends with exit code 0.

## What to write

* `{bridge}`: `RULES` (which checkpoint tensor is which parameter), `config_from_hf`, `config_to_hf`, `KILL_LIST`.
  Every open decision stands there as `undecided(name, question)`, an error that names it. Replace each by what the
  modelling file of transformers does. Read that file; copy nothing from it.
* `{model}`: the family's class. A difference between families is a field of `DecoderConfig`, not code. If no field
  describes what {config_class} does, refuse that value by `hf.unsupported(…)`, or stop and say which field is missing.

Nothing else may change: {allowed}
A port may import torch, the standard library's {standard}, and `bestiary.bridges`, `bestiary.models`,
`bestiary.kernels`; not transformers, not files or processes, not the verifier. Thresholds cannot be changed, no check
can be skipped. Breaking a rule is exit code 6.

## The loop

From {where}, in a shell with:

```
export PYTHONSAFEPATH=1 PYTHONPATH={path}
```

1. Ask. The first divergence, the likely cause and a command that shows it again stand at the end of the output.

```
verify-bridge {model_type} --level V0..V2 --only layer0
verify-bridge {model_type} --json {verdict}
```

2. Change the bridge or its config, ask the level that judged it again. 0 pass, 1 numbers, 2 keys or shapes or round
   trip, 3 a config field ignored, 4 refused, 5 inconclusive, 6 tampering, 7 usage.
3. See where the port stands, and the next command:

```
bestiary port status {target}
```

4. When the whole family passes:

```
bestiary port check {target}
```

It checks that only your files changed, then runs all levels in a fresh process with a new seed and new configs, our
forward also where transformers' models cannot be imported, and plants every bug that concerns the family: each must be
killed. It writes `acceptance.json`, `kills.json` and `CARD.md`. If it says that `KILL_LIST` is wrong, its remedy is
the right list.

Stop when it ends with 0. Stop and report if the same check fails three times after changes that should have fixed it,
or if transformers itself is wrong: then say which check, which file and line, and what you expected.

## {config_class}

{fields}

## Keys

{keys}

## Nearest family

```
{nearest}
```
"""


def task(port: Port, analysis: Analysis) -> str:
    """The text of PORT.md."""
    name, tree = port.model_type, port.root is not None
    fields = ["| field | default | in transformers | ours |", "|---|---|---|---|"]
    fields += [f"| `{row.name}` | `{row.default}` | {row.kind} | {row.ours or '–'} |" for row in analysis.fields]
    keys = ["| pattern | shape | tensors in the tiny model |", "|---|---|---|"]
    keys += [f"| `{row.pattern}` | {', '.join(row.shape)} | {row.count} |" for row in analysis.keys]
    return _TASK.format(
        model_type=name,
        reference=analysis.reference.rpartition(":")[2],
        config_class=analysis.config_class,
        bridge=f"bridges/{name}.py" if tree else f"src/{port.package}/bridge.py",
        model=f"models/{name}.py" if tree else f"src/{port.package}/model.py",
        allowed=(
            f"beside them `models/__init__.py`, the entry point in `pyproject.toml`, `ports/{name}/` and tests named "
            f"`test_{name}*.py`."
            if tree
            else "the package may hold further Python files, bestiary and transformers stay as installed."
        ),
        standard="collections, dataclasses, enum, functools, itertools, math and typing",
        where="the root of the checkout" if tree else "this folder",
        path=f'"$PWD/ports/{name}"' if tree else '"$PWD/src"',
        verdict=f"ports/{name}/verdict.json" if tree else "verdict.json",
        target=name if tree else f"{name} --plugin .",
        fields="\n".join(fields),
        keys="\n".join(keys),
        nearest="\n".join(nearest_lines(analysis)),
    )
