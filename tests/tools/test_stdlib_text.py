"""The text of demos: docstrings of the standard library, collected the same way every time."""

import inspect
import json
import sys
import textwrap

import pytest

from bestiary.tools.stdlib_text import NoStandardLibrary, docstrings, documents, text


@pytest.fixture
def library(tmp_path):
    """A small library: a package, a module, a test, a template that does not parse."""
    files = {
        "alpha.py": '''
            """Alpha module."""
            class Outer:
                """Outer class."""
                async def method(self):
                    """Method."""
                    def inner():
                        """Inner."""
            def silent():
                return 1
            def blank():
                """   """
        ''',
        "beta/__init__.py": '"""Beta package."""',
        "beta/gamma.py": 'x = "not a docstring"\ndef f():\n    "One line."',
        "beta/test/test_gamma.py": '"""A test."""',
        "site-packages/other.py": '"""Installed beside the library."""',
        "broken.py": "def f(:",
    }
    for name, source in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return tmp_path


def test_every_docstring_once_in_order(library):
    assert [(doc.name, doc.text) for doc in docstrings(library)] == [
        ("alpha", "Alpha module."),
        ("alpha.Outer", "Outer class."),
        ("alpha.Outer.method", "Method."),
        ("alpha.Outer.method.inner", "Inner."),
        ("beta", "Beta package."),
        ("beta.gamma.f", "One line."),
    ]


def test_text_is_whole_docstrings(library):
    assert text(15, library) == "Alpha module."
    assert text(16, library) == "Alpha module.\n\nOuter class."
    assert text(10**6, library).endswith("Beta package.\n\nOne line.")


def test_a_document_is_a_module_and_packages_are_held_out_whole(library):
    assert documents(library, every=2) == (
        ["Alpha module.\n\nOuter class.\n\nMethod.\n\nInner."],
        ["Beta package.", "One line."],
    )


def test_no_sources_is_an_error(tmp_path):
    with pytest.raises(NoStandardLibrary, match=str(tmp_path)):
        list(docstrings(tmp_path))


@pytest.fixture(scope="module")
def real_library():
    """Every docstring of the running Python."""
    return list(docstrings())


@pytest.mark.slow
def test_of_the_running_python(real_library):
    """Long enough for any window, the same twice, and really what the library says about itself."""
    sample = text(200_000)
    assert 200_000 <= len(sample) < 220_000
    assert sample == text(200_000)
    found = {doc.name: doc.text for doc in real_library}
    assert found["textwrap.dedent"] == inspect.getdoc(textwrap.dedent)
    assert found["json.decoder.JSONDecoder.decode"] == inspect.getdoc(json.JSONDecoder.decode)
    assert not [name for name in found if "site-packages" in name]


def test_nothing_is_imported(real_library):
    """Collecting must not run the library: `this` prints a poem and `antigravity` opens a browser."""
    assert {"antigravity", "turtle"} <= {doc.name.split(".")[0] for doc in real_library}
    assert not {"this", "antigravity", "turtle"} & set(sys.modules)
