"""What waits for a module hears of it once, and of the whole of it."""

import sys
import threading

import pytest

from bestiary.kernels.deferred import when_imported

SLOW = """
import sys
sys.begun.set()
sys.may_end.wait(10)
whole = True
"""


@pytest.mark.parametrize("asked", ["before", "while", "behind"])
def test_a_module_that_another_thread_imports_is_told_once_and_whole(tmp_path, monkeypatch, asked):
    name = f"deferred_{asked}"
    (tmp_path / f"{name}.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    begun, may_end, told = threading.Event(), threading.Event(), []
    monkeypatch.setattr(sys, "begun", begun, raising=False)
    monkeypatch.setattr(sys, "may_end", may_end, raising=False)

    def ask():
        when_imported(name, lambda module: told.append(vars(module).get("whole")))

    importing, asking = threading.Thread(target=__import__, args=(name,)), threading.Thread(target=ask)
    steps = {"before": [ask, importing.start], "while": [importing.start, begun.wait, asking.start]}
    for one in steps.get(asked, [importing.start]):
        one()
    assert begun.wait(10)
    if asked == "while":
        asking.join(0.2)
    assert told == []
    may_end.set()
    importing.join(10)
    if asked == "while":
        asking.join(10)
    elif asked == "behind":
        ask()
    assert told == [True]
    sys.modules.pop(name)
